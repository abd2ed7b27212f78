"""`kvtide doctor`: looks at everything kvtide needs, and says what to do where it is missing."""

import click

from kvtide.cli import examine
from kvtide.cli.here import printable


@click.command()
def command() -> None:
    """Look for what keeps kvtide from working well here.

    Each line says what was looked at and how it is: ok, a note, or wrong, with what to do. Ends
    with code 1 where something is wrong. Nothing is changed, but a node that runs checks its
    state, and answers nobody meanwhile.
    """
    findings = list(examine.everything())
    width = max(len(finding.what) for finding in findings)
    for finding in findings:
        line = f"{finding.verdict:<6}{finding.what:<{width}}  {printable(finding.text)}"
        click.echo(line.rstrip())
    wrong = sum(finding.verdict == examine.WRONG for finding in findings)
    if wrong:
        click.echo(f"\n{wrong} of {len(findings)} lines say what is wrong", err=True)
        raise click.exceptions.Exit(1)

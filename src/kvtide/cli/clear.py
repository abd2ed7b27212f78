"""`kvtide clear`: take entries away. The salt is hashed here; it never reaches the node."""

import os
import sys
from typing import Any

import click

from kvtide.cli.here import find_places, printable
from kvtide.core.keys import salt_digest
from kvtide.node.health import ON
from kvtide.wire.command import ask

STDIN = "-"
SALT_VARIABLE = "KVTIDE_SALT"
SALT_CHARS_MAX = 1 << 20


@click.command()
@click.option(
    "--salt",
    metavar="SALT",
    envvar=SALT_VARIABLE,
    help="Only entries of requests with this cache_salt; '' means those without one. With '-' it"
    " is read from standard input, so that it stands in no shell history; the variable KVTIDE_SALT"
    " does too.",
)
def command(salt: str | None) -> None:
    """Take away what the node holds, or what it holds of one salt.

    Engines go on; what is being copied at this moment is not found afterwards.
    """
    places = find_places()
    if salt is None and SALT_VARIABLE in os.environ:  # empty, which click takes for not there
        raise click.UsageError(
            f"{SALT_VARIABLE} is empty: unset it to clear everything, or give --salt '' for"
            " entries without a salt"
        )
    if salt is None:
        _tell(ask(places, "clear"), "")
        return
    if salt == STDIN:
        salt = _read_salt()
    answer = ask(places, "clear", {"salt_digest": salt_digest(salt).hex()})
    _tell(answer, " of this salt" if salt else " of requests without a salt")


def _tell(answer: dict[str, Any], of_whom: str) -> None:
    """Say what was cleared, place by place; a tier that does not work now may have more."""
    tiers = answer["tiers"]
    entries = "1 entry" if answer["entries"] == 1 else f"{answer['entries']} entries"
    counts = [f"{entries}{of_whom}" + (" in memory" if tiers else "")]
    counts += [f"{tier['records']} in {name}" for name, tier in tiers.items()]
    not_on = {name: tier["state"] for name, tier in tiers.items() if tier["state"] != ON}
    is_all = not of_whom and not not_on
    click.echo(f"cleared {', '.join(counts)}{', all there were' if is_all else ''}")
    for name, state in not_on.items():
        click.echo(
            f"{name} may have more ({printable(state)}): that is cleared as soon as it can be;"
            " if the node ends before, clear again"
        )


def _read_salt() -> str:
    """The salt on standard input, without the line's end."""
    try:
        salt = sys.stdin.read(SALT_CHARS_MAX)
    except UnicodeDecodeError:
        raise click.UsageError("the salt on standard input is not text") from None
    salt = salt.removesuffix("\n").removesuffix("\r")
    if not salt:
        raise click.UsageError(
            "there is no salt on standard input; --salt '' clears entries without one"
        )
    return salt

"""`kvtide status`: what the node says of itself."""

import json

import click

from kvtide.cli.here import find_places
from kvtide.cli.page import page
from kvtide.wire.command import ask


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Everything, for programs.")
def command(as_json: bool) -> None:
    """Show the node, its engines, memory, hits and misses.

    Salts and keys never appear.
    """
    places = find_places()
    status = ask(places, "status")
    if as_json:
        click.echo(json.dumps(status, indent=2))
    else:
        click.echo(page(status, str(places.directory)))

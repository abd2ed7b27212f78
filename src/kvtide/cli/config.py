"""`kvtide config show`: every setting, its value, its owner, and the place it comes from."""

import json
from collections.abc import Sequence

import click

from kvtide import config
from kvtide.cli.here import find_places
from kvtide.errors import NodeUnreachable
from kvtide.wire.command import ask


@click.group()
def command() -> None:
    """Show settings and where they come from."""


@command.command("show")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def show(as_json: bool) -> None:
    """Print every setting with its effective value, owner and source.

    A running node tells its own settings, which hold until it ends; an engine's are those that one
    started from here would have.
    """
    read = config.read()
    places = find_places()
    settings = [
        {
            "name": one.name,
            "value": one.value,
            "owner": one.owner,
            "source": one.source,
            "default": one.default,
        }
        for one in read.effective()
    ]
    try:
        running = {one["name"]: one for one in ask(places, "config")["settings"]}
    except NodeUnreachable:
        running = {}
    for setting in settings:
        setting |= running.get(setting["name"], {})
        if setting["name"] in running and setting["source"].startswith("environment "):
            setting["source"] = f"the node's {setting['source']}"  # not that of this command
    if as_json:
        found = {
            "runtime_dir": str(places.directory),
            "node_is_running": bool(running),
            "settings": settings,
        }
        click.echo(json.dumps(found, indent=2))
        return
    click.echo(f"runtime directory: {places.directory}")
    whose = "those of the running node" if running else "those that a node would start with"
    click.echo(f"settings of the node: {whose}\n")
    for line in table(
        [("setting", "value", "owner", "source")]
        + [(one["name"], one["value"], one["owner"], one["source"]) for one in settings]
    ):
        click.echo(line)


def table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Rows in columns."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]

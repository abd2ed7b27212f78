"""`kvtide config show`: every setting, its value, its owner, and the place it comes from."""

import json
from collections.abc import Sequence

import click

from kvtide import config
from kvtide.cli.here import look_for_places
from kvtide.errors import ConfigError, NodeUnreachable
from kvtide.wire.command import ask
from kvtide.wire.places import Places


@click.group()
def command() -> None:
    """Show settings and where they come from."""


@command.command("show")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def show(as_json: bool) -> None:
    """Print every setting with its effective value, owner and source.

    A running node tells its own settings, which hold until it ends; an engine's are those that one
    started from here would have. Where something is wrong with them, that stands at the end, each
    fault on a line, and the code is 1.
    """
    faults: list[ConfigError] = []
    read = config.read(on_fault=faults.append)
    places = look_for_places()
    settings = [
        {
            "name": one.name,
            "value": one.value,
            "owner": one.owner,
            "source": one.source,
            "default": one.default,
        }
        for one in read.effective
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
            "faults": [str(fault) for fault in faults],
        }
        click.echo(json.dumps(found, indent=2))
    else:
        _print(settings, places, is_running=bool(running))
    for fault in faults:
        click.echo(f"Error: {fault}", err=True)
    if faults:
        raise click.exceptions.Exit(1)


def _print(settings: Sequence[dict[str, str]], places: Places, *, is_running: bool) -> None:
    click.echo(f"runtime directory: {places.directory}")
    whose = "those of the running node" if is_running else "those that a node would start with"
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

"""`kvtide`: what a person asks of the node. An error is one line and exit code 1; usage, 2."""

import collections
import hashlib
import json
import logging
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

import kvtide
from kvtide import config as settings
from kvtide.cli.doctor import examine
from kvtide.cli.status_page import page
from kvtide.errors import ConfigError, KVTideError, NodeUnreachable
from kvtide.node.main import NodeRunning, Way, become_node
from kvtide.wire.command import ask
from kvtide.wire.places import Places, open_directory

STOP_S_MAX = 10.0
"""T_stop of a node."""
FOLLOW_S = 0.2


class Commands(click.Group):
    """Turns what kvtide reports into one line on stderr."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command."""
        try:
            return super().invoke(ctx)
        except KVTideError as error:
            raise click.ClickException(str(error)) from error


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(kvtide.__version__, prog_name="kvtide")
def main() -> None:
    """Keep the KV cache of inference engines outside the engine."""


def _places() -> Places:
    return open_directory(settings.read().runtime_dir)


@main.command()
def serve() -> None:
    """Run a node here until Ctrl-C.

    It stays without engines too, unless linger_s is set. Engines of this user find it by
    themselves.
    """
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        sys.exit(become_node(Way.FOREGROUND))
    except NodeRunning as error:
        raise KVTideError(f"{error}; `kvtide status` shows it, `kvtide stop` ends it") from error


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Everything, for programs.")
def status(*, as_json: bool) -> None:
    """Show the node, its engines, and what they hit and miss."""
    values = ask(_places(), "status")
    click.echo(json.dumps(values, indent=2) if as_json else page(values))


@main.command()
def stop() -> None:
    """End the node; engines serve on, uncached, and do not start another."""
    places = _places()
    pid = ask(places, "stop")["pid"]
    deadline = time.monotonic() + STOP_S_MAX
    while _lives(pid):
        if time.monotonic() > deadline:
            raise KVTideError(f"node {pid} has not ended yet; its log is {places.log}")
        time.sleep(0.02)
    click.echo(f"node {pid} has ended")


def _lives(pid: int) -> bool:
    """Whether the node's process is there; one of another container is not ours to see."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@main.command()
@click.option(
    "--salt",
    envvar="KVTIDE_SALT",
    help="Only what was stored under this salt; - reads it from standard input, which no shell "
    "history keeps. The variable KVTIDE_SALT does the same.",
)
def clear(salt: str | None) -> None:
    """Take everything out of the host tier; loads that run are computed instead."""
    arguments = {}
    if salt is not None:
        text = sys.stdin.readline().rstrip("\n") if salt == "-" else salt
        digest = hashlib.sha256(text.encode()).hexdigest() if text else ""
        arguments["salt_digest"] = digest
    cleared = ask(_places(), "clear", arguments)["entries"]
    click.echo(f"{cleared} entries cleared")


@main.command()
@click.option("-n", "--lines", default=50, show_default=True, help="How many of the last lines.")
@click.option("-f", "--follow", is_flag=True, help="Go on with what comes, until Ctrl-C.")
def logs(*, lines: int, follow: bool) -> None:
    """Show the node's log."""
    path = _places().log
    try:
        with path.open(encoding="utf-8", errors="replace") as log:
            for line in collections.deque(log, maxlen=max(0, lines)):
                click.echo(line, nl=False)
            if follow:
                for line in _new_lines(path, log.tell()):
                    click.echo(line, nl=False)
    except FileNotFoundError:
        raise NodeUnreachable(
            f"there is no log at {path}: no node was started here by an engine, or it runs as "
            "`kvtide serve`, which logs to its terminal"
        ) from None


def _new_lines(path: Path, offset: int) -> Iterator[str]:
    """What is appended to a log, over its rotations."""
    while True:
        with path.open(encoding="utf-8", errors="replace") as log:
            log.seek(offset if path.stat().st_size >= offset else 0)
            yield from log
            offset = log.tell()
        time.sleep(FOLLOW_S)


@main.command()
def doctor() -> None:
    """Check this machine and the node; say what to do about what is wrong."""
    findings = examine()
    for finding in findings:
        mark = click.style("ok  ", fg="green") if finding.is_ok else click.style("BAD ", fg="red")
        click.echo(f"{mark} {finding.what}: {finding.text}")
    sys.exit(0 if all(finding.is_ok for finding in findings) else 1)


@main.group("config")
def config_group() -> None:
    """Settings."""


@config_group.command("show")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def config_show(*, as_json: bool) -> None:
    """Show every setting with its value, owner and source; a running node tells its own."""
    config = settings.read()
    shown = [
        {"name": e.name, "value": e.value, "owner": e.owner, "source": e.source}
        for e in config.effective()
    ]
    node = "no node runs: its settings are those that one would start with"
    try:
        theirs = ask(open_directory(config.runtime_dir), "config")["settings"]
    except (NodeUnreachable, ConfigError):
        pass
    else:
        by_name = {entry["name"]: entry for entry in theirs}
        shown = [by_name.get(entry["name"], entry) for entry in shown]
        node = "a node runs: its settings are what it was started with"
    if as_json:
        click.echo(json.dumps(shown, indent=2))
        return
    widths = [max(len(entry[key]) for entry in shown) for key in ("name", "value", "owner")]
    for entry in shown:
        columns = zip(("name", "value", "owner"), widths, strict=True)
        row = "  ".join(entry[key].ljust(width) for key, width in columns)
        click.echo(f"{row}  {entry['source']}")
    click.echo(f"\nruntime directory {config.runtime_dir}; {node}")


if __name__ == "__main__":
    main()

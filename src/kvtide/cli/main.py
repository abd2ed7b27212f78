"""The command `kvtide`.

Each command is a module that is imported when it is asked for, so that `kvtide --help` and the
others' starts do not pay for it. An error of ours is one line and exit code 1; one of usage is 2.
"""

import difflib
import importlib

import click

import kvtide
from kvtide.errors import KVTideError, reason_of

COMMANDS = {
    "serve": ("kvtide.cli.serve", "Run a node here, until Ctrl-C or SIGTERM."),
    "status": ("kvtide.cli.status", "Show the node, its engines, memory, hits and misses."),
    "stop": ("kvtide.cli.stop", "End the node; what its memory holds is lost, engines serve on."),
    "clear": ("kvtide.cli.clear", "Take away what the node holds, or what it holds of one salt."),
    "logs": ("kvtide.cli.logs", "Show the end of the node's log."),
    "doctor": ("kvtide.cli.doctor", "Look for what keeps kvtide from working well here."),
    "disk": ("kvtide.cli.disk", "Look at the directory of a disk tier, and prove it."),
    "tier": ("kvtide.cli.tier", "Try the places below host memory."),
    "config": ("kvtide.cli.config", "Show settings and where they come from."),
}
"""Module and line of help of each command, in the order of the page of help; the lines are those
that the commands' own pages begin with, here so that none need be imported."""


class Commands(click.Group):
    """A group whose commands are imported one at a time."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All names."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one."""
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(COMMANDS[cmd_name][0]).command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Which one is meant; for a name that is none, the nearest is told."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            near = difflib.get_close_matches(args[0], COMMANDS, n=1)
            if not near:
                raise
            text = f"{error.format_message()} Did you mean {near[0]!r}?"
            raise click.UsageError(text, ctx) from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list of commands, without importing any."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])

    def invoke(self, ctx: click.Context) -> object:
        """Run a command; what it cannot do is said in one line."""
        try:
            return super().invoke(ctx)
        except KVTideError as error:
            raise click.ClickException(str(error)) from error
        except BrokenPipeError:
            raise  # of our own output: click ends quietly
        except OSError as error:
            place = f" ({error.filename})" if error.filename else ""
            raise click.ClickException(f"{reason_of(error)}{place}") from error


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(kvtide.__version__, prog_name="kvtide")
def main() -> None:
    """Keep the KV cache of inference engines, so that a prefix is computed once.

    Settings are read from the environment (KVTIDE_…) and a YAML file: `kvtide config show`.
    """


if __name__ == "__main__":
    main()

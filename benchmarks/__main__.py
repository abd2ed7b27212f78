"""Runs the benchmarks and writes down what they found.

    python -m benchmarks [host|tiers|paths|engine|all] [--quick]

`host`, which is what `make bench` runs, is what needs host memory alone, in less than an hour:
HOST_PATHS and HOST_PARTS. `tiers` is the rest: places below it, each up to ten minutes. The same
by kind are `paths`: every module benchmarks/paths_*.py, which measure parts of kvtide without a
whole engine, and what each prints goes to benchmarks/results/NAME.md below the machine's facts;
and `engine`: the module of that name, which writes its own. With `--quick` nothing is written, and
it is passed on to those that have it (whose docstring says so).
"""

import argparse
import contextlib
import importlib
import io
import sys
from pathlib import Path
from typing import TextIO

from benchmarks import engine, report
from benchmarks.report import Section

PATHS = "paths_*.py"
HOST_PATHS = ("paths_core", "paths_mover", "paths_node", "paths_retrieve")
HOST_PARTS = ("reuse", "chat", "overhead")


class Tee(io.TextIOBase):
    """Text that goes on and is kept."""

    def __init__(self, shown: TextIO) -> None:
        self._shown = shown
        self.kept = io.StringIO()

    def write(self, text: str) -> int:
        """Pass on, and keep."""
        self._shown.write(text)
        return self.kept.write(text)

    def flush(self) -> None:
        """Pass on."""
        self._shown.flush()


def run_paths(name: str, *, is_quick: bool) -> int:
    """One module's `main`, in this process."""
    print(f"{name}:", flush=True)
    facts = report.machine()
    module = importlib.import_module(f"benchmarks.{name}")
    tee = Tee(sys.stdout)
    has_quick = "--quick" in (module.__doc__ or "")
    with contextlib.redirect_stdout(tee):
        code = module.main(["--quick"] if is_quick and has_quick else [])
    if not is_quick:
        text = f"```\n{tee.kept.getvalue().rstrip()}\n```"
        title = (module.__doc__ or name).splitlines()[0].rstrip(".")
        report.write(report.RESULTS, name, title, facts, [Section("Output", text)])
    return int(code or 0)


def chosen(what: str) -> tuple[list[str], list[str]]:
    """Names of modules without an engine, and of parts of the engine's, in order."""
    paths = sorted(path.stem for path in Path(__file__).parent.glob(PATHS))
    parts = list(engine.PARTS)
    is_host = what == "host"
    if what in ("host", "tiers"):
        paths = [name for name in paths if (name in HOST_PATHS) == is_host]
        parts = [name for name in parts if (name in HOST_PARTS) == is_host]
    return (paths if what != "engine" else []), (parts if what != "paths" else [])


def main(argv: list[str]) -> int:
    """Run what was asked for; 1 if any of it failed or missed a budget."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=(__doc__ or "").splitlines()[0]
    )
    kinds = ["host", "tiers", "paths", "engine", "all"]
    parser.add_argument("what", nargs="?", choices=kinds, default="host")
    parser.add_argument("--quick", action="store_true", help="a few minutes, nothing written")
    options = parser.parse_args(argv)
    paths, parts = chosen(options.what)
    codes = [run_paths(name, is_quick=options.quick) for name in paths]
    if parts:
        quick = ["--quick"] if options.quick else []
        codes.append(engine.main(["--only", ",".join(parts), *quick]))
    return 1 if any(codes) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

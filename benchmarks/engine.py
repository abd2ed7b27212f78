"""kvtide in a real vLLM, against no cache, the engine's own prefix cache, and LMCache.

    python -m benchmarks.engine [--quick] [--only PART,PART] [--results DIRECTORY]

SmolLM2-135M in bf16 on all cores of this process. Every arm is a `vllm serve` of its own; those
that are compared live at the same time and take turns, so what changes with time changes for all.
Parts are reuse, chat, disk, remote and overhead; each is written down as engine_PART.md as soon as
it has ended.
`--quick` shows that everything runs; its numbers decide nothing and are not written down.
"""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks import chat, overhead, place_hits, report, reuse
from benchmarks.report import Section, Verdict

Part = Callable[[bool], Section]

PARTS: Mapping[str, Part] = {
    "reuse": lambda is_quick: (
        reuse.run(reuse.QUICK, reuse.QUICK_ARMS) if is_quick else reuse.run(reuse.FULL)
    ),
    "chat": lambda is_quick: (
        chat.run(chat.QUICK, chat.QUICK_ARMS) if is_quick else chat.run(chat.FULL)
    ),
    "disk": lambda is_quick: _hits(is_quick, place_hits.DISK),
    "remote": lambda is_quick: _hits(is_quick, place_hits.REMOTE),
    "overhead": lambda is_quick: overhead.run(overhead.QUICK if is_quick else overhead.FULL),
}


def _hits(is_quick: bool, subject: place_hits.Subject) -> Section:
    return place_hits.run(place_hits.QUICK if is_quick else place_hits.FULL, subject)


def main(argv: Sequence[str]) -> int:
    """Run the parts asked for; 1 if a budget is missed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.engine", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--quick", action="store_true", help="a few minutes, nothing written")
    parser.add_argument("--only", default=",".join(PARTS), help="parts, with commas between")
    parser.add_argument("--results", type=Path, default=report.RESULTS, help="where to write")
    options = parser.parse_args(argv)
    unknown = set(options.only.split(",")) - set(PARTS)
    if unknown:
        parser.error(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    missed = 0
    for name in options.only.split(","):
        print(f"engine: {name}", flush=True)
        facts = report.machine()
        section = PARTS[name](options.quick)
        print(f"\n{section.markdown()}\n", flush=True)
        if not options.quick:
            report.write(options.results, f"engine_{name}", "kvtide in vLLM", facts, [section])
        missed += sum(check.verdict is Verdict.MISSED for check in section.checks)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

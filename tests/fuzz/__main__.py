"""Fuzz all that reads bytes of others, or some of it; see scripts/fuzz."""

import argparse
import logging
import secrets
import sys

from tests.fuzz.fuzzing import for_seconds, fuzz
from tests.fuzz.targets import TARGETS


def main(argv: list[str]) -> int:
    """Each target in turn, for its share of the time; 1 if one broke."""
    parser = argparse.ArgumentParser(prog="scripts/fuzz")
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=", ".join(TARGETS))
    parser.add_argument("--minutes", type=float, default=5.0, help="for all together")
    parser.add_argument("--seed", type=int, default=None)
    given = parser.parse_args(argv)
    unknown = set(given.targets) - TARGETS.keys()
    if unknown:
        parser.error(f"no target is called {', '.join(unknown)}; known are {', '.join(TARGETS)}")
    logging.getLogger("kvtide").addHandler(logging.NullHandler())  # what is refused says so
    names = given.targets or list(TARGETS)
    seed = secrets.randbits(32) if given.seed is None else given.seed
    findings = 0
    for name in names:
        until = for_seconds(60 * given.minutes / len(names))
        report = fuzz(TARGETS[name], seed, until=until)
        answers = f"{report.inputs} inputs, {len(report.answers)} kinds of answers"
        print(f"{name}, seed {seed}: {answers}, {'broken' if report.fault else 'well'}")
        if report.fault:
            findings += 1
            print(f"kept in the corpus ({len(report.found or b'')} bytes)\n{report.fault}")
    return min(findings, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

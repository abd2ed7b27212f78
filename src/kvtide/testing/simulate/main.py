"""Many worlds, by seed, for minutes; what fails is minimised to a plan that replays.

    scripts/simulate --minutes 5 --seed 1
    scripts/simulate --seed 17 --replay FILE       the plan in a file, with every line of its log

The last line tells seeds, events, faults by kind, and findings.
"""

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from kvtide.core.tiering import WritePolicy
from kvtide.testing.simulate.engine import EngineShape
from kvtide.testing.simulate.plan import Action
from kvtide.testing.simulate.world import Outcome, World, WorldShape
from kvtide.units import KiB

TRIES_MAX = 60
"""Worlds that a minimisation may run."""


def shape_of(seed: int) -> WorldShape:
    """What a seed's world consists of."""
    draw = random.Random(f"shape of {seed}")
    ranks, replicas = draw.choice(((1, 1), (1, 1), (2, 1), (2, 2), (4, 2)))
    engine = EngineShape(
        ranks=ranks,
        replicas=replicas,
        block_count=draw.choice((32, 48, 96)),
        step_tokens=draw.choice((16, 32, 64)),
        is_async=draw.random() < 0.5,
        has_priorities=draw.random() < 0.3,
        prefix_caching=draw.random() < 0.5,
        hashing_s=draw.choice((0.0, 0.0, 0.5)),
    )
    engines = [engine] * draw.choice((1, 2, 3))
    if draw.random() < 0.4:
        other = replace(engine, model="another", weights=7, is_async=not engine.is_async)
        engines.append(other)
    return WorldShape(
        homes=draw.choice((1, 1, 2)),
        engines=tuple(engines),
        host_bytes=draw.choice((256, 512, 2048)) * KiB * ranks // replicas,
        yield_ratio=draw.choice((0.0, 0.01, 0.1)),
        below=draw.choice(((), ("disk",), ("server",), ("server",), ("disk", "server"))),
        policy=draw.choice(list(WritePolicy)),
    )


@dataclass(slots=True)
class Total:
    """Of all worlds so far."""

    worlds: int = 0
    events: int = 0
    requests: int = 0
    tokens: int = 0
    hit_tokens: int = 0
    simulated_s: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    findings: list[str] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        """One more."""
        self.worlds += 1
        self.events += outcome.machine_events
        self.requests += outcome.requests
        self.tokens += outcome.tokens
        self.hit_tokens += outcome.hit_tokens
        self.simulated_s += outcome.simulated_s
        self.faults += outcome.faults


def fault_of(seed: int, shape: WorldShape, plan: Sequence[Action] | None) -> str:
    """What goes wrong in a world; empty where nothing does."""
    try:
        World(seed, shape, plan).run()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def kind_of(fault: str) -> str:
    """What two findings have in common that are one: their words, without numbers."""
    return "".join(letter for letter in fault.splitlines()[0][:120] if not letter.isdigit())


def minimised(seed: int, shape: WorldShape, plan: list[Action], fault: str) -> list[Action]:
    """As few actions as still fail alike: halves, quarters and so on are left out in turn."""
    wanted, size, tries = kind_of(fault), len(plan) // 2, 0
    while size and tries < TRIES_MAX:
        start = 0
        while start < len(plan) and tries < TRIES_MAX:
            less = plan[:start] + plan[start + size :]
            tries += 1
            found = fault_of(seed, shape, less)
            if found and kind_of(found) == wanted:
                plan = less
            else:
                start += size
        size //= 2
    return plan


def run_seed(seed: int, total: Total, *, minimises: bool) -> None:
    """One world; a failure is told, with its plan."""
    world = World(seed, shape_of(seed))
    try:
        total.add(world.run())
    except Exception as error:
        fault = f"{type(error).__name__}: {error}"
        total.findings.append(f"seed {seed}: {fault}")
        print(f"seed {seed}, event {world.machine_events}: {fault}", flush=True)
        if not minimises:
            return
        plan = minimised(seed, shape_of(seed), list(world.plan), fault)
        print(f"  fails alike with these {len(plan)} of {len(world.plan)} actions:")
        for action in plan:
            print(f"  {action}")


def replay(seed: int, path: Path | None) -> int:
    """One world, with every line of its log."""
    plan = None
    if path is not None:
        lines = path.read_text(encoding="utf-8").splitlines()
        plan = [Action.parse(line) for line in lines if line.strip()]
    world = World(seed, shape_of(seed), plan)
    world.kernel.keeps_lines = True
    fault = ""
    try:
        outcome = world.run()
        print(outcome)
    except Exception as error:
        fault = f"{type(error).__name__}: {error}"
    print("\n".join(world.kernel.lines))
    print(fault or f"nothing goes wrong; the log's hash is {world.kernel.digest}")
    return bool(fault)


def main(arguments: Sequence[str] | None = None) -> int:
    """From the command line."""
    parser = argparse.ArgumentParser(prog="simulate", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--worlds", type=int, default=1 << 30, help="at most so many")
    parser.add_argument("--replay", nargs="?", const="", help="this seed, with its whole log")
    parser.add_argument("--stop", action="store_true", help="at the first finding, as it is")
    given = parser.parse_args(arguments)
    if given.replay is not None:
        return replay(given.seed, Path(given.replay) if given.replay else None)
    total = Total()
    began_s = time.monotonic()
    seed = given.seed
    while time.monotonic() - began_s < given.minutes * 60 and seed - given.seed < given.worlds:
        run_seed(seed, total, minimises=not given.stop)
        seed += 1
        if given.stop and total.findings:
            break
    took_s = time.monotonic() - began_s
    print(
        f"seeds {given.seed}..{seed - 1}: {total.events} machine events,"
        f" {total.events / took_s:.0f} a second, {total.simulated_s / took_s:.0f} x real time;"
        f" {total.requests} requests, {total.hit_tokens} of {total.tokens} prompt tokens hit;"
        f" faults {dict(sorted(total.faults.items()))}; {len(total.findings)} findings"
    )
    return bool(total.findings)


if __name__ == "__main__":
    sys.exit(main())

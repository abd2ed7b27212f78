"""What happens in a world, drawn from its seed beforehand: requests, and faults between them.

An action says when and what, with numbers that are taken modulo whatever is there by then. So any
part of a plan is a plan: a failure is minimised by leaving actions out.
"""

import random
from dataclasses import dataclass

MIX: dict[str, float] = {
    "request": 60.0,
    "abort": 8.0,
    "cut": 1.0,  # a connection of a scheduler breaks, both ends live
    "cut_rank": 1.0,
    "stall": 0.5,  # a process stands still, and goes on
    "kill_node": 0.08,
    "kill_engine": 0.15,  # one of its processes, at any edge
    "leave": 0.1,  # an engine ends in order
    "reset": 0.2,  # of an engine's cache
    "weights": 0.1,  # an engine's weights are others from now on
    "adapter": 0.3,  # the files of one are replaced, and engines notice later
    "clear": 0.3,  # the command, of all or one salt
    "shrink": 0.3,  # the machine has less memory, and then more
    "short": 0.2,  # the machine gives no region for a while
    "slow_rank": 0.3,
    "slow_net": 0.2,
    "preempt": 1.0,
    "tier": 2.0,  # what lies below fails, stalls, forgets or damages
}
"""How often each kind of thing happens."""
FAULTS = tuple(kind for kind in MIX if kind not in ("request", "abort"))
NUMBERS = 4


@dataclass(frozen=True, slots=True)
class Action:
    """One thing that happens."""

    at_us: int
    kind: str
    numbers: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.at_us} {self.kind} {' '.join(map(str, self.numbers))}"

    @classmethod
    def parse(cls, line: str) -> "Action":
        """As it was written."""
        at_us, kind, *numbers = line.split()
        return cls(int(at_us), kind, tuple(map(int, numbers)))


def draw_plan(seed: int, count: int, span_us: int, without: frozenset[str]) -> list[Action]:
    """So many actions in so long."""
    draw = random.Random(f"plan of {seed}")
    # Each world has a mood: some see one kind of fault often, and others never.
    weights = {
        kind: weight * (1.0 if kind == "request" else draw.choice((0.0, 0.5, 1.0, 3.0)))
        for kind, weight in MIX.items()
        if kind not in without
    }
    kinds = draw.choices(list(weights), list(weights.values()), k=count)
    times = sorted(draw.randrange(span_us) for _ in range(count))
    return [
        Action(at_us, kind, tuple(draw.randrange(1 << 30) for _ in range(NUMBERS)))
        for at_us, kind in zip(times, kinds, strict=True)
    ]

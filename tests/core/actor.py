"""An engine that keeps its side of the protocol, and remembers what it may still do."""

from dataclasses import dataclass, field
from typing import Any

from kvtide.core import messages as m
from tests.core.world import BLOCK_TOKENS, Engine, World

Content = tuple[bytes, tuple[int, ...]]
"""A root key and the tokens up to the end of a block: what that block's bytes depend on."""


@dataclass(eq=False)
class Plan:
    """A grant as its engine knows it."""

    number: int
    run: m.Run
    contents: list[Content]
    connections: list[int]
    is_planned: bool = False
    is_cleared: bool = False
    to_write: set[int] = field(default_factory=set)
    """Ranks that hold it and have not answered."""
    written: set[int] = field(default_factory=set)


@dataclass(eq=False)
class Load:
    """A match that may be loaded, and what must then have been read."""

    lease: int
    runs: list[m.Run]
    contents: list[list[Content]]
    taken_ms: int
    has_begun: bool = False
    is_disturbed: bool = False
    """Cleared or moved since: it may fail, but not lie."""


class Actor(Engine):
    """An engine that keeps its side of the protocol."""

    def __init__(self, world: World, engine_id: str, shape: dict[str, Any]) -> None:
        super().__init__(world, engine_id, **shape)
        self.plans: dict[int, Plan] = {}
        self.loads: list[Load] = []
        self.asked: dict[int, tuple[bytes, list[int], int]] = {}
        self.read = 0
        self.last_grant = 0
        self.is_connected = False
        self.worker_is_connected = [False] * len(self.workers)
        self.is_scheduler_alive = True
        self.worker_is_alive = [True] * len(self.workers)

    @property
    def serves(self) -> bool:
        """Whether the scheduler may ask: it was told that it is served."""
        return self.is_connected and bool(self.heard(m.Serving)) and not self.off

    @property
    def off(self) -> bool:
        return bool(self.last(m.Serving).off_reason)

    def held_by(self, rank: int) -> list[int]:
        return [number for number, plan in self.plans.items() if rank in plan.to_write]

    def blocks(self, root: bytes, tokens: list[int], chunk: int) -> list[Content]:
        """What the blocks of one chunk of a prompt depend on."""
        first, last = chunk * self.chunk_tokens, min(len(tokens), (chunk + 1) * self.chunk_tokens)
        ends = range(first + BLOCK_TOKENS, last + 1, BLOCK_TOKENS)
        return [(root, tuple(tokens[:end])) for end in ends]

"""One lookup that waits for tiers: what it asks for, how far it has come, what it waits for."""

from collections import deque
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from kvtide.core import messages as m
from kvtide.core.index import Entry, Root
from kvtide.core.instances import Instance

if TYPE_CHECKING:
    from kvtide.core.records import Record

Question: TypeAlias = m.Lookup | m.Probe


class Name(NamedTuple):
    """What tells a lookup that waits from all others: who asks, and its own number of it."""

    engine_id: str
    number: int


class Promotion:
    """One lookup on its way through the tiers, from the first that is asked to the answer."""

    __slots__ = (
        "began_ms",
        "ends_ms",
        "instance",
        "is_asking",
        "is_loading",
        "kept_bytes",
        "loaded_bytes",
        "may_go_on",
        "progress_ms",
        "question",
        "running",
        "start",
        "tier",
        "todo",
        "told_ms",
        "trail",
        "waits_for_memory",
    )

    def __init__(
        self,
        instance: Instance,
        question: Question,
        start: Entry | Root,
        trail: list[Entry],
        now_ms: int,
    ) -> None:
        self.instance = instance
        self.question = question
        self.start = start
        """What its chain is behind."""
        self.trail = trail
        """The chain as far as it has come: held, or on its way."""
        self.kept_bytes = 0
        """What it pins that nobody kept before."""
        self.tier = 0
        """The one that is asked, or loaded from, now."""
        self.is_asking = False
        """That tier has not answered yet."""
        self.todo: deque[Record] = deque()
        """Found there, and not begun yet; in the order of the chain."""
        self.running: set[Entry] = set()
        """On their way, loaded for this lookup or for one that it joined."""
        self.may_go_on = False
        """A tier has more behind, which only block digests would tell."""
        self.began_ms = now_ms
        """When the loads of the present tier began."""
        self.is_loading = False
        """Whether any of these is this lookup's own, and not of one that it joined."""
        self.loaded_bytes = 0
        """Of its own: what has been loaded."""
        self.ends_ms: int | None = None
        """By when computing would have been quicker; None without clear evidence."""
        self.progress_ms = now_ms
        """When something for it came last."""
        self.waits_for_memory = False
        """Nothing more can be loaded before memory that is on its way has come."""
        self.told_ms: int | None = None
        """When the engine was last told that it waits."""

    @property
    def name(self) -> Name:
        """What tells it from all others."""
        return Name(self.instance.engine_id, self.question.number)

    @property
    def chunks(self) -> int:
        """Whole chunks of the question as far as its chain has come."""
        return sum(entry.is_whole for entry in self.trail)

    @property
    def deepest(self) -> Entry | Root:
        """Where the chain has come to. Pinned where it is an entry."""
        return self.trail[-1] if self.trail else self.start

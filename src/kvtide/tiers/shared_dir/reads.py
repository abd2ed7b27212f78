"""Lookups and loads of a shared directory, and the looks at what others wrote that they wait for.

    lookup ─► the view has it all, or a look was made just now ─► answered
                      └► a look ─► what others wrote is in the view ─► answered
    load   ─► one of those who have it ─► proven

There is one look at a time. One that hangs does so in one member's journal, if the place is well:
then the next leaves that member out, and so do loads, until the call has come back.

Ownership: the node's owner thread.
"""

import logging
from collections import Counter
from collections.abc import Callable

from kvtide.bounds import T_LOAD_MS
from kvtide.errors import CorruptRecord
from kvtide.tiers.base import Done, Found, Loaded, LoadJob, LoadOutcome, LookupJob, StoreOutcome
from kvtide.tiers.breaker import SHARED_RETRY_MS_MAX, Breaker
from kvtide.tiers.hung import Hung
from kvtide.tiers.kinds import Kind
from kvtide.tiers.shared_dir.ops import Ended, LoadOp, LookOp, ReadOp
from kvtide.tiers.shared_dir.others import Others
from kvtide.tiers.shared_dir.stores import Stores
from kvtide.tiers.shared_dir.view import Row, View
from kvtide.tiers.shared_dir.workers import Workers

logger = logging.getLogger("kvtide.shared_dir")

FRESH_MS = 100
"""A lookup that finds less than it asks for makes a look, unless one began within this time: what
others stored is found a tenth of a second later, and their server is asked ten times a second."""
LOOK_MS = 1_000
"""Without lookups too: what hangs on records that others evicted gives its room back."""
MEMBER_MS_MAX = 20
"""What a look may take for each member: some three answers of a server that is not near."""
HUNG_LOOKS_MAX = 2
"""So many may hang and be followed by another: the other reading threads are for what works."""


class Reads:
    """All that reads.

    Args:
        place: what warnings name it.
        view, others, workers, stores: those of the tier.
        end: is told of each job that has ended.
    """

    def __init__(
        self,
        place: str,
        view: View,
        others: Others,
        workers: Workers,
        stores: Stores,
        end: Callable[[Done], None],
    ) -> None:
        self.breaker = Breaker("reads", place, logger, SHARED_RETRY_MS_MAX)
        self.loaded: Counter[str] = Counter()
        self.loaded_bytes = 0
        self._view = view
        self._others = others
        self._workers = workers
        self._stores = stores
        self._end = end
        self._now_ms = 0
        self._asking: list[LookupJob] = []
        self._look: LookOp | None = None
        self._looked_ms = 0
        self._hung: Hung[ReadOp] = Hung(_run_ms_max)
        self._is_closed = False

    # ---- lookups

    def lookup(self, job: LookupJob) -> None:
        """Answer it, now or after a look."""
        if self.breaker.is_open or self._is_closed:
            self._end(Found(job.number, [], may_go_on=False))
            return
        found, is_all = self._found(job)
        is_fresh = self._now_ms - self._looked_ms < FRESH_MS or self._others.are_more
        if is_all or is_fresh or self._is_look_late:
            self._end(found)
            return
        self._asking.append(job)
        self.look_around()

    def _found(self, job: LookupJob) -> tuple[Found, bool]:
        """The answer, as far as is known; whether it has all that was asked for."""
        kind = Kind(job.root, job.layout)
        rows, may_go_on = self._view.match(kind, job.parent, job.keys, job.digests)
        last = rows[-1].digests if rows else b""
        is_all = len(rows) * len(job.parent) >= len(job.keys) and last.startswith(job.digests)
        return Found(job.number, [row.record for row in rows], may_go_on), is_all

    def look_around(self) -> None:
        """Make a look, unless one is being made."""
        if self._look is None:
            self._looked_ms = self._now_ms
            self._look = self._others.look(self.stuck)
            self._workers.read(self._look)

    @property
    def stuck(self) -> frozenset[bytes]:
        """Members in whose folders calls hang: nothing else waits for them."""
        return frozenset(op.at for op in self._hung.told if op.at)

    @property
    def _is_look_late(self) -> bool:
        """Whether there is one that nobody waits for any more."""
        return self._look is not None and self._now_ms - self._looked_ms >= T_LOAD_MS

    def take_look(self, op: LookOp, ended: Ended) -> None:
        """What a thread says of a look."""
        self._hung.ended(op)
        if op is self._look:
            self._look = None
        if ended.error is None:
            self._stores.free(self._others.take(ended))
        self._judge(ended.error)  # which has answered, if that broke it
        if ended.error is not None or op.own == self._view.own:  # else the next one says more
            self._answer()
        if ended.error is None and self._others.are_more and not self._is_closed:
            self.look_around()

    def _answer(self) -> None:
        """Whoever waits is told what is known."""
        asking, self._asking = self._asking, []
        for job in asking:
            found, _ = self._found(job)
            self._end(found)

    # ---- loads

    def load(self, job: LoadJob) -> None:
        """Have it done, or end it."""
        if self._is_closed:
            self._end_load(job, LoadOutcome.CLOSED)
            return
        if self.breaker.is_open:
            self._end_load(job, LoadOutcome.BROKEN)
            return
        row = self._view.find(job.record)
        if row is None:
            self._end_load(job, LoadOutcome.ABSENT)
            return
        stuck, own = self.stuck, self._view.own
        members = [member for member in row.members if member not in stuck]
        if not members:
            self._end_load(job, LoadOutcome.FAILED)
            return
        self._view.touch([row])
        row.holds += 1
        members.sort(key=lambda member: member != own)
        self._workers.read(LoadOp(job, row, tuple(members)))

    def take_load(self, op: LoadOp, ended: Ended) -> None:
        """What a thread says of a load."""
        self._hung.ended(op)
        op.row.holds -= 1
        outcome = LoadOutcome.LOADED
        if isinstance(ended.error, CorruptRecord):
            outcome = LoadOutcome.CORRUPT
        elif ended.error is not None:
            outcome = LoadOutcome.FAILED
        elif len(ended.bad) == len(op.members):
            outcome = LoadOutcome.ABSENT
        if outcome is not LoadOutcome.FAILED:
            self._not_there(op.row, ended.bad)
        self._judge(ended.error if outcome is LoadOutcome.FAILED else None)
        self._end_load(op.job, outcome)

    def _not_there(self, row: Row, members: list[bytes]) -> None:
        """None of these members has it, whatever their journals say."""
        for member in members:
            if self._view.index.get(row.key) is not row or member not in row.members:
                continue
            if member == self._view.own:
                self._stores.let_go(row)
            else:
                self._stores.free(self._view.remove(row, member))

    def _end_load(self, job: LoadJob, outcome: LoadOutcome) -> None:
        self.loaded[outcome] += 1
        if outcome is LoadOutcome.LOADED:
            self.loaded_bytes += job.record.payload_bytes
        self._end(Loaded(job.number, outcome))

    # ---- time, faults, the end

    def tick(self, now_ms: int) -> None:
        """Time has passed."""
        self._now_ms = now_ms
        hung = self._hung.look(self._workers.running_reads(), now_ms)
        if hung and self.breaker.hung(max(map(_run_ms_max, hung)), now_ms):
            self._break()
        if self._is_look_late:
            self._answer()
        self._leave_hung_look()
        is_due = not self.breaker.is_open and now_ms - self._looked_ms >= LOOK_MS
        if self.breaker.wants_probe(now_ms) or is_due:
            self.look_around()

    def _leave_hung_look(self) -> None:
        """The next one may be made, where the last hangs in one member's journal."""
        look, told = self._look, self._hung.told
        look_count = sum(isinstance(op, LookOp) for op in told)
        if look is not None and look in told and look.at and look_count <= HUNG_LOOKS_MAX:
            self._look = None

    def _judge(self, error: Exception | None) -> None:
        if self.breaker.is_probing and self._look is None:
            self.breaker.probed(error, self._now_ms)
        elif error is None:
            self.breaker.worked()
        elif self.breaker.failed(error, self._now_ms):
            self._break()

    def _break(self) -> None:
        """Whoever waits is told now."""
        self._take_back_loads(LoadOutcome.BROKEN)
        self._answer_empty()
        self._stores.take_back(StoreOutcome.BROKEN)

    def _answer_empty(self) -> None:
        for job in self._asking:
            self._end(Found(job.number, [], may_go_on=False))
        self._asking.clear()

    def _take_back_loads(self, outcome: LoadOutcome) -> None:
        """Loads that no thread has begun end so."""
        for op in self._workers.take_loads():
            op.row.holds -= 1
            self._end_load(op.job, outcome)

    def close(self) -> None:
        """Nothing more is begun."""
        self._is_closed = True
        self._answer_empty()
        self._take_back_loads(LoadOutcome.CLOSED)


def _run_ms_max(op: ReadOp) -> int:
    """How long it runs before it hangs."""
    return T_LOAD_MS + (MEMBER_MS_MAX * len(op.positions) if isinstance(op, LookOp) else 0)

"""What is held: entries by key, linked to their parents, with the order of eviction.

An entry is *storing* from its grant until every shard is copied, then *held*; only held entries
match, and an entry is held only when its parent is, so whatever matches is whole up to the root.
*Detached* entries can no longer be found; their cells come back when nobody uses them any more.

Eviction takes leaves first, least recently used first: for each region a heap with one item per
entry that may be evicted, put right when it is popped (an item whose entry was used since goes
back in). One for each region, since an engine can use only the cells of those that it has mapped.

A cleared root is replaced by an empty one, so what is below it can no longer be reached, however
much that is; it is taken away piece by piece.

An entry matches only behind its own parent, so a lookup whose keys are no chain ends where they
stop being one. Invariant: `children` counts every attached entry below, storing ones included.
Links run both ways (parent ⇄ tree), so detaching cuts them: the collector is off in the node.
"""

import heapq
import itertools
from collections.abc import Iterable, Iterator

from kvtide.core import radix
from kvtide.core.keys import INNER_DIGEST_BYTES, KEY_BYTES
from kvtide.core.layout import KVLayout
from kvtide.core.messages import Run
from kvtide.core.records import RootName

NO_RUN = Run(0, 0, 0, 0)
"""Of an entry that has no cells yet."""
IDLE_ROOTS_MAX = 1 << 16
"""Roots kept without looking whether anybody needs them."""
FRESHENED_MAX = 1_000
"""Items of heaps that are put right in one tick: a millisecond's work at most."""


class Root:
    """The start of chains: all entries below share fingerprint, epoch, salt and adapter."""

    __slots__ = (
        "children",
        "entry_count",
        "epoch",
        "fingerprint",
        "is_cleared",
        "key",
        "salt_digest",
        "storing",
        "tree",
    )

    is_held = True

    def __init__(self, key: bytes, fingerprint: bytes, epoch: bytes, salt_digest: bytes) -> None:
        self.key = key
        self.fingerprint = fingerprint
        self.epoch = epoch
        self.salt_digest = salt_digest
        self.children = 0
        self.entry_count = 0
        """All entries below."""
        self.is_cleared = False
        self.tree: radix.Tree = None
        self.storing: list[Entry] | None = None

    @property
    def root(self) -> "Root":
        """Itself, as for the entries below."""
        return self

    @property
    def name(self) -> RootName:
        """What it is called below the host."""
        return RootName(self.key, self.fingerprint, self.epoch, self.salt_digest)

    def is_same(self, other: "Root") -> bool:
        """Whether two roots of one key stand for the same."""
        mine = (self.fingerprint, self.epoch, self.salt_digest)
        return mine == (other.fingerprint, other.epoch, other.salt_digest)


class Entry:
    """What the index knows of one chunk or tail on this machine."""

    __slots__ = (
        "children",
        "digests",
        "in_heap",
        "is_attached",
        "is_copied",
        "is_held",
        "kept",
        "key",
        "layout",
        "leases",
        "parent",
        "pins",
        "root",
        "run",
        "storing",
        "tree",
        "used_ms",
    )

    def __init__(
        self, key: bytes, digests: bytes, parent: "Entry | Root", layout: KVLayout, used_ms: int
    ) -> None:
        self.key = key
        self.digests = digests
        self.parent: Entry | Root | None = parent
        self.root: Root = parent.root
        self.layout = layout
        self.used_ms = used_ms
        self.run = NO_RUN
        self.children = 0  # attached entries directly below, storing ones included
        self.kept = 0
        """For each tier a bit: it is there, as far as is known, or on its way there."""
        self.pins = 0  # users that forbid eviction and keep its cells
        self.leases = 0
        """Its own (of waiting lookups too), and the children that have some."""
        self.tree: radix.Tree = None  # its children that are held
        self.storing: list[Entry] | None = None  # its other children; None for none
        self.is_attached = True
        self.is_copied = False  # every shard's copy has succeeded
        self.is_held = False  # copied, behind one that is held: it can be found
        self.in_heap = False

    @property
    def blocks(self) -> int:
        """Blocks, and so cells, of this entry."""
        return len(self.digests) // INNER_DIGEST_BYTES

    @property
    def bytes(self) -> int:
        """Bytes of its cells, over all shards."""
        return self.blocks * self.layout.block_bytes

    @property
    def region(self) -> int:
        """The region of its cells."""
        return self.run.region

    @property
    def is_whole(self) -> bool:
        """A whole chunk, not a tail: only these have children."""
        return self.blocks == self.layout.blocks_per_chunk

    @property
    def is_evictable(self) -> bool:
        """A held leaf that nobody uses."""
        return self.is_held and self.is_attached and not self.children and not self.pins


class Matched:
    """A prefix match: whole chunks in order, then maybe an entry that matches in part."""

    __slots__ = ("blocks", "entries", "may_go_on", "regions", "runs")

    def __init__(self, entries: list[Entry], blocks: int, *, may_go_on: bool) -> None:
        self.entries = entries
        """The last is what a lease must protect: its ancestors are safe behind it."""
        self.blocks = blocks
        """Blocks of the last entry where it matches in part; 0 where it is a whole chunk."""
        self.may_go_on = may_go_on
        """Whether the chunk behind has children to be probed."""
        self.runs = [entry.run for entry in entries]
        if blocks:
            self.runs[-1] = self.runs[-1].part(0, blocks)
        self.regions = {run.region for run in self.runs}

    @property
    def chunks(self) -> int:
        """Whole chunks: all entries but a last one that matches in part."""
        return len(self.entries) - (self.blocks > 0)

    def within(self, regions: set[int]) -> "Matched":
        """The part of the match before the first entry that lies elsewhere."""
        if self.regions <= regions:
            return self
        end = next(i for i, run in enumerate(self.runs) if run.region not in regions)
        return Matched(self.entries[:end], 0, may_go_on=False)


class _Order:
    """The order of eviction in one region."""

    __slots__ = ("dead_count", "items")

    def __init__(self) -> None:
        self.items: list[tuple[int, int, Entry]] = []
        """A heap: when the entry was used, or earlier; a sequence number; the entry."""
        self.dead_count = 0
        """Items of entries that are detached."""

    def add(self, entry: Entry, sequence: int) -> None:
        entry.in_heap = True
        heapq.heappush(self.items, (entry.used_ms, sequence, entry))

    def put_right(self, sequence: Iterator[int], count_max: int) -> int:
        """Make the top true: put back what was used since, drop what may not go; how many were."""
        for count in range(count_max):
            if not self.items:
                return count
            used_ms, _, entry = self.items[0]
            if entry.is_evictable and entry.used_ms == used_ms:
                return count
            heapq.heappop(self.items)
            entry.in_heap = False
            if entry.is_evictable:
                self.add(entry, next(sequence))
            elif not entry.is_attached:
                self.dead_count -= 1
        return count_max

    def bury(self) -> None:
        """An entry was detached; rebuild a heap that is mostly items of entries already gone."""
        self.dead_count += 1
        if self.dead_count * 2 > max(64, len(self.items)):
            self.items = [item for item in self.items if item[2].is_attached]
            heapq.heapify(self.items)
            self.dead_count = 0


class Index:
    """All entries of the node, of every layout."""

    def __init__(self) -> None:
        self.roots: dict[bytes, Root] = {}
        self.roots_max = IDLE_ROOTS_MAX
        """From so many roots on, those that nobody needs are looked for."""
        self.entries: dict[bytes, Entry] = {}
        self.held_chunks = 0
        self.held_tails = 0
        self.leased_bytes = 0
        """Bytes of all entries that leases and waiting lookups keep, each counted once."""
        self.shown: list[Entry] = []
        """Entries that have become held since somebody last emptied this."""
        self._orders: dict[int, _Order] = {}  # by region; the one freshened last comes last
        self._sequence = itertools.count()

    def find(self, key: bytes) -> "Entry | Root | None":
        """A root or an attached entry by its key, cleared ones included."""
        return self.entries.get(key) or self.roots.get(key)

    def reachable(self, key: bytes) -> "Entry | Root | None":
        """A root or an attached entry by its key; none that was cleared."""
        found = self.find(key)
        return None if found is None or found.root.is_cleared else found

    def clear(self, root: Root) -> None:
        """Cut off all that is below a root: none of it is reachable any more."""
        assert self.roots[root.key] is root, "cleared twice"
        root.is_cleared = True
        self.roots[root.key] = Root(root.key, root.fingerprint, root.epoch, root.salt_digest)

    def match(self, root: Root, keys: bytes, digests: bytes, now_ms: int) -> Matched:
        """The longest held prefix of a chain of chunk keys, then of the blocks behind them."""
        entries = self.entries
        matched: list[Entry] = []
        deepest: Entry | Root = root
        for start in range(0, len(keys), KEY_BYTES):
            key = keys[start : start + KEY_BYTES]
            child = deepest.tree
            # Most have one child: following it spares the cache misses of the great dictionary.
            entry = child if isinstance(child, Entry) and child.key == key else entries.get(key)
            if entry is None or not entry.is_held or entry.parent is not deepest:
                return Matched(matched, 0, may_go_on=child is not None)
            entry.used_ms = now_ms
            matched.append(entry)
            deepest = entry
        partial, blocks = radix.longest(deepest.tree, digests)
        if partial is not None:
            partial.used_ms = now_ms
            matched.append(partial)
        return Matched(matched, blocks, may_go_on=False)

    def match_blocks(self, parent: "Entry | Root", digests: bytes, now_ms: int) -> Matched:
        """The longest match of one chunk's short block digests among the children of `parent`."""
        partial, blocks = radix.longest(parent.tree, digests)
        if partial is None:
            return Matched([], 0, may_go_on=False)
        partial.used_ms = now_ms
        return Matched([partial], blocks, may_go_on=False)

    def attach_storing(self, entry: Entry) -> None:
        """A grant is given: the entry exists, invisible."""
        assert entry.key not in self.entries, "one key twice"
        parent = entry.parent
        assert parent is not None
        self.entries[entry.key] = entry
        parent.children += 1
        entry.root.entry_count += 1
        if parent.storing is None:
            parent.storing = []
        parent.storing.append(entry)

    def copied(self, entry: Entry) -> list[Entry]:
        """Every shard of the entry is copied: show it, and what waited behind it, if it may be.

        Returns the entries that have become superfluous, some of them twice: the caller takes
        them away. One that has a twin (two keys for the same blocks: an engine's fault) is among
        them and was not shown.
        """
        entry.is_copied = True
        superseded: list[Entry] = []
        waiting = [entry]
        while waiting:
            entry = waiting.pop()
            parent = entry.parent
            if parent is None or not parent.is_held or not entry.is_copied:
                continue
            if radix.twin(parent.tree, entry) is not None:
                superseded.append(entry)
                continue
            superseded += self._show(entry, parent)
            waiting.extend(entry.storing or ())
        return superseded

    def _show(self, entry: Entry, parent: "Entry | Root") -> list[Entry]:
        assert parent.storing is not None
        parent.storing.remove(entry)
        parent.storing = parent.storing or None
        entry.is_held = True
        self.shown.append(entry)
        self._count_held(entry, 1)
        parent.tree = radix.insert(parent.tree, entry)
        self.reconsider(entry)
        shorter = radix.endings_above(parent.tree, entry)
        return [entry] if radix.is_covered(parent.tree, entry) else shorter

    def _count_held(self, entry: Entry, more: int) -> None:
        if entry.is_whole:
            self.held_chunks += more
        else:
            self.held_tails += more

    def detach(self, entry: Entry) -> None:
        """Take a childless entry out of the index; it can no longer be found."""
        assert entry.is_attached, "detached twice"
        assert not entry.children, entry.children
        parent = entry.parent
        assert parent is not None
        del self.entries[entry.key]
        if entry.is_held:
            self._count_held(entry, -1)
            parent.tree = radix.remove(parent.tree, entry)
        else:
            assert parent.storing is not None
            parent.storing.remove(entry)
            parent.storing = parent.storing or None
        parent.children -= 1
        entry.root.entry_count -= 1
        entry.is_attached = False
        if entry.leases and isinstance(parent, Entry):
            self.unlease(parent)
        entry.parent = None
        if entry.in_heap:
            self._orders[entry.region].bury()
        if isinstance(parent, Entry):
            self.reconsider(parent)

    def below(self, entry: "Entry | Root") -> list[Entry]:
        """All attached entries below this one, each before its ancestors."""
        found: list[Entry] = []
        waiting: list[Entry | Root] = [entry]
        while waiting:
            node = waiting.pop()
            children = radix.entries(node.tree) + (node.storing or [])
            found.extend(children)
            waiting.extend(children)
        found.reverse()
        return found

    def forget_idle_roots(self, in_use: set[bytes]) -> None:
        """Roots without entries that no engine has registered are dropped."""
        for key in [key for key, root in self.roots.items() if not root.children]:
            if key not in in_use:
                del self.roots[key]
        self.roots_max = max(IDLE_ROOTS_MAX, 2 * len(self.roots))

    # ---- what leases keep

    def unleased_bytes(self, entry: Entry) -> int:
        """What a lease on this entry would keep of its chain, and none keeps yet."""
        return self._climb_bytes(entry, lease_count=0)

    def lease(self, entry: Entry) -> None:
        """One lease more; its ancestors are kept with it. A chain's first costs its length."""
        self.leased_bytes += self._climb_bytes(entry, lease_count=1)

    def _climb_bytes(self, entry: Entry, lease_count: int) -> int:
        """Add leases up to the first entry that had some; the bytes of those that had none."""
        node: Entry | Root | None = entry
        climbed = 0
        while isinstance(node, Entry):
            leases = node.leases
            node.leases = leases + lease_count
            if leases:
                break
            climbed += 1
            node = node.parent
        if not climbed:
            return 0  # above the deepest, all are whole chunks of one layout
        return entry.bytes + (climbed - 1) * entry.layout.chunk_bytes

    def unlease(self, entry: Entry) -> None:
        """One lease less, or one leased child."""
        node: Entry | Root | None = entry
        climbed = 0
        while isinstance(node, Entry):
            assert node.leases > 0, "leases ended more often than begun"
            node.leases -= 1
            if node.leases:
                break
            climbed += 1
            node = node.parent
        if climbed:
            self.leased_bytes -= entry.bytes + (climbed - 1) * entry.layout.chunk_bytes

    # ---- order of eviction

    def reconsider(self, entry: Entry) -> None:
        """The entry may have become evictable: a lease ended, a child went, it became visible."""
        if entry.is_evictable and not entry.in_heap:
            order = self._orders.get(entry.region)
            if order is None:
                order = self._orders[entry.region] = _Order()
            order.add(entry, next(self._sequence))

    def next_to_evict(self, regions: Iterable[int]) -> Entry | None:
        """Pop the evictable entry in these regions that was used longest ago."""
        best: _Order | None = None
        for number in regions:
            order = self._orders.get(number)
            if order is None or not order.items:
                continue
            if best is not None and best.items[0] < order.items[0]:
                continue  # a top is never younger than its heap, true or not
            order.put_right(self._sequence, len(order.items))
            if order.items and (best is None or order.items[0] < best.items[0]):
                best = order
        if best is None:
            return None
        used_ms, _, entry = heapq.heappop(best.items)
        assert entry.is_evictable, "the order of eviction is wrong"
        assert entry.used_ms == used_ms, (entry.used_ms, used_ms)
        entry.in_heap = False
        return entry

    def oldest_leaves(self, count: int) -> list[Entry]:
        """About the next so many that would be evicted, whatever their region."""
        tops = itertools.chain.from_iterable(
            order.items[:count] for order in self._orders.values()
        )
        return [entry for _, _, entry in heapq.nsmallest(count, tops) if entry.is_evictable]

    def freshen(self) -> None:
        """Do some of the work of `next_to_evict` ahead, so that no store waits for all of it."""
        count_left = FRESHENED_MAX
        for number in list(self._orders):
            if count_left <= 0:
                return
            order = self._orders.pop(number)
            count_left -= order.put_right(self._sequence, count_left)
            if order.items:
                self._orders[number] = order

    def check_integrity(self) -> None:
        """Assert what the module's header says, over everything. Slow: for tests and doctor."""
        held = [0, 0]
        below_root = dict.fromkeys(self.roots.values(), 0)
        for key, entry in self.entries.items():
            parent = entry.parent
            assert entry.key == key, "an entry under another key"
            assert entry.is_attached, "a detached entry can be found"
            assert parent is not None, "an entry without a parent"
            is_found = parent.root.is_cleared or self.find(parent.key) is parent
            assert is_found, "a parent that cannot be found"
            assert entry.root is parent.root, "below another root than its parent"
            below_root[entry.root] = below_root.get(entry.root, 0) + 1
            assert parent.is_held or not entry.is_held, "held behind something that is not"
            assert entry.in_heap or not entry.is_evictable, "evictable, but not in the heap"
            held[entry.is_whole] += entry.is_held
        assert (self.held_tails, self.held_chunks) == tuple(held), held
        children = 0
        for root, count in below_root.items():
            assert root.entry_count == count, (root.entry_count, count)
        holders = itertools.chain[Entry | Root](self.entries.values(), below_root)
        for holder in holders:
            below = radix.entries(holder.tree)
            assert all(entry.is_held and entry.parent is holder for entry in below), holder.key
            storing = holder.storing or []
            assert all(entry.parent is holder for entry in storing), holder.key
            assert len(below) + len(storing) == holder.children, holder.key
            children += holder.children
        assert children == len(self.entries), (children, len(self.entries))

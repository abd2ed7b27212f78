"""What is held, what matches, and what is evicted first."""

import gc
import hashlib
import sys
import weakref
from collections.abc import Callable

import pytest

from kvtide.core import index as index_module
from kvtide.core.index import Entry, Index, Root
from kvtide.core.keys import INNER_DIGEST_BYTES
from kvtide.core.layout import KVLayout
from kvtide.core.messages import Run

LAYOUT = KVLayout(2, 8, (4096,))


def name(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


class Shelf:
    """An index with one root; contents are words, one letter a block."""

    def __init__(self) -> None:
        self.index = Index()
        self.root = Root(name("root"), name("fingerprint"), b"", b"")
        self.index.roots[self.root.key] = self.root

    def digests(self, word: str) -> list[bytes]:
        """Digests of the blocks of the last chunk of a word: each stands for all before it."""
        start = (len(word) - 1) // 4 * 4
        return [name(word[: end + 1]) for end in range(start, len(word))]

    def key(self, word: str) -> bytes:
        return self.digests(word)[-1]

    def short(self, word: str) -> bytes:
        return b"".join(digest[:INNER_DIGEST_BYTES] for digest in self.digests(word))

    def storing(self, word: str, now_ms: int = 0, region: int = 1) -> Entry:
        parent_word = word[: (len(word) - 1) // 4 * 4]
        parent = self.index.find(self.key(parent_word)) if parent_word else self.root
        assert parent is not None
        entry = Entry(self.key(word), self.short(word), parent, LAYOUT, now_ms)
        entry.run = Run(region, 0, entry.blocks, 1)
        self.index.attach_storing(entry)
        self.index.check_integrity()
        return entry

    def held(self, word: str, now_ms: int = 0, region: int = 1) -> Entry:
        entry = self.storing(word, now_ms, region)
        self.copied(entry)
        return entry

    def copied(self, entry: Entry) -> list[Entry]:
        found = self.index.copied(entry)
        self.index.check_integrity()
        return found

    def match(self, word: str, now_ms: int = 0) -> int:
        """How many letters match."""
        whole = len(word) // 4 * 4
        chunk_keys = b"".join(self.key(word[:end]) for end in range(4, whole + 1, 4))
        digests = self.short(word) if len(word) % 4 else b""
        matched = self.index.match(self.root, chunk_keys, digests, now_ms)
        blocks = matched.blocks
        if matched.may_go_on:
            chunks = len(matched.entries)
            parent = matched.entries[-1] if matched.entries else self.root
            behind = word[: min(len(word), 4 * chunks + 4)]
            blocks = self.index.match_blocks(parent, self.short(behind), now_ms).blocks
            return 4 * chunks + blocks
        return 4 * (len(matched.entries) - (blocks > 0)) + blocks


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


def line_count(call: Callable[[], object]) -> int:
    """Lines of Python that run."""
    count, before = 0, sys.gettrace()

    def trace(frame: object, event: str, _: object) -> object:
        nonlocal count
        count += event == "line"
        return trace

    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("at", ["beside", "behind"])
def test_a_match_takes_no_more_steps_among_many_entries(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """Beside the chain that is asked for, or among the children of its last whole chunk."""
    chain = "abcdefghij"
    for end in (4, 8, 10):
        shelf.held(chain[:end])
    start = "" if at == "beside" else chain[:8]
    shelf.held(f"{start}0000")
    few = line_count(lambda: shelf.match(chain))
    monkeypatch.setattr(
        Index, "check_integrity", lambda _: None
    )  # it would look at all, each time
    for number in range(1, 2_000):
        shelf.held(f"{start}{number:04d}")
    assert shelf.match(chain) == len(chain)
    assert line_count(lambda: shelf.match(chain)) == few


@pytest.mark.parametrize(
    ("asked", "letters"),
    [
        ("tide", 4),
        ("tidewater", 9),
        ("tidewaterline", 9),
        ("tidewatt", 6 + 1),
        ("tidewall", 6),
        ("tidal", 3),
        ("ti", 2),
        ("ebb", 0),
    ],
)
def test_the_longest_held_prefix_matches_block_for_block(
    shelf: Shelf, asked: str, letters: int
) -> None:
    """Held: two chunks and a tail of one block; asked: prompts that share less and less."""
    for word in ("tide", "tidewate", "tidewater"):
        shelf.held(word)
    assert shelf.match(asked) == letters


def test_what_is_being_stored_does_not_match(shelf: Shelf) -> None:
    entry = shelf.storing("tide")
    assert shelf.match("tide") == 0
    shelf.copied(entry)
    assert shelf.match("tide") == 4


def test_what_is_copied_first_waits_for_what_is_before_it(shelf: Shelf) -> None:
    """Three chunks granted at once, answered from the last to the first."""
    entries = [shelf.storing(word) for word in ("tide", "tidewate", "tidewater")]
    for entry in reversed(entries[1:]):
        shelf.copied(entry)
        assert shelf.match("tidewater") == 0
    shelf.copied(entries[0])
    assert shelf.match("tidewater") == 9


def test_keys_that_are_no_chain_match_as_far_as_they_are_one(shelf: Shelf) -> None:
    """Both chunks are held, but the second does not follow the first."""
    for word in ("tide", "ebbs", "ebbsaway"):
        shelf.held(word)
    chunk_keys = shelf.key("tide") + shelf.key("ebbsaway")
    assert len(shelf.index.match(shelf.root, chunk_keys, b"", 0).entries) == 1
    assert not shelf.index.match(shelf.root, shelf.key("ebbsaway"), b"", 0).entries


def test_a_probe_is_worth_it_only_behind_an_entry_with_children(shelf: Shelf) -> None:
    shelf.held("tide")
    chunk_keys = shelf.key("tide") + shelf.key("tidewate")
    assert not shelf.index.match(shelf.root, chunk_keys, b"", 0).may_go_on
    shelf.held("tidewa")
    assert shelf.index.match(shelf.root, chunk_keys, b"", 0).may_go_on
    assert shelf.index.match(shelf.root, shelf.key("ebbs"), b"", 0).may_go_on, "below the root"


def test_a_tail_is_superseded_by_what_begins_with_it(shelf: Shelf) -> None:
    tail = shelf.held("ti")
    assert shelf.copied(shelf.storing("tid")) == [tail]
    both = shelf.copied(shelf.storing("tide"))
    assert {entry.key for entry in both} == {shelf.key("ti"), shelf.key("tid")}


def test_a_tail_that_comes_after_the_longer_one_is_superfluous_itself(shelf: Shelf) -> None:
    shelf.held("tide")
    tail = shelf.storing("ti")
    assert shelf.copied(tail) == [tail]


def test_a_tail_beside_a_longer_one_stays(shelf: Shelf) -> None:
    shelf.held("tiny")
    assert shelf.copied(shelf.storing("tid")) == []


def test_two_keys_for_the_same_blocks_are_not_both_shown(shelf: Shelf) -> None:
    """An engine's fault: its keys differ behind the digest that they begin with."""
    shelf.held("tide")
    twin = Entry(shelf.key("tide")[:16] + bytes(16), shelf.short("tide"), shelf.root, LAYOUT, 0)
    shelf.index.attach_storing(twin)
    assert shelf.copied(twin) == [twin]
    assert not twin.is_held


def test_below_names_leaves_before_what_they_hang_on(shelf: Shelf) -> None:
    """Storing entries too: what is taken away in this order never has children."""
    for word in ("tide", "tidewate", "tidepool", "tidewater"):
        shelf.held(word)
    shelf.storing("tidepoolside")
    order = shelf.index.below(shelf.root)
    assert len(order) == 5
    for entry in order:
        shelf.index.detach(entry)
    shelf.index.check_integrity()
    assert not shelf.index.entries


def evicted(shelf: Shelf) -> list[bytes]:
    """Evict everything that may be, in order."""
    order = []
    while (entry := shelf.index.next_to_evict([1])) is not None:
        shelf.index.detach(entry)
        shelf.index.check_integrity()
        order.append(entry.key)
    return order


def keys_of(shelf: Shelf, *words: str) -> list[bytes]:
    return [shelf.key(word) for word in words]


def test_leaves_are_evicted_before_what_they_hang_on(shelf: Shelf) -> None:
    for word in ("tide", "tidewate", "tidewater"):
        shelf.held(word)
    assert evicted(shelf) == keys_of(shelf, "tidewater", "tidewate", "tide")


def test_what_was_used_longest_ago_is_evicted_first(shelf: Shelf) -> None:
    """Stored in order, then the first is looked up."""
    for now_ms, word in enumerate(("tide", "ebbs", "flow")):
        shelf.held(word, now_ms)
    assert shelf.match("tide", now_ms=10) == 4
    assert evicted(shelf) == keys_of(shelf, "ebbs", "flow", "tide")


def test_a_match_touches_the_whole_chain(shelf: Shelf) -> None:
    """The parent of a used leaf is not older than a chain used in between."""
    for now_ms, word in enumerate(("tide", "tidewate", "ebbs", "ebbsaway")):
        shelf.held(word, now_ms)
    assert shelf.match("tidewate", now_ms=10) == 8
    assert evicted(shelf) == keys_of(shelf, "ebbsaway", "ebbs", "tidewate", "tide")


def test_what_is_pinned_or_storing_is_not_evicted(shelf: Shelf) -> None:
    pinned = shelf.held("tide")
    shelf.held("tidewa")
    shelf.storing("ebbs")
    pinned.pins += 1
    assert evicted(shelf) == keys_of(shelf, "tidewa")
    pinned.pins -= 1
    shelf.index.reconsider(pinned)
    assert evicted(shelf) == keys_of(shelf, "tide")


def test_order_that_was_put_right_ahead_is_the_same(shelf: Shelf) -> None:
    """Ticks do some of the work after many lookups: a few items at a time, until none is wrong."""
    words = [f"{number:04}" for number in range(50)]
    for now_ms, word in enumerate(words):
        shelf.held(word, now_ms)
    order = words[::3] + words[1::3] + words[2::3]
    for now_ms, word in enumerate(order):
        shelf.match(word, now_ms=100 + now_ms)
    for _ in range(3):
        shelf.index.freshen()
        shelf.index.check_integrity()
    (order_now,) = shelf.index._orders.values()
    assert order_now.items[0][2].key == shelf.key(order[0])
    assert evicted(shelf) == keys_of(shelf, *order)


def test_items_of_entries_that_are_gone_do_not_pile_up(shelf: Shelf) -> None:
    """Ten thousand tails come and are superseded; the heap holds no more than twice what lives."""
    for number in range(10_000):
        entry = shelf.held(f"{number:04}"[:4])
        shelf.index.detach(entry)
    (order,) = shelf.index._orders.values()
    assert len(order.items) <= 65
    assert shelf.index.next_to_evict([1]) is None
    shelf.index.freshen()
    assert not shelf.index._orders, "nor do empty heaps of regions"


def test_entries_are_evicted_from_the_regions_that_are_named(shelf: Shelf) -> None:
    """Used in turns, in three regions; the oldest of the named ones goes, wherever it lies."""
    for now_ms in range(12):
        entry = shelf.held(f"{now_ms:04}", now_ms, region=now_ms % 3)
    shelf.match("0001", now_ms=100)
    order = []
    while (entry := shelf.index.next_to_evict([2, 7, 1])) is not None:
        shelf.index.detach(entry)
        order.append(int(entry.used_ms))
    assert order == [2, 4, 5, 7, 8, 10, 11, 100]
    assert shelf.index.next_to_evict([0]) is not None


def test_roots_that_nobody_needs_are_forgotten(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those with entries and those that an engine has registered stay."""
    monkeypatch.setattr(index_module, "IDLE_ROOTS_MAX", 1)
    shelf.held("tide")
    for other in ("idle", "registered"):
        root = Root(name(other), b"", b"", b"")
        shelf.index.roots[root.key] = root
    shelf.index.forget_idle_roots({name("registered")})
    assert set(shelf.index.roots) == {shelf.root.key, name("registered")}
    assert shelf.index.roots_max == 4, "it is not looked for again with every new one"


def test_a_detached_entry_is_freed_without_the_collector(shelf: Shelf) -> None:
    """The node runs with the collector off: a cycle would stay for ever."""

    class Watched(Entry):
        __slots__ = ("__weakref__",)

    gc.collect()
    gc.disable()
    try:
        parent = Watched(shelf.key("tide"), shelf.short("tide"), shelf.root, LAYOUT, 0)
        parent.run = Run(1, 0, 4, 1)
        shelf.index.attach_storing(parent)
        shelf.copied(parent)
        shelf.held("tidewa")
        shelf.held("tidewood")
        gone = weakref.ref(parent)
        del parent
        shelf.index.shown.clear()  # as the machine does after each event
        assert gone() is not None
        evicted(shelf)
        assert shelf.index.next_to_evict([1]) is None
        assert gone() is None
    finally:
        gc.enable()


def test_entries_know_their_size() -> None:
    sizes = [("tide", 4, True), ("ti", 2, False)]
    for word, blocks, is_whole in sizes:
        shelf = Shelf()
        entry = shelf.held(word)
        assert (entry.blocks, entry.is_whole, entry.region) == (blocks, is_whole, 1)

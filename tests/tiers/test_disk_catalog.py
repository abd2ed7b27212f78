"""The catalog against a dictionary: random operations, all beliefs checked after each."""

import random
from collections.abc import Iterator, Sequence
from itertools import pairwise

import pytest

from kvtide.core.keys import INNER_DIGEST_BYTES, KEY_BYTES
from kvtide.core.layout import KVLayout
from kvtide.core.records import Record
from kvtide.testing.tier_records import root_of
from kvtide.tiers.disk import columns as tables
from kvtide.tiers.disk.intake import LazyCatalog
from kvtide.tiers.disk.rows import Kept
from kvtide.tiers.kinds import Kind
from tests.tiers.test_disk_rows import decoded

LAYOUT = KVLayout(4, 16, (4096,))
SALTS = ("", "one", "two")
PAGE = 4096


class Model:
    """A catalog and what should be in it."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.catalog = LazyCatalog()
        self.records: dict[bytes, Record] = {}
        self.held: list[bytes] = []
        self.next_page = 0

    def below(self, key: bytes) -> list[bytes]:
        """All that hangs on a record."""
        found = [key]
        for one in found:
            found += [record.key for record in self.records.values() if record.parent == one]
        return found[1:]

    def leaves(self) -> set[bytes]:
        parents = {record.parent for record in self.records.values()}
        return set(self.records) - parents - set(self.held)

    def add(self) -> None:
        root = root_of(salt=self.draw.choice(SALTS))
        whole = [
            record.key
            for record in self.records.values()
            if record.is_whole and record.root == root
        ]
        parent = self.draw.choice([*whole, root.key])
        blocks = self.draw.choice([1, 2, 3, 4, 4, 4])
        key = self.draw.randbytes(KEY_BYTES)
        # Few first blocks, so that many records begin alike; a block's digest names its parent.
        first = bytes([self.draw.randrange(2)]) + parent[1:INNER_DIGEST_BYTES]
        inner = first + self.draw.randbytes((blocks - 1) * INNER_DIGEST_BYTES)
        digests = inner[: (blocks - 1) * INNER_DIGEST_BYTES] + key[:INNER_DIGEST_BYTES]
        record = Record(root, parent, key, digests, LAYOUT)
        kind = self.catalog.kind_number(Kind(root, LAYOUT))
        self.next_page += 1
        self.catalog.add(kind, 1, Kept(self.next_page * PAGE, kind, key, parent, digests))
        self.records[key] = record

    def evict(self) -> None:
        row = self.catalog.coldest()
        leaves = self.leaves()
        if row is None:
            assert not leaves
            return
        key = self.catalog.keys[row]
        assert key in leaves, "a leaf that nobody holds"
        self.catalog.remove(row)
        del self.records[key]

    def damage(self) -> None:
        if not self.records:
            return
        key = self.draw.choice(list(self.records))
        behind = self.below(key)
        self.catalog.remove(self.catalog.index[key])
        for one in [key, *behind]:
            del self.records[one]
        self.sweep()

    def clear(self) -> None:
        if self.draw.random() < 0.9:
            return
        salt = self.draw.choice([*SALTS, None])
        digest = None if salt is None else root_of(salt=salt).salt_digest
        gone = [
            key
            for key, record in self.records.items()
            if digest in (None, record.root.salt_digest)
        ]
        kinds = [
            number
            for number, state in self.catalog.kinds.items()
            if not state.is_retired and digest in (None, state.kind.root.salt_digest)
        ]
        assert self.catalog.retire(kinds) == len(gone)
        for key in gone:
            del self.records[key]
        self.sweep()

    def sweep(self) -> None:
        while not self.catalog.is_swept:
            self.catalog.sweep()

    def hold(self) -> None:
        if self.records and len(self.held) < 5:
            key = self.draw.choice(list(self.records))
            self.catalog.hold(key)
            self.held.append(key)

    def let_go(self) -> None:
        if self.held:
            key = self.held.pop(self.draw.randrange(len(self.held)))
            self.catalog.let_go(key)

    def look_up(self) -> None:
        if not self.records:
            return
        record = self.draw.choice(list(self.records.values()))
        chain = [record]
        while chain[0].parent in self.records:
            chain.insert(0, self.records[chain[0].parent])
        *before, last = chain
        keys = b"".join(one.key for one in before)
        kind = self.catalog.kind_numbers[Kind(record.root, LAYOUT)]
        rows = self.catalog.match(kind, chain[0].parent, keys, last.digests).rows
        found = [self.catalog.record(row) for row in rows]
        assert found[:-1] == before
        assert found[-1].digests.startswith(last.digests)

    def check(self) -> None:
        self.catalog.check_integrity()
        assert len(self.catalog) == len(self.records)
        assert self.catalog.index.keys() == self.records.keys()


@pytest.mark.parametrize("seed", range(6))
def test_random_operations_leave_what_a_dictionary_holds(seed: int) -> None:
    model = Model(seed)
    actions = [model.add] * 6 + [model.evict, model.damage, model.clear]
    actions += [model.hold, model.let_go, model.look_up, model.look_up]
    for _ in range(300):
        model.draw.choice(actions)()
        model.check()
    for key in model.held:
        model.catalog.let_go(key)
    model.held.clear()
    while model.records:
        model.evict()
        model.check()
    assert not model.catalog.kinds, "roots are kept no longer than their records"


def grown(seed: int, adds: int = 60) -> Model:
    model = Model(seed)
    for _ in range(adds):
        model.add()
    return model


def kept_in(model: Model, kinds: dict[int, Kind]) -> Iterator[Kept]:
    numbers = {kind: number for number, kind in kinds.items()}
    for record in model.records.values():
        place = model.catalog.place(model.catalog.index[record.key])
        kind = numbers[Kind(record.root, LAYOUT)]
        yield Kept(place.offset_bytes, kind, record.key, record.parent, record.digests)


@pytest.fixture(params=["at once", "by and by"])
def start(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How rows are made of what a start has read."""
    if request.param == "by and by":
        monkeypatch.setattr("kvtide.tiers.disk.intake.EAGER_ROWS", -1)


@pytest.mark.usefixtures("start")
@pytest.mark.parametrize("cut", [0, 1, 30, 59])
def test_indexes_make_the_same_catalog_again(cut: int) -> None:
    """Of one segment or of two that share chains, written to bytes and read."""
    model = grown(1)
    kinds = {number: Kind(root_of(salt=salt), LAYOUT) for number, salt in enumerate(SALTS)}
    kept = sorted(kept_in(model, kinds), key=lambda one: one.offset_bytes)
    again = LazyCatalog()
    for segment, part in ((1, kept[:cut]), (2, kept[cut:])):
        again.take(
            segment, decoded(tables.encode(tables.from_rows(kinds, part), segment), segment), ()
        )
    assert again.settle() == []
    again.check_integrity()
    for record in model.records.values():
        assert again.record(again.index[record.key]) == record


@pytest.mark.usefixtures("start")
def test_what_is_gone_and_what_hung_on_it_are_not_taken_in() -> None:
    """Rows that a log takes away; one whose children it forgot."""
    model = grown(2)
    kinds = {number: Kind(root_of(salt=salt), LAYOUT) for number, salt in enumerate(SALTS)}
    kept = sorted(kept_in(model, kinds), key=lambda one: one.offset_bytes)
    parent = max(model.records, key=lambda key: len(model.below(key)))
    behind = model.below(parent)
    assert behind
    offset = next(one.offset_bytes for one in kept if one.key == parent)
    again = LazyCatalog()
    taken = tables.from_rows(kinds, kept)
    [row] = again.take(1, taken, {offset})
    assert taken.pages[row] * PAGE == offset
    again.settle()
    while not again.is_swept:
        again.sweep()
    again.check_integrity()
    assert again.index.keys() == model.records.keys() - {parent, *behind}


@pytest.mark.usefixtures("start")
def test_of_two_records_with_one_key_the_later_counts() -> None:
    """A removal whose row was lost: the key was stored again in a later segment."""
    model = grown(3, adds=20)
    kinds = {number: Kind(root_of(salt=salt), LAYOUT) for number, salt in enumerate(SALTS)}
    kept = sorted(kept_in(model, kinds), key=lambda one: one.offset_bytes)
    again = LazyCatalog()
    for segment in (1, 2):
        again.take(segment, tables.from_rows(kinds, kept), ())
    places = again.settle()
    while not again.is_swept:
        places += again.sweep()
    assert {place.segment for place in places} == {1}
    assert len(places) == len(kept)
    again.check_integrity()
    assert len(again) == len(kept)
    assert {again.place(row).segment for row in again.index.values()} == {2}


def test_what_was_used_since_the_hand_came_by_stays() -> None:
    """And a cold chain goes from its end, in one round."""
    model = Model(4)
    root = root_of()
    kind = model.catalog.kind_number(Kind(root, LAYOUT))
    chains: list[list[bytes]] = []
    for number in range(4):
        parent, chain = root.key, []
        for depth in range(5):
            key = bytes([number, depth]) * 16
            digests = bytes([number, depth, 1, 1]) * 12 + key[:INNER_DIGEST_BYTES]
            offset = (number * 5 + depth) * PAGE
            model.catalog.add(kind, 1, Kept(offset, kind, key, parent, digests))
            chain.append(key)
            parent = key
        chains.append(chain)
    model.catalog.match(kind, root.key, b"".join(chains[1]), b"")
    gone = []
    for _ in range(15):
        row = model.catalog.coldest()
        assert row is not None
        gone.append(model.catalog.keys[row])
        model.catalog.remove(row)
    assert gone == chains[0][::-1] + chains[2][::-1] + chains[3][::-1]


# ---- while a start's records become rows


def taken_by_and_by(
    kept: Sequence[Kept], again: Sequence[Kept], kinds: dict[int, Kind], draw: random.Random
) -> LazyCatalog:
    """A catalog of several segments, of which no record is a row yet. What is `again` in the last
    one is gone from where it was."""
    catalog = LazyCatalog()
    cuts = sorted(draw.sample(range(1, len(kept)), 4))
    gone = {one.key for one in again}
    for segment, (begin, end) in enumerate(pairwise([0, *cuts, len(kept)]), 1):
        part = kept[begin:end]
        offsets = {one.offset_bytes for one in part if one.key in gone}
        catalog.take(segment, tables.from_rows(kinds, part), offsets)
    more = tables.from_rows(kinds, again)
    catalog.take(len(cuts) + 2, more, {one.offset_bytes for one in again[::2]})
    assert catalog.settle() == []
    assert not catalog.is_taken_in
    return catalog


@pytest.mark.parametrize("seed", range(20))
def test_questions_are_answered_before_there_are_rows(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In any order, with slices of the rest in between: every chain and tail that is there is
    found the first time it is asked for, nothing else is, and what it all comes to is the same.
    Some leaves were evicted and stored again, and every second one of those evicted once more."""
    monkeypatch.setattr("kvtide.tiers.disk.intake.EAGER_ROWS", -1)
    model, draw = grown(seed), random.Random(seed)
    kinds = {number: Kind(root_of(salt=salt), LAYOUT) for number, salt in enumerate(SALTS)}
    kept = sorted(kept_in(model, kinds), key=lambda one: one.offset_bytes)
    leaves = [one for one in kept if not model.below(one.key)]
    again = sorted(draw.sample(leaves, 6), key=kept.index)
    model.catalog = taken_by_and_by(kept, again, kinds, draw)
    missing = [model.records.pop(one.key) for one in again[::2]]
    assert len(model.catalog) == len(model.records), "gone at once"
    for _ in range(20):
        if draw.random() < 0.2:
            assert model.catalog.sweep() == []
        model.look_up()
        record = draw.choice(missing)
        kind = model.catalog.kind_numbers[Kind(record.root, LAYOUT)]
        assert model.catalog.find(record.key, kind) is None
    while not model.catalog.is_swept:
        assert model.catalog.sweep() == [], "all places were known from the start"
    model.check()


@pytest.mark.parametrize("segment", [1, 2])
def test_what_was_evicted_and_stored_again_is_there_once(
    segment: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever of its two segments becomes rows first; its first place is given back once."""
    monkeypatch.setattr("kvtide.tiers.disk.intake.EAGER_ROWS", -1)
    model = grown(3, adds=20)
    kinds = {number: Kind(root_of(salt=salt), LAYOUT) for number, salt in enumerate(SALTS)}
    kept = sorted(kept_in(model, kinds), key=lambda one: one.offset_bytes)
    leaf = next(one for one in kept if not model.below(one.key))
    again = LazyCatalog()
    taken = tables.from_rows(kinds, kept)
    [row] = again.take(1, taken, {leaf.offset_bytes})
    assert taken.cut_keys()[row] == leaf.key
    assert again.take(2, tables.from_rows(kinds, [leaf]), ()) == []
    assert again.settle() == []
    again._take_in([again._untaken._segments.pop(segment)])
    while not again.is_swept:
        assert again.sweep() == []
    assert again.place(again.index[leaf.key]).segment == 2
    model.catalog = again
    model.check()


def test_one_that_is_there_twice_costs_no_walk_over_all_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A kill after a clear of much may leave some in each of thousands of segments."""
    monkeypatch.setattr("kvtide.tiers.disk.intake.EAGER_ROWS", -1)

    class Rows(list[bytes | None]):
        def __iter__(self) -> Iterator[bytes | None]:
            raise AssertionError("a walk")

    model = grown(3, adds=20)
    kinds = {number: Kind(root_of(salt=salt), LAYOUT) for number, salt in enumerate(SALTS)}
    kept = sorted(kept_in(model, kinds), key=lambda one: one.offset_bytes)
    leaf = next(one for one in kept if not model.below(one.key))
    again = LazyCatalog()
    again.take(1, tables.from_rows(kinds, kept), ())
    again.take(2, tables.from_rows(kinds, [leaf]), ())
    again.settle()
    again.keys = Rows(again.keys)
    again.take_rest()
    again.keys = list(again.keys[:])
    [place] = again.sweep()
    assert (place.segment, place.offset_bytes) == (1, leaf.offset_bytes)
    assert again.place(again.index[leaf.key]).segment == 2
    model.catalog = again
    model.check()


def test_a_stale_copy_is_not_found_though_the_later_one_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The later one was asked for first, so its segment became rows first."""
    monkeypatch.setattr("kvtide.tiers.disk.intake.EAGER_ROWS", -1)
    model = grown(3, adds=20)
    kinds = {number: Kind(root_of(salt=salt), LAYOUT) for number, salt in enumerate(SALTS)}
    kept = sorted(kept_in(model, kinds), key=lambda one: one.offset_bytes)
    leaf = next(one for one in kept if not model.below(one.key))
    again = LazyCatalog()
    again.take(1, tables.from_rows(kinds, kept), ())
    again.take(2, tables.from_rows(kinds, [leaf]), {leaf.offset_bytes})
    again.settle()
    again._take_in([again._untaken._segments.pop(2)])
    again.take_rest()
    assert leaf.key not in again.index
    model.catalog = again
    del model.records[leaf.key]
    model.sweep()
    model.check()


def test_what_was_cleared_goes_though_a_store_needs_all_rows_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A clear, a slice of the sweep, and then all that a start has left for later: rows that come
    behind the slice are taken away too."""
    monkeypatch.setattr("kvtide.tiers.disk.intake.EAGER_ROWS", -1)
    kind = Kind(root_of(), LAYOUT)
    keys = [bytes([number]) * KEY_BYTES for number in range(6)]
    kept = [
        Kept(at * PAGE, 0, key, kind.root.key, key[:INNER_DIGEST_BYTES])
        for at, key in enumerate(keys)
    ]
    catalog = LazyCatalog()
    for segment in (1, 2):
        part = kept[3 * segment - 3 : 3 * segment]
        catalog.take(segment, tables.from_rows({0: kind}, part), ())
    assert catalog.settle() == []
    assert catalog.retire([catalog.kind_numbers[kind]]) == len(kept)
    places = catalog.sweep()
    catalog.take_rest()
    while not catalog.is_swept:
        places += catalog.sweep()
    assert len(places) == len(kept)
    catalog.check_integrity()
    assert not catalog.kinds

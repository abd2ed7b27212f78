"""The regions of one worker: what it says of them, and what it makes up for after a silence."""

import os
import queue
import resource
import threading
from collections.abc import Iterator

import pytest

from kvtide.errors import HostMemoryError
from kvtide.memory import mapped as mapped_module
from kvtide.memory.mapped import DESCRIPTORS_LEFT_MIN, MappedRegions
from kvtide.memory.region import GenerationMemory, MappedRegion, RegionMemory
from kvtide.units import KiB

CELL_BYTES = 64 * KiB
CELL_COUNT = 4
WAIT_S_MAX = 10.0


@pytest.fixture
def descriptors() -> Iterator[list[int]]:
    memory = RegionMemory.create("test", CELL_COUNT * CELL_BYTES)
    generations = GenerationMemory("test", CELL_COUNT)
    yield [memory.fd, generations.fd]
    memory.close()
    generations.close()


class Said:
    """A worker's regions, and all that they said."""

    def __init__(self, descriptors: list[int]) -> None:
        self.descriptors = descriptors
        self.words: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()
        self.detail = ""
        self.regions = MappedRegions(
            lambda number: self.words.put(("open", number)),
            self.failed,
            lambda number: self.words.put(("left", number)),
        )

    def failed(self, number: int, detail: str) -> None:
        self.detail = detail
        self.words.put(("failed", number))

    def offer(self, number: int) -> None:
        self.regions.offer(number, CELL_COUNT, CELL_BYTES, self.descriptors)

    def next(self) -> tuple[str, int]:
        return self.words.get(timeout=WAIT_S_MAX)


@pytest.fixture
def said(descriptors: list[int]) -> Iterator[Said]:
    one = Said(descriptors)
    one.regions.start()
    yield one
    one.regions.close(WAIT_S_MAX)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Populating lasts until this is set, and fails where it is set with `fails`."""
    go_on = threading.Event()
    populate = MappedRegion.populate

    def wait(self: MappedRegion, stop: threading.Event) -> bool:
        assert go_on.wait(WAIT_S_MAX)
        return populate(self, stop)

    monkeypatch.setattr(MappedRegion, "populate", wait)
    yield go_on
    go_on.set()


def test_a_region_that_is_not_there_has_left(said: Said) -> None:
    """Or the node would wait for the word for ever, and never free the memory."""
    said.regions.leave(7)
    assert said.next() == ("left", 7)


def test_a_region_leaves_once(said: Said) -> None:
    said.offer(1)
    assert said.next() == ("open", 1)
    said.regions.leave(1)
    assert said.next() == ("left", 1)
    said.offer(2)
    assert said.next() == ("open", 2)


def test_a_hello_tells_open_regions_from_those_that_are_being_mapped(
    said: Said, slow: threading.Event
) -> None:
    said.offer(1)
    assert said.regions.named() == ([], [1])
    slow.set()
    assert said.next() == ("open", 1)
    assert said.regions.named() == ([1], [])


def test_what_happened_between_hello_and_welcome_is_said_after_it(
    said: Said, slow: threading.Event
) -> None:
    """The link took neither word: one region was populated meanwhile, one has left."""
    slow.set()
    said.offer(1)
    assert said.next() == ("open", 1)
    slow.clear()
    said.offer(2)
    assert said.regions.named() == ([1], [2])
    slow.set()
    said.regions.leave(1)
    assert {said.next(), said.next()} == {("open", 2), ("left", 1)}
    said.regions.say_changes()
    assert {said.next(), said.next()} == {("open", 2), ("left", 1)}
    said.regions.say_changes()
    assert said.words.empty(), "said once"


def test_a_region_that_failed_between_hello_and_welcome_is_said_to_have_left(
    said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = threading.Event()

    def fail(self: MappedRegion, stop: threading.Event) -> bool:
        assert named.wait(WAIT_S_MAX)
        raise HostMemoryError("no memory")

    monkeypatch.setattr(MappedRegion, "populate", fail)
    said.offer(1)
    assert said.regions.named() == ([], [1])
    named.set()
    assert said.next() == ("failed", 1)
    said.regions.say_changes()
    assert said.next() == ("left", 1)


def test_a_region_offered_again_is_open_or_will_be(said: Said, slow: threading.Event) -> None:
    """Words that crossed: it is mapped once, and the node hears that it has it."""
    said.offer(1)
    said.offer(1)
    slow.set()
    assert said.next() == ("open", 1)
    said.offer(1)
    assert said.next() == ("open", 1)
    assert said.regions.numbers() == [1]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) == 1, reason="needs two processors")
def test_populating_does_not_share_the_processor_of_the_thread_that_computes(
    descriptors: list[int],
) -> None:
    """An engine binds its main thread to one core, and whoever that starts inherits this."""
    used: queue.SimpleQueue[set[int]] = queue.SimpleQueue()

    def main_thread_of_a_worker() -> None:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        regions = MappedRegions(
            lambda _: used.put(os.sched_getaffinity(0)), lambda *_: None, lambda _: None
        )
        regions.start()
        regions.offer(1, CELL_COUNT, CELL_BYTES, descriptors)
        assert used.get(timeout=WAIT_S_MAX) == os.sched_getaffinity(os.getpid())
        used.put(set())
        regions.close(WAIT_S_MAX)

    thread = threading.Thread(target=main_thread_of_a_worker)
    thread.start()
    thread.join()
    assert used.get(timeout=WAIT_S_MAX) == set(), "kvtide-map populates on the bound core alone"


def test_a_region_whose_copy_outlives_the_closing_is_unmapped_when_that_ends(said: Said) -> None:
    """The process may live on: a worker that turned itself off, a notebook without its engine."""
    said.offer(1)
    assert said.next() == ("open", 1)
    with said.regions.using({1}) as first, said.regions.using({1}):
        region = first[1]
        said.regions.close(WAIT_S_MAX)
        assert not said.regions._thread.is_alive()
        region.cells[0] = 1
    assert said.regions.wait_empty(0)
    assert said.next() == ("left", 1)
    with pytest.raises(ValueError, match="released"):
        region.cells[0]


def test_a_region_offered_after_the_closing_is_not_mapped(said: Said) -> None:
    said.regions.close(WAIT_S_MAX)
    said.offer(1)
    assert said.next() == ("failed", 1)
    assert said.regions.wait_empty(0)


def test_regions_that_never_began_are_closed(descriptors: list[int]) -> None:
    """There was no thread to be had."""
    Said(descriptors).regions.close(WAIT_S_MAX)


def test_a_fault_while_one_region_is_populated_costs_that_one(
    said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread goes on with the next."""

    def fail(self: MappedRegion, stop: threading.Event) -> bool:
        raise ValueError("a fault")

    with monkeypatch.context() as patch:
        patch.setattr(MappedRegion, "populate", fail)
        said.offer(1)
        assert said.next() == ("failed", 1)
    said.offer(2)
    assert said.next() == ("open", 2)


def test_regions_leave_the_engine_descriptors(said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host of hundreds of GiB has more regions than a process may open files."""
    open_count = 1024 - DESCRIPTORS_LEFT_MIN
    monkeypatch.setattr(mapped_module, "_open_count", lambda: open_count)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 1024))
    said.offer(1)
    assert said.next() == ("open", 1)
    open_count += 1
    said.offer(2)
    assert said.next() == ("failed", 2)
    assert said.detail == (
        "769 of 1024 open files are in use, and 256 are left to the engine: raise `ulimit -n`"
    )
    open_count -= 1
    said.offer(2)
    assert said.next() == ("open", 2), "the engine has closed one"


def test_a_process_of_few_descriptors_keeps_a_part_of_them(
    said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (400, 400))
    for open_count, outcome in ((300, "open"), (301, "failed"), (None, "failed")):
        monkeypatch.setattr(mapped_module, "_open_count", lambda count=open_count: count)
        number = 1000 + (open_count or 0)
        said.offer(number)
        assert said.next() == (outcome, number)


def test_what_is_open_is_counted() -> None:
    before = mapped_module._open_count()
    descriptor = os.open(os.devnull, os.O_RDONLY)
    assert mapped_module._open_count() == (before or 0) + 1
    os.close(descriptor)

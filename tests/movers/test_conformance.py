"""Every mover keeps the promises of the shipped suite; the suite notices movers that do not."""

from collections.abc import Sequence

import pytest

from kvtide.movers.base import CellPlace, PagePlace
from kvtide.movers.host import HostMover
from kvtide.movers.reference import ReferenceMover
from kvtide.testing.mover_suite import COPIES, LAYOUTS, MoverTests, movers_without_tests


class TestHostMover(MoverTests):
    mover_type = HostMover


class TestReferenceMover(MoverTests):
    mover_type = ReferenceMover


def test_every_mover_is_tested_by_the_suite() -> None:
    assert movers_without_tests() == []


def test_a_mover_that_nobody_tests_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TestHostMover, "mover_type", ReferenceMover)
    assert movers_without_tests() == ["kvtide.movers.host.HostMover"]


class SwapsTwoBlocks(ReferenceMover):
    def load(self, block_ids: Sequence[int], cells: Sequence[CellPlace]) -> None:
        super().load([*block_ids[1:], *block_ids[:1]], cells)


class SwapsTwoPages(ReferenceMover):
    """Consistent with itself, but a cell's order is the layout's and not the mover's choice."""

    def __init__(self, pages: Sequence[PagePlace], block_count: int) -> None:
        super().__init__([*pages[1:], *pages[:1]], block_count)


class ForgetsTheLastPage(ReferenceMover):
    def store(self, block_ids: Sequence[int], cells: Sequence[CellPlace]) -> None:
        kept, self._pages = self._pages, self._pages[:-1]
        super().store(block_ids, cells)
        self._pages = kept


class TakesStridesForPages(ReferenceMover):
    """Copies the gaps too."""

    def load(self, block_ids: Sequence[int], cells: Sequence[CellPlace]) -> None:
        super().load(block_ids, cells)
        first = self._pages[0]
        if block_ids and first.page_bytes < first.block_stride_bytes:
            gap = PagePlace(first.address + first.page_bytes, first.block_stride_bytes, 1)
            ReferenceMover([gap], self._block_count).load(block_ids, cells)


class ClearsThePadding(ReferenceMover):
    def store(self, block_ids: Sequence[int], cells: Sequence[CellPlace]) -> None:
        super().store(block_ids, cells)
        for place in cells:
            end = (place.cell + 1) * self.cell_bytes
            padding = self.cell_bytes - self.payload_bytes
            place.region[end - padding : end] = bytes(padding)


class WritesTheFirstRegionOnly(ReferenceMover):
    def store(self, block_ids: Sequence[int], cells: Sequence[CellPlace]) -> None:
        super().store(block_ids, [CellPlace(cells[0].region, place.cell) for place in cells])


class DoesNotLookAtBounds(ReferenceMover):
    def load(self, block_ids: Sequence[int], cells: Sequence[CellPlace]) -> None:
        inside = [pair for pair in zip(block_ids, cells, strict=False) if pair[0] in range(12)]
        super().load([block for block, _ in inside], [cell for _, cell in inside])


@pytest.mark.parametrize(
    ("broken", "promise"),
    [
        (SwapsTwoBlocks, "load"),
        (SwapsTwoBlocks, "back"),
        (SwapsTwoPages, "store"),
        (ForgetsTheLastPage, "store"),
        (TakesStridesForPages, "load"),
        (ClearsThePadding, "store"),
        (WritesTheFirstRegionOnly, "store"),
        (DoesNotLookAtBounds, "bounds"),
    ],
)
def test_the_suite_notices_a_mover_that(broken: type[ReferenceMover], promise: str) -> None:
    suite = type("Suite", (MoverTests,), {"mover_type": broken})()
    pairs = [(layout, copy) for layout in LAYOUTS for copy in COPIES if copy != "nothing"]
    bounds = [([0, 12], [(0, 0), (0, 1)])]
    runs = {
        "store": (suite.test_a_store_fills_these_cells_and_touches_nothing_else, pairs),
        "load": (suite.test_a_load_fills_these_blocks_and_touches_nothing_else, pairs),
        "back": (
            suite.test_what_was_stored_comes_back_in_other_blocks,
            [(layout,) for layout in LAYOUTS],
        ),
        "bounds": (suite.test_a_copy_out_of_bounds_is_refused_before_its_first_byte, bounds),
    }
    test, cases = runs[promise]

    def run_all() -> None:
        for case in cases:
            test(*case)

    # pytest.raises inside a test fails by its own kind of exception, which is no AssertionError.
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        run_all()

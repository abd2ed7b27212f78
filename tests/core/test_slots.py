"""Cells of a region: a cell is free or lent, never both, and lent once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtide.core.slots import RegionCells


def test_a_region_is_handed_out_from_its_start() -> None:
    """Whole chunks take one slot each, in order, until none is left."""
    cells = RegionCells(slot_count=3, cells_per_slot=4)
    assert [cells.take(4) for _ in range(4)] == [0, 4, 8, None]
    assert cells.free_cells == cells.free_slots == 0


def test_tails_share_a_slot() -> None:
    cells = RegionCells(slot_count=2, cells_per_slot=4)
    assert [cells.take(1), cells.take(2), cells.take(1)] == [0, 1, 3]
    assert cells.free_slots == 1


def test_a_tail_never_crosses_the_border_of_a_slot() -> None:
    """Three cells and three cells do not fit into one slot of four."""
    cells = RegionCells(slot_count=2, cells_per_slot=4)
    assert [cells.take(3), cells.take(3)] == [0, 4]
    assert cells.take(2) is None
    assert [cells.take(1), cells.take(1)] == [3, 7]


def test_a_tail_goes_where_it_leaves_the_least_behind() -> None:
    """A hole of one cell is filled before a hole of three is broken."""
    cells = RegionCells(slot_count=2, cells_per_slot=4)
    assert [cells.take(2), cells.take(3)] == [0, 4]
    assert cells.take(1) == 7
    assert cells.take(2) == 2


def test_a_slot_that_is_free_again_takes_a_whole_chunk() -> None:
    cells = RegionCells(slot_count=1, cells_per_slot=4)
    first, second = cells.take(1), cells.take(3)
    assert (first, second) == (0, 1)
    cells.give_back(1, 3)
    assert cells.take(4) is None
    cells.give_back(0, 1)
    assert cells.take(4) == 0


@pytest.mark.parametrize(
    ("first_cell", "count"), [(0, 4), (0, 1), (6, 2), (5, 2), (12, 4), (2, 4), (10, 4)]
)
def test_cells_that_are_free_cannot_be_given_back(first_cell: int, count: int) -> None:
    """A run given back twice would be lent twice: that ends the node instead.

    The first slot was given back, half of the second is lent, all of the third, and no other.
    """
    cells = RegionCells(slot_count=4, cells_per_slot=4)
    assert [cells.take(4), cells.take(2), cells.take(4)] == [0, 4, 8]
    cells.give_back(0, 4)
    with pytest.raises(AssertionError):
        cells.give_back(first_cell, count)


@given(
    st.integers(1, 4),
    st.integers(1, 9),
    st.lists(st.tuples(st.booleans(), st.integers(1, 9), st.integers(0, 99)), max_size=60),
)
def test_cells_against_a_set_of_cells(
    slot_count: int, cells_per_slot: int, steps: list[tuple[bool, int, int]]
) -> None:
    """Random taking and giving back: runs never overlap, and None is said only when it is so."""
    cells = RegionCells(slot_count, cells_per_slot)
    lent: list[range] = []
    for is_take, wanted, which in steps:
        count = min(wanted, cells_per_slot)
        taken = {cell for run in lent for cell in run}
        if is_take:
            first = cells.take(count)
            fits = any(
                not taken & set(range(start, start + count))
                for start in range(slot_count * cells_per_slot)
                if start // cells_per_slot == (start + count - 1) // cells_per_slot
                and start + count <= slot_count * cells_per_slot
            )
            assert (first is not None) == fits
            if first is not None:
                run = range(first, first + count)
                assert not taken & set(run)
                assert run[0] // cells_per_slot == run[-1] // cells_per_slot
                lent.append(run)
        elif lent:
            run = lent.pop(which % len(lent))
            cells.give_back(run[0], len(run))
        cells.check_integrity()
        assert cells.free_cells == cells.cell_count - sum(map(len, lent))

"""Cells of one region: which are free, which are lent. Plain integers, no bytes.

    slot 0                 slot 1                 slot 2
    [c0 c1 c2 c3 c4 c5 c6 c7][c8 … ]               …        cells are numbered through the region

A whole chunk takes a slot; tails share slots, each a run of neighbouring cells that never crosses
a slot's border. A tail goes where it leaves the least behind: shared slots are kept by the length
of their longest free run, so taking costs the blocks of a chunk, never the number of slots.
Invariant: a cell is free or lent, never both, and lent once.

Rejected: a best-fit allocator over the region. Chunks of one layout are all the same size, so
only tails can fragment, and a slot bounds the damage.
"""


class RegionCells:
    """Free list of one region."""

    def __init__(self, slot_count: int, cells_per_slot: int) -> None:
        assert slot_count > 0, slot_count
        assert cells_per_slot > 0, cells_per_slot
        self.slot_count = slot_count
        self.cells_per_slot = cells_per_slot
        self.free_cells = slot_count * cells_per_slot
        self._all_free = (1 << cells_per_slot) - 1
        self._free = [self._all_free] * slot_count  # for each slot the bit set of its free cells
        # Highest first: pop() hands out the region from its start, so pages touched stay together.
        self._free_slots = list(range(slot_count - 1, -1, -1))
        # Shared slots by the length of their longest free run; dicts, for a steady order.
        self._by_run: list[dict[int, None]] = [{} for _ in range(cells_per_slot)]

    @property
    def cell_count(self) -> int:
        """All cells of the region."""
        return self.slot_count * self.cells_per_slot

    @property
    def free_slots(self) -> int:
        """Slots with no lent cell."""
        return len(self._free_slots)

    def take(self, cells: int) -> int | None:
        """Lend a run of `cells`; its first cell, or None where no slot has room for it."""
        assert 0 < cells <= self.cells_per_slot, (cells, self.cells_per_slot)
        for slots in self._by_run[cells:]:
            if slots:
                slot = next(iter(slots))
                del slots[slot]
                return self._lend(slot, cells)
        return self._lend(self._free_slots.pop(), cells) if self._free_slots else None

    def give_back(self, first_cell: int, cells: int) -> None:
        """Return a run that `take` lent."""
        slot, start = divmod(first_cell, self.cells_per_slot)
        assert start + cells <= self.cells_per_slot, (first_cell, cells)
        mask, free = ((1 << cells) - 1) << start, self._free[slot]
        assert free & mask == 0, f"cells {first_cell}+{cells} were free already"
        if free:
            del self._by_run[_longest_run(free)][slot]
        self.free_cells += cells
        self._set_free(slot, free | mask)

    def _lend(self, slot: int, cells: int) -> int:
        start = _first_run(self._free[slot], cells)
        self.free_cells -= cells
        self._set_free(slot, self._free[slot] & ~(((1 << cells) - 1) << start))
        return slot * self.cells_per_slot + start

    def _set_free(self, slot: int, free: int) -> None:
        self._free[slot] = free
        if free == self._all_free:
            self._free_slots.append(slot)
        elif free:
            self._by_run[_longest_run(free)][slot] = None

    def check_integrity(self) -> None:
        """Assert that the free list agrees with itself."""
        counted = sum(free.bit_count() for free in self._free)
        assert counted == self.free_cells, (counted, self.free_cells)
        whole = [slot for slot, free in enumerate(self._free) if free == self._all_free]
        assert whole == sorted(self._free_slots), "the list of free slots is wrong"
        shared = {slot: _longest_run(free) for slot, free in enumerate(self._free) if free}
        by_run = {slot: run for run, slots in enumerate(self._by_run) for slot in slots}
        by_run |= dict.fromkeys(whole, self.cells_per_slot)
        assert by_run == shared, (by_run, shared)


def _longest_run(free: int) -> int:
    """How many set bits stand in a row at most."""
    length = 0
    while free:
        free &= free >> 1
        length += 1
    return length


def _first_run(free: int, cells: int) -> int:
    """The lowest start of `cells` set bits in a row, which must be there."""
    length = 1
    while length < cells:
        step = min(length, cells - length)
        free &= free >> step
        length += step
    assert free, f"no {cells} free cells in a row"
    return (free & -free).bit_length() - 1

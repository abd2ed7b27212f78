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
        # Highest first: pop() hands out the region from its start, so pages touched stay together.
        self._free_slots = list(range(slot_count - 1, -1, -1))
        self._shared: dict[int, int] = {}  # slot -> bit set of its free cells, for slots of tails
        # The same slots by the length of their longest free run; dicts, for a steady order.
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
                return self._lend(slot, self._unshare(slot), cells)
        if not self._free_slots:
            return None
        return self._lend(self._free_slots.pop(), self._all_free, cells)

    def give_back(self, first_cell: int, cells: int) -> None:
        """Return a run that `take` lent."""
        slot, start = divmod(first_cell, self.cells_per_slot)
        assert start + cells <= self.cells_per_slot, (first_cell, cells)
        mask = ((1 << cells) - 1) << start
        free = self._unshare(slot)
        assert free & mask == 0, f"cells {first_cell}+{cells} were free already"
        self.free_cells += cells
        assert self.free_cells <= self.cell_count, (self.free_cells, self.cell_count)
        if free | mask == self._all_free:
            self._free_slots.append(slot)
        else:
            self._share(slot, free | mask)

    def _lend(self, slot: int, free: int, cells: int) -> int:
        start = _first_run(free, cells)
        free &= ~(((1 << cells) - 1) << start)
        self.free_cells -= cells
        if free:
            self._share(slot, free)
        return slot * self.cells_per_slot + start

    def _share(self, slot: int, free: int) -> None:
        self._shared[slot] = free
        self._by_run[_longest_run(free)][slot] = None

    def _unshare(self, slot: int) -> int:
        """Take a slot out of those that are shared; its free cells, none where it was not."""
        free = self._shared.pop(slot, 0)
        if free:
            del self._by_run[_longest_run(free)][slot]
        return free

    def check_integrity(self) -> None:
        """Assert that the free list agrees with itself."""
        shared = sum(free.bit_count() for free in self._shared.values())
        counted = len(self._free_slots) * self.cells_per_slot + shared
        assert counted == self.free_cells, (counted, self.free_cells)
        assert len(set(self._free_slots)) == len(self._free_slots), "a slot is free twice"
        assert not set(self._free_slots) & set(self._shared), "a slot is free and shared"
        assert all(0 < free < self._all_free for free in self._shared.values()), self._shared
        by_run = {slot: run for run, slots in enumerate(self._by_run) for slot in slots}
        wanted = {slot: _longest_run(free) for slot, free in self._shared.items()}
        assert by_run == wanted, (by_run, wanted)


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

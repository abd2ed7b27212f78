"""The promises of a mover as tests: subclass `MoverTests`, name the mover, and run pytest.

    class TestHostMover(MoverTests):
        mover_type = HostMover

Each test makes two equal worlds, lets the mover work in one and `ReferenceMover` in the other, and
compares every byte of both memories: what was to be copied, and what was to be left alone.
"""

import ctypes
import importlib
import math
import pkgutil
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar, TypeAlias

import pytest

from kvtide import movers
from kvtide.movers.base import CellPlace, Mover, PagePlace
from kvtide.movers.compare import PageNumbers
from kvtide.movers.reference import ReferenceMover

BLOCK_COUNT = 12
CELL_COUNT = 10

Place: TypeAlias = tuple[int, int]
"""Number of a region, cell in it."""


@dataclass(frozen=True, slots=True)
class PageShape:
    """A `PagePlace` before its memory has an address."""

    offset_bytes: int
    block_stride_bytes: int
    page_bytes: int


def _layers_outside(layers: int, page_bytes: int, padding_bytes: int = 0) -> list[PageShape]:
    """All blocks of a layer, then the next layer: LBHNC of vLLM."""
    stride = page_bytes + padding_bytes
    return [PageShape(layer * BLOCK_COUNT * stride, stride, page_bytes) for layer in range(layers)]


def _blocks_outside(layers: int, page_bytes: int) -> list[PageShape]:
    """All layers of a block, then the next block: BLHNC of vLLM."""
    stride = layers * page_bytes
    return [PageShape(layer * page_bytes, stride, page_bytes) for layer in range(layers)]


def _shifted(pages: list[PageShape], by_bytes: int) -> list[PageShape]:
    return [
        PageShape(page.offset_bytes + by_bytes, page.block_stride_bytes, page.page_bytes)
        for page in pages
    ]


LAYOUTS: dict[str, list[PageShape]] = {
    "one page": _layers_outside(1, 4096),
    "layers outside": _layers_outside(5, 1024),
    "blocks outside": _blocks_outside(5, 1024),
    "layers in reverse": _layers_outside(5, 1024)[::-1],
    "padded pages": _layers_outside(3, 1000, padding_bytes=24),
    "odd sizes": _layers_outside(3, 7, padding_bytes=2),
    "a gap between layers": [
        *_layers_outside(3, 512),
        *_shifted(_layers_outside(2, 512), 5 * BLOCK_COUNT * 512),
    ],
    "layers of two sizes": [
        *_layers_outside(2, 512),
        *_shifted(_layers_outside(3, 768), 2 * BLOCK_COUNT * 512),
    ],
    "sizes that alternate": [
        PageShape(index * BLOCK_COUNT * 96, 96, size) for index, size in enumerate((96, 32) * 3)
    ],
    "layers in no order": [_layers_outside(5, 256)[layer] for layer in (3, 0, 4, 1, 2)],
}

COPIES: dict[str, tuple[list[int], list[Place]]] = {
    "nothing": ([], []),
    "one block": ([3], [(0, 2)]),
    "the first and the last": ([0, BLOCK_COUNT - 1], [(0, CELL_COUNT - 1), (0, 0)]),
    "ascending": ([2, 3, 4, 5], [(0, 1), (0, 2), (0, 3), (0, 4)]),
    "descending blocks": ([9, 8, 7, 6], [(0, 1), (0, 2), (0, 3), (0, 4)]),
    "descending cells": ([1, 2, 3, 4], [(0, 9), (0, 8), (0, 7), (0, 6)]),
    "both descending": ([7, 6, 5], [(0, 9), (0, 8), (0, 7)]),
    "every second block": ([1, 3, 5, 7, 9, 11], [(0, cell) for cell in range(6)]),
    "in no order": ([5, 0, 11, 2, 7], [(0, 3), (0, 9), (0, 0), (0, 4), (0, 1)]),
    "two runs and one block": ([1, 2, 3, 8, 7, 6, 0], [(0, c) for c in (0, 1, 2, 3, 4, 5, 9)]),
    "two regions": ([1, 2, 3, 4], [(0, 8), (0, 9), (1, 0), (1, 1)]),
    "two regions in turn": ([1, 2, 3, 4], [(0, 1), (1, 2), (0, 3), (1, 4)]),
}


class World:
    """The memory of an engine and two regions, full of random bytes, and a mover between them."""

    def __init__(
        self,
        shapes: Sequence[PageShape],
        make: Callable[[Sequence[PagePlace], int], Mover],
        seed: int = 1,
    ) -> None:
        draw = random.Random(seed)
        span_bytes = max(
            shape.offset_bytes + BLOCK_COUNT * shape.block_stride_bytes for shape in shapes
        )
        self.paged = ctypes.create_string_buffer(draw.randbytes(span_bytes), span_bytes)
        base = ctypes.addressof(self.paged)
        self.pages = [
            PagePlace(base + shape.offset_bytes, shape.block_stride_bytes, shape.page_bytes)
            for shape in shapes
        ]
        self.mover = make(self.pages, BLOCK_COUNT)
        region_bytes = CELL_COUNT * self.mover.cell_bytes
        self.regions = [bytearray(draw.randbytes(region_bytes)) for _ in range(2)]
        self._views = [memoryview(region) for region in self.regions]

    def cells(self, places: Sequence[Place]) -> list[CellPlace]:
        """The places as a mover takes them."""
        return [CellPlace(self._views[region], cell) for region, cell in places]

    def bytes_now(self) -> tuple[bytes, list[bytes]]:
        """All there is to compare."""
        return self.paged.raw, [bytes(region) for region in self.regions]

    def scramble_paged(self) -> None:
        """The engine has given its memory to somebody else."""
        self.paged.raw = random.Random(2).randbytes(len(self.paged))


class MoverTests:
    """What every mover promises."""

    mover_type: ClassVar[type[Any]]

    def make_mover(self, pages: Sequence[PagePlace], block_count: int) -> Mover:
        """The mover under test; override it if it takes more than these two."""
        mover: Mover = self.mover_type(pages, block_count)
        return mover

    def worlds(self, layout: str) -> tuple[World, World]:
        """One for the mover under test and an equal one for the oracle."""
        shapes = LAYOUTS[layout]
        return World(shapes, self.make_mover), World(shapes, ReferenceMover)

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_a_cell_holds_the_pages_of_a_block_and_is_padded(self, layout: str) -> None:
        """Sizes are those of the pages, whatever lies between them."""
        world, _ = self.worlds(layout)
        payload = sum(shape.page_bytes for shape in LAYOUTS[layout])
        assert world.mover.payload_bytes == payload
        assert world.mover.cell_bytes % 4096 == 0
        assert 0 <= world.mover.cell_bytes - payload < 4096

    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize("copy", COPIES)
    def test_a_store_fills_these_cells_and_touches_nothing_else(
        self, layout: str, copy: str
    ) -> None:
        """Blocks stay, other cells stay, padding stays."""
        world, oracle = self.worlds(layout)
        blocks, places = COPIES[copy]
        world.mover.store(blocks, world.cells(places))
        oracle.mover.store(blocks, oracle.cells(places))
        assert world.bytes_now() == oracle.bytes_now()

    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize("copy", COPIES)
    def test_a_load_fills_these_blocks_and_touches_nothing_else(
        self, layout: str, copy: str
    ) -> None:
        """Cells stay, other blocks stay, gaps between pages stay."""
        world, oracle = self.worlds(layout)
        blocks, places = COPIES[copy]
        world.mover.load(blocks, world.cells(places))
        oracle.mover.load(blocks, oracle.cells(places))
        assert world.bytes_now() == oracle.bytes_now()

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_what_was_stored_comes_back_in_other_blocks(self, layout: str) -> None:
        """The main job: store, forget, load elsewhere. A swap of two blocks would be seen."""
        world, _ = self.worlds(layout)
        before = {block: self.block_bytes(world, block) for block in (4, 5, 9)}
        cells = world.cells([(0, 7), (1, 0), (0, 2)])
        world.mover.store([4, 5, 9], cells)
        world.scramble_paged()
        world.mover.load([1, 0, 4], cells)
        after = [self.block_bytes(world, block) for block in (1, 0, 4)]
        assert after == [before[4], before[5], before[9]]
        assert after != [before[5], before[4], before[9]]

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_a_comparison_sees_each_page_and_changes_nothing(self, layout: str) -> None:
        """Equal blocks have no distance; each page of each block that is another has one."""
        world, _ = self.worlds(layout)
        blocks, cells = [4, 9, 5], world.cells([(0, 7), (1, 0), (0, 2)])
        numbers = [PageNumbers("uint8")] * len(world.pages)
        world.mover.store(blocks, cells)
        before = world.bytes_now()
        assert world.mover.compare(blocks, cells, numbers) == 0
        assert world.mover.compare([], [], numbers) == 0
        assert world.bytes_now() == before
        for page in world.pages:
            for block in blocks:
                last = page.address + block * page.block_stride_bytes + page.page_bytes - 1
                byte = ctypes.c_uint8.from_address(last)
                byte.value ^= 1
                assert world.mover.compare(blocks, cells, numbers) == math.inf
                byte.value ^= 1

    @pytest.mark.parametrize("page_index", [0, 3, 4])
    def test_a_comparison_knows_which_numbers_a_page_holds(self, page_index: int) -> None:
        """Of floats the distance, which is small where one of them is a little larger."""
        world, _ = self.worlds("layers of two sizes")
        kinds = ["uint8"] * len(world.pages)
        kinds[page_index] = "float32"
        numbers = [PageNumbers(kind) for kind in kinds]
        page, cells = world.pages[page_index], world.cells([(0, 1), (0, 2)])
        floats = (ctypes.c_float * (page.page_bytes // 4)).from_address(
            page.address + 2 * page.block_stride_bytes
        )
        floats[:] = [1.0] * len(floats)
        world.mover.store([1, 2], cells)
        floats[5] = 1.5
        wanted = 0.5 / math.sqrt(len(floats) - 1 + 1.5**2)
        found = world.mover.compare([1, 2], cells, numbers)
        assert found == pytest.approx(wanted)
        floats[5] = 1.0

    @staticmethod
    def block_bytes(world: World, block: int) -> list[bytes]:
        """The pages of one block."""
        return [
            ctypes.string_at(page.address + block * page.block_stride_bytes, page.page_bytes)
            for page in world.pages
        ]

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_threads_may_load_side_by_side(self, layout: str) -> None:
        """Two mover threads share a request: half of the blocks each."""
        world, oracle = self.worlds(layout)
        blocks, places = list(range(10)), [(0, cell) for cell in range(10)]
        cells = world.cells(places)
        failures: list[BaseException] = []

        def load(part: slice) -> None:
            try:
                world.mover.load(blocks[part], cells[part])
            except BaseException as error:
                failures.append(error)

        threads = [
            threading.Thread(target=load, args=(part,)) for part in (slice(0, 5), slice(5, 10))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        oracle.mover.load(blocks, oracle.cells(places))
        assert not failures
        assert world.bytes_now() == oracle.bytes_now()

    @pytest.mark.parametrize(
        ("blocks", "places"),
        [
            ([0, BLOCK_COUNT], [(0, 0), (0, 1)]),
            ([0, -1], [(0, 0), (0, 1)]),
            ([0, 1], [(0, 0), (0, CELL_COUNT)]),
            ([0, 1], [(0, 0), (0, -1)]),
            ([0, 1], [(0, 0)]),
            ([0], [(0, 0), (0, 1)]),
            ([1, 1], [(0, 0), (0, 1)]),
        ],
    )
    def test_a_copy_out_of_bounds_is_refused_before_its_first_byte(
        self, blocks: list[int], places: list[Place]
    ) -> None:
        """The last belt: a wrong plan must not write into the engine's memory."""
        world, oracle = self.worlds("layers outside")
        with pytest.raises(AssertionError):
            world.mover.store(blocks, world.cells(places))
        with pytest.raises(AssertionError):
            world.mover.load(blocks, world.cells(places))
        assert world.bytes_now() == oracle.bytes_now()

    @pytest.mark.parametrize(
        "pages",
        [
            [],
            [PagePlace(4096, 512, 512), PagePlace(4096, 512, 512)],
            [PagePlace(4096, 511, 512)],
            [PagePlace(4096, 512, 0)],
            [PagePlace(0, 512, 512)],
        ],
    )
    def test_pages_that_cannot_be_are_refused(self, pages: list[PagePlace]) -> None:
        """Layers that share memory are the connector's to sort out."""
        with pytest.raises(AssertionError):
            self.make_mover(pages, BLOCK_COUNT)

    def test_a_memory_without_blocks_is_refused(self) -> None:
        """There is nothing that it could copy."""
        with pytest.raises(AssertionError):
            self.make_mover([PagePlace(4096, 512, 512)], 0)


def movers_without_tests(package: ModuleType = movers) -> list[str]:
    """Movers of a package that no subclass of `MoverTests` names; assert that there are none."""
    tested = {getattr(tests, "mover_type", None) for tests in _subclasses(MoverTests)}
    missing = []
    for found in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        module = importlib.import_module(found.name)
        missing += [
            f"{module.__name__}.{name}"
            for name, value in vars(module).items()
            if _is_mover(value) and value.__module__ == module.__name__ and value not in tested
        ]
    return missing


def _is_mover(value: object) -> bool:
    return isinstance(value, type) and value is not Mover and {"store", "load"} <= set(dir(value))


def _subclasses(of: type) -> list[type]:
    direct: list[type] = of.__subclasses__()
    return direct + [below for one in direct for below in _subclasses(one)]

"""The shape of a chunk in bytes."""

import pytest

from kvtide.core.layout import BLOCKS_PER_CHUNK_MAX, KVLayout
from kvtide.units import KiB, MiB


def test_bytes_follow_from_the_shape() -> None:
    """Two shards of unequal cells, sixteen blocks a chunk."""
    layout = KVLayout(16, 256, (96 * KiB, 32 * KiB))
    assert layout.blocks_per_chunk == 16
    assert layout.shard_count == 2
    assert layout.block_bytes == 128 * KiB
    assert layout.chunk_bytes == 2 * MiB


def test_layouts_are_told_apart_by_name() -> None:
    layouts = [
        KVLayout(16, 256, (4096,)),
        KVLayout(32, 256, (4096,)),
        KVLayout(16, 512, (4096,)),
        KVLayout(16, 256, (8192,)),
        KVLayout(16, 256, (4096, 4096)),
        KVLayout(16, 256, (4096, 8192)),
        KVLayout(16, 256, (8192, 4096)),
    ]
    assert len({layout.name for layout in layouts}) == len(layouts)
    assert KVLayout(16, 256, (4096,)).name == layouts[0].name


@pytest.mark.parametrize(
    ("block_tokens", "chunk_tokens", "cell_bytes"),
    [
        (0, 256, (4096,)),
        (16, 250, (4096,)),
        (16, 0, (4096,)),
        (1, BLOCKS_PER_CHUNK_MAX + 1, (4096,)),
        (16, 256, ()),
        (16, 256, (4095,)),
        (16, 256, (4096, 0)),
        (16, 256, (-4096,)),
    ],
)
def test_impossible_shapes_cannot_be_made(
    block_tokens: int, chunk_tokens: int, cell_bytes: tuple[int, ...]
) -> None:
    """`checks` refuses them with an error before; here they would be a mistake of ours."""
    with pytest.raises(AssertionError):
        KVLayout(block_tokens, chunk_tokens, cell_bytes)

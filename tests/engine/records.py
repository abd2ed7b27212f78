"""What a node left on disk, read and damaged from outside while none runs, as by a drive.

A chain is found by the salt of the request that stored it.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from kvtide.codec import record as codec
from kvtide.core.keys import salt_digest
from kvtide.tiers.disk.check import Checked, listed


def chain_of(disk: Path, salt: str) -> list[Checked]:
    """The records of the one chain that requests with this salt left, root first."""
    mine = [one for one in listed(disk) if one.record and _salt_of(one) == salt_digest(salt)]
    by_parent = {one.record.parent: one for one in mine if one.record}
    assert len(by_parent) == len(mine), f"the chain of {salt} branches"
    chain: list[Checked] = []
    key = next(one.record.root.key for one in mine if one.record)
    while key in by_parent:
        chain.append(by_parent[key])
        key = _key_of(chain[-1])
    assert len(chain) == len(mine), f"the chain of {salt} has a gap"
    return chain


def flip(disk: Path, one: Checked, block: int) -> None:
    """Change one bit of one byte of a block."""
    with _changed(disk, one) as content:
        header = codec.read_header(memoryview(content))
        at, size = _cell(header, block)
        content[at + size // 2] ^= 0x10


def put(disk: Path, one: Checked, block: int, source: Checked, source_block: int) -> None:
    """Give a block the bytes of another, under checksums that are right: no check of the tier can
    tell, so whatever is answered shows them."""
    with _changed(disk, source) as content:
        at, size = _cell(codec.read_header(memoryview(content)), source_block)
        other = bytes(content[at : at + size])
    with _changed(disk, one) as content:
        header = codec.read_header(memoryview(content))
        at, size = _cell(header, block)
        assert content[at : at + size] != other
        content[at : at + size] = other
        start, _ = _cell(header, 0)
        cells = memoryview(content)[start:]
        right = replace(header, checksums=codec.checksums_of(cells, header.record.blocks))
        codec.write_header(memoryview(content)[:start], right)


def _salt_of(one: Checked) -> bytes:
    assert one.record is not None
    return one.record.root.salt_digest


def _key_of(one: Checked) -> bytes:
    assert one.record is not None
    return one.record.key


def _cell(header: codec.Header, block: int) -> tuple[int, int]:
    """Where a block is in a record of one shard, and its size."""
    layout = header.record.layout
    assert layout.shard_count == 1, layout
    size = layout.cell_bytes[0]
    return codec.header_bytes(1, header.record.blocks) + block * size, size


@contextmanager
def _changed(disk: Path, one: Checked) -> Iterator[bytearray]:
    """All bytes of a record; what is changed of them inside is written back, and synced."""
    assert one.offset_bytes is not None
    with (disk / f"{one.segment:08d}.segment").open("r+b") as file:
        file.seek(one.offset_bytes)
        content = bytearray(file.read(one.length_bytes))
        before = bytes(content)
        yield content
        if content != before:
            file.seek(one.offset_bytes)
            file.write(content)
            os.fsync(file.fileno())

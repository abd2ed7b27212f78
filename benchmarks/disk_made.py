"""Directories of a disk tier with many records, made quickly, and a tier that is driven.

Indexes are real, written by the tier's own functions, of chains that go on from segment to
segment. Segments are as long as they would be but empty, all but the first one: a start does not
read them. That one holds a chain that can be loaded.

One that was killed at its cap has a log beside each index, which says that the ends of all chains
are gone, as many as may be gone before an index is written anew; and of its last segment, which
was being written, the log alone.
"""

import hashlib
import os
import shutil
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvtide.codec.record import stored_bytes
from kvtide.core.keys import INNER_DIGEST_BYTES, fingerprint, root_key
from kvtide.core.layout import KVLayout
from kvtide.core.records import Record, RootName
from kvtide.tiers.base import Found, Loaded, LoadJob, LoadOutcome, LookupJob, StoreJob
from kvtide.tiers.disk import columns, sealing
from kvtide.tiers.disk import rows as logs
from kvtide.tiers.disk.directory import INDEX, ROWS, SEGMENT, Directory
from kvtide.tiers.disk.room import REWRITE_RATIO
from kvtide.tiers.disk.rows import Kept
from kvtide.tiers.disk.space import SEGMENT_BYTES_MAX
from kvtide.tiers.disk.tier import DiskTier
from kvtide.tiers.files import SystemFiles, page_memory
from kvtide.tiers.kinds import Kind
from kvtide.units import MiB

BLOCKS, TAIL_BLOCKS = 16, 5
CHAIN_RECORDS = 32
GONE_OF_CHAIN = int(CHAIN_RECORDS * REWRITE_RATIO)
CAP_BYTES = 1 << 50
WAIT_S_MAX = 60.0

_NAME = fingerprint({"engine": "benchmark"})
ROOT = RootName(root_key(_NAME, epoch=b"", salt=None, adapter=b""), _NAME, b"", b"")


@dataclass(frozen=True, slots=True)
class Shape:
    """A directory to start on: how many chains, of records of how many bytes of payload."""

    chains: int
    record_bytes: int
    is_killed: bool = False

    @property
    def records(self) -> int:
        """Of all chains, as far as they are there."""
        return self.chains * (CHAIN_RECORDS - (GONE_OF_CHAIN if self.is_killed else 0))

    @property
    def layout(self) -> KVLayout:
        """Of its records."""
        return KVLayout(16, 16 * BLOCKS, (self.record_bytes // BLOCKS,))

    @property
    def in_segment(self) -> int:
        """Records of a full segment."""
        return SEGMENT_BYTES_MAX // stored_bytes(self.layout, BLOCKS)

    def __str__(self) -> str:
        killed = ", killed" if self.is_killed else ""
        return f"{self.records:,} of {self.record_bytes // MiB} MiB{killed}"


def keys_from(seed: bytes, count: int) -> list[bytes]:
    """Keys of a chain that can be made again."""
    return [hashlib.sha256(seed + bytes([number])).digest() for number in range(count)]


def chain_from(keys: Sequence[bytes], layout: KVLayout) -> list[Record]:
    """A chain of records with these keys, the last one a tail."""
    parents = [ROOT.key, *keys]
    return [
        Record(ROOT, parent, key, digests_of(key, key == keys[-1]), layout)
        for parent, key in zip(parents, keys, strict=False)
    ]


def digests_of(key: bytes, is_tail: bool) -> bytes:
    """Of the blocks of a record."""
    inner = (TAIL_BLOCKS if is_tail else BLOCKS) - 1
    return hashlib.shake_128(key).digest(inner * INNER_DIGEST_BYTES) + key[:INNER_DIGEST_BYTES]


def fill(path: Path, shape: Shape) -> None:
    """Make a directory of this shape, as a node leaves it whose segments are all sealed, or as a
    kill leaves it."""
    tier = Driven(path)
    tier.store(first_chain(shape.layout))
    tier.close()
    place = Directory(str(path), SystemFiles(), sync="none")
    place.take()
    length = stored_bytes(shape.layout, BLOCKS)
    kept: list[Kept] = []
    gone: list[list[int]] = []
    number = 2
    for chain in range(shape.chains):
        for depth, record in enumerate(chain_from(chain_keys(chain), shape.layout)):
            offset = len(kept) * length
            kept.append(Kept(offset, 0, record.key, record.parent, record.digests))
            if shape.is_killed and depth >= CHAIN_RECORDS - GONE_OF_CHAIN:
                if depth == CHAIN_RECORDS - GONE_OF_CHAIN or not gone:
                    gone.append([])
                gone[-1].append(offset)
            if len(kept) == shape.in_segment:
                _write(place, number, kept, gone, shape)
                number += 1
    if kept:
        _write(place, number, kept, gone, shape, is_sealed=not shape.is_killed)
    place.free()


def be_killed(path: Path) -> None:
    """As `fill` left it, before each start: the one before has sealed the last segment."""
    for log in path.parent.glob(f"*.{ROWS}"):
        (path / log.with_suffix(f".{INDEX}").name).unlink(missing_ok=True)
        shutil.copyfile(log, path / log.name)


def chain_keys(number: int) -> list[bytes]:
    """Of one of a directory's chains."""
    return keys_from(b"chain" + number.to_bytes(4, "little"), CHAIN_RECORDS)


def first_chain(layout: KVLayout) -> list[Record]:
    """The one that is loaded: a chunk, and its tail."""
    return chain_from(keys_from(b"first", 2), layout)


def _write(
    place: Directory,
    number: int,
    kept: list[Kept],
    gone: list[list[int]],
    shape: Shape,
    *,
    is_sealed: bool = True,
) -> None:
    """The files of a segment; `gone` has the offsets that each removal took."""
    path, kind = place.at(number, SEGMENT), Kind(ROOT, shape.layout)
    Path(path).touch(0o600)
    os.truncate(path, len(kept) * stored_bytes(shape.layout, BLOCKS))
    log = bytearray(logs.opening(number))
    if is_sealed:
        sealing.write_index(place, number, columns.from_rows({0: kind}, kept))
    else:
        log += logs.kind_row(number, len(log), 0, kind)
        for one in kept:
            log += logs.kept_row(number, len(log), one)
    for offsets in gone:
        log += logs.gone_row(number, len(log), offsets)
    if gone:
        Path(place.at(number, ROWS)).write_bytes(log)
    if not is_sealed:
        (Path(place.path).parent / Path(place.at(number, ROWS)).name).write_bytes(log)
    kept.clear()
    gone.clear()


class Driven:
    """A tier, driven as the node drives it."""

    def __init__(self, path: Path) -> None:
        self._woken = threading.Event()
        self.tier = DiskTier(path, CAP_BYTES, self._woken.set, sync="none", floor_bytes=0)
        self._number = 0

    def find(self, records: Sequence[Record]) -> Found:
        """A whole chain and its tail."""
        *before, last = records
        keys = b"".join(record.key for record in before)
        self._number += 1
        self.tier.lookup(LookupJob(self._number, ROOT, ROOT.key, keys, last.digests, last.layout))
        return next(done for done in self.tier.poll() if isinstance(done, Found))

    def load(self, record: Record) -> None:
        """All its bytes, proven."""
        self._number += 1
        self.tier.load(LoadJob(self._number, record, [page_memory(record.payload_bytes)]))
        [done] = self._wait(1)
        assert isinstance(done, Loaded), done
        assert done.outcome is LoadOutcome.LOADED, done

    def submit_store(self, record: Record, cells: memoryview) -> None:
        """Begin to keep one."""
        self._number += 1
        self.tier.store(StoreJob(self._number, record, [cells]))

    def store(self, records: Sequence[Record]) -> None:
        """Keep these."""
        for record in records:
            self.submit_store(record, page_memory(record.payload_bytes))
        self._wait(len(records))

    def _wait(self, count: int) -> list[object]:
        ended: list[object] = []
        while len(ended) < count:
            assert self._woken.wait(WAIT_S_MAX), "the tier does not answer"
            self._woken.clear()
            ended += self.tier.poll()
        return ended

    def settle(self) -> None:
        """Let all that a start has left for later be done."""
        while not self.tier._catalog.is_swept:
            self.tier.poll()

    def close(self) -> None:
        """As at a node's end."""
        self.tier.close(WAIT_S_MAX)
        self.tier.poll()

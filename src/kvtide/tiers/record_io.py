"""The bytes of a record in a file: header, cells, header, cells, of all shards in order.

Cells are written and read where they are, by one call for all; only headers have memory of their
own. What was read is proven, byte for byte, before anybody gets it.
"""

import os

from kvtide.codec import record as codec
from kvtide.codec.record import Header
from kvtide.core.records import Record
from kvtide.errors import CorruptRecord
from kvtide.tiers.base import LoadJob, StoreJob
from kvtide.tiers.files import Files, page_memory, read_fully


def to_write(job: StoreJob) -> list[memoryview]:
    """The bytes of a record, checksums taken."""
    record = job.record
    headers = _headers(record, page_memory(headers_bytes(record)))
    write_id = os.urandom(codec.WRITE_ID_BYTES)
    parts = []
    for shard, (into, cells) in enumerate(zip(headers, job.cells, strict=True)):
        payload = memoryview(cells).cast("B")
        checksums = codec.checksums_of(payload, record.blocks)
        codec.write_header(into, Header(record, shard, write_id, checksums))
        parts += [into, payload]
    return parts


def read_proven(
    files: Files, descriptor: int, offset_bytes: int, job: LoadJob, memory: memoryview, where: str
) -> None:
    """Fill a job's cells from here on. `memory` is for headers, and begins on a page; `where` is
    what the errors name.

    Raises:
        OSError: it cannot be read.
        CorruptRecord: what is there is not the record.
    """
    headers = _headers(job.record, memory)
    cells = [memoryview(part).cast("B") for part in job.cells]
    parts = [part for pair in zip(headers, cells, strict=True) for part in pair]
    count, wanted = read_fully(files, descriptor, parts, offset_bytes), sum(map(len, parts))
    if count != wanted:
        raise CorruptRecord(f"{where} ends inside the record: {count} bytes instead of {wanted}")
    try:
        codec.verify(headers, cells, job.record)
    except CorruptRecord as error:
        raise CorruptRecord(f"{where}: {error}") from error


def headers_bytes(record: Record) -> int:
    """Memory that the headers of all its shards need."""
    shards = record.layout.shard_count
    return shards * codec.header_bytes(shards, record.blocks)


def _headers(record: Record, memory: memoryview) -> list[memoryview]:
    shards = record.layout.shard_count
    length = headers_bytes(record) // shards
    return [memory[shard * length :][:length] for shard in range(shards)]

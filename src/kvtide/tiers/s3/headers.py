"""What kinds the names in a bucket are of: the header of any record of a kind says it.

A kind whose headers cannot be read stays unknown: what is of it is not found, its parts look like
what killed writers left, and a clear may mean it. It is tried a few times, and again with the next
look at everything.
"""

import asyncio
import enum
from collections import Counter
from collections.abc import Sequence

from kvtide.codec.record import HEADER_BYTES_MAX, read_header
from kvtide.errors import CorruptRecord, PlaceFailed, UnknownFormat
from kvtide.tiers.remote.kinds import kind_of
from kvtide.tiers.s3 import names
from kvtide.tiers.s3.bucket import Bucket, Listed, gathered
from kvtide.tiers.s3.mirror import Mirror
from kvtide.tiers.s3.names import Written

TRIES_MAX = 8
"""Headers of one kind that are read between two looks at everything, where none can be read."""
KINDS_MAX = 16
"""Kinds whose headers are read at once: there is one for each salt."""
HEADER_S = 1.0
"""Less than a call may take, so that one object that never comes does not stop each look."""


class Header(enum.Enum):
    """What came of asking for one."""

    READ, GONE, UNREADABLE = range(3)


class Headers:
    """One session's. Ownership: its thread.

    Attributes:
        is_any_unknown: whether a kind was left unknown since `try_all`.
    """

    def __init__(self, bucket: Bucket, mirror: Mirror) -> None:
        self.is_any_unknown = False
        self._bucket = bucket
        self._mirror = mirror
        self._tries: Counter[bytes] = Counter()

    def try_all(self) -> None:
        """What was tried in vain may be tried again."""
        self._tries.clear()
        self.is_any_unknown = False

    async def take_in(self, listed: Sequence[Listed]) -> None:
        """Names of records were seen: they stand in the mirror, once their kind is known."""
        unknown: dict[bytes, list[tuple[str, Written]]] = {}
        for one in listed:
            written = names.parse_record(self._mirror.top, one.name)
            if written is not None and not self._mirror.take_in(written):
                unknown.setdefault(written.kind_digest, []).append((one.name, written))
        ahead = asyncio.Semaphore(KINDS_MAX)

        async def take_in(of_kind: Sequence[tuple[str, Written]]) -> None:
            async with ahead:
                await self._take_in_unknown(of_kind)

        await gathered([asyncio.ensure_future(take_in(of_kind)) for of_kind in unknown.values()])

    async def _take_in_unknown(self, of_kind: Sequence[tuple[str, Written]]) -> None:
        is_unknown = False
        for name, written in of_kind:
            header = await self._learn(name, written.kind_digest)
            is_unknown = header is Header.UNREADABLE or (is_unknown and header is Header.GONE)
            if header is Header.READ:
                break
        self.is_any_unknown |= is_unknown
        for _, written in of_kind:
            self._mirror.take_in(written)

    async def _learn(self, name: str, kind_digest: bytes) -> Header:
        """What a kind stands for. Neither a call that was given up nor a header that is gone is a
        try: they say nothing of it."""
        if self._tries[kind_digest] >= TRIES_MAX:
            return Header.UNREADABLE
        try:
            async with asyncio.timeout(HEADER_S):
                start = await self._bucket.get_start(name, HEADER_BYTES_MAX)
        except TimeoutError as error:
            self._tries[kind_digest] += 1
            raise PlaceFailed(f"a header did not come within {HEADER_S} s") from error
        except PlaceFailed:  # counts: one object that is always refused would stop each look
            self._tries[kind_digest] += 1
            raise
        if start is None:
            return Header.GONE
        try:
            record = read_header(start).record
        except (CorruptRecord, UnknownFormat):
            record = None
        if record is None or kind_of(record.root, record.layout) != kind_digest:
            self._tries[kind_digest] += 1
            return Header.UNREADABLE
        self._mirror.learned(record.root, record.layout)
        del self._tries[kind_digest]
        return Header.READ

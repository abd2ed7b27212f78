"""Calls to a bucket, by obstore: the only file that knows it.

    put      a row of cells and headers ──► an object      sent from where they are
    get      an object ──► received by the library ──► cells      one copy, by the caller's thread

A call that its caller gives up (its task is cancelled) is broken off, and writes to no cell then.
It may still send from cells for a moment; what comes of that has a name that nobody believes.
The library's own retries are off: whether a place that fails is asked again is the breaker's to
say, where it throttles too.
"""

import asyncio
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from kvtide.errors import ConfigError, CorruptRecord, PlaceFailed

try:
    import obstore
    from obstore.exceptions import BaseError
    from obstore.store import S3Store
except ModuleNotFoundError as error:
    raise ConfigError("it needs the package obstore: pip install 'kvtide[s3]'") from error

LISTED_MAX = 1000
"""Names of one answer; S3 gives no more."""
REASON_CHARS_MAX = 300
_SAID = re.compile(r"<Code>(\w+)</Code>(?:.*?<Message>([^<]*)</Message>)?", re.DOTALL)
_LACKS_DELETES = re.compile(r"<Code>(NotImplemented|MethodNotAllowed|InvalidRequest)</Code>")
"""Said by servers that know no `DeleteObjects`, or not this one."""
SINGLY_MAX = 16
"""Objects that are removed at once where each takes a request of its own."""
_STEADY: dict[str, Any] = {"allow_http": True, "http1_only": True}
"""A connection for each call under way: one that stalls holds up no other."""
_FAILURES = (BaseError, OSError, ValueError)
"""What the library raises: FileNotFoundError, too."""


@dataclass(frozen=True, slots=True)
class Listed:
    """One object: its name, and when the server took it, in seconds by its own clock."""

    name: str
    at_s: float


class Client:
    """A bucket. Any thread may call, each from a loop of its own.

    Args:
        bucket: its name.
        config: of the place, in obstore's words.
        connection: of connections, the same.
        limit_s: no request takes longer; callers set shorter limits by themselves.
        credentials: gives what is signed with, where the library shall not look for it itself.

    Raises:
        ConfigError: what was configured cannot be used.
    """

    def __init__(
        self,
        bucket: str,
        config: Mapping[str, Any],
        connection: Mapping[str, Any],
        limit_s: float,
        credentials: Any = None,
    ) -> None:
        """Nothing is asked yet."""
        self.bucket = bucket
        known: Any = {"unsigned_payload": True, **config}
        singly: Any = {**known, "disable_bulk_delete": True}
        options: Any = {**_STEADY, "timeout": timedelta(seconds=limit_s), **connection}
        both: dict[str, Any] = {
            "client_options": options,
            "retry_config": {"max_retries": 0},
            "credential_provider": credentials,
        }
        try:
            self._store = S3Store(bucket, config=known, **both)
            self._singly = S3Store(bucket, config=singly, **both)
        except _FAILURES as error:
            raise ConfigError(f"it cannot be opened: {_reason(error)}") from error

    async def put(self, name: str, pieces: Sequence[memoryview | bytes]) -> None:
        """Make an object of these bytes."""
        content: Any = list(pieces)
        try:
            await obstore.put_async(self._store, name, content, use_multipart=False)
        except _FAILURES as error:
            raise PlaceFailed(_reason(error)) from error

    async def get_into(self, name: str, pieces: Sequence[memoryview]) -> bool:
        """Fill these with an object; False: it is not there.

        Raises:
            CorruptRecord: it has another length.
        """
        wanted = sum(map(len, pieces))
        content = await self.get(name, wanted)
        if content is None:
            return False
        if len(content) != wanted:
            raise CorruptRecord(f"object {name} has {len(content)} bytes, expected {wanted}")
        at = 0
        for piece in pieces:
            piece[:] = content[at : at + len(piece)]
            at += len(piece)
        return True

    async def get(self, name: str, bytes_max: int) -> memoryview | None:
        """An object of at most so many bytes; None: it is not there.

        Raises:
            CorruptRecord: it is longer.
        """
        try:
            answer = await obstore.get_async(self._store, name)
            is_fine = answer.meta["size"] <= bytes_max
            content: Any = await answer.bytes_async() if is_fine else None
        except _FAILURES as error:
            if _is_absence(error):
                return None
            raise PlaceFailed(_reason(error)) from error
        if content is None:
            raise CorruptRecord(f"object {name} has more than {bytes_max} bytes")
        return memoryview(content)

    async def get_start(self, name: str, length_bytes: int) -> memoryview | None:
        """The first bytes of an object, so many at most; None: it is not there. No range is asked
        for, which some servers answer with all there is: no more is received than is taken."""
        start = bytearray()
        try:
            answer = await obstore.get_async(self._store, name)
            async for content in answer.stream(min_chunk_size=length_bytes):
                start += memoryview(content)[: length_bytes - len(start)]
                if len(start) == length_bytes:
                    break
        except _FAILURES as error:
            if _is_absence(error):
                return None
            raise PlaceFailed(_reason(error)) from error
        return memoryview(start)

    async def delete(self, names: Sequence[str]) -> None:
        """Remove objects; one that is not there is no error."""
        if not names:
            return
        try:
            await obstore.delete_async(self._store, list(names))
        except _FAILURES as error:
            if not (_is_absence(error) or _LACKS_DELETES.search(str(error))):
                raise PlaceFailed(_reason(error)) from error
        else:
            return
        ahead = asyncio.Semaphore(SINGLY_MAX)

        async def delete_one(name: str) -> None:
            async with ahead:
                await self._delete_one(name)

        await gathered([asyncio.ensure_future(delete_one(name)) for name in names])

    async def _delete_one(self, name: str) -> None:
        try:
            await obstore.delete_async(self._singly, [name])
        except _FAILURES as error:
            if not _is_absence(error):
                raise PlaceFailed(_reason(error)) from error

    async def listed(self, folder: str, after: str = "") -> list[Listed]:
        """The next names in a folder, in order; fewer than `LISTED_MAX`: there are no more."""
        try:
            pages = obstore.list(self._store, folder, offset=after or None, chunk_size=LISTED_MAX)
            async for page in pages:
                return [Listed(one["path"], one["last_modified"].timestamp()) for one in page]
        except _FAILURES as error:
            raise PlaceFailed(_reason(error)) from error
        return []


async def gathered(calls: "Sequence[asyncio.Future[Any]]", *, are_needed: bool = True) -> None:
    """Until all have ended; where one fails, or none is needed, the others are broken off."""
    try:
        if are_needed:
            await asyncio.gather(*calls)
    finally:
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)


def _is_absence(error: Exception) -> bool:
    """Whether the object is not there; a bucket that is not there is a failure."""
    said = str(error)
    is_one = isinstance(error, FileNotFoundError) or "(code: NoSuchKey)" in said
    return is_one and "NoSuchBucket" not in said


def _reason(error: Exception) -> str:
    """What a server said, or the library, in a line and without names of objects."""
    said = _SAID.search(str(error))
    if said is not None:
        return ": ".join(filter(None, said.groups()))[:REASON_CHARS_MAX]
    words = str(error).partition("\n\nDebug source")[0].rpartition(" - ")[2]
    return " ".join(words.split())[:REASON_CHARS_MAX]

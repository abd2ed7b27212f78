"""Calls to a bucket, by obstore: the only file that knows it.

A call that a caller gives up (its task is cancelled) is broken off, and then writes to no cell: the
library receives into memory of its own, which is copied to the cells once, by the caller's thread.
The library's own retries are off: what fails is the breaker's to judge, throttling too.
"""

import asyncio
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
_STEADY: dict[str, Any] = {"allow_http": True, "http1_only": True}
"""A connection for each call under way: one that stalls holds up no other."""


@dataclass(frozen=True, slots=True)
class Listed:
    """One object: its name, and when the server took it, in seconds by its own clock."""

    name: str
    at_s: float


class Client:
    """A bucket. Any thread may call, each from a loop of its own.

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
        """`config` and `connection` are in obstore's words; no call takes longer than `limit_s`."""
        options: dict[str, Any] = {**_STEADY, "timeout": timedelta(seconds=limit_s), **connection}
        try:
            self._store = S3Store(
                bucket,
                config={"unsigned_payload": True, **config},  # type: ignore[typeddict-item]
                client_options=options,  # type: ignore[arg-type]
                retry_config={"max_retries": 0},
                credential_provider=credentials,
            )
        except (BaseError, ValueError) as error:
            raise ConfigError(f"it cannot be opened: {_reason(error)}") from error

    async def put(self, name: str, pieces: Sequence[memoryview | bytes]) -> None:
        """Make an object of these bytes."""
        try:
            await obstore.put_async(self._store, name, list(pieces), use_multipart=False)
        except (BaseError, OSError, ValueError) as error:
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
            raise CorruptRecord(f"an object has {len(content)} bytes, expected {wanted}")
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
            if answer.meta["size"] > bytes_max:
                raise CorruptRecord(f"an object has {answer.meta['size']} bytes")
            return memoryview(await answer.bytes_async())
        except (BaseError, OSError, ValueError) as error:
            if _is_absence(error):
                return None
            raise PlaceFailed(_reason(error)) from error

    async def get_start(self, name: str, length: int) -> memoryview | None:
        """The first bytes of an object, so many at most; None: it is not there. Where a server
        answers with all of it, as some do, no more than these are taken."""
        start = bytearray()
        try:
            answer = await obstore.get_async(self._store, name)
            async for content in answer.stream(min_chunk_size=length):
                start += memoryview(content)[: length - len(start)]
                if len(start) == length:
                    break
        except (BaseError, OSError, ValueError) as error:
            if _is_absence(error):
                return None
            raise PlaceFailed(_reason(error)) from error
        return memoryview(start)

    async def delete(self, names: Sequence[str]) -> None:
        """Remove objects; one that is not there is no error."""
        for at in range(0, len(names), LISTED_MAX):
            try:
                await obstore.delete_async(self._store, list(names[at : at + LISTED_MAX]))
            except (BaseError, OSError, ValueError) as error:
                if not _is_absence(error):
                    raise PlaceFailed(_reason(error)) from error

    async def listed(self, folder: str, after: str = "") -> list[Listed]:
        """The next names in a folder, in order; fewer than `LISTED_MAX`: there are no more."""
        try:
            stream = obstore.list(
                self._store, folder, offset=after or None, chunk_size=LISTED_MAX
            )
            async for page in stream:
                return [Listed(one["path"], one["last_modified"].timestamp()) for one in page]
        except (BaseError, OSError, ValueError) as error:
            raise PlaceFailed(_reason(error)) from error
        return []


async def gathered(calls: "Sequence[asyncio.Future[Any]]", *, are_needed: bool = True) -> None:
    """Until all have ended; if one fails, or none is needed, all are broken off first."""
    try:
        if are_needed:
            await asyncio.gather(*calls)
    finally:
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)


def _is_absence(error: Exception) -> bool:
    """Whether the object is not there: a bucket that is not there fails."""
    return isinstance(error, FileNotFoundError) and "NoSuchBucket" not in str(error)


def _reason(error: Exception) -> str:
    """In a line: the library adds pages."""
    said = str(error).partition("\n\nDebug source")[0]
    return " ".join(said.split())[:REASON_CHARS_MAX]

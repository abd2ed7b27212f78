"""Room below a cap that all nodes share, without anybody who counts for all.

    put `room.N` ──► list what others hold and have claimed ──► evict what is too much ──► take N

A node says how much it will take before it looks how much there is. Lists name what was put before
they were asked for: so of two who claim at one time at least the later one sees both, and takes
nothing before it has made room for both. What is claimed is taken bit by bit: few stores ask.

A claim holds for a minute by its owner's clock, and counts for others for two by the server's: who
was killed leaves no more than that behind.
"""

import time
from collections.abc import Iterable

from kvtide.tiers.base import NO_CAP_BYTES
from kvtide.tiers.s3.client import Client
from kvtide.tiers.s3.listing import Listing
from kvtide.tiers.s3.mirror import Mirror
from kvtide.tiers.s3.names import Message, message_name
from kvtide.units import GiB

CLAIMS_PER_CAP = 32
CLAIM_BYTES_MAX = GiB
"""At once: as much as a node stores in seconds."""
SPARE_RATIO = 1 / 64
"""Of the cap, for what is no record: lists of what is gone."""
OWN_S_MAX = 60.0


class Room:
    """One node's. Ownership: the writing thread's."""

    def __init__(
        self,
        client: Client,
        mirror: Mirror,
        writer: str,
        bytes_max: int,
        listing: Listing,
    ) -> None:
        self.name = ""
        """Of the own claim."""
        self._client = client
        self._mirror = mirror
        self._writer = writer
        self._limit_bytes = int(bytes_max * (1 - SPARE_RATIO))
        self._claim_bytes = min(bytes_max // CLAIMS_PER_CAP, CLAIM_BYTES_MAX)
        self._has_no_cap = bytes_max >= NO_CAP_BYTES
        self._listing = listing
        self._left_bytes = 0
        self._until_s = 0.0

    async def take(self, length_bytes: int, sent_bytes: int, keep: Iterable[bytes]) -> bool:
        """Room for a record, where these bytes of earlier ones are on their way; none of the
        records with these keys is evicted for it."""
        if self._listing.is_first and not self._has_no_cap:  # it is not known what is there
            await self._listing.refresh()
            return False
        if length_bytes > self._left_bytes or time.monotonic() > self._until_s:
            keep = list(keep)
            wanted = max(length_bytes, self._claim_bytes)
            for size in sorted({wanted, length_bytes}, reverse=True):
                if await self._claim(size, sent_bytes, keep):
                    break
            else:
                await self._client.delete([self.name])
                self.name = ""
                return False
        self._left_bytes -= length_bytes
        return True

    async def end_old(self) -> None:
        """Take back a claim that does not hold any more."""
        if self.name and time.monotonic() > self._until_s:
            await self._client.delete([self.name])
            self.name = ""

    async def _claim(self, size: int, sent_bytes: int, keep: Iterable[bytes]) -> bool:
        self._left_bytes, began_s = 0, time.monotonic()
        claimed = size + sent_bytes
        message = Message(self._mirror.next_stamp(), self._writer, "room", claimed)
        old, self.name = self.name, message_name(self._mirror.top, message)
        await self._client.put(self.name, [b""])
        if old:
            await self._client.delete([old])
        await self._listing.refresh()
        while (over := self._over(claimed)) > 0:
            self._mirror.evict(over - self._mirror.given_up_bytes, keep)
            if not await self._listing.delete_given_up():
                return False
        self._left_bytes, self._until_s = size, began_s + OWN_S_MAX
        return True

    def _over(self, claimed: int) -> int:
        taken = self._mirror.used_bytes + self._listing.others_bytes
        return taken + claimed - self._limit_bytes

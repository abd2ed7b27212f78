"""The s3 tier keeps every promise of a tier, on real servers."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import obstore
import pytest

from kvtide.core.records import Record
from kvtide.testing import object_servers
from kvtide.testing.proxy import Proxy
from kvtide.testing.tier_suite import TierTests
from kvtide.tiers.base import Tier
from kvtide.tiers.remote.tier import RemoteTier
from kvtide.tiers.s3 import names
from tests.tiers.s3_place import QUEUE_BYTES_MAX, TOP, open_s3


class S3Tests(TierTests):
    """The suite, through a proxy that can fail."""

    tier_type = RemoteTier
    program: str
    queue_bytes_max = QUEUE_BYTES_MAX
    running_max = 12

    @pytest.fixture(autouse=True)
    def _server(self, tmp_path: Path) -> Iterator[None]:
        with object_servers.running(self.program, tmp_path / "server") as server:
            self.server = server
            self.proxy = Proxy("127.0.0.1", server.port)
            yield
            self.proxy.close()

    def make_tier(self, tmp_path: Path, *, bytes_max: int) -> Tier:
        return open_s3(self.proxy.port, self.wake, bytes_max)

    def reopen(self, tier: Tier) -> Tier | None:
        assert isinstance(tier, RemoteTier)
        return open_s3(self.proxy.port, self.wake, tier.bytes_max)

    def bytes_taken(self, tier: Tier) -> int:
        return self.server.bytes_taken()

    def stalled(self, tier: Tier) -> AbstractContextManager[None]:
        return self.proxy.stalled()

    def failing(self, tier: Tier) -> AbstractContextManager[None]:
        return self.proxy.refusing()

    def damage(self, tier: Tier, record: Record) -> None:
        """Change one byte."""
        for name in self.server.names(f"{TOP}/r"):
            written = names.parse_record(TOP, name)
            if written is not None and written.key == record.key:
                content = bytearray(obstore.get(self.server.bucket, name).bytes())
                content[-5] ^= 1
                obstore.put(self.server.bucket, name, bytes(content))


class TestMoto(S3Tests):
    program = "moto"


class TestRclone(S3Tests):
    program = "rclone"

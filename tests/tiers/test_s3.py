"""The s3 tier keeps every promise of a tier, on real servers."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from kvtide.core.records import Record
from kvtide.testing import object_servers
from kvtide.testing.object_servers import Server
from kvtide.testing.proxy import Proxy
from kvtide.testing.tier_suite import TierTests
from kvtide.tiers.base import Tier
from kvtide.tiers.remote.tier import RemoteTier
from tests.tiers.s3_place import QUEUE_BYTES_MAX, Bucket, open_s3


@pytest.fixture(scope="class")
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    program: str = request.cls.program
    with object_servers.running(program, tmp_path_factory.mktemp(program)) as one:
        yield one


class S3Tests(TierTests):
    """The suite, through a proxy that can fail."""

    tier_type = RemoteTier
    program: str
    queue_bytes_max = QUEUE_BYTES_MAX
    running_max = 12
    """Two loads, what one session stores at a time, and what it was given ahead."""

    @pytest.fixture(autouse=True)
    def _server(self, server: Server) -> Iterator[None]:
        self.bucket = Bucket(server.port)
        self.bucket.clear()
        self.proxy = Proxy("127.0.0.1", server.port)
        yield
        self.proxy.close()

    def make_tier(self, tmp_path: Path, *, bytes_max: int) -> Tier:
        return open_s3(self.proxy.port, self.wake, bytes_max)

    def reopen(self, tier: Tier) -> Tier | None:
        assert isinstance(tier, RemoteTier)
        return open_s3(self.proxy.port, self.wake, tier.bytes_max)

    def bytes_taken(self, tier: Tier) -> int:
        return self.bucket.bytes_taken()

    def stalled(self, tier: Tier) -> AbstractContextManager[None]:
        return self.proxy.stalled()

    def failing(self, tier: Tier) -> AbstractContextManager[None]:
        return self.proxy.refusing()

    def damage(self, tier: Tier, record: Record) -> None:
        self.bucket.change(self.bucket.objects_of(record)[-1])


@pytest.mark.long
class TestRclone(S3Tests):
    program = "rclone"


@pytest.mark.long
class TestMoto(S3Tests):
    program = "moto"


@pytest.mark.slow
@pytest.mark.timeout(600)
class TestRadosgw(S3Tests):
    program = "radosgw"

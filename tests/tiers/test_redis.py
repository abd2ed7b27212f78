"""The redis tier keeps every promise of a tier, on real servers."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import pytest

from kvtide.core.records import Record
from kvtide.testing import redis_servers
from kvtide.testing.proxy import Proxy
from kvtide.testing.tier_suite import TierTests
from kvtide.tiers.base import Tier
from kvtide.tiers.remote.tier import RemoteTier
from tests.tiers import redis_cluster
from tests.tiers.redis_place import QUEUE_BYTES_MAX, open_redis, part_names


class RedisTests(TierTests):
    """The suite, through a proxy that can fail."""

    tier_type = RemoteTier
    program: str
    queue_bytes_max = QUEUE_BYTES_MAX

    @pytest.fixture(autouse=True)
    def _server(self, tmp_path: Path) -> Iterator[None]:
        with redis_servers.running(self.program, tmp_path / "server") as server:
            self.server = server
            self.proxy = Proxy("127.0.0.1", server.port)
            yield
            self.proxy.close()

    def make_tier(self, tmp_path: Path, *, bytes_max: int) -> Tier:
        return open_redis(self.proxy.port, self.wake, bytes_max)

    def reopen(self, tier: Tier) -> Tier | None:
        assert isinstance(tier, RemoteTier)
        return open_redis(self.proxy.port, self.wake, tier.bytes_max)

    def bytes_taken(self, tier: Tier) -> int:
        return self.server.bytes_taken()

    def stalled(self, tier: Tier) -> AbstractContextManager[None]:
        return self.proxy.stalled()

    def failing(self, tier: Tier) -> AbstractContextManager[None]:
        return self.proxy.refusing()

    def damage(self, tier: Tier, record: Record) -> None:
        self.flip(part_names(self.server, record)[-1])

    def flip(self, name: bytes) -> None:
        """Change one byte of a part."""
        length = self.server.ask(b"STRLEN", name)
        assert isinstance(length, int)
        at = b"%d" % (length - 5)
        old = self.server.ask(b"GETRANGE", name, at, at)
        assert isinstance(old, bytes)
        self.server.ask(b"SETRANGE", name, at, bytes([old[0] ^ 1]))


@pytest.mark.long
class TestValkey(RedisTests):
    program = "valkey"


@pytest.mark.long
class TestRedis(RedisTests):
    program = "redis"


@pytest.mark.slow
class TestCluster(RedisTests):
    """The suite on three servers, which name a proxy each."""

    program = "valkey"

    @pytest.fixture(autouse=True)
    def _server(self, tmp_path: Path) -> Iterator[None]:
        self.proxies: list[Proxy] = []
        with redis_cluster.running(self.program, tmp_path, self.proxies) as servers:
            self.servers = servers
            self.proxy = self.proxies[0]
            yield

    def bytes_taken(self, tier: Tier) -> int:
        return sum(server.bytes_taken() for server in self.servers)

    @contextmanager
    def _all(self, name: str) -> Iterator[None]:
        with ExitStack() as stack:
            for proxy in self.proxies:
                stack.enter_context(getattr(proxy, name)())
            yield

    def stalled(self, tier: Tier) -> AbstractContextManager[None]:
        return self._all("stalled")

    def failing(self, tier: Tier) -> AbstractContextManager[None]:
        return self._all("refusing")

    def damage(self, tier: Tier, record: Record) -> None:
        for server in self.servers:
            if server.names(b"kvtide:{*"):
                self.server = server
        name = part_names(self.server, record)[-1]
        self.server = next(server for server in self.servers if name in server.names())
        self.flip(name)

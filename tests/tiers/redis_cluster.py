"""A cluster of three masters, each with a third of the slots."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from kvtide.testing import redis_servers
from kvtide.testing.proxy import Proxy
from kvtide.testing.redis_servers import Server
from kvtide.tiers.redis.routes import SLOTS

WAIT_S = 30.0


def wait_until(is_so: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.02)


@contextmanager
def running(
    program: str, directory: Path, proxies: list[Proxy] | None = None
) -> Iterator[list[Server]]:
    """The cluster, up; with a list, servers name a proxy each, which are put in there."""
    with ExitStack() as stack:
        servers = []
        for number in range(3):
            options = ["--cluster-enabled", "yes", "--cluster-node-timeout", "1000"]
            # The other port is 10000 above the first by itself, which may be none.
            options += ["--cluster-port", str(redis_servers.free_port())]
            one = redis_servers.server(program, directory / f"node{number}", *options)
            if proxies is not None:
                proxies.append(Proxy("127.0.0.1", one.port))
                stack.callback(proxies[-1].close)
                one.command += ["--cluster-announce-port", str(proxies[-1].port)]
                one.command += ["--cluster-announce-ip", "127.0.0.1"]
            stack.callback(one.kill)
            one.start()
            servers.append(one)
        shares = [SLOTS * n // 3 for n in range(4)]
        for one, first, end in zip(servers, shares, shares[1:], strict=False):
            one.ask(b"CLUSTER", b"ADDSLOTSRANGE", b"%d" % first, b"%d" % (end - 1))
            meet = (b"CLUSTER", b"MEET", b"127.0.0.1", b"%d" % servers[0].port)
            one.ask(*meet, _bus_of(servers[0]))
        wait_until(lambda: all(map(is_joined, servers)), "the cluster is up")
        yield servers


def _bus_of(server: Server) -> bytes:
    return server.command[server.command.index("--cluster-port") + 1].encode()


def is_joined(server: Server) -> bool:
    """Whether it knows the others, and all slots have a server."""
    said = server.ask(b"CLUSTER", b"INFO")
    assert isinstance(said, bytes)
    return b"cluster_state:ok" in said and b"cluster_known_nodes:3" in said

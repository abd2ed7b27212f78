"""A redis tier on what people run: a unix socket, TLS, Sentinels, a cluster."""

import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from kvtide.core.records import Record
from kvtide.errors import PlaceFailed
from kvtide.redis_address import Address, parse_address
from kvtide.testing import redis_servers
from kvtide.testing.proxy import Proxy
from kvtide.testing.redis_servers import Server
from kvtide.testing.tier_records import chain_of, layout_of, root_of, text
from kvtide.tiers.base import LoadOutcome, StoreOutcome
from kvtide.tiers.breaker import FAILURES_MAX
from kvtide.tiers.redis import resp
from kvtide.tiers.redis.opening import tls_context
from kvtide.tiers.redis.resp import Connection, ServerError
from kvtide.tiers.redis.routes import slot_of
from kvtide.units import KiB
from tests.tiers import redis_cluster
from tests.tiers.certificates import made_certificates
from tests.tiers.redis_place import driven, heal, part_names

ROOT = root_of()
LARGE = layout_of(256 * KiB)
"""Chunks of a megabyte: parts that lie in several slots."""
CHAIN = chain_of(ROOT, LARGE, text(1, 18))


def check_all(address: Address, **more: ssl.SSLContext) -> None:
    """Stores, finds, loads and clears a chain."""
    with driven(address, 64 << 20, **more) as tier:
        assert tier.store(CHAIN) == [StoreOutcome.STORED] * len(CHAIN)
        assert tier.find(CHAIN[:-1], CHAIN[-1].digests) == CHAIN
        assert {tier.load(record) for record in CHAIN} == {LoadOutcome.LOADED}
        assert tier.tier.clear(None) == len(CHAIN)
        assert tier.find(CHAIN[:1]) == []


def test_a_unix_socket(tmp_path: Path) -> None:
    with redis_servers.running("valkey", tmp_path / "server") as server:
        check_all(parse_address(f"unix://{server.path}"))


def test_another_database(tmp_path: Path) -> None:
    with redis_servers.running("valkey", tmp_path / "server") as server:
        with driven(parse_address(f"redis://127.0.0.1:{server.port}/3")) as tier:
            tier.keep(CHAIN[:1])
        assert server.names() == [], "none in database 0"
        with driven(parse_address(f"unix://{server.path}?3")) as tier:
            assert tier.load(CHAIN[0]) is LoadOutcome.LOADED


# ---- TLS


@pytest.fixture
def secure(tmp_path: Path) -> Iterator[Server]:
    """A server that speaks TLS, and wants a certificate of its clients."""
    for name in ("good", "evil"):
        made_certificates(tmp_path, name)
    port = redis_servers.free_port()
    options = ["--tls-port", str(port)]
    for option, name in (("cert", "good.crt"), ("key", "good.key"), ("ca-cert", "good-ca.crt")):
        options += [f"--tls-{option}-file", str(tmp_path / name)]
    with redis_servers.running("redis", tmp_path / "server", *options) as server:
        yield replace(server, port=port)


def test_tls_with_certificates_on_both_sides(secure: Server, tmp_path: Path) -> None:
    tls = tls_context(tmp_path / "good-ca.crt", tmp_path / "good.crt", tmp_path / "good.key")
    check_all(replace(secure.address, is_tls=True), tls=tls)


class SlowClock:
    """A minute passes between two looks at it: longer than a server may say nothing."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        self.now_s += 60.0
        return self.now_s


@pytest.mark.parametrize("for_s", [3600.0, 300.0])
def test_a_value_over_tls_is_sent_as_long_as_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, for_s: float
) -> None:
    """However slowly it is taken, up to the deadline of the call, which is looked at meanwhile."""
    made_certificates(tmp_path, "good")
    theirs = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    theirs.load_cert_chain(tmp_path / "good.crt", tmp_path / "good.key")
    mine = tls_context(tmp_path / "good-ca.crt", None, None)
    taken = 0

    def take() -> None:
        nonlocal taken
        with suppress(OSError), theirs.wrap_socket(ends[1], server_side=True) as sock:
            while piece := sock.recv(1 << 20):
                taken += len(piece)

    ends = socket.socketpair()
    thread = threading.Thread(target=take)
    thread.start()
    sock = mine.wrap_socket(ends[0], server_hostname="127.0.0.1")
    monkeypatch.setattr(resp, "time", SlowClock())
    connection = Connection(sock, 20.0)
    connection.limit(for_s)
    value = memoryview(bytes(8 << 20))
    if for_s > 1000.0:
        connection.send(b"SET", b"key", [value])
    else:
        with pytest.raises(PlaceFailed, match="in time"):
            connection.send(b"SET", b"key", [value])
    connection.close()
    thread.join()
    assert (taken > len(value)) == (for_s > 1000.0)


@pytest.mark.parametrize("wrong", ["ca", "certificate", "name", "plain"])
def test_tls_that_proves_nothing_is_refused(secure: Server, tmp_path: Path, wrong: str) -> None:
    """Another CA, a certificate of nobody, another host's; and the state says what is wrong."""
    ca = tmp_path / ("evil-ca.crt" if wrong == "ca" else "good-ca.crt")
    mine = "evil" if wrong == "certificate" else "good"
    address = replace(secure.address, is_tls=wrong != "plain")
    if wrong == "name":
        address = replace(address, hosts=(("localhost", secure.port),))
    tls = tls_context(ca, tmp_path / f"{mine}.crt", tmp_path / f"{mine}.key")
    with driven(address, tls=None if wrong == "plain" else tls) as tier:
        for _ in range(FAILURES_MAX):
            assert tier.load(CHAIN[0]) in (LoadOutcome.FAILED, LoadOutcome.BROKEN)
        state = tier.tier.statistics().state
    wanted = {"ca": "certificate verify failed", "name": "localhost", "plain": "connection"}
    assert wanted.get(wrong, "") in state.lower(), state
    assert state != "on"


# ---- Sentinels


@pytest.mark.long
def test_after_a_failover_the_new_master_is_used(tmp_path: Path) -> None:
    """The old one is killed; Sentinels promote its replica, and hits resume by themselves."""
    with ExitStack() as stack:
        run = lambda *args: stack.enter_context(redis_servers.running(*args))  # noqa: E731
        master = run("redis", tmp_path / "a")
        replica = run("redis", tmp_path / "b", "--replicaof", "127.0.0.1", str(master.port))
        sentinel = sentinel_of(tmp_path / "s", master)
        sentinel.start()
        stack.callback(sentinel.kill)
        address = Address((("127.0.0.1", 1), ("127.0.0.1", sentinel.port)), watched="kv")
        with driven(address) as tier:
            tier.keep(CHAIN[:2])
            assert master.names(), "it is the master that has them"
            size = len(master.names())
            redis_cluster.wait_until(lambda: len(replica.names()) == size, "replicated")
            knows = lambda: sentinel.ask(b"SENTINEL", b"REPLICAS", b"kv")  # noqa: E731
            redis_cluster.wait_until(lambda: bool(knows()), "the replica is known")
            master.kill()
            heal(tier, CHAIN[0])
            assert tier.find(CHAIN[:2]) == CHAIN[:2]
            assert tier.store(CHAIN[2:3]) == [StoreOutcome.STORED]
            assert len(replica.names()) > size


def sentinel_of(directory: Path, master: Server) -> Server:
    directory.mkdir()
    port = redis_servers.free_port()
    config = directory / "sentinel.conf"
    config.write_text(
        f"port {port}\nbind 127.0.0.1\nunixsocket {directory / 'r.sock'}\ndir {directory}\n"
        f"sentinel monitor kv 127.0.0.1 {master.port} 1\n"
        "sentinel down-after-milliseconds kv 300\nsentinel failover-timeout kv 2000\n"
    )
    return Server([redis_servers.redis(), str(config), "--sentinel"], directory, port)


def test_what_the_url_says_of_sentinels_must_be_so(tmp_path: Path) -> None:
    """A name without Sentinels, a Sentinel without a name, a name it does not watch, a replica."""
    with ExitStack() as stack:
        run = lambda *args: stack.enter_context(redis_servers.running(*args))  # noqa: E731
        master = run("redis", tmp_path / "a")
        replica = run("redis", tmp_path / "b", "--replicaof", "127.0.0.1", str(master.port))
        sentinel = sentinel_of(tmp_path / "s", master)
        sentinel.start()
        stack.callback(sentinel.kill)
        for address, said in (
            (replace(master.address, watched="kv"), "no Sentinel"),
            (sentinel.address, "end the url with the name"),
            (replace(sentinel.address, watched="other"), "watches no 'other'"),
            (replica.address, "is a replica"),
        ):
            with driven(address) as tier:
                assert said in tier.tier.statistics().state


# ---- a cluster


@pytest.fixture(params=["valkey", pytest.param("redis", marks=pytest.mark.slow)])
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[list[Server]]:
    with redis_cluster.running(request.param, tmp_path) as servers:
        yield servers


def owner_of(servers: list[Server], key: bytes) -> Server:
    return next(one for one in servers if not isinstance(one.ask(b"EXISTS", key), ServerError))


def test_parts_are_spread_over_a_cluster(cluster: list[Server]) -> None:
    """Any of its servers leads to all; the index is on one, parts are everywhere."""
    check_all(cluster[1].address)
    with driven(cluster[2].address, 64 << 20) as tier:
        tier.keep(chain_of(ROOT, LARGE, text(number, 4))[0] for number in range(24))
        assert all(one.names(b"kvtide:2:*") for one in cluster), "each has some"
        assert sum(bool(one.names(b"kvtide:{*")) for one in cluster) == 1
        assert tier.tier.clear(None) == 24
        redis_cluster.wait_until(
            lambda: not any(one.names(b"kvtide:2:*") for one in cluster), "swept"
        )


def test_the_cap_holds_on_a_cluster(cluster: list[Server]) -> None:
    """Counted over all its servers."""
    with driven(cluster[0].address) as tier:
        for number in range(12):
            tier.keep(chain_of(ROOT, LARGE, text(number, 4)))
        assert sum(one.bytes_taken() for one in cluster) <= 8 << 20
        assert tier.tier.statistics().evicted > 0


def test_slots_that_move_are_found_again(cluster: list[Server]) -> None:
    """First half moved, when servers say ASK, then wholly, when they say MOVED."""
    record = CHAIN[0]
    with driven(cluster[0].address, 64 << 20) as tier:
        tier.keep([record])
        name = part_names(owner_of(cluster, index_key()), record)[0]
        source = owner_of(cluster, name)
        target = next(one for one in cluster if one is not source)
        slot = b"%d" % slot_of(name)
        ids = {id(one): one.ask(b"CLUSTER", b"MYID") for one in cluster}
        mine, theirs = ids[id(source)], ids[id(target)]
        assert isinstance(mine, bytes)
        assert isinstance(theirs, bytes)
        assert target.ask(b"CLUSTER", b"SETSLOT", slot, b"IMPORTING", mine) == b"OK"
        assert source.ask(b"CLUSTER", b"SETSLOT", slot, b"MIGRATING", theirs) == b"OK"
        migrate = (b"MIGRATE", b"127.0.0.1", b"%d" % target.port, name, b"0", b"5000")
        assert source.ask(*migrate) == b"OK"
        assert isinstance(source.ask(b"GET", name), ServerError)
        assert tier.load(record) is LoadOutcome.LOADED, "asked for at the target"
        for one in (target, source):
            assert one.ask(b"CLUSTER", b"SETSLOT", slot, b"NODE", theirs) == b"OK"
        assert tier.load(record) is LoadOutcome.LOADED, "moved"
        assert tier.tier.statistics().state == "on"


def index_key() -> bytes:
    return b"kvtide:{kvtide:2}:index"


def test_a_cluster_that_lost_a_server_costs_misses(cluster: list[Server]) -> None:
    """Without it the whole cluster refuses; when it is back, empty, hits of the others resume."""
    keeper = owner_of(cluster, index_key())
    records = [chain_of(ROOT, LARGE, text(number, 4))[0] for number in range(16)]
    with driven(keeper.address, 64 << 20) as tier:
        tier.keep(records)
        lost = next(one for one in cluster if one is not keeper)
        whole = [one for one in records if not _has_parts_on(keeper, one, lost)]
        lost.kill()
        outcomes = {tier.load(record) for record in records}
        assert outcomes <= {LoadOutcome.LOADED, LoadOutcome.FAILED, LoadOutcome.BROKEN}
        assert LoadOutcome.FAILED in outcomes
        lost.start()
        heal(tier, whole[0])
        redis_cluster.wait_until(
            lambda: all(map(redis_cluster.is_joined, cluster)), "the cluster is whole"
        )
        for record in records:
            wanted = LoadOutcome.LOADED if record in whole else LoadOutcome.ABSENT
            assert tier.load(record) is wanted


def _has_parts_on(keeper: Server, record: Record, lost: Server) -> bool:
    names = part_names(keeper, record)
    return any(not isinstance(lost.ask(b"EXISTS", name), ServerError) for name in names)


def test_slots_are_those_of_the_servers(cluster: list[Server]) -> None:
    """Tags, empty tags, and none."""
    for key in (b"a", b"kvtide:2:00:0", b"x{tag}y", b"x{}y", b"x{y", b"{a}{b}", b"x}{y}", b""):
        assert cluster[0].ask(b"CLUSTER", b"KEYSLOT", key) == slot_of(key), key


def test_a_tier_over_tls_closes_while_the_server_says_nothing(
    secure: Server, tmp_path: Path
) -> None:
    """What it was asked for ends as closed, and its cells are left alone."""
    tls = tls_context(tmp_path / "good-ca.crt", tmp_path / "good.crt", tmp_path / "good.key")
    proxy = Proxy("127.0.0.1", secure.port)
    address = Address((("127.0.0.1", proxy.port),), is_tls=True)
    with driven(address, tls=tls) as tier:
        tier.keep(CHAIN[:1])
        with proxy.stalled():
            loads = [tier.submit_load(CHAIN[0]) for _ in range(4)]
            store = tier.submit_store(CHAIN[1])
            tier.close(1.0)
            assert {tier.loaded(job) for job in loads} == {LoadOutcome.CLOSED}
            assert tier.stored(store) is StoreOutcome.CLOSED
    proxy.close()

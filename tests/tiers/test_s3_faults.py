"""What a store does to an s3 tier: says nothing, ends in the middle, throttles, forgets, lies."""

import random
import time
from collections.abc import Iterator
from pathlib import Path

import obstore
import pytest

from kvtide.core.records import Record
from kvtide.testing import object_servers
from kvtide.testing.object_servers import Server
from kvtide.testing.proxy import Proxy
from kvtide.testing.tier_drive import DrivenTier
from kvtide.testing.tier_records import chain_of, layout_of, root_of, text
from kvtide.tiers.base import LoadOutcome, StoreOutcome
from kvtide.tiers.breaker import FAILURES_MAX
from kvtide.tiers.remote.workers import StoreOp
from kvtide.tiers.s3 import names
from kvtide.tiers.s3.session import Limits
from kvtide.units import KiB, MiB
from tests.tiers.certificates import made_certificates
from tests.tiers.s3_answers import Front, refusing, served
from tests.tiers.s3_place import PROGRAMS, TOP, Bucket, driven, until

ROOT = root_of()
SMALL = layout_of(4096, 8192)
LARGE = layout_of(256 * KiB)
HASTY = Limits(call_s=0.5, put_s=1.0)


@pytest.fixture(scope="module", params=PROGRAMS)
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    with object_servers.running(request.param, tmp_path_factory.mktemp(request.param)) as one:
        yield one


@pytest.fixture
def bucket(server: Server) -> Bucket:
    """Empty."""
    one = Bucket(server.port)
    one.clear()
    return one


@pytest.fixture
def proxy(server: Server, bucket: Bucket) -> Iterator[Proxy]:
    one = Proxy("127.0.0.1", server.port)
    yield one
    one.close()


def records(count: int, first: int = 0) -> list[Record]:
    """Chunks of a megabyte, each right below the root."""
    return [chain_of(ROOT, LARGE, text(number, 4))[0] for number in range(first, first + count)]


def heal(tier: DrivenTier, record: Record) -> None:
    """Let time pass until a record can be loaded again."""
    until(tier, lambda: tier.load(record) is LoadOutcome.LOADED)


# ---- it says nothing, or not enough


@pytest.mark.parametrize(
    "fault",
    [
        "stalled",
        pytest.param("throttled", marks=pytest.mark.long),
        pytest.param("delayed", marks=pytest.mark.long),
    ],
)
def test_a_store_that_is_too_slow_costs_its_bound_and_then_nothing(
    proxy: Proxy, fault: str
) -> None:
    """Each load ends in bounded time; after five in a row nothing is tried, until it is well.
    Lookups, which are answered without it, do not count as success between them."""
    record, other = records(2)
    with driven(proxy.port, limits=HASTY) as tier:
        until(tier, lambda: tier.store([record])[0].is_kept)
        proxy.delay_s = 0.6 if fault == "delayed" else 0.0
        proxy.bytes_per_s = 100_000 if fault == "throttled" else 0
        stop = proxy.stalled()
        if fault == "stalled":
            stop.__enter__()
        for _ in range(FAILURES_MAX):
            assert tier.find([record]) == [record], "the mirror says so"
            began_s = time.monotonic()
            assert tier.load(record) is LoadOutcome.FAILED
            assert time.monotonic() - began_s < HASTY.call_s + 5.0
        began_s = time.monotonic()
        assert tier.load(record) is LoadOutcome.BROKEN
        assert tier.find([record]) == []
        assert tier.store([other]) == [StoreOutcome.BROKEN]
        assert time.monotonic() - began_s < HASTY.call_s, "it was not asked"
        assert "in time" in tier.tier.statistics().state
        proxy.delay_s = proxy.bytes_per_s = 0
        if fault == "stalled":
            stop.__exit__(None, None, None)
        heal(tier, record)
        assert tier.find([record]) == [record]


def test_an_answer_that_ends_anywhere_is_a_failure(proxy: Proxy) -> None:
    """Loads end after any number of bytes of answers; what follows is right."""
    chain = chain_of(ROOT, SMALL, text(1, 10))
    failed = 0
    with driven(proxy.port) as tier:
        tier.keep(chain)
        for end_after in [*range(1, 400, 61), *range(1_000, 60_000, 4_999)]:
            proxy.end_after = end_after
            outcomes = [tier.load(record) for record in chain]
            assert set(outcomes) <= {LoadOutcome.LOADED, LoadOutcome.FAILED}, outcomes
            failed += outcomes.count(LoadOutcome.FAILED)
            proxy.end_after = None
            assert tier.load(chain[1]) is LoadOutcome.LOADED, end_after
            assert tier.find(chain[:2], chain[2].digests) == chain
    assert failed > 10


def test_a_store_whose_answers_end_anywhere_leaves_a_whole_record_or_none(proxy: Proxy) -> None:
    """It is found and brings every byte, or can be stored: now, and by who starts later."""
    chain = [chain_of(ROOT, SMALL, text(number, 4))[0] for number in range(12)]
    seen = set()
    with driven(proxy.port) as tier:
        for number, record in enumerate(chain):
            proxy.end_after = 1 + 61 * number
            seen.add(tier.store([record])[0])
            proxy.end_after = None
            until(tier, lambda record=record: tier.store([record])[0].is_kept)
            heal(tier, record)
    assert StoreOutcome.FAILED in seen
    with driven(proxy.port) as tier:
        assert [tier.load(record) for record in chain] == [LoadOutcome.LOADED] * len(chain)


def test_random_faults_never_bring_a_wrong_byte(proxy: Proxy) -> None:
    """The driver looks at each byte of each load that ended well; at the end all heals."""
    seed = random.randrange(1 << 30)
    chance = random.Random(seed)
    chains = [chain_of(ROOT, SMALL, text(number, 10)) for number in range(6)]
    loaded = 0
    with driven(proxy.port) as tier:
        tier.keep(chains[0])
        for _ in range(60):
            proxy.end_after = chance.choice([None, None, None, chance.randrange(1, 80_000)])
            if chance.random() < 0.1:
                proxy.cut()
            chain = chance.choice(chains)
            jobs = [tier.submit_store(record) for record in chain]
            loads = [tier.submit_load(record) for record in chance.choice(chains)]
            tier.wait([*jobs, *loads, tier.ask(chain[:2], chain[2].digests)])
            loaded += sum(tier.loaded(job) is LoadOutcome.LOADED for job in loads)
            if tier.tier.statistics().state != "on":
                proxy.end_after = None
                heal(tier, chains[0][0])
        proxy.end_after = None
        for chain in chains:
            until(tier, lambda chain=chain: all(o.is_kept for o in tier.store(chain)))
            assert tier.find(chain[:2], chain[2].digests) == chain, seed
            assert {tier.load(record) for record in chain} == {LoadOutcome.LOADED}, seed
    assert loaded > 10, seed


# ---- it says no


@pytest.mark.parametrize(
    ("status", "code"),
    [(503, "SlowDown"), (429, "TooManyRequests"), (500, "InternalError"), (403, "AccessDenied")],
)
def test_a_store_that_says_no_is_left_alone_by_the_breakers_rules(
    proxy: Proxy, status: int, code: str
) -> None:
    """One request for each of five failures, none of them retried; then none, but for probes."""
    record = records(1)[0]
    with driven(proxy.port) as tier:
        tier.keep([record])
        with refusing(proxy, status, code) as refusals:
            before = refusals.asked
            outcomes = [tier.load(record) for _ in range(FAILURES_MAX + 3)]
            assert outcomes == [LoadOutcome.FAILED] * FAILURES_MAX + [LoadOutcome.BROKEN] * 3
            assert refusals.asked - before == FAILURES_MAX
            assert code in tier.tier.statistics().state
        heal(tier, record)
        assert tier.tier.statistics().state == "on"


def test_a_bucket_that_is_not_there_is_no_miss(proxy: Proxy) -> None:
    """It is said, and nothing that is known of it is forgotten."""
    record = records(1)[0]
    with driven(proxy.port) as tier:
        tier.keep([record])
        with refusing(proxy, 404, "NoSuchBucket"):
            assert tier.load(record) is LoadOutcome.FAILED
        assert tier.find([record]) == [record]
        heal(tier, record)


def test_wrong_keys_are_said_in_words(tmp_path: Path) -> None:
    """They never become right, and cost nothing."""
    record = records(1)[0]
    wrong = {"secret_access_key": "wrong"}
    with object_servers.running("rclone", tmp_path) as server:
        with driven(server.port, config=wrong) as tier:
            assert tier.store([record]) == [StoreOutcome.FAILED]
            assert "SignatureDoesNotMatch" in tier.tier.statistics().state
            assert tier.find([record]) == []
        assert Bucket(server.port).names() == []


def test_a_store_that_was_dropped_before_it_began_tells_nothing_of_the_place(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was not asked for it: what is wrong there goes on to be said."""
    with proxy.refusing(), driven(proxy.port) as tier:
        monkeypatch.setattr(StoreOp, "is_doomed", property(lambda _: True))
        assert tier.store(records(1)) == [StoreOutcome.NOT_ANCHORED]
        assert "it has not worked yet" in tier.tier.statistics().state


def test_a_store_that_deletes_objects_only_singly_is_as_good(
    server: Server, bucket: Bucket
) -> None:
    """What is evicted, replaced and cleared goes, at a request for each object."""
    front = Front(server.port)
    with served(front), driven(front.server_address[1], bytes_max=2 * MiB) as tier:
        for number in range(0, 4):
            tier.keep(records(1, number))
            assert bucket.bytes_taken() <= 2 * MiB
        assert tier.tier.clear(None) == 1
        until(tier, lambda: bucket.names(f"{TOP}/r") == [])
        assert front.refused > 0


@pytest.mark.parametrize("trusted", [False, True])
def test_a_certificate_is_verified(tmp_path: Path, trusted: bool) -> None:
    """One that nobody vouches for is none; one that a file vouches for is."""
    for name in ("good", "evil"):
        made_certificates(tmp_path, name)
    server = object_servers.rclone(tmp_path)
    files = ["--cert", str(tmp_path / "good.crt"), "--key", str(tmp_path / "good.key")]
    server.commands[0][3:3] = files
    server.start()
    record = records(1)[0]
    endpoint = {"endpoint": f"https://127.0.0.1:{server.port}"}
    vouching = tmp_path / ("good-ca.crt" if trusted else "evil-ca.crt")
    connection = {"root_certificate": vouching.read_bytes()}
    try:
        with driven(server.port, config=endpoint, connection=connection) as tier:
            outcome = tier.store([record])[0]
            assert outcome is (StoreOutcome.STORED if trusted else StoreOutcome.FAILED)
            assert (tier.load(record) is LoadOutcome.LOADED) == trusted
    finally:
        server.kill()


# ---- it forgets, or lies


def test_an_object_that_the_store_evicts_is_a_miss_that_removes_its_record(
    server: Server, bucket: Bucket
) -> None:
    """With what lies behind it; and it can be stored again."""
    first, second = chain_of(ROOT, LARGE, text(1, 8))
    with driven(server.port) as tier:
        tier.keep([first, second])
        obstore.delete(bucket.store, bucket.objects_of(first))
        assert tier.load(first) is LoadOutcome.ABSENT
        assert tier.tier.statistics().state == "on"
        assert tier.find([first, second]) == []
        assert tier.tier.statistics().records == 0
        assert tier.tier.statistics().bytes_used == 0
        assert bucket.names(f"{TOP}/r") == []
        assert tier.store([first, second]) == [StoreOutcome.STORED] * 2
        assert tier.load(second) is LoadOutcome.LOADED


def test_a_part_that_is_gone_is_a_miss(server: Server, bucket: Bucket) -> None:
    """Of a record of several objects, whichever of them is gone."""
    layout = layout_of(5 * MiB)
    for number in range(3):
        record = chain_of(ROOT, layout, text(number, 4))[0]
        with driven(server.port, bytes_max=128 * MiB, queue_bytes_max=32 * MiB) as tier:
            tier.keep([record])
            assert tier.load(record) is LoadOutcome.LOADED
            objects = bucket.objects_of(record)
            assert len(objects) == 3
            obstore.delete(bucket.store, objects[number])
            assert tier.load(record) is LoadOutcome.ABSENT
            assert bucket.objects_of(record) == []
            assert bucket.names(f"{TOP}/p") == []


def test_bytes_that_were_swapped_between_names_are_never_loaded(
    server: Server, bucket: Bucket
) -> None:
    """Of equal length, of another salt: each proves whose it is."""
    one = chain_of(root_of(salt="one"), LARGE, text(1, 4))[0]
    other = chain_of(root_of(salt="other"), LARGE, text(1, 4))[0]
    with driven(server.port) as tier:
        tier.keep([one, other])
        (name,), (second,) = bucket.objects_of(one), bucket.objects_of(other)
        content = [bytes(obstore.get(bucket.store, each).bytes()) for each in (name, second)]
        for each, swapped in zip((name, second), reversed(content), strict=True):
            obstore.put(bucket.store, each, swapped)
        assert tier.load(one) is LoadOutcome.CORRUPT
        assert tier.load(other) is LoadOutcome.CORRUPT
        assert tier.find([one]) == tier.find([other]) == []


def test_a_name_that_does_not_fit_its_bytes_is_not_taken_in(
    server: Server, bucket: Bucket
) -> None:
    """A name of ours, made by somebody who stores something else there."""
    chain = chain_of(ROOT, SMALL, text(1, 8))
    with driven(server.port) as tier:
        tier.keep(chain[:1])
    (name,) = bucket.objects_of(chain[0])
    head = names.parse_record(TOP, name)
    assert head is not None
    content = bytes(obstore.get(bucket.store, name).bytes())
    bucket.clear()
    other = names.written(chain_of(root_of("other"), SMALL, text(1, 4))[0], head.stamp, bytes(16))
    obstore.put(bucket.store, names.record_name(TOP, other), content)
    obstore.put(bucket.store, f"{TOP}/r/what is this", b"")
    obstore.put(bucket.store, f"{TOP}/m/what is this", b"")
    for what in ("gone", "used"):
        obstore.put(bucket.store, f"{TOP}/m/{1:012x}.{1:016x}.{what}", bytes(MiB))
        obstore.put(bucket.store, f"{TOP}/m/{2:012x}.{1:016x}.{what}", bytes(49))
    with driven(server.port) as tier:
        assert tier.tier.statistics().state == "on"
        assert tier.tier.statistics().records == 0
        assert tier.store(chain) == [StoreOutcome.STORED] * 2


@pytest.mark.parametrize("is_short", [True, False])
def test_what_is_wrong_with_a_record_is_logged(
    server: Server, bucket: Bucket, caplog: pytest.LogCaptureFixture, is_short: bool
) -> None:
    """In words, with where it was; it is gone when somebody asks."""
    record = records(1)[0]
    with driven(server.port) as tier:
        tier.keep([record])
        (name,) = bucket.objects_of(record)
        if is_short:
            obstore.put(bucket.store, name, b"short")
        else:
            bucket.change(name)
        assert tier.load(record) is LoadOutcome.CORRUPT
    (said,) = (one.getMessage() for one in caplog.records if "is removed" in one.getMessage())
    assert said.startswith(f"s3 {object_servers.BUCKET}/{TOP}: record {record.key.hex()}: ")
    assert (f"{name} has 5 bytes" if is_short else "checksum") in said


@pytest.mark.parametrize("keeps", [True, False])
def test_hits_resume_after_the_server_was_killed(tmp_path: Path, keeps: bool) -> None:
    """With its data they are hits; without it they are misses, and can be stored again."""
    chain = chain_of(ROOT, SMALL, text(1, 10))
    server = object_servers.rclone(tmp_path)
    server.start()
    with driven(server.port) as tier:
        tier.keep(chain)
        server.kill()
        outcomes = [tier.load(chain[0]) for _ in range(FAILURES_MAX + 1)]
        assert outcomes == [LoadOutcome.FAILED] * FAILURES_MAX + [LoadOutcome.BROKEN]
        server.start()
        if not keeps:
            Bucket(server.port).clear()
        until(tier, lambda: tier.tier.statistics().state == "on")
        assert tier.load(chain[0]) is (LoadOutcome.LOADED if keeps else LoadOutcome.ABSENT)
        assert tier.find(chain[:2], chain[2].digests) == (chain if keeps else [])
        outcome = StoreOutcome.HELD if keeps else StoreOutcome.STORED
        assert tier.store(chain) == [outcome] * 3
    server.kill()

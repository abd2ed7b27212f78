"""Engines come, are told whether they are served, go and come back; then the node ends."""

import pytest

from kvtide.core import messages as m
from kvtide.core.effects import (
    Close,
    Disconnected,
    End,
    HostLimit,
    ProcessDied,
    Received,
    Send,
)
from kvtide.core.presence import START_MS_MAX
from kvtide.core.reasons import DropReason, OffReason
from kvtide.units import GiB, KiB
from tests.core.world import CELL_BYTES, NODE, Engine, World, prompt


@pytest.fixture
def world() -> World:
    return World()


def off(engine: Engine) -> tuple[str, str]:
    """What the engine was told last: why it is off, or twice nothing."""
    serving = engine.last(m.Serving)
    return serving.off_reason, serving.off_detail


# ---- coming


def test_an_engine_is_served_when_all_its_workers_have_come(world: World) -> None:
    """Facts go to the scheduler, in the order of ranks; its identity comes back."""
    engine = Engine(world, workers=2)
    engine.connect_scheduler()
    engine.connect_worker(1)
    assert not engine.heard(m.Workers)
    engine.connect_worker(0)
    told = engine.last(m.Workers)
    assert told.facts == [{"rank": 0}, {"rank": 1}]
    assert told.cell_bytes == [CELL_BYTES] * 2
    assert not engine.heard(m.Serving)
    engine.identify()
    assert off(engine) == ("", "")


def test_workers_may_come_before_their_scheduler(world: World) -> None:
    engine = Engine(world, workers=2)
    engine.connect_worker(0)
    engine.connect_worker(1)
    engine.connect_scheduler()
    assert len(engine.heard(m.Workers)) == 1


def test_a_welcome_names_the_connection_and_the_node(world: World) -> None:
    engine = Engine(world).start()
    welcomes = [engine.last(m.Welcome), world.inbox[engine.workers[0]][0]]
    assert [welcome.connection for welcome in welcomes] == [engine.scheduler, *engine.workers]
    assert {welcome.node for welcome in welcomes} == {NODE}
    assert welcomes[0].host_bytes == 1024 * KiB


@pytest.mark.parametrize("role", ["scheduler", "worker"])
def test_another_wire_version_is_refused(world: World, role: str) -> None:
    """With both versions named; and nothing of it stays."""
    engine = Engine(world)
    if role == "scheduler":
        effects = engine.connect_scheduler(wire_version=99, version="9.9")
        connection, other = engine.scheduler, "9.9"
    else:
        effects = engine.connect_worker(0, wire_version=99)
        connection, other = engine.workers[0], "unknown"
    detail = (
        f"the node (kvtide 0) speaks version {m.WIRE_VERSION}, "
        f"the engine (kvtide {other}) version 99"
    )
    assert effects == [
        Send(connection, m.Refused(OffReason.WIRE_VERSION, detail)),
        Close(connection),
    ]
    assert not world.machine.instances


def test_an_engine_id_in_use_is_refused(world: World) -> None:
    """Another process under the same name: while the first one lives, connected or not."""
    engine = Engine(world, "same").start()
    other = Engine(world, "same")
    for _ in range(2):
        effects = other.connect_scheduler()
        assert effects[-1] == Close(other.scheduler)
        assert other.last(m.Refused) == m.Refused(
            OffReason.ENGINE_ID_IN_USE, "engine_id same is in use by process 1000"
        )
        other.connect_worker(0)
        (refused,) = world.inbox[other.workers[0]]
        assert refused.reason == OffReason.ENGINE_ID_IN_USE
        engine.disconnect(engine.scheduler)
        engine.disconnect(engine.workers[0])
    engine.kill_all()
    other.start()
    assert off(other) == ("", "")


def test_a_refused_connection_ends_nothing_of_the_engine_it_named(world: World) -> None:
    engine = Engine(world, "same").start()
    engine.store(prompt(1))
    other = Engine(world, "same")
    other.connect_scheduler()
    world.give(ProcessDied(other.scheduler))
    assert engine.blocks_held(prompt(1)) == 4


def test_what_is_off_by_itself_has_no_memory(world: World) -> None:
    engine = Engine(world)
    engine.connect_scheduler()
    engine.connect_worker(0)
    engine.identify(off_reason="groups", off_detail="two kinds of layers")
    assert not world.made
    assert str(world.machine.instances["engine"].off) == "groups (two kinds of layers)"
    assert not engine.heard(m.Serving)


def test_an_engine_may_be_on_after_it_was_off(world: World) -> None:
    """Its weights have been read to the end."""
    engine = Engine(world)
    engine.connect_scheduler()
    engine.connect_worker(0)
    engine.identify(off_reason="weights_hashing")
    engine.identify()
    engine.register(engine.root)
    assert engine.store(prompt(1)).outcomes == [""]


def test_a_model_too_large_for_the_host_is_off_with_the_bytes(world: World) -> None:
    engine = Engine(world, cell_bytes=1 * GiB)
    engine.connect_scheduler()
    engine.connect_worker(0)
    engine.identify()
    detail = "this model needs 64 GiB of host memory at least, the node has 1 MiB"
    assert off(engine) == (OffReason.HOST_TOO_SMALL, detail)
    assert not world.made


def test_a_model_is_judged_by_the_hosts_size_not_by_a_passing_limit(world: World) -> None:
    """Memory is short when the engine comes: it is served, and stores once there is some again."""
    world.give(HostLimit(0))
    engine = Engine(world).start()
    assert off(engine) == ("", "")
    assert engine.offer(prompt(1)).outcomes == [DropReason.NOT_MAPPED]
    world.give(HostLimit(1024 * KiB))
    assert engine.offer(prompt(1)).outcomes == [""]


@pytest.mark.parametrize(
    ("hellos", "cell_bytes", "detail"),
    [
        ([{"shard": 0}, {"shard": 0}], [4096, 4096], "workers store the shards [0, 0] of 2"),
        ([{}, {"is_writer": False}], [4096, 4096], "workers store the shards [0] of 2"),
        ([{}, {}], [4096], "workers store the shards [0, 1] of 1"),
        ([{}, {}], [4096] * 3, "workers store the shards [0, 1] of 3"),
        ([{}, {"shard_count": 3}], [4096] * 2, "rank 1 knows of 3 shards, not 2"),
        ([{}, {}], [4096, 8192], "rank 1 has cells of 4096 bytes, not 8192"),
        (
            [{"shard_count": 1}, {"shard": 0, "shard_count": 1, "is_writer": False}],
            [8192],
            "rank 0 has cells of 4096 bytes, not 8192",
        ),
        (
            [
                {"shard_count": 1},
                {"shard": 0, "shard_count": 1, "is_writer": False, "cell_bytes": 8192},
            ],
            [4096],
            "rank 1 has cells of 8192 bytes, not 4096",
        ),
    ],
)
def test_workers_that_do_not_make_up_the_shards_turn_caching_off(
    world: World, hellos: list[dict[str, object]], cell_bytes: list[int], detail: str
) -> None:
    """A shard that nobody stores would be loaded as whatever was there before."""
    engine = Engine(world, workers=2)
    engine.connect_scheduler()
    for rank, hello in enumerate(hellos):
        engine.connect_worker(rank, **hello)
    engine.identify(cell_bytes=cell_bytes)
    assert off(engine) == (OffReason.WORKERS_DIFFER, detail)
    assert not world.made


def test_more_workers_than_were_announced_turn_caching_off(world: World) -> None:
    engine = Engine(world, workers=2)
    engine.connect_scheduler(worker_count=1)
    engine.connect_worker(0)
    engine.connect_worker(1)
    engine.identify()
    assert off(engine) == (OffReason.WORKERS_DIFFER, "2 of 1 workers have come")


def test_a_worker_more_than_announced_ends_the_serving(world: World) -> None:
    """It comes late, while the others serve: nothing is lent before it is judged."""
    engine = Engine(world).start()
    extra = Engine(world, engine.engine_id, workers=2, shards=1)
    extra.connect_worker(1)
    assert engine.offer(prompt(1)).outcomes == [DropReason.NOT_MAPPED]
    engine.identify()
    assert off(engine) == (OffReason.WORKERS_DIFFER, "2 of 1 workers have come")


# ---- workers that are missing


def test_a_missing_worker_is_named_after_t_start(world: World) -> None:
    engine = Engine(world, workers=3)
    engine.connect_scheduler()
    engine.connect_worker(1)
    world.tick(after_ms=START_MS_MAX - 1)
    assert not engine.heard(m.Serving)
    world.tick(after_ms=1)
    assert off(engine) == (OffReason.WORKERS_DIFFER, "no word from the workers of ranks [0, 2]")
    world.tick(after_ms=START_MS_MAX)
    assert len(engine.heard(m.Serving)) == 1, "said once"


def test_an_engine_heals_when_the_missing_worker_comes(world: World) -> None:
    engine = Engine(world, workers=2)
    engine.connect_scheduler()
    engine.connect_worker(0)
    world.tick(after_ms=START_MS_MAX)
    engine.connect_worker(1)
    assert len(engine.heard(m.Workers)) == 1
    engine.identify()
    assert off(engine) == ("", "")


def test_a_worker_that_was_away_for_long_heals_the_engine_when_it_is_back(world: World) -> None:
    """It had served for an hour; then one connection broke for as long as T_start."""
    engine = Engine(world, workers=2).start()
    engine.store(prompt(1))
    world.tick(after_ms=3_600_000)
    engine.disconnect(engine.workers[1])
    world.tick(after_ms=START_MS_MAX - 1)
    assert off(engine) == ("", ""), "counted from the break, not from the start"
    world.tick(after_ms=1)
    assert off(engine)[0] == OffReason.WORKERS_DIFFER
    engine.connect_worker(1)
    assert len(engine.heard(m.Workers)) == 2
    engine.identify()
    assert off(engine) == ("", "")
    assert engine.blocks_held(prompt(1)) == 4


def test_a_short_break_of_a_worker_is_not_noticed(world: World) -> None:
    engine = Engine(world, workers=2).start()
    engine.store(prompt(1))
    world.tick(after_ms=3_600_000)
    for _ in range(3):
        engine.disconnect(engine.workers[1])
        world.tick(after_ms=5_000)
        engine.connect_worker(1)
        world.tick(after_ms=5_000)
    assert len(engine.heard(m.Serving)) == 1
    assert len(engine.heard(m.Workers)) == 1
    assert engine.blocks_held(prompt(1)) == 4


def test_another_worker_process_is_not_served_before_it_is_known(world: World) -> None:
    """A worker died and was started anew: its facts are judged before it is offered memory."""
    engine = Engine(world, workers=2).start()
    engine.store(prompt(1))
    engine.kill(engine.workers[1])
    offered = len(world.offered)
    engine.connect_worker(1, incarnation=b"another life")
    assert len(world.offered) == offered
    assert engine.offer(prompt(2)).outcomes == [DropReason.NOT_MAPPED]
    assert len(engine.heard(m.Workers)) == 2
    engine.identify()
    assert engine.offer(prompt(2)).outcomes == [""]
    assert engine.blocks_held(prompt(1)) == 4


# ---- going and coming back


def test_a_scheduler_that_is_back_starts_over_and_finds_its_chunks(world: World) -> None:
    engine = Engine(world).start()
    engine.store(prompt(1))
    engine.disconnect(engine.scheduler)
    engine.connect_scheduler()
    assert len(engine.heard(m.Workers)) == 1, "on the new connection"
    engine.identify()
    engine.register(engine.root)
    assert engine.blocks_held(prompt(1)) == 4


def test_a_scheduler_may_be_back_before_its_old_connection_has_ended(world: World) -> None:
    """The end of the old one, seen late, ends nothing of the new one."""
    engine = Engine(world).start()
    engine.store(prompt(1))
    engine.lookup(prompt(1), keeps=True)
    old = engine.scheduler
    engine.connect_scheduler()
    assert world.machine.leases.counts() == (0, 0)
    engine.identify()
    engine.register(engine.root)
    world.give(Disconnected(old))
    assert engine.blocks_held(prompt(1)) == 4


def test_a_worker_may_be_back_before_its_old_connection_has_ended(world: World) -> None:
    engine = Engine(world).start()
    (old,) = engine.workers
    engine.connect_worker(0)
    world.give(Disconnected(old))
    assert engine.offer(prompt(1)).connections == engine.workers


def test_a_hello_that_a_newer_one_has_overtaken_takes_nothing_over(world: World) -> None:
    """A process has given up a connection and made another; a node that stood still reads both."""
    engine = Engine(world).start()
    older: dict[int, m.SchedulerHello | m.WorkerHello] = {
        world.connect(): engine.scheduler_hello(),
        world.connect(): engine.worker_hello(0),
    }
    engine.connect_scheduler()
    engine.connect_worker(0)
    for connection, hello in older.items():
        assert world.give(Received(connection, hello)) == [Close(connection)]
        world.give(Disconnected(connection))
    engine.identify()
    engine.register(engine.root)
    assert engine.offer(prompt(1)).connections == engine.workers


def test_any_connection_of_a_process_tells_of_its_death(world: World) -> None:
    """The runtime may watch the pidfd that came with the first hello, or with the last."""
    for use in (0, 1):
        engine = Engine(world, f"engine {use}").start()
        connections = [engine.workers[0]]
        engine.offer(prompt(use))
        engine.disconnect(engine.workers[0])
        engine.connect_worker(0, grants_held=list(world.machine.lending.grants))
        connections.append(engine.workers[0])
        engine.mapped[0].clear()
        world.give(ProcessDied(connections[use]))
        assert not world.machine.lending.grants
        world.give(ProcessDied(connections[1 - use]))


def test_connections_of_a_process_do_not_pile_up(world: World) -> None:
    """It reconnects a hundred times; the last but one is known still, for who watches by it."""
    engine = Engine(world).start()
    for _ in range(100):
        before = (engine.scheduler, engine.workers[0])
        for connection in before:
            engine.disconnect(connection)
        engine.connect_scheduler()
        engine.connect_worker(0)
        for old, new in zip(before, (engine.scheduler, engine.workers[0]), strict=True):
            assert world.machine.peers[old] is world.machine.peers[new]
    assert len(world.machine.peers) == 4


def test_a_new_process_is_not_ended_by_the_late_word_of_an_old_one(world: World) -> None:
    """Both connections of the dead scheduler report its death, one of them late."""
    engine = Engine(world).start()
    first = engine.scheduler
    engine.connect_scheduler()
    second = engine.scheduler
    world.give(ProcessDied(second))
    engine.incarnation = b"another life"
    engine.connect_scheduler()
    engine.identify()
    engine.register(engine.root)
    world.give(ProcessDied(first))
    world.give(Disconnected(second))
    assert engine.store(prompt(1)).outcomes == [""]


def test_a_restarted_engine_finds_what_its_predecessor_stored(world: World) -> None:
    engine = Engine(world).start()
    engine.store(prompt(1, 2))
    engine.kill_all()
    assert not world.machine.instances
    assert Engine(world, "after").start().blocks_held(prompt(1, 2)) == 8


def test_events_about_nobody_change_nothing(world: World) -> None:
    engine = Engine(world).start()
    for connection in (0, 999):
        assert world.give(Disconnected(connection)) == []
        assert world.give(ProcessDied(connection)) == []
    assert engine.store(prompt(1)).outcomes == [""]


# ---- the end


def test_the_node_ends_after_the_last_engine_has_left() -> None:
    world = World(linger_ms=600_000)
    engines = [Engine(world, name).start() for name in ("a", "b")]
    world.tick(after_ms=700_000)
    engines[0].kill_all()
    world.tick(after_ms=700_000)
    engines[1].kill(engines[1].scheduler)
    world.tick(after_ms=700_000)
    assert not any(isinstance(effect, End) for effect in world.log), "a worker lives"
    engines[1].kill(engines[1].workers[0])
    world.tick()
    assert world.tick(after_ms=599_999) == []
    (end,) = world.tick(after_ms=1)
    assert isinstance(end, End)
    assert not end.on_purpose


def test_an_engine_that_comes_keeps_the_node_alive() -> None:
    world = World(linger_ms=1_000)
    world.tick()
    world.tick(after_ms=999)
    engine = Engine(world).start()
    world.tick(after_ms=10_000)
    engine.kill_all()
    world.tick()
    assert world.tick(after_ms=999) == []
    assert [type(effect) for effect in world.tick(after_ms=1)] == [End]


def test_an_engine_whose_connection_broke_keeps_the_node_alive() -> None:
    """Only its death proves that it has left."""
    world = World(linger_ms=1_000)
    engine = Engine(world).start()
    for connection in (engine.scheduler, *engine.workers):
        engine.disconnect(connection)
    for _ in range(9):
        assert world.tick(after_ms=1_000) == []


def test_an_engine_of_which_only_an_unconnected_scheduler_lives_is_not_gone() -> None:
    """It comes back, and what it was known by is there until it has died."""
    world = World(linger_ms=1_000)
    engine = Engine(world).start()
    engine.disconnect(engine.scheduler)
    for connection in engine.workers:
        engine.kill(connection)
    assert list(world.machine.instances) == [engine.engine_id]
    for _ in range(9):
        assert world.tick(after_ms=1_000) == []


def test_a_node_without_linger_never_ends_by_itself(world: World) -> None:
    for _ in range(9):
        assert world.tick(after_ms=3_600_000) == []


# ---- contract


def test_at_idle_nothing_is_held_whatever_happened_before(world: World) -> None:
    """Two engines in the middle of everything die: all that is not held is free."""
    for number in range(2):
        engine = Engine(world, f"engine {number}", workers=2).start()
        engine.store(prompt(1, 2, blocks=3))
        match = engine.lookup(prompt(1, 2), keeps=True)
        assert isinstance(match, m.Match)
        engine.say(m.LoadBegin(match.lease))
        engine.lookup(prompt(1), keeps=True)
        engine.offer(prompt(1, 2, 3 + number))
        (grant, *_) = world.machine.lending.grants
        engine.stored([grant], ranks=[0])
        engine.kill_all()
    lending = world.machine.lending
    assert world.machine.leases.counts() == (0, 0)
    assert (lending.grants, lending.loose, lending.granted_bytes) == ({}, set(), 0)
    evictable = sum(entry.blocks for entry in world.machine.index.entries.values())
    assert world.lent_cells() == evictable
    world.machine.clear(None)
    assert world.lent_cells() == 0
    assert not world.machine.peers


def test_the_machine_is_a_function_of_its_events() -> None:
    """The same history gives the same effects, so that a failure can be replayed."""
    logs = []
    for _ in range(2):
        world = World(host_bytes=256 * KiB)
        engine = Engine(world).start()
        for part in range(1, 30):
            world.now_ms += 7
            engine.store(prompt(part % 5 + 1, part, blocks=part % 4 + 1))
            engine.lookup(prompt(part % 5 + 1, part))
        world.give(HostLimit(128 * KiB))
        engine.kill_all()
        logs.append(world.log)
    assert logs[0] == logs[1]

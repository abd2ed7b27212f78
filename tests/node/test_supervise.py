"""When an engine starts a node, on a false clock, without starting any."""

import os
import subprocess
import time
from pathlib import Path

import pytest

from kvtide import config
from kvtide.node import supervise
from kvtide.node.main import take_lock
from kvtide.node.supervise import COME_UP_S_MAX, SHORT_LIFE_S, NodeStarter
from kvtide.units import GiB
from kvtide.wire.places import Places


class Starts:
    """What stands in for `start_node`."""

    def __init__(self) -> None:
        self.made: list[tuple[Path, dict[str, str]]] = []
        self.error: Exception | None = None

    def __call__(self, runtime_dir: Path, settings: dict[str, str]) -> None:
        self.made.append((runtime_dir, settings))
        if self.error is not None:
            raise self.error

    def __len__(self) -> int:
        return len(self.made)


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> Starts:
    stub = Starts()
    monkeypatch.setattr(supervise, "start_node", stub)
    return stub


@pytest.fixture
def starter(starts: Starts) -> NodeStarter:
    return NodeStarter(Path("/run/kvtide"), {"KVTIDE_HOST_BYTES": "1GiB"})


def test_starts_at_once_when_none_is_there(starter: NodeStarter, starts: Starts) -> None:
    starter.absent(100.0)
    assert starts.made == [(Path("/run/kvtide"), {"KVTIDE_HOST_BYTES": "1GiB"})]


def test_waits_for_the_one_that_comes_up(starter: NodeStarter, starts: Starts) -> None:
    for tenths in range(int(COME_UP_S_MAX * 10)):
        starter.absent(100.0 + tenths / 10)
    assert len(starts) == 1
    assert starter.short_lives == 0


def test_pauses_double_from_one_second_to_sixty(starter: NodeStarter, starts: Starts) -> None:
    """Nodes that live for a while and die again and again: each death waits twice as long."""
    now_s, pauses = 100.0, []
    starter.absent(now_s)
    for _ in range(9):
        starter.dead(now_s)
        starter.served()
        count, died_s = len(starts), now_s
        while len(starts) == count:
            now_s += 0.1
            starter.absent(now_s)
        pauses.append(round(now_s - died_s))
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60]


def test_long_life_starts_the_pauses_anew(starter: NodeStarter, starts: Starts) -> None:
    starter.absent(100.0)
    starter.dead(101.0)
    starter.absent(102.5)
    starter.dead(102.5 + SHORT_LIFE_S)
    assert starter.short_lives == 0
    starter.absent(102.5 + SHORT_LIFE_S + 0.9)
    assert len(starts) == 2
    starter.absent(102.5 + SHORT_LIFE_S + 1.0)
    assert len(starts) == 3


def test_gives_up_after_three_short_lives(starter: NodeStarter, starts: Starts) -> None:
    now_s = 100.0
    for lives in range(3):
        assert not starter.has_given_up, lives
        starter.absent(now_s)
        starter.dead(now_s + 1)
        now_s += 100.0
    assert starter.has_given_up
    starter.absent(now_s + 1_000)
    assert len(starts) == 3


def test_node_that_never_listens_counts_as_a_short_life(
    starter: NodeStarter, starts: Starts
) -> None:
    starter.absent(100.0)
    starter.absent(100.0 + COME_UP_S_MAX)
    assert starter.short_lives == 1
    starter.absent(100.0 + COME_UP_S_MAX + 1.0)
    assert len(starts) == 2


def test_death_of_a_node_that_others_started_is_waited_for_too(
    starter: NodeStarter, starts: Starts
) -> None:
    starter.dead(100.0)
    starter.absent(100.5)
    assert len(starts) == 0
    starter.absent(101.0)
    assert len(starts) == 1


@pytest.mark.parametrize(
    "error",
    [
        OSError(12, "Cannot allocate memory"),
        subprocess.TimeoutExpired("python", 10),
        subprocess.CalledProcessError(1, "python"),
    ],
)
def test_start_that_fails_is_told_and_tried_again(
    starter: NodeStarter, starts: Starts, error: Exception
) -> None:
    starts.error = error
    starter.absent(100.0)
    assert starter.error == str(error)
    starts.error = None
    starter.absent(100.9)
    assert len(starts) == 1
    starter.absent(101.0)
    assert len(starts) == 2
    assert starter.error == ""


def test_last_words_of_the_launcher_are_told(starter: NodeStarter, starts: Starts) -> None:
    starts.error = subprocess.CalledProcessError(1, "python", stderr="ImportError: no kvtide\n")
    starter.absent(100.0)
    assert starter.error.endswith("exit status 1.: ImportError: no kvtide")


def test_no_memory_is_waited_for_and_no_short_life(starts: Starts) -> None:
    spare = [-GiB]
    starter = NodeStarter(Path("/run/kvtide"), spare_bytes=lambda: spare[0])
    for seconds in range(200):
        starter.absent(float(seconds))
    assert starter.error.startswith(
        "no node is started: 0 B of memory are to spare, a cache takes"
    )
    assert not starts.made
    assert not starter.has_given_up
    spare[0] = GiB
    starter.absent(300.0)
    assert len(starts) == 1
    assert starter.error == ""


def test_node_that_holds_the_lock_is_waited_for_and_no_short_life(
    starts: Starts, tmp_path: Path
) -> None:
    """It ends and does not listen any more, or hangs: whatever is started leaves at once."""
    lock = take_lock(Places(tmp_path))
    assert lock is not None
    starter = NodeStarter(tmp_path)
    for seconds in range(400):
        starter.absent(float(seconds))
    assert len(starts) > 3
    assert starter.short_lives == 0
    os.close(lock)
    for seconds in range(400, 800):
        starter.absent(float(seconds))
    assert starter.has_given_up


def test_node_stopped_on_purpose_is_not_replaced_by_who_lived_then(
    starts: Starts, tmp_path: Path
) -> None:
    """An engine that was not connected does not hear it; one that is started later starts one."""
    old = NodeStarter(tmp_path)
    marker = Places(tmp_path).stopped
    marker.write_text("kvtide stop\n")
    os.utime(marker, (time.time() + 1, time.time() + 1))
    old.absent(0.0)
    assert not starts.made
    os.utime(marker, (1e9, 1e9))
    NodeStarter(tmp_path).absent(0.0)
    assert len(starts) == 1
    marker.unlink()
    old.absent(1.0)
    assert len(starts) == 2


def test_settings_of_the_extra_config_reach_the_node(starts: Starts, tmp_path: Path) -> None:
    """An engine that starts a node gives it the node's settings that it was given."""
    extra = {"kvtide.host_bytes": 1 << 30, "kvtide.chunk_tokens": 64, "kvtide.linger_s": 1.5}
    environ = {"HOME": str(tmp_path), "KVTIDE_HTTP_ADDRESS": "127.0.0.1:1"}
    read = config.read(extra, environ=environ)
    assert read.node_environment == {"KVTIDE_HOST_BYTES": "1073741824", "KVTIDE_LINGER_S": "1.5"}
    NodeStarter(read.runtime_dir, read.node_environment).absent(0.0)
    again = config.read(environ=environ | starts.made[0][1])
    assert again.node == read.node


def test_secret_of_the_extra_config_is_not_shown(tmp_path: Path) -> None:
    extra = {"kvtide.http_token": "hunter2", "kvtide.http_address": "127.0.0.1:1"}
    read = config.read(extra, environ={"HOME": str(tmp_path)})
    assert read.node_environment["KVTIDE_HTTP_TOKEN"] == "hunter2"
    assert "hunter2" not in repr(read)

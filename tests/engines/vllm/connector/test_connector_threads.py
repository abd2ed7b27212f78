"""Where the system grants no thread: less caching, nothing left behind, an engine that runs."""

import threading
from collections.abc import Callable

import pytest

from kvtide.testing.vllm_toy import ToyOptions
from tests.engines.vllm.connector.toys import Toys, assert_right, scheduler_of, tokens, until

pytestmark = [pytest.mark.filterwarnings("ignore")]

OPTIONS = ToyOptions(chunk_tokens=32, step_tokens=40)


@pytest.fixture
def refuse(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """From its call on no thread of this name is to be had."""
    refused: set[str] = set()
    start = threading.Thread.start

    def started(thread: threading.Thread) -> None:
        if thread.name in refused:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", started)
    return refused.add


def ours() -> set[threading.Thread]:
    """The threads of kvtide in this process."""
    return {thread for thread in threading.enumerate() if thread.name.startswith("kvtide-")}


@pytest.mark.parametrize(
    "name", ["kvtide-scheduler", "kvtide-worker", "kvtide-map", "kvtide-mover-0"]
)
def test_a_role_that_gets_no_thread_leaves_none(
    toys: Toys, refuse: Callable[[str], None], name: str
) -> None:
    """It is off, in that process; its engine computes, and ends in order."""
    before = ours()
    refuse(name)
    engine = toys.start(OPTIONS, wait=False)
    toys.engines.remove(engine)
    try:
        is_of_scheduler = name == "kvtide-scheduler"
        off = engine.connector if is_of_scheduler else engine.workers[0].connector
        assert off._is_off
        others = {"kvtide-scheduler"} if not is_of_scheduler else _WORKERS
        until("the rest has ended", lambda: {one.name for one in ours() - before} <= others)
        assert_right(engine.generate(tokens(100)), 1)
    finally:
        engine.close()
    until("all have ended", lambda: ours() <= before)


_WORKERS = {"kvtide-worker", "kvtide-map", "kvtide-mover-0", "kvtide-mover-1"}


def test_an_engine_whose_adapters_get_no_thread_ends_in_order(
    toys: Toys, refuse: Callable[[str], None]
) -> None:
    refuse("kvtide-adapters")
    engine = toys.start(OPTIONS)
    assert scheduler_of(engine)._adapters.digest("/somewhere") is None
    name = engine.config.kv_transfer_config.engine_id[:8]
    assert name in str(toys.node.status()["engines"])
    engine.close()
    toys.engines.remove(engine)
    until("the node knows nothing of it", lambda: name not in str(toys.node.status()["engines"]))

"""The scheduler's session: what it owes the node whatever becomes of the connection."""

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from kvtide import config
from kvtide.core import messages as m
from kvtide.core.reasons import Off, OffReason
from kvtide.engines.vllm.file_digests import FileDigests
from kvtide.engines.vllm.session import FAILED_LOADS, EngineIdentity, EngineSession, Session
from kvtide.engines.vllm.weights import Known, LocalWeights, WeightsDigest
from kvtide.wire.places import Places
from tests.engines.vllm.checkpoints import WAIT_S, HeldReads, a_snapshot, settled

WELCOME = m.Welcome(1, b"node", 1, 1)


@pytest.fixture
def session(tmp_path: Path) -> EngineSession:
    """Of an engine that no node serves yet."""
    identity = EngineIdentity(
        engine_id="one",
        label="an engine",
        fields={},
        weights=(),
        worker_count=1,
        block_tokens=16,
        chunk_tokens=16,
        step_tokens=16,
        may_load=True,
        may_store=True,
        failed_loads="recompute",
        drops_last_block=False,
        off=None,
    )
    given = {"KVTIDE_RUNTIME_DIR": str(tmp_path)}
    return EngineSession(identity, config.read(environ=given), Places(tmp_path))


def test_grants_on_their_way_when_the_connection_comes_back_are_returned_again(
    session: EngineSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old connection has lost them: else their cells were lent until the worker's end."""
    sent: list[m.Message] = []
    is_back = threading.Event()

    def come_back() -> None:
        """On the link's thread, at once where nothing keeps it."""
        if session._owing.acquire(blocking=False):
            session._owing.release()
            is_back.set()
            session.on_up(WELCOME)

    def send(message: m.Message) -> bool:
        sent.append(message)
        thread = threading.Thread(target=come_back)
        thread.start()
        thread.join()
        return True

    monkeypatch.setattr(session._link, "send", send)
    session.return_grants([7])
    if not is_back.is_set():
        session.on_up(WELCOME)
    assert sent == [m.GrantReturn([7])] * 2


def test_grants_that_cannot_be_sent_go_back_with_the_next_connection(
    session: EngineSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    session.return_grants([7])
    session.return_grants([8])
    sent: list[m.Message] = []

    def send(message: m.Message) -> bool:
        sent.append(message)
        return True

    monkeypatch.setattr(session._link, "send", send)
    session.on_up(WELCOME)
    assert sent == [m.GrantReturn([7, 8])]


def test_an_engine_that_may_start_no_node_says_where_none_is(
    session: EngineSession, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    caplog.set_level("INFO", "vllm.kvtide")
    engine = replace(session._config.engine, start_node=False)
    session._config = replace(session._config, engine=engine)
    session.on_absent()
    session.on_absent()
    assert session.off is not None
    assert session.off.reason is OffReason.NODE_UNREACHABLE
    (line,) = caplog.messages
    assert line.startswith("kvtide off: node_unreachable (none at ")
    assert str(tmp_path) in line


@pytest.mark.parametrize("error", ["", "no such interpreter"])
def test_an_engine_whose_nodes_end_at_once_says_where_their_log_is(
    error: str,
    session: EngineSession,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level("INFO", "vllm.kvtide")
    starter = session._starter
    monkeypatch.setattr(starter, "absent", lambda _: None)
    starter.error = error
    starter.short_lives = 99
    assert starter.has_given_up
    session.on_absent()
    assert session.off == Off(OffReason.NODE_ENDS_AT_START, error or f"see {session._places.log}")
    assert caplog.messages == [f"kvtide off: {session.off}"]


def test_what_is_on_is_said_in_one_line(
    session: EngineSession, caplog: pytest.LogCaptureFixture
) -> None:
    """And how failed loads end, which is not ours to choose beside other connectors."""
    caplog.set_level("INFO", "vllm.kvtide")
    session._welcome = m.Welcome(1, b"node", 4711, 16 << 30)
    session._sent = bytes.fromhex("ab12cd34") + bytes(28)
    session.on_message(m.Serving(), [])
    (line,) = caplog.messages
    assert line.startswith(
        "kvtide on: node 4711, host 16 GiB, fingerprint ab12cd34, blocks of 16, chunks of 16, "
    )
    assert line.endswith(FAILED_LOADS["recompute"])


def test_an_engine_whose_weights_are_not_verified_says_that_its_stores_wait(
    session: EngineSession, held: HeldReads, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "vllm.kvtide")
    weights = WeightsDigest(LocalWeights(a_snapshot(tmp_path / "hub", b"weights")), held)
    session._identity = replace(session._identity, weights=(weights,))
    session._welcome, session._sent = WELCOME, bytes(32)
    weights.start()
    assert isinstance(weights.wait(WAIT_S), Known)
    session.on_message(m.Serving(), [])
    held.go.set()
    weights.wait(WAIT_S, verified=True)
    session.on_message(m.Serving(), [])
    weights.close()
    waiting, verified = caplog.messages
    assert waiting == f"{verified}, stores wait until weights are verified"


def test_an_engine_whose_node_was_stopped_says_so_once(
    session: EngineSession, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It starts none itself; what starts the next one, the line says."""
    caplog.set_level("INFO", "vllm.kvtide")
    monkeypatch.setattr(session._starter, "absent", lambda _: pytest.fail("it was stopped"))
    session._link.stopped_on_purpose = True
    session.on_absent()
    session.on_absent()
    (line,) = caplog.messages
    assert line.startswith("kvtide off: node_unreachable (it was stopped; kvtide serve, ")
    session._welcome, session._sent = WELCOME, bytes(32)
    session.on_message(m.Serving(), [])
    assert caplog.messages[1].startswith("kvtide on: ")


def test_salts_are_cleared_as_soon_as_there_is_a_connection(
    session: EngineSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is wrong lies on disk too, and outlives the node and its connection."""
    sent: list[m.Message] = []
    is_connected = False

    def send(message: m.Message) -> bool:
        if is_connected:
            sent.append(message)
        return is_connected

    monkeypatch.setattr(session._link, "send", send)
    session._last_sent = bytes(32)
    session.clear({b"one"})
    session.on_pulse()
    assert not sent
    is_connected = True
    session.on_up(WELCOME)
    session.on_pulse()
    assert sent == [m.Clear(bytes(32), b"one")]
    session.clear({b"two"})
    assert sent[1:] == [m.Clear(bytes(32), b"two")]


def test_a_clear_is_said_again_where_its_connection_ends_before_the_answer(
    session: EngineSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was on its way when a node died, say; what is wrong lies on that node's disk."""
    sent: list[m.Message] = []

    def send(message: m.Message) -> bool:
        sent.append(message)
        return True

    monkeypatch.setattr(session._link, "send", send)
    session._last_sent = bytes(32)
    session.on_up(WELCOME)
    session.clear({b"one", b"two"})
    first, second = sent
    session.on_message(first, [])
    session.on_down(node_is_dead=True)
    session.on_up(WELCOME)
    assert sent[2:] == [second]
    session.on_message(second, [])
    session.on_down(node_is_dead=False)
    session.on_up(WELCOME)
    assert len(sent) == 3


@pytest.fixture
def sent(session: EngineSession, monkeypatch: pytest.MonkeyPatch) -> list[m.Message]:
    """What the session says on a connection that takes all of it."""
    found: list[m.Message] = []

    def send(message: m.Message) -> bool:
        found.append(message)
        return True

    monkeypatch.setattr(session._link, "send", send)
    session.session = Session(bytes(32))
    return found


def test_clears_on_their_way_when_the_connection_ends_are_said_before_a_good_bye(
    session: EngineSession, sent: list[m.Message]
) -> None:
    """An engine may end while it is not connected: its link comes once more, and is not up."""
    session._last_sent = bytes(32)
    session.on_up(WELCOME)
    session.clear({b"one"})
    session.on_down(node_is_dead=False)
    del sent[:]
    session.on_pulse()
    assert sent == [m.Clear(bytes(32), b"one")]


class FullOutbox:
    """A connection that takes nothing for now."""

    def __init__(self) -> None:
        self.sent: list[m.Message] = []
        self.is_full = True

    def send(self, message: m.Message) -> bool:
        if not self.is_full:
            self.sent.append(message)
        return not self.is_full


@pytest.fixture
def full(session: EngineSession, monkeypatch: pytest.MonkeyPatch) -> FullOutbox:
    """The session's connection, to a node that does not read."""
    outbox = FullOutbox()
    monkeypatch.setattr(session._link, "send", outbox.send)
    session.on_up(WELCOME)
    return outbox


def test_the_end_of_a_load_that_found_no_room_is_said_later(
    session: EngineSession, full: FullOutbox
) -> None:
    """The node protects what was loaded for as long as the connection lasts, or until it hears
    of the end."""
    ends = [m.LoadEnd(1, 4), m.LoadEnd(2, 0)]
    for end in ends:
        session.end_load(end)
    session.on_pulse()
    full.is_full = False
    session.on_pulse()
    session.on_pulse()
    assert full.sent == ends


def test_the_end_of_a_load_is_not_said_to_another_node(
    session: EngineSession, full: FullOutbox
) -> None:
    session.end_load(m.LoadEnd(1, 4))
    full.is_full = False
    session.on_up(replace(WELCOME, node=b"another"))
    session.on_pulse()
    assert not full.sent


@pytest.mark.parametrize("off", [None, Off(OffReason.GROUPS, "two of them")])
def test_what_the_engine_is_and_found_no_room_is_said_later(
    off: Off | None,
    session: EngineSession,
    full: FullOutbox,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else it were not served for as long as the connection lasts."""
    monkeypatch.setattr(session, "_fields", lambda *_: off or {"a": 1})
    session.on_message(m.Workers([], [64]), [])
    full.is_full = False
    session.on_pulse()
    session.on_pulse()
    (said,) = full.sent
    assert isinstance(said, m.Identity)
    assert said.off_reason == (off.reason if off else "")


OFFER = m.StoreOffer(1, bytes(32), bytes(32), [], [])
GRANTED = m.StoreAnswer(1, [""], [7], [m.Run(1, 0, 1, 5)], [3])


@pytest.mark.parametrize("is_early", [False, True])
def test_what_nobody_waits_for_any_more_goes_back_as_soon_as_it_comes(
    is_early: bool, session: EngineSession, sent: list[m.Message]
) -> None:
    session.ask(OFFER)
    session.on_message(m.Pending(1), [])
    if is_early:
        session.on_message(GRANTED, [])
    session.abandon(1)
    if not is_early:
        session.on_message(GRANTED, [])
    assert sent == [OFFER, m.GrantReturn([7])]
    assert not session.take_answers(None)


@pytest.mark.parametrize("is_early", [False, True])
@pytest.mark.parametrize("is_given_up", [False, True])
def test_what_an_engine_was_granted_that_is_off_by_then_goes_back_at_once(
    is_given_up: bool, is_early: bool, session: EngineSession, sent: list[m.Message]
) -> None:
    """It may take no step for a long time, and its connection lives on."""
    session.ask(OFFER)
    if is_early:
        session.on_message(GRANTED, [])
    session.on_message(m.Serving("workers_differ", "rank 1 is missing"), [])
    if is_given_up:
        session.abandon(1)
    if not is_early:
        session.on_message(GRANTED, [])
    assert sent == [OFFER, m.GrantReturn([7])]
    assert not session.take_answers(None)


def test_what_was_asked_in_a_session_before_goes_back_at_once(
    session: EngineSession, sent: list[m.Message]
) -> None:
    session.ask(OFFER)
    session._welcome, session._sent = WELCOME, bytes(32)
    session.on_message(m.Serving(), [])
    lookup = m.Lookup(2, bytes(32), b"", b"")
    session.ask(lookup)
    match = m.Match(2, 0, 0, [], 9)
    for answer in (GRANTED, match):
        session.on_message(answer, [])
    assert sent == [OFFER, lookup, m.GrantReturn([7])]
    assert session.take_answers(None) == [match]


def test_what_was_asked_on_a_connection_that_has_ended_is_not_remembered(
    session: EngineSession, sent: list[m.Message]
) -> None:
    """The scheduler's thread may give a question up a moment after its connection has ended: the
    answer never comes, so nothing may wait for it."""
    session.ask(OFFER)
    session.on_down(node_is_dead=False)
    session.abandon(1)
    assert not session._answers._open


def test_a_question_that_cannot_be_sent_is_not_remembered(session: EngineSession) -> None:
    assert not session.ask(OFFER)
    session.abandon(1)
    assert not session._answers._open


def test_a_start_that_fails_leaves_no_thread_that_reads(
    session: EngineSession, model: Path, held: HeldReads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no thread to be had for the link."""
    weights = WeightsDigest(LocalWeights(model), held)
    session._identity = replace(session._identity, weights=(weights,))

    def refuse() -> None:
        assert held.began.wait(WAIT_S)
        held.go.set()
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(session._link, "start", refuse)
    with pytest.raises(RuntimeError, match="new thread"):
        session.start()
    assert weights._stop.is_set()


def test_weights_are_read_by_as_many_threads_as_are_to_be_had(
    model: Path, digests: FileDigests, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, started = threading.Thread.start, []

    def one_alone(thread: threading.Thread) -> None:
        started.append(thread)
        if len(started) > 1:
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", one_alone)
        alone = settled(WeightsDigest(LocalWeights(model), digests))
    assert len(started) == 2
    assert alone == settled(WeightsDigest(LocalWeights(model), digests))
    assert isinstance(alone, Known)

"""What is said of a lookup's question, in which order. The node is a stub."""

from types import SimpleNamespace
from typing import Any

import pytest

from kvtide.core import messages as m
from kvtide.core.chain import Chain
from kvtide.engines.vllm.canaries import Canaries
from kvtide.engines.vllm.lookups import FRESH_MS_MAX, Lookups
from kvtide.engines.vllm.tracker import Tracker
from kvtide.metrics import Counters

BLOCK, CHUNK = 4, 16
ROOT = m.RegisterRoot(bytes(32), b"", b"")
TOKENS = list(range(3 * CHUNK))


class Scene:
    """One request, and all that is said because of it."""

    def __init__(self) -> None:
        self.said: list[m.Message] = []
        self.takes_roots = True
        self.take_in: Any = lambda: None
        self.now_ms = 0
        numbers = iter(range(1, 10))
        link: Any = SimpleNamespace(is_usable=True, ask=self._send, send=self._send)
        identity: Any = SimpleNamespace(
            chunk_tokens=CHUNK, block_tokens=BLOCK, drops_last_block=False
        )
        canaries = Canaries(identity, 0.0, link, Counters())
        self.lookups = Lookups(
            link,
            lambda: next(numbers),
            lambda root: self.takes_roots and self._send(root),
            lambda _: self.take_in(),
            SimpleNamespace(now_ms=lambda: self.now_ms),
            Counters(),
            canaries,
        )
        request = SimpleNamespace(request_id="one", all_token_ids=TOKENS, num_tokens=len(TOKENS))
        self.tracker = Tracker(request, 0.0, chain=Chain(ROOT.root, BLOCK, CHUNK), root=ROOT)
        self.lookups.ask(self.tracker)

    def _send(self, message: m.Message) -> bool:
        self.said.append(message)
        return True

    def match(self) -> None:
        """One chunk is held, and part of the one behind."""
        match = m.Match(1, 1, 0, [m.Run(1, 0, 4, 5)], 0, probe=True)
        self.lookups.matched(match)


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_a_root_is_made_known_before_it_is_named(scene: Scene) -> None:
    """By a probe as well: behind many others the node may have forgotten it meanwhile."""
    scene.match()
    kinds = [type(message) for message in scene.said]
    assert kinds == [m.RegisterRoot, m.Lookup, m.RegisterRoot, m.Probe]


def test_where_a_root_cannot_be_made_known_the_first_answer_holds(scene: Scene) -> None:
    scene.takes_roots = False
    scene.match()
    assert [type(message) for message in scene.said] == [m.RegisterRoot, m.Lookup]
    match = scene.lookups.match_of(scene.tracker)
    assert match is not None
    assert (match.chunks, match.blocks) == (1, 0)


def test_a_match_is_as_old_as_its_question(scene: Scene) -> None:
    """Its lease runs from the answer, which may have lain there unread for as long as a step."""
    scene.now_ms = FRESH_MS_MAX
    scene.lookups.matched(m.Match(1, 1, 0, [m.Run(1, 0, 4, 5)], 7))
    scene.said.clear()
    assert scene.lookups.match_of(scene.tracker) is None
    assert [type(message) for message in scene.said] == [m.LeaseRelease, m.RegisterRoot, m.Lookup]
    again = m.Match(2, 1, 0, [m.Run(1, 0, 4, 5)], 8)
    scene.lookups.matched(again)
    scene.now_ms *= 3
    assert scene.lookups.match_of(scene.tracker) is again, "once is enough"


def test_nobody_waits_for_an_answer_that_cannot_come(scene: Scene) -> None:
    """The session ends in the midst of a wait."""
    looks = 0

    def end() -> None:
        nonlocal looks
        looks += 1
        scene.lookups.session_changed([scene.tracker])

    scene.take_in = end
    assert scene.lookups.match_of(scene.tracker) is None
    assert looks == 1

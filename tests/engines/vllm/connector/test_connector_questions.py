"""What is said of a lookup's question, in which order. The node is a stub."""

from types import SimpleNamespace
from typing import Any

import pytest

from kvtide.clock import MonotonicClock
from kvtide.core import messages as m
from kvtide.core.chain import Chain
from kvtide.engines.vllm.lookups import Lookups
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
        numbers = iter(range(1, 10))
        link: Any = SimpleNamespace(is_usable=True, ask=self._send)
        self.lookups = Lookups(
            link,
            lambda: next(numbers),
            lambda root: self.takes_roots and self._send(root),
            lambda _: None,
            MonotonicClock(),
            Counters(),
        )
        request = SimpleNamespace(all_token_ids=TOKENS, num_tokens=len(TOKENS))
        self.tracker = Tracker(request, 0.0, chain=Chain(ROOT.root, BLOCK, CHUNK), root=ROOT)
        self.lookups.ask(self.tracker)

    def _send(self, message: m.Message) -> bool:
        self.said.append(message)
        return True

    def match(self) -> None:
        """One chunk is held, and part of the one behind."""
        match = m.Match(1, 1, 0, [m.Run(1, 0, 4, 5)], 0, probe=True)
        self.lookups.matched(match, MonotonicClock().now_ms())


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

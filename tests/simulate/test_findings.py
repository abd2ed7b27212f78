"""What is broken on purpose is found: one edit of production code at a time, in a world whose seed
has shown it, or, since any change of the code changes what happens in a world, in one of the next.
An edit that does not apply any more fails, too."""

import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from types import ModuleType
from typing import Any

import pytest

from kvtide.core.leases import Leases
from kvtide.core.lending import Lending
from kvtide.engines.vllm import scheduler, worker
from kvtide.engines.vllm.canaries import Canaries
from kvtide.engines.vllm.scheduler import SchedulerSide
from kvtide.engines.vllm.session import EngineSession
from kvtide.engines.vllm.stores import Stores
from kvtide.engines.vllm.worker import WorkerSide
from kvtide.memory.mapped import MappedRegions
from kvtide.testing.simulate.main import fault_of, shape_of
from kvtide.testing.simulate.plan import FAULTS
from kvtide.testing.simulate.world import WorldShape
from kvtide.wire.channel import Channel
from kvtide.wire.frames import FrameReader, Outbox

pytestmark = pytest.mark.long

WORLDS_MAX = 40


@dataclass(frozen=True, slots=True)
class Edit:
    """One thing that is broken: these words of this function become those."""

    what: str
    owner: type | ModuleType
    function: str
    words: str
    instead: str
    seed: int
    """Of the first world that is tried."""
    only: tuple[str, ...] = FAULTS
    """The kinds of faults that this world has."""


EDITS = (
    Edit("the generation check", worker, "_moved", "if found != run.generation", "if False", 2),
    Edit("the salt", scheduler, "root_key", '_text_bytes(salt or "")', 'b""', 1),
    Edit("the adapter", scheduler, "root_key", ", adapter):", ', b""):', 1),
    Edit("the epoch", scheduler, "root_key", "(epoch,", '(b"",', 4),
    Edit(
        "chunks whose shards are not all there",
        Lending,
        "answered",
        "grant.waiting.discard(worker)",
        "grant.waiting.clear()",
        2,
    ),
    Edit("copies that failed", Lending, "answered", "if not is_ok:", "if False:", 2),
    Edit(
        "grants lost on their way back",
        EngineSession,
        "on_up",
        "self._returned += self._returned_last",
        "pass",
        1,
        ("cut", "preempt"),
    ),
    Edit("blocks given away", Stores, "_is_intact", "return", "return True or", 2),
    Edit(
        "blocks not computed yet",
        SchedulerSide,
        "_note_tokens",
        "min(end, request.num_tokens)",
        "min(end + 4, request.num_tokens)",
        1,
    ),
    Edit(
        "ends of loads",
        Canaries,
        "load_ended",
        "self._link.end_load(load_end)",
        "pass",
        1,
    ),
    Edit("blocks that failed", WorkerSide, "take_ended", "|= load.failed", "|= set()", 2),
    Edit("pins of leases", Leases, "take", "self._lending.pin(lease.entry)", "pass", 1),
    Edit("users of a region", MappedRegions, "_unmap", "mapping.users or", "", 34),
    Edit(
        "what others read", Channel, "_read_for", "self._left.append((message, own))", "pass", 15
    ),
    Edit("frames in parts", FrameReader, "feed", "< end:", "< end and not self._data.clear():", 1),
    Edit("frames sent in part", Outbox, "flush", "frame[sent:]", "frame", 1),
)


def broken(edit: Edit) -> Callable[..., Any]:
    """The function with its edit."""
    function = getattr(edit.owner, edit.function)
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(edit.words) == 1, f"the edit of {edit.what} does not apply any more"
    found: dict[str, Any] = {}
    exec(source.replace(edit.words, edit.instead), function.__globals__, found)
    made: Callable[..., Any] = found[edit.function]
    return made


@cache
def shape_for(seed: int, only: tuple[str, ...]) -> WorldShape:
    """A small world, in which nothing goes wrong with the code as it is."""
    without = frozenset(FAULTS).difference(only)
    shape = replace(shape_of(seed), actions=400, span_s=5.0, without=without)
    assert not fault_of(seed, shape, None)
    return shape


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.what)
def test_what_is_not_heeded_any_more_is_found(edit: Edit, monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = range(edit.seed, edit.seed + WORLDS_MAX)
    function, other = getattr(edit.owner, edit.function), broken(edit)
    for seed in seeds:
        monkeypatch.setattr(edit.owner, edit.function, function)
        shape = shape_for(seed, edit.only)
        monkeypatch.setattr(edit.owner, edit.function, other)
        if fault_of(seed, shape, None):
            return
    pytest.fail(f"nobody heeds {edit.what}, and no world of {seeds} shows it")

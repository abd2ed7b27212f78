"""Requests with adapters: what is named by their content, and what is taken back."""

import threading
import time
from dataclasses import replace as replace_options
from pathlib import Path
from typing import Any

import pytest
from vllm.lora.request import LoRARequest

from kvtide.engines.vllm import adapters as adapters_side
from kvtide.engines.vllm.adapters import AdapterDigests
from kvtide.engines.vllm.file_digests import FileDigests, FileIdentity
from kvtide.testing.vllm_toy import ToyEngine, ToyOptions
from tests.engines.vllm.connector.toys import WAIT_S_MAX, Toys, scheduler_of, tokens, until

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("patient")]

LENGTH = 150


def options() -> ToyOptions:
    return ToyOptions(chunk_tokens=64, step_tokens=64)


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """An adapter as it lies on disk."""
    directory = tmp_path / "adapter"
    directory.mkdir()
    (directory / "adapter_config.json").write_text("{}")
    (directory / "adapter_model.safetensors").write_bytes(b"weights")
    return directory


def with_adapter(engine: ToyEngine, adapter: Path, kept: Path) -> LoRARequest:
    """Known to an engine that has begun after it was written, which has not named it yet."""
    side = scheduler_of(engine)
    later_ns = time.time_ns() + 60_000_000_000
    side._adapters = AdapterDigests(FileDigests(kept), later_ns, side._link.clear)
    until("the adapter is known", lambda: side._adapters.digest(str(adapter)) is not None)
    return LoRARequest("a", 1, str(adapter))


def name(engine: ToyEngine, lora: LoRARequest) -> None:
    """Have the number of an adapter that is known stand for it."""
    side = scheduler_of(engine)
    assert side._adapter_numbers.note(lora)
    until("it counts", lambda: side._adapter_numbers.digest(lora, side._adapters) is not None)


def held_chunks(toys: Toys) -> int:
    toys.rest()
    count: int = toys.node.status()["entries"]["chunks"]
    return count


def test_what_an_adapter_computed_is_hit(toys: Toys, adapter: Path, tmp_path: Path) -> None:
    engine = toys.start(options())
    lora, prompt = with_adapter(engine, adapter, tmp_path / "kept"), tokens(LENGTH)
    name(engine, lora)
    engine.generate(prompt, adapter=lora)
    toys.rest()
    engine.reset()
    assert engine.generate(prompt, adapter=lora).external > 0


@pytest.mark.parametrize("first", ["opted out", "unnamed"])
def test_an_adapter_of_a_request_that_is_not_cached_takes_its_number_too(
    first: str, toys: Toys, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine has loaded it, and goes on computing with it under that number."""
    engine = toys.start(options())
    lora, prompt = with_adapter(engine, adapter, tmp_path / "kept"), tokens(LENGTH)
    earlier = LoRARequest("b", 1, str(tmp_path))
    if first == "opted out":
        off = {"kv_transfer_params": {"kvtide": "off"}}
        engine.generate(tokens(20), adapter=earlier, extra_args=off)
    else:
        with monkeypatch.context() as patch:
            patch.setattr(scheduler_of(engine), "_fingerprint", b"")
            engine.generate(tokens(20), adapter=earlier)
    for _ in range(2):
        assert not engine.generate(prompt, adapter=lora).external
        toys.rest()
        engine.reset()


@pytest.mark.parametrize("way", ["another path", "loaded in place", "changed"])
def test_nothing_is_kept_of_an_adapter_that_may_have_become_another(
    way: str, toys: Toys, adapter: Path, tmp_path: Path
) -> None:
    """The engine goes by an adapter's number: it may go on with other bytes at any moment."""
    engine = toys.start(options())
    lora = with_adapter(engine, adapter, tmp_path / "kept")
    name(engine, lora)
    held = held_chunks(toys)
    long = engine.add(tokens(LENGTH), 3, adapter=lora)
    match way:
        case "another path":
            engine.add(tokens(20), adapter=LoRARequest("b", 1, str(tmp_path)))
        case "loaded in place":
            engine.add(tokens(20), adapter=LoRARequest("a", 1, str(adapter), load_inplace=True))
        case _:
            (adapter / "adapter_model.safetensors").write_bytes(b"other")
            adapters = scheduler_of(engine)._adapters
            until("that is seen", lambda: not adapters.is_unchanged(str(adapter), b""))
    engine.run()
    assert len(engine.results[long].tokens) == 3
    kept = 0 if way == "changed" else held  # that is cleared, with all that shares its salt
    assert held_chunks(toys) == kept
    again = engine.generate(tokens(LENGTH), adapter=lora)
    assert not again.external
    assert held_chunks(toys) == kept, "never again under this number"


def replace(adapter: Path, content: bytes) -> None:
    """What a trainer does: the next version stands in the place of the last, atomically."""
    other = adapter.parent / "other"
    other.write_bytes(content)
    other.replace(adapter / "adapter_model.safetensors")


def test_an_adapter_replaced_and_named_at_once_is_not_taken_for_the_one_before(
    toys: Toys, adapter: Path, tmp_path: Path
) -> None:
    """The engine loads the new bytes under the new number; the last look saw the old ones."""
    engine = toys.start(options())
    lora, prompt = with_adapter(engine, adapter, tmp_path / "kept"), tokens(LENGTH)
    name(engine, lora)
    engine.generate(prompt, adapter=lora)
    toys.rest()
    assert engine.reset()
    adapters = scheduler_of(engine)._adapters
    until("it is looked at", lambda: adapters.digest(str(adapter)) is not None)
    before = held_chunks(toys)
    replace(adapter, b"WEIGHTS")
    new = LoRARequest("b", 2, str(adapter))
    assert not engine.generate(prompt, adapter=new).external
    assert not engine.generate(tokens(LENGTH), adapter=new).external
    assert held_chunks(toys) <= before, "none is added"


def test_a_new_number_of_an_adapter_that_is_as_it_was_is_hit_after_a_look(
    toys: Toys, adapter: Path, tmp_path: Path
) -> None:
    engine = toys.start(options())
    lora, prompt = with_adapter(engine, adapter, tmp_path / "kept"), tokens(LENGTH)
    name(engine, lora)
    engine.generate(prompt, adapter=lora)
    toys.rest()
    new = LoRARequest("b", 2, str(adapter))

    def is_hit() -> bool:
        assert engine.reset()
        return engine.generate(prompt, adapter=new).external > 0

    until("it is hit", is_hit)


def test_what_was_loaded_and_stored_under_a_wrong_name_is_forgotten_everywhere(
    toys: Toys, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An adapter changed behind the last look, and the engine loads it anew: what it computes
    then goes by the old name, in the node and in its own cache, until the next look."""
    engine = toys.start(options())
    lora, prompt = with_adapter(engine, adapter, tmp_path / "kept"), tokens(LENGTH)
    running = tokens(LENGTH)
    name(engine, lora)
    engine.generate(prompt, adapter=lora)
    toys.rest()
    assert engine.reset()
    adapters, go, of = scheduler_of(engine)._adapters, threading.Event(), FileIdentity.of

    def wait(path: Path) -> FileIdentity:
        assert go.wait(WAIT_S_MAX)
        return of(path)

    monkeypatch.setattr(adapters_side, "CONFIRMED_S_MAX", WAIT_S_MAX)
    monkeypatch.setattr(FileIdentity, "of", wait)
    replace(adapter, b"WEIGHTS")
    assert engine.generate(prompt, adapter=lora).external > 0, "nobody could know it"
    request_id = engine.add(running, 40, adapter=lora)
    for _ in range(6):
        engine.step()
    assert held_in(toys) > 0
    go.set()
    until("that is seen", lambda: not adapters.is_unchanged(str(adapter), b""))
    until("the node has forgotten it", lambda: held_in(toys) == 0)
    engine.run()
    for again in (prompt, [*running, *engine.results[request_id].tokens]):
        result = engine.generate(again, adapter=lora)
        assert (result.external, result.local) == (0, 0)
    assert held_chunks(toys) == 0, "of no request"


@pytest.mark.parametrize("is_async", [False, True])
def test_what_is_stored_by_a_step_that_loads_another_adapter_is_forgotten(
    is_async: bool, toys: Toys, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was as it should be when the step was planned, and when it was looked at after that."""
    engine = toys.start(replace_options(options(), is_async=is_async, runs_late=is_async))
    lora, side = with_adapter(engine, adapter, tmp_path / "kept"), scheduler_of(engine)
    name(engine, lora)
    adapters, build_plan, path = side._adapters, side.build_plan, str(adapter)
    planned: list[object] = []

    def plan_and_look(output: object) -> Any:
        plan = build_plan(output)
        if plan.stores and not planned:
            planned.extend(plan.stores)
            asked_s = time.monotonic()
            until("it is looked at", lambda: adapters.digest(path, asked_s) is not None)
            replace(adapter, b"WEIGHTS")
            until("that is seen", lambda: adapters._adapters[path].is_distrusted)
        return plan

    monkeypatch.setattr(side, "build_plan", plan_and_look)
    # A grant that comes too late for the step is dropped, by design.
    until("it is stored", lambda: engine.generate(tokens(LENGTH), adapter=lora) and planned)
    until("the node has forgotten it", lambda: held_chunks(toys) == 0)


def held_in(toys: Toys) -> int:
    """Chunks in the node, which may be at work."""
    count: int = toys.node.status()["entries"]["chunks"]
    return count

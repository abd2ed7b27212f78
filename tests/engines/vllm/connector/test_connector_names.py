"""What names a request besides its tokens and its salt: its images and its adapter."""

import time
from pathlib import Path

import pytest
from vllm.lora.request import LoRARequest

from kvtide.engines.vllm.adapters import AdapterDigests
from kvtide.engines.vllm.file_digests import FileDigests
from kvtide.testing.vllm_toy import ToyEngine, ToyOptions
from tests.engines.vllm.connector.test_connector_roles import Features
from tests.engines.vllm.connector.toys import Toys, own_hit, scheduler_of, tokens, until

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("patient")]

OPTIONS = ToyOptions(chunk_tokens=64, step_tokens=64)
LENGTH = 200


def keys_of(
    engine: ToyEngine, prompt: list[int], identifier: str, first_token: int
) -> list[bytes]:
    """The keys of the chunks of a prompt with an image in it, as the scheduler role makes them."""
    request = Features(identifier, "salt")
    request.all_token_ids, request.num_tokens = prompt, len(prompt)
    request.mm_features[0].mm_position.offset = first_token
    engine.connector.on_new_request(request)
    side = scheduler_of(engine)
    tracker = side._trackers.pop(request.request_id)
    side._lookups.drop(tracker)
    assert tracker.no_load is None
    return list(tracker.chain.keys)


def test_an_image_counts_by_its_id_and_its_place(toys: Toys) -> None:
    """What stands before it is shared; lookups and stores are made from the same chain."""
    engine = toys.start(OPTIONS)
    engine.generate(tokens(20))  # so that the session is taken in
    prompt = tokens(LENGTH)
    cat = keys_of(engine, prompt, "cat", 70)
    assert len(cat) == LENGTH // 64
    assert keys_of(engine, prompt, "cat", 70) == cat
    for other in (keys_of(engine, prompt, "dog", 70), keys_of(engine, prompt, "cat", 71)):
        assert other[0] == cat[0]
        assert not set(other[1:]) & set(cat)


def test_adapters_and_the_base_model_are_kept_apart(toys: Toys, tmp_path: Path) -> None:
    """Three of one prompt: each finds its own, and nobody another's."""
    engine = toys.start(OPTIONS)
    side, later_ns = scheduler_of(engine), time.time_ns() + 60_000_000_000
    adapters = AdapterDigests(FileDigests(tmp_path / "kept"), later_ns, side._link.clear)
    side._adapters = adapters
    loras: list[LoRARequest | None] = [None]
    for number, name in enumerate(("one", "other"), 1):
        directory = tmp_path / name
        directory.mkdir()
        (directory / "adapter_config.json").write_text("{}")
        (directory / "adapter_model.safetensors").write_bytes(name.encode())
        until("it is known", lambda path=str(directory): adapters.digest(path) is not None)
        lora = LoRARequest(name, number, str(directory))
        assert side._adapter_numbers.note(lora)
        until(
            "it counts", lambda lora=lora: side._adapter_numbers.digest(lora, adapters) is not None
        )
        loras.append(lora)
    prompt = tokens(LENGTH)
    for wanted in (0, own_hit(LENGTH, LENGTH)):
        for lora in loras:
            assert engine.generate(prompt, adapter=lora).external == wanted
            toys.rest()
            assert engine.reset()

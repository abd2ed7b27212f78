"""Which requests are left alone, and why."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from kvtide import config
from kvtide.core.keys import CONTENT_ID_BYTES_MAX
from kvtide.core.reasons import MissReason
from kvtide.engines.vllm.tracker import refusal

SETTINGS = config.read(environ={}).engine
TRUSTED = replace(SETTINGS, multimodal_ids="trusted")
IMAGE = SimpleNamespace(identifier="an image")
NAMELESS = SimpleNamespace(identifier="x" * (CONTENT_ID_BYTES_MAX + 1))


def request(**changes: Any) -> SimpleNamespace:
    """A request of plain text, but for these."""
    plain: dict[str, Any] = {
        "kv_transfer_params": None,
        "prompt_embeds": None,
        "resumable": False,
        "lora_request": None,
        "cache_salt": None,
        "mm_features": [],
    }
    return SimpleNamespace(**plain | changes)


@pytest.mark.parametrize(
    ("changes", "settings", "wanted"),
    [
        ({}, SETTINGS, None),
        ({"kv_transfer_params": {"kvtide": "off"}}, SETTINGS, MissReason.OPTED_OUT),
        ({"kv_transfer_params": {"kvtide": "on"}}, SETTINGS, None),
        ({"kv_transfer_params": "off"}, SETTINGS, None),
        ({"prompt_embeds": object()}, SETTINGS, MissReason.PROMPT_EMBEDS),
        ({"resumable": True}, SETTINGS, MissReason.STREAMING),
        ({"mm_features": None}, SETTINGS, None),
        ({"mm_features": [IMAGE]}, SETTINGS, MissReason.MULTIMODAL),
        ({"mm_features": [IMAGE], "cache_salt": "salt"}, SETTINGS, None),
        ({"mm_features": [IMAGE]}, TRUSTED, None),
        ({"mm_features": [IMAGE, NAMELESS]}, TRUSTED, MissReason.MULTIMODAL),
        ({"lora_request": object()}, SETTINGS, None),
    ],
)
def test_what_is_not_cached_has_its_reason(
    changes: dict[str, Any], settings: Any, wanted: MissReason | None
) -> None:
    assert refusal(request(**changes), settings) is wanted


def test_where_adapters_may_be_loaded_in_place_none_is_cached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """But on the word of whoever says that the cache is reset then."""
    with_adapter = request(lora_request=object())
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
    assert refusal(with_adapter, SETTINGS) is MissReason.ADAPTER_MAY_CHANGE
    assert refusal(with_adapter, replace(SETTINGS, weights_change="reset")) is None
    assert refusal(request(), SETTINGS) is None

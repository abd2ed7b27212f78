"""Values of vLLM's configuration as values that a fingerprint can hold.

vLLM's configs hold enums, torch dtypes, dataclasses, Hugging Face configs and, now and then,
things that have no value at all (functions, compiled objects). Each kind is turned into plain data
by a rule that is written here, or the field is unknown. Rejected: `str()` or `repr()` of whatever
it is, which gives addresses, that differ in each process, and hides what it does not show.
"""

import dataclasses
import enum
from collections.abc import Collection, Mapping
from fractions import Fraction
from typing import Any

import torch

from kvtide.core.keys import FieldValue, encode, fingerprint
from kvtide.errors import KVTideError

DEPTH_MAX = 32
"""Deeper nesting is taken for a cycle."""
SHOWN_CHARACTERS_MAX = 64
"""A field's value is shown up to here."""


class FieldUnknown(KVTideError):
    """A field of the fingerprint cannot be determined: caching is off, by its name."""


def config_fields(config: object, left_out: Collection[str]) -> dict[str, object]:
    """All fields of one of vLLM's config dataclasses but those named."""
    assert dataclasses.is_dataclass(config), config
    names = (field.name for field in dataclasses.fields(config))
    return {name: getattr(config, name) for name in names if name not in left_out}


def plain(value: object, name: str, depth: int = 0) -> FieldValue:
    """Turn a value into plain data, or raise FieldUnknown, which names the field.

    Args:
        value: what a config holds.
        name: the field's name, for the message.
        depth: how deep it lies in the field.
    """
    if depth > DEPTH_MAX:
        raise FieldUnknown(f"{name} is nested too deeply")
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return value
    if isinstance(value, Fraction):
        return str(value)
    if isinstance(value, Mapping):
        return _plain_mapping(value, name, depth)
    if isinstance(value, list | tuple):
        return [plain(part, name, depth + 1) for part in value]
    if isinstance(value, set | frozenset):
        return sorted((plain(part, name, depth + 1) for part in value), key=encode)
    if isinstance(value, type):
        return _class_name(value, name)
    if hasattr(value, "to_dict"):  # Hugging Face's configs
        return plain(value.to_dict(), name, depth + 1)
    if dataclasses.is_dataclass(value):
        parts = {"class": type(value).__qualname__, **config_fields(value, ())}
        return _plain_mapping(parts, name, depth)
    # Of compiler passes: a digest of their source.
    if hasattr(value, "uuid") and callable(value.uuid):
        return plain(value.uuid(), name, depth + 1)
    raise FieldUnknown(f"{name} holds a {type(value).__name__}, which has no plain value")


def _plain_mapping(value: Mapping[Any, object], name: str, depth: int) -> FieldValue:
    """JSON has only text as names, so 1 and "1" are one name; both at once would be two."""
    parts: dict[str, FieldValue] = {}
    for key, part in value.items():
        key = plain(key, name, depth + 1)
        if not isinstance(key, str | int | None) or str(key) in parts:
            raise FieldUnknown(f"{name} has the name {key!r}, which is not one of JSON")
        parts[str(key)] = plain(part, name, depth + 1)
    return parts


def _class_name(value: type, name: str) -> str:
    """The name of vLLM's own classes says what they do, with the version; others bring code."""
    if value.__module__.partition(".")[0] not in ("vllm", "builtins"):
        raise FieldUnknown(f"{name} is {value.__module__}.{value.__qualname__}, not vLLM's own")
    return f"{value.__module__}.{value.__qualname__}"


def shown_field(value: FieldValue) -> str:
    """A field's value for people; a long one by the digest of its encoding."""
    text = value.hex() if isinstance(value, bytes) else str(value)
    if len(text) <= SHOWN_CHARACTERS_MAX:
        return text
    return "digest " + fingerprint({"value": encode(value)}).hex()[:16]

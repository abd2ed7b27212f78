"""Values of settings that speak of tiers: a path, a cap, or a list of places."""

import difflib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from kvtide.units import MiB, parse_bytes
from kvtide.values import one_of, show_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

DISK_BYTES_MIN = 64 * MiB  # a few chunks of a small model

DISK_WRITE = ("through", "on_reuse", "on_eviction")
DISK_SYNC = ("none", "sealed", "each")


def parse_disk_path(raw: object) -> Path:
    """An absolute path."""
    if not isinstance(raw, str) or not Path(raw).is_absolute():
        raise ValueError("not an absolute path")
    return Path(raw)


def parse_disk_bytes(raw: object) -> int | Literal["auto"]:
    """A size, or `auto`."""
    if raw == "auto":
        return "auto"
    size = parse_bytes(raw)
    if size < DISK_BYTES_MIN:
        raise ValueError(f"{size} bytes is too little to be of use; give at least 64MiB")
    return size


@dataclass(frozen=True, slots=True)
class DiskConfig:
    """A disk as a tier.

    Attributes:
        path: of its directory.
        bytes_max: the cap; `auto` is 80 % of what is free there.
        write: when a chunk is written.
        sync: when the drive is told to make it durable.
    """

    path: Path
    bytes_max: int | Literal["auto"]
    write: str = "through"
    sync: str = "sealed"


def parse_tiers(raw: object) -> tuple[DiskConfig, ...]:
    """A list of tiers, in YAML, or as JSON text."""
    if isinstance(raw, str):
        try:
            raw = json.loads(raw)
        except ValueError:
            raise ValueError("not a list in JSON") from None
    if not isinstance(raw, list):
        raise ValueError("not a list")  # noqa: TRY004 - as of all parsers
    tiers = tuple(_parse_tier(entry) for entry in raw)
    if len(tiers) > 1:
        raise ValueError("more than one disk; give one")
    return tiers


def _parse_tier(raw: object) -> DiskConfig:
    if not isinstance(raw, dict) or raw.get("type") != "disk":
        raise ValueError("an entry without `type: disk`, the only type there is")
    parsers: dict[str, Callable[[object], Any]] = {
        "path": parse_disk_path,
        "bytes_max": parse_disk_bytes,
        "write": one_of(*DISK_WRITE),
        "sync": one_of(*DISK_SYNC),
    }
    given = {name: value for name, value in raw.items() if name != "type"}
    for name in given:
        if name not in parsers:
            near = difflib.get_close_matches(str(name), parsers, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(parsers)}"
            raise ValueError(f"a disk has no {name!r}; {hint}")
    missing = {"path", "bytes_max"} - given.keys()
    if missing:
        raise ValueError(f"a disk without {' and '.join(sorted(missing))}")
    parsed = {}
    for name, value in given.items():
        try:
            parsed[name] = parsers[name](value)
        except ValueError as error:
            raise ValueError(f"{name} {value!r} of a disk: {error}") from None
    return DiskConfig(**parsed)


def show_tiers(value: object) -> str:
    """Each in a few words."""
    if not isinstance(value, tuple) or not value:
        return "not set"
    return ", ".join(f"disk {one.path}, {show_bytes(one.bytes_max)}" for one in value)

"""Options of the tiers that come with kvtide: what an entry of `tiers` of each type may say.

A type is a row in `BUILT_IN` here, and one in `kvtide.tiers.registry`, which says where it is.
"""

import json
from pathlib import Path
from typing import Literal

from kvtide import tier_entries
from kvtide.tier_entries import Option, TierEntry
from kvtide.units import MiB, parse_bytes
from kvtide.values import one_of, show_bytes

BYTES_MIN = 64 * MiB  # a few chunks of a small model

DISK_SYNC = ("none", "sealed", "each")


def parse_path(raw: object) -> Path:
    """An absolute path."""
    if not isinstance(raw, str) or not Path(raw).is_absolute():
        raise ValueError("not an absolute path")
    return Path(raw)


def parse_bytes_max(raw: object) -> int:
    """A size that is of use."""
    size = parse_bytes(raw)
    if size < BYTES_MIN:
        raise ValueError(f"{size} bytes is too little to be of use; give at least 64MiB")
    return size


def parse_disk_bytes(raw: object) -> int | Literal["auto"]:
    """A size, or `auto`."""
    return "auto" if raw == "auto" else parse_bytes_max(raw)


DISK = (
    Option(
        "path",
        parse=parse_path,
        accepts="an absolute path",
        doc="As `disk_path`.",
    ),
    Option(
        "bytes_max",
        parse=parse_disk_bytes,
        accepts="a size, or `auto`",
        doc="As `disk_bytes_max`.",
        show=show_bytes,
    ),
    Option(
        "sync",
        parse=one_of(*DISK_SYNC),
        accepts="`none`, `sealed` or `each`",
        doc="As `disk_sync`.",
        default="sealed",
    ),
)

SHARED_DIR = (
    Option(
        "path",
        parse=parse_path,
        accepts="an absolute path",
        doc="Directory that several machines mount, each as the same user; made if need be.",
    ),
    Option(
        "bytes_max",
        parse=parse_bytes_max,
        accepts="a size",
        doc="Most bytes of the files that this node keeps there; others have caps of their own.",
        show=show_bytes,
    ),
)

BUILT_IN: dict[str, tuple[Option, ...]] = {"disk": DISK, "shared_dir": SHARED_DIR}
"""Types of ours, in the order of docs/configuration.md, and what each may be told."""


def parse_tiers(raw: object) -> tuple[TierEntry, ...]:
    """A list of tiers, in YAML, or as JSON text."""
    if isinstance(raw, str):
        try:
            raw = json.loads(raw)
        except ValueError:
            raise ValueError("not a list in JSON") from None
    if not isinstance(raw, list):
        raise ValueError("not a list")  # noqa: TRY004 - as of all parsers
    entries = [tier_entries.parse(one, BUILT_IN, tier_entries.installed) for one in raw]
    return tier_entries.checked_together(entries)


def disk_entry(path: Path, bytes_max: int | str, write: str, sync: str) -> TierEntry:
    """What `disk_path` and its like say in short."""
    raw = {"path": str(path), "bytes_max": bytes_max, "write": write, "sync": sync}
    return tier_entries.parse({"type": "disk", **raw}, BUILT_IN, tuple)

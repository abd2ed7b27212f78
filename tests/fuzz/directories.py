"""Directories of a disk and of a shared directory, some of whose bytes are not what was written.

An input is a program of edits, eight bytes each: what is done, to which file, where, and how much.
Whatever they do: a start ends well, no load brings a wrong byte (the driver compares each), caps
hold, and what is stored afterwards is there.
"""

import contextlib
import shutil
import struct
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from kvtide.core.records import Record
from kvtide.testing.tier_drive import DrivenTier
from kvtide.testing.tier_records import chain_of, text
from kvtide.tiers.base import LoadOutcome, StoreOutcome
from tests.fuzz.fuzzing import Check
from tests.tiers import disk_place, shared_place

EDIT = struct.Struct("<BBIH")
EDITS_MAX = 12
SPAN_BYTES_MAX = 8192
RECORDS = [
    *chain_of(disk_place.ROOT, disk_place.SMALL, text(1, 14)),
    *disk_place.tails(3),
]


def edited(file: Path, operation: int, at: int, much: int) -> None:
    """Carry one edit out."""
    content = bytearray(file.read_bytes())
    at = at % (len(content) + 1)
    match operation % 8:
        case 0:
            if content:
                content[at % len(content)] ^= 1 << much % 8
        case 1:
            content[at : at + much] = bytes(len(content[at : at + much]))
        case 2:
            del content[at:]
        case 3:  # another place of the file, on top of this one
            first = much * 16 % (len(content) + 1)
            piece = content[first : first + SPAN_BYTES_MAX]
            content[at : at + len(piece)] = piece
        case 4:
            content += bytes([much & 0xFF]) * (much & 0x1FFF)
        case 5:
            struct.pack_into("<I", content, max(0, min(at, len(content) - 4)), 2**32 - 1 - much)
        case 6:
            del content[at : at + much]
        case 7:
            content[at:at] = content[at : at + much]
    file.write_bytes(content)


def carry_out(program: bytes, files: Sequence[Path]) -> None:
    """Carry all edits out; bytes that are left over are none."""
    for number, (operation, which, at, much) in enumerate(
        EDIT.iter_unpack(program[: len(program) // EDIT.size * EDIT.size])
    ):
        if number < EDITS_MAX:
            edited(files[which % len(files)], operation, at, much)


def _program(*edits: tuple[int, int, int, int]) -> bytes:
    return b"".join(EDIT.pack(*edit) for edit in edits)


def _asked(tier: DrivenTier, records: Sequence[Record]) -> Counter[str]:
    """Ask for all, and load what may be there."""
    said: Counter[str] = Counter()
    for record in records:
        outcome = tier.load(record)
        assert outcome in (LoadOutcome.LOADED, LoadOutcome.CORRUPT, LoadOutcome.ABSENT), outcome
        said[outcome] += 1
    return said


def _stored(tier: DrivenTier, records: Sequence[Record]) -> None:
    """All may be stored again, and are there then. What is held already may be found damaged by
    the first load that gets so far: once."""
    for _ in range(len(records) + 1):
        for outcome in tier.store(records):
            assert outcome in (StoreOutcome.STORED, StoreOutcome.HELD), outcome
        if _asked(tier, records) == {LoadOutcome.LOADED: len(records)}:
            return
    raise AssertionError("what is stored again is not there")


def _checked(
    made: Path,
    suffixes: tuple[str, ...],
    opened: Callable[[Path], contextlib.AbstractContextManager[DrivenTier]],
) -> Check:
    copy = made.parent / "copy"

    def check(data: bytes) -> str:
        shutil.copytree(made, copy)
        try:
            files = sorted(one for one in copy.rglob("*") if one.name.endswith(suffixes))
            carry_out(data, [one for one in files if one.is_file()])
            with opened(copy) as tier:
                said = _asked(tier, RECORDS)
                _stored(tier, RECORDS)
            with opened(copy) as tier:
                assert _asked(tier, RECORDS) == {LoadOutcome.LOADED: len(RECORDS)}
        finally:
            shutil.rmtree(copy)
        return str(sorted(said.items()))

    return check


# ---- a disk


def disk_seeds() -> list[bytes]:
    """Edits of each kind."""
    return [_program((operation, 1, 5_000, 300)) for operation in range(8)] + [
        _program((0, 0, 4096, 1), (2, 2, 900, 0)),
        _program((3, 0, 0, 512), (1, 1, 64, 64)),
    ]


@contextlib.contextmanager
def disk() -> Iterator[Check]:
    """One that was left in order, and what a kill leaves (a log of rows, no index) beside it."""
    with tempfile.TemporaryDirectory() as directory:
        made = Path(directory) / "kv"
        disk_place.keep(made, RECORDS[:4])
        with disk_place.driven(made) as tier:
            tier.keep(RECORDS[4:])
            shutil.copytree(made, Path(directory) / "killed")
        yield _checked(
            Path(directory) / "killed", (".segment", ".rows", ".index"), disk_place.driven
        )


# ---- a shared directory


def shared_seeds() -> list[bytes]:
    """Edits of each kind, of journals and of records."""
    return [_program((operation, which, 100, 40)) for operation in range(8) for which in (0, 3)]


@contextlib.contextmanager
def shared_dir() -> Iterator[Check]:
    """Of two members that have left."""
    with tempfile.TemporaryDirectory() as directory:
        made = Path(directory) / "kv"
        with shared_place.driven(made) as one, shared_place.driven(made) as other:
            one.keep(RECORDS[:4])
            other.keep(RECORDS[4:])
        yield _checked(made, ("",), shared_place.driven)

"""Which records were used lately, kept over a restart: a hint, in one small file.

    USED    written when a node ends, read and removed by the next start

The clock of the catalog has one bit for it, and a hand that comes by. A start sets the hand to
what is oldest, and sets the bits that were set; after a kill there is no file, and what is oldest
goes first. A file that is not as it was written says nothing.
"""

import os
import struct
import sys
import threading
import time
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial

from kvtide.codec import record as codec
from kvtide.core.layout import CELL_ALIGN_BYTES
from kvtide.tiers.disk.catalog import Place
from kvtide.tiers.disk.directory import TEMPORARY, USED, Directory
from kvtide.tiers.files import read_fully, write_fully

MAGIC = b"kvtidUSE"
VERSION = 1
USED_MAX = 131_072
"""Records that the file names at most, those that the hand meets first: one MiB."""
_OPENING = struct.Struct("<8sIIQ")
"""Magic, version, records, checksum of them."""
_RECORD_BYTES = 8


def encode(places: Iterable[Place]) -> bytes:
    """The file: of each record its segment, and its page there."""
    numbers = array("I")
    for _, place in zip(range(USED_MAX), places, strict=False):
        numbers.extend((place.segment, place.offset_bytes // CELL_ALIGN_BYTES))
    if sys.byteorder == "big":
        numbers.byteswap()
    content = numbers.tobytes()
    count = len(content) // _RECORD_BYTES
    return _OPENING.pack(MAGIC, VERSION, count, codec.checksum(content)) + content


def decode(content: bytes) -> Mapping[int, set[int]]:
    """Pages of the records that were used, by segment; none where it is no such file."""
    used: defaultdict[int, set[int]] = defaultdict(set)
    if len(content) >= _OPENING.size:
        magic, version, count, checksum = _OPENING.unpack_from(content)
        rest = content[_OPENING.size :]
        is_ours = (magic, version, count * _RECORD_BYTES) == (MAGIC, VERSION, len(rest))
        if is_ours and codec.checksum(rest) == checksum:
            for segment, page in struct.iter_unpack("<II", rest):
                used[segment].add(page)
    return used


def write(directory: Directory, content: bytes) -> None:
    """Leave it for the next start; what fails is no loss."""
    files, path = directory.files, f"{directory.path}/{USED}"
    with suppress(OSError):
        directory.require()
        descriptor = files.open(path + TEMPORARY, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            write_fully(files, descriptor, [content], 0)
        finally:
            files.close(descriptor)
        files.rename(path + TEMPORARY, path)


def leave(
    directory: Directory, used: Iterable[Place], is_room_for: Callable[[int], bool], until: float
) -> None:
    """The same where there is room, and no longer than until then: the drive may hang."""
    content = encode(used)
    if not is_room_for(len(content)):
        return
    work = partial(write, directory, content)
    thread = threading.Thread(target=work, name="kvtide-disk-used", daemon=True)
    with suppress(RuntimeError):  # the machine grants no thread
        thread.start()
        thread.join(max(0.0, until - time.monotonic()))


def take(directory: Directory) -> Mapping[int, set[int]]:
    """What the last node left, which is removed: a later start must not take it for news."""
    files, path = directory.files, f"{directory.path}/{USED}"
    content = memoryview(bytearray(_OPENING.size + USED_MAX * _RECORD_BYTES + 1))
    count = 0
    with suppress(OSError):
        descriptor = files.open(path, os.O_RDONLY)
        try:
            count = read_fully(files, descriptor, [content], 0)
        finally:
            files.close(descriptor)
            files.unlink(path)
    return decode(bytes(content[:count]))

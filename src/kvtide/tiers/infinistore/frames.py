"""What is sent to an InfiniStore server (0.2.35) over TCP, and what its answers begin with.

    ask       magic │ operation │ length of body │ body          9 bytes, and a name or a table
    answer    code                                  put; or no   4 bytes
              code │ number                         exist, delete
              code │ length │ value                 get

Two kinds of ask carry a table in the format of FlatBuffers, each of one fixed shape, so they are
packed here by hand; answers carry none. All numbers are little-endian.
"""

import enum
import struct
from collections.abc import Sequence

MAGIC = 0xDEADBEEF
_HEAD = struct.Struct("<IcI")
_EXIST, _DELETE, _PAYLOAD = b"C", b"X", b"L"
_GET, _PUT = ord("G"), ord("P")
"""Operations; the last two stand in the table of a _PAYLOAD."""

CODE = struct.Struct("<i")
NUMBER = struct.Struct("<iI")
"""An answer with FINISH: its code; and a number (`exist`, `delete`), or a value's length."""

FINISH = 200
NOT_FOUND = 404
NO_ROOM = 507
CODES = {200, 202, 400, 404, 408, 500, 503, 507}
"""All that a server answers. Whoever answers anything else is no InfiniStore."""

BODY_BYTES_MAX = 4 << 20
"""Of one ask, without the value that follows it."""


class Ask(enum.Enum):
    """What was asked, by which its answer is read."""

    EXIST = enum.auto()
    DELETE = enum.auto()
    GET = enum.auto()
    PUT = enum.auto()


def exist(name: bytes) -> bytes:
    """Whether there is a value of this name. The number: 0, or 1 where there is none."""
    return _HEAD.pack(MAGIC, _EXIST, len(name)) + name


def delete(names: Sequence[bytes]) -> bytes:
    """Remove these. The number: how many of them were there."""
    # root ─► table: one field, a vector of offsets of strings
    vector = struct.pack("<IHHH2xiII", 12, 6, 8, 4, 8, 4, len(names))
    strings, offsets = bytearray(), []
    for number, name in enumerate(names):
        offsets.append(4 * (len(names) - number) + len(strings))  # from where it stands itself
        strings += _string(name)
    body = vector + struct.pack(f"<{len(names)}I", *offsets) + strings
    assert len(body) <= BODY_BYTES_MAX, len(names)
    return _HEAD.pack(MAGIC, _DELETE, len(body)) + body


def get(name: bytes) -> bytes:
    """A value. Nothing more is asked on its connection before it has all come: a server that is
    asked then asks itself the same for ever."""
    return _payload(name, 0, _GET)


def put(name: bytes, length_bytes: int) -> bytes:
    """A value, whose bytes follow at once. A server without room says so, and takes them for
    another ask: it ends the connection, since no value of ours begins with its magic."""
    return _payload(name, length_bytes, _PUT)


def _payload(name: bytes, length_bytes: int, operation: int) -> bytes:
    # root ─► table: name, length (in eight bytes, however many of them are read), operation
    table = struct.pack("<I5H2xiIQB3x", 16, 10, 20, 4, 8, 16, 12, 16, length_bytes, operation)
    body = table + _string(name)
    return _HEAD.pack(MAGIC, _PAYLOAD, len(body)) + body


def _string(content: bytes) -> bytes:
    """Length, bytes, a zero; filled up to four."""
    text = struct.pack("<I", len(content)) + content + b"\0"
    return text + bytes(-len(text) % 4)

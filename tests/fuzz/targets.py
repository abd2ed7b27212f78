"""What is fuzzed, and what each reader promises of any bytes."""

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import socket
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from kvtide import config
from kvtide.codec import record as codec
from kvtide.errors import ConfigError, CorruptRecord, PlaceFailed, UnknownFormat, WireError
from kvtide.node import report
from kvtide.node.http import HTTPPages
from kvtide.tiers.redis.resp import Connection, ServerError
from kvtide.tiers.s3 import names
from kvtide.values import HTTPAddress
from kvtide.wire.frames import FrameReader, encode
from tests.codec.test_record import example, written
from tests.core.world import World
from tests.fuzz.directories import disk, disk_seeds, shared_dir, shared_seeds
from tests.fuzz.fuzzing import Check, Target, where
from tests.wire.frame_vectors import EXAMPLES

if TYPE_CHECKING:
    from kvtide.node.runtime import Runtime

# ---- frames: a stream is cut into messages in one way, or refused


def _frames() -> list[bytes]:
    frames = [encode(message) for message in EXAMPLES]
    return [*frames, b"".join(frames[3:9])]


def _cut(pieces: Sequence[bytes]) -> tuple[list[bytes], str]:
    """The messages of a stream, written again; and why no more came."""
    reader, read = FrameReader(), list[bytes]()
    try:
        for piece in pieces:
            for message, _ in reader.feed(piece, []):
                read.append(encode(message))
    except WireError as error:
        return read, where(error)
    finally:
        reader.close()
    return read, ""


@contextlib.contextmanager
def _frame_reader() -> Iterator[Check]:
    def check(data: bytes) -> str:
        read, end = _cut([data])
        assert _cut([data[at : at + 7] for at in range(0, len(data), 7)]) == (read, end)
        assert _cut(read) == (read, ""), "what was read is not what is written"
        return f"{len(read)} {end}"

    yield check


# ---- a record's header: what was written, or an error that says why not


def _headers() -> list[bytes]:
    found = [bytes(headers[0]) for headers, _ in map(written, (example(), example(1, shards=1)))]
    return [content.rstrip(b"\0") for content in found]  # what follows has to be zeros


def _sealed(content: bytearray) -> None:
    """Make checksum and length right: what else is wrong has to be seen by itself."""
    magic, version, length, _ = codec._OPENING.unpack_from(content)
    found = codec.checksum(content[codec._OPENING.size : length], length)
    codec._OPENING.pack_into(content, 0, magic, version, length, found)


@contextlib.contextmanager
def _header_reader() -> Iterator[Check]:
    def read(content: bytearray) -> str:
        try:
            header = codec.read_header(memoryview(content))
        except (CorruptRecord, UnknownFormat) as error:
            return where(error)
        record = header.record
        again = memoryview(bytearray(codec.header_bytes(record.layout.shard_count, record.blocks)))
        codec.write_header(again, header)
        assert codec.read_header(again) == header
        return "read"

    def check(data: bytes) -> str:
        content = bytearray(data.ljust(2 * 4096, b"\0"))
        said = read(content)
        _sealed(content)
        return f"{said}, {read(content)}"

    yield check


# ---- settings: a file and a variable of any text are read, or refused in a few words

SETTINGS = (
    b"host_bytes: 2GiB\nlinger_s: 1.5\nchunk_tokens: 64\n",
    b"disk_path: /mnt/kv\ndisk_bytes_max: auto\nload_policy: always\n",
    b'http_address: "[::1]:9470"\nhttp_token: abcdefgh\nenabled: no\n',
    b"tiers:\n- {type: redis, url: 'redis://host/1', bytes_max: 1TiB, prefix: a}\n"
    b"- {type: shared_dir, path: /mnt/all, bytes_max: 1TiB, write: on_reuse}\n",
    b"tiers: [{type: s3, url: 's3://b/p', bytes_max: 1TiB, region: x}, {type: mooncake}]\n",
    b"a: &a [x, x, x, x]\nhost_bytes: [*a, *a, 2020-01-01, !!set {b}, ~, 0x1F, 1e400, .nan]\n",
)
LAUGHS = b"".join(b"- &%c [%s]\n" % (98 + n, b",".join([b"*%c" % (97 + n)] * 9)) for n in range(9))
"""Nine lines, each of which holds the one before nine times."""
SECONDS_MAX = 5.0
"""For reading one file, on a busy machine."""
SAID_CHARS_MAX = 2_000


def _settings() -> list[bytes]:
    entries = [{"type": "disk", "path": "/mnt/kv", "bytes_max": "2TiB"}]
    bombs = [b"%s:\n- &a [x]\n%s" % (name, LAUGHS) for name in (b"host_bytes", b"tiers", b"what")]
    return [*bombs, *SETTINGS, json.dumps(entries).encode()]


@contextlib.contextmanager
def _settings_reader() -> Iterator[Check]:
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "kvtide.yaml"
        home = {"XDG_CONFIG_HOME": directory}

        def read(environ: dict[str, str]) -> str:
            began_s = time.monotonic()
            try:
                found = config.read(environ=environ)
                said, shown = "read", max(len(one.value) for one in found.effective)
            except ConfigError as error:
                said, shown = where(error), len(str(error))
            assert 3 < shown < SAID_CHARS_MAX, f"{shown} characters"
            assert time.monotonic() - began_s < SECONDS_MAX
            return said

        def check(data: bytes) -> str:
            file.write_bytes(data)
            said = read(home)
            file.unlink()
            text = os.fsdecode(data.replace(b"\0", b""))
            return f"{said}, {read({**home, 'KVTIDE_TIERS': text})}"

        yield check


# ---- replies of Redis: read, or the connection is of no use any more

REPLIES = (
    b"+OK\r\n:7\r\n$3\r\nabc\r\n$-1\r\n",
    b"*3\r\n$1\r\na\r\n*1\r\n:5\r\n$-1\r\n",
    b"-ERR no\r\n-MOVED 7 host:1\r\n",
    b"$8\r\nabcdefgh\r\n+OK\r\n",
)
READS_MAX = 20


@contextlib.contextmanager
def _reply_reader() -> Iterator[Check]:
    def read(data: bytes, *, values: bool) -> str:
        mine, theirs = socket.socketpair()
        connection = Connection(mine, 1.0)
        said = []
        try:
            theirs.sendall(data)
            theirs.close()
            connection.limit(time.monotonic() + 1.0)
            connection.unread = READS_MAX
            for _ in range(READS_MAX):
                if values and len(said) % 2:
                    said.append(str(connection.read_into([memoryview(bytearray(8))])))
                else:
                    said.append(type(connection.read()).__name__)
        except (PlaceFailed, CorruptRecord, ServerError) as error:
            said.append(where(error))
        finally:
            connection.close()
        return " ".join(said)

    def check(data: bytes) -> str:
        data = data[: 1 << 14]
        return f"{read(data, values=False)}, {read(data, values=True)}"

    yield check


# ---- names of objects: what `parse_record` takes is what `record_name` makes


def _names() -> list[bytes]:
    write = names.written(example(), 77, b"w" * 16)
    notes = (names.Claim(1, "a" * 16, 5), names.Gone(2, "b" * 16), names.Used(3, "c" * 16))
    made = [names.record_name("top/1", write), names.part_name("top/1", write, 3)]
    return [name.encode() for name in (*made, *(names.note_name("top/1", one) for one in notes))]


@contextlib.contextmanager
def _name_reader() -> Iterator[Check]:
    def check(data: bytes) -> str:
        name = data.decode("utf-8", "replace")
        record = names.parse_record("top/1", name)
        assert record is None or names.record_name("top/1", record) == name
        note, part = names.parse_note("top/1", name), names.parse_part("top/1", name)
        if note is not None:
            again = names.parse_note("top/1", names.note_name("top/1", note))
            assert again == note, "a note that is told on is another one"
        return f"{record is None} {type(note).__name__} {part is None}"

    yield check


# ---- HTTP: an answer or none, soon, and the next one is served

TOKEN = "correct-horse"
REQUESTS = (
    b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n",
    b"HEAD /metrics HTTP/1.0\r\n\r\n",
    b"GET /status HTTP/1.1\r\nAuthorization: Bearer wrong\r\n\r\n",
    b"POST /status?x=1 HTTP/1.1\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\nabc",
    b"GET /healthz\r\n",
)
SECRET = "only for who has the token"


class _Runtime:
    """What pages are made of: a node at rest. The server and all its threads are the node's."""

    def __init__(self) -> None:
        self._machine = World().machine

    def health(self) -> str:
        return "ok\n"

    def numbers(self) -> dict[str, Any]:
        return report.numbers(self._machine, {}, {})

    def status(self) -> dict[str, Any]:
        return {"status": SECRET}


class _Faults(logging.Handler):
    """Keeps what is worse than a warning."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


@contextlib.contextmanager
def _pages() -> Iterator[Check]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    address = HTTPAddress("127.0.0.1", 0)
    node = dataclasses.replace(
        config.read(environ={}).node, http_address=address, http_token=TOKEN
    )
    faults = _Faults()
    logging.getLogger("kvtide").addHandler(faults)
    pages = HTTPPages(node, cast("Runtime", _Runtime()), loop)
    serving = threading.Thread(target=pages.serve_forever, args=(0.05,), daemon=True)
    serving.start()

    def asked(data: bytes) -> bytes:
        with socket.create_connection(("127.0.0.1", pages.server_port), 10) as sock:
            answer = bytearray()
            with contextlib.suppress(ConnectionError):  # it has heard enough
                sock.sendall(data)
                sock.shutdown(socket.SHUT_WR)
                while piece := sock.recv(1 << 16):
                    answer += piece
            return bytes(answer)

    def check(data: bytes) -> str:
        answer = asked(data)
        assert SECRET.encode() not in answer or TOKEN.encode() in data
        assert asked(REQUESTS[0]).endswith(b"ok\n"), "the next request is not served"
        assert not faults.said, faults.said
        return answer[:16].decode("latin-1").partition("\r")[0]

    try:
        yield check
    finally:
        pages.shutdown()
        pages.server_close()
        serving.join()
        logging.getLogger("kvtide").removeHandler(faults)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


TARGETS = {
    one.name: one
    for one in (
        Target("frames", _frames, _frame_reader),
        Target("headers", _headers, _header_reader, (codec.MAGIC,)),
        Target("disk", disk_seeds, disk),
        Target("shared_dir", shared_seeds, shared_dir),
        Target("settings", _settings, _settings_reader, (b"&a", b"*a", b"!!", b"? ", b"<<: ")),
        Target("replies", lambda: REPLIES, _reply_reader, (b"\r\n", b"$", b"*", b"-", b":")),
        Target("names", _names, _name_reader, (b"/r/", b"/m/", b".gone", b".clear.any.none")),
        Target("http", lambda: REQUESTS, _pages, (b"\r\n", b"/healthz", b"HTTP/9.9", b"%00")),
    )
}
"""By name, which `scripts/fuzz` takes."""

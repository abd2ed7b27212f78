"""What a store's master tells of itself by HTTP: how much there is, and under which names.

Its clients have no call for this. Where nobody answers, numbers are missing and nothing else.
"""

import http.client
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

PORT = 9003
"""Where a master answers that is told nothing."""
NAMES_MAX = 100_000
"""A store with more of them is not listed: it tells all at once, those of others too."""
ANSWER_BYTES_MAX = 1 << 20
"""Of numbers."""
PIECE_BYTES = 64 << 10
_NUMBER = re.compile(rb"^(\w+) ([0-9.e+]+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Numbers:
    """One moment of a store, of all that use it.

    Attributes:
        bytes_used: what is given out of its memory.
        bytes_max: its memory.
        names: of values.
    """

    bytes_used: int
    bytes_max: int
    names: int


class Master:
    """One master's port for this."""

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port

    def numbers(self, until_s: float) -> Numbers:
        """How much there is. Raises OSError: it does not say."""
        with self._asked("/metrics", until_s) as answer:
            found = dict(_NUMBER.findall(answer.read(ANSWER_BYTES_MAX)))

        def number(name: bytes) -> int:
            return int(float(found.get(name, b"0")))

        used, most = number(b"master_allocated_bytes"), number(b"master_total_capacity_bytes")
        return Numbers(used, most, number(b"master_key_count"))

    def names(self, until_s: float) -> Iterator[str]:
        """Of all that is there, as they come: there may be many, and others want to run
        meanwhile. Raises OSError: it does not say."""
        with self._asked("/get_all_keys", until_s) as answer:
            rest = b""
            while piece := answer.read(PIECE_BYTES):
                *lines, rest = (rest + piece).split(b"\n")
                yield from (line.decode(errors="replace") for line in lines)
                if time.monotonic() > until_s:
                    raise TimeoutError("its master goes on to tell names")
            yield rest.decode(errors="replace")

    @contextmanager
    def _asked(self, path: str, until_s: float) -> Iterator[http.client.HTTPResponse]:
        limit_s = max(0.001, until_s - time.monotonic())
        connection = http.client.HTTPConnection(self._host, self._port, timeout=limit_s)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            if answer.status != http.client.OK:
                raise OSError(f"its master answers {path} with {answer.status}")
            yield answer
        except http.client.HTTPException as error:
            raise OSError(f"its master answers {path} with what is no HTTP: {error}") from error
        finally:
            connection.close()

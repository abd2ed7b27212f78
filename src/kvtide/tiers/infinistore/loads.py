"""A record's parts from a server into cells: some are under way while one is proven."""

from collections.abc import Iterator, Sequence

from kvtide.errors import CorruptRecord, PlaceFailed
from kvtide.tiers.infinistore import frames
from kvtide.tiers.infinistore.client import Client
from kvtide.tiers.infinistore.frames import FINISH, NOT_FOUND, Ask
from kvtide.tiers.infinistore.names import MARK, Note, lengths_of, part_names
from kvtide.tiers.remote import parts

UNDER_WAY = 4
"""Parts that are asked for, each on a connection of its own."""


class Missing(Exception):
    """A part is not there any more."""


def received(
    client: Client,
    prefix: str,
    note: Note,
    headers: Sequence[memoryview],
    cells: Sequence[memoryview],
) -> Iterator[list[memoryview]]:
    """The memory of each part in turn, filled. Where it raises, or is left, other parts may be
    under way still.

    Raises:
        Missing: one is not there.
        CorruptRecord: one is not what was put.
    """
    lengths = lengths_of(note.record)
    names = part_names(prefix, note.write_id, len(lengths))

    def ask(number: int) -> None:
        if number < len(names):
            one = client.connection(number % UNDER_WAY)
            one.send(Ask.GET, [frames.get(names[number])])

    for number in range(UNDER_WAY):
        ask(number)
    mark = memoryview(bytearray(len(MARK)))
    for number, pieces in enumerate(parts.cut(headers, cells, lengths)):
        one = client.connection(number % UNDER_WAY)
        code, length = one.answer()
        if code == NOT_FOUND:
            raise Missing(names[number])
        if code != FINISH:
            raise PlaceFailed(f"it answers {code}")
        if length != len(MARK) + lengths[number]:
            raise CorruptRecord(f"part {number} has {length} bytes")
        one.read_into(mark)
        if mark != MARK:
            raise CorruptRecord(f"part {number} begins with {mark.tobytes().hex()}")
        for piece in pieces:
            one.read_into(piece)
        ask(number + UNDER_WAY)
        yield pieces

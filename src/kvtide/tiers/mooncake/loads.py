"""A record from its store into cells: through windows, each proven while the next one travels."""

from collections.abc import Iterator, Sequence

from kvtide.codec.passing import Proof
from kvtide.codec.record import read_header, stored_bytes
from kvtide.core.records import Record
from kvtide.errors import CorruptRecord, UnknownFormat
from kvtide.tiers.base import LoadOutcome
from kvtide.tiers.mooncake.client import NOT_THERE, WINDOW_BYTES, WINDOWS, Client
from kvtide.tiers.remote import parts


def window_lengths(record: Record) -> list[int]:
    """Into what a record's bytes are cut on their way."""
    length = stored_bytes(record.layout, record.blocks)
    return [min(WINDOW_BYTES, length - at) for at in range(0, length, WINDOW_BYTES)]


def loaded(client: Client, name: str, record: Record, cells: Sequence[memoryview]) -> LoadOutcome:
    """LOADED, ABSENT or CORRUPT; it is left where it is."""
    if client.code("begin_get", name, but=NOT_THERE) < 0:
        return LoadOutcome.ABSENT
    headers = parts.empty_headers(record)
    proof: Proof | None = None
    try:
        for pieces in _received(client, name, record, headers, cells):
            if proof is None:
                header = read_header(headers[0])
                if header.record != record:
                    return _given_up(client, name, LoadOutcome.ABSENT)
                proof = Proof(record, header.write_id, headers)
            proof.came(pieces)
    except (CorruptRecord, UnknownFormat):
        return _given_up(client, name, LoadOutcome.CORRUPT)
    return _given_up(client, name, LoadOutcome.LOADED)


def _given_up(client: Client, name: str, outcome: LoadOutcome) -> LoadOutcome:
    while client.due:
        client.answer()
    client.code("end_get", name)
    return outcome


def _received(
    client: Client,
    name: str,
    record: Record,
    headers: Sequence[memoryview],
    cells: Sequence[memoryview],
) -> Iterator[list[memoryview]]:
    """The memory of each window in turn, filled."""
    lengths = window_lengths(record)

    def ask(number: int) -> None:
        if number < len(lengths):
            place = number % WINDOWS * WINDOW_BYTES
            client.ask("get", name, number * WINDOW_BYTES, lengths[number], place)

    for number in range(WINDOWS):
        ask(number)
    for number, pieces in enumerate(parts.cut(headers, cells, lengths)):
        client.judge(client.answer())
        at = number % WINDOWS * WINDOW_BYTES
        for piece in pieces:
            piece[:] = client.memory[at : at + len(piece)]
            at += len(piece)
        ask(number + WINDOWS)
        yield pieces

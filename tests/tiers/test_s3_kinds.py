"""What kinds of records a bucket has, headers say; and what is done where none is to be had."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import obstore
import pytest

from kvtide.core.records import Record, RootName
from kvtide.errors import PlaceFailed
from kvtide.testing import object_servers
from kvtide.testing.tier_records import chain_of, layout_of, root_of, text
from kvtide.tiers.base import LookupJob
from kvtide.tiers.remote.census import Census
from kvtide.tiers.s3 import listing, names
from kvtide.tiers.s3.client import Client
from kvtide.tiers.s3.listing import TRIES_MAX, Listing
from kvtide.tiers.s3.mirror import Mirror
from kvtide.tiers.s3.names import Message
from kvtide.tiers.s3.session import Limits
from kvtide.tiers.scope import EVERYTHING
from kvtide.units import KiB, MiB
from tests.tiers.s3_answers import Front, served
from tests.tiers.s3_place import TOP, WAIT_S, Bucket, driven, until

LAYOUT = layout_of(24 * KiB)
"""Two objects for each record."""
ROOT, OTHER = root_of(), root_of("other")
SALTS = 120
"""Their headers take longer than a call may, though many are asked for at once."""


class Place:
    """A bucket, and one node that looks at it through a front that can refuse."""

    def __init__(self, front: Front, bucket: Bucket) -> None:
        self.front = front
        self.bucket = bucket
        config = object_servers.config_for(front.server_address[1])
        client = Client(object_servers.BUCKET, config, {}, WAIT_S)
        self.mirror = Mirror(Census(), TOP)
        self.listing = Listing(client, self.mirror, "00000000000000ab")

    def records(self) -> list[str]:
        """Names of their first objects."""
        return self.bucket.names(f"{TOP}/r")

    def parts(self) -> list[str]:
        return self.bucket.names(f"{TOP}/p")

    def look(self) -> int:
        """At everything, as often as it needs; how often it failed."""
        return asyncio.run(self._look())

    async def _look(self) -> int:
        failed = 0
        await self.listing.refresh()
        self.listing.begin_look()
        is_more = True
        while is_more:
            try:
                is_more = await self.listing.delete_given_up() or await self.listing.look()
            except PlaceFailed:
                failed += 1
        return failed


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.setattr(names, "PART_BYTES", 64 * KiB)
    with object_servers.running("rclone", tmp_path) as server:
        front = Front(server.port)
        with served(front):
            yield Place(front, Bucket(server.port))


def kept(place: Place, records: list[Record]) -> None:
    """These are there since ten minutes."""
    with driven(place.bucket.port, bytes_max=128 * MiB) as tier:
        tier.keep(records)
    for name in place.records() + place.parts():
        stamp, rest = name[len(TOP) + 3 :].split(".", 1)
        old = f"{name[: len(TOP) + 3]}{int(stamp, 16) - 600_000:012x}.{rest}"
        obstore.rename(place.bucket.store, name, old)


def found(place: Place, record: Record) -> bool:
    """Whether this node finds it."""
    job = LookupJob(1, record.root, record.root.key, record.key, b"", record.layout)
    return place.mirror.find(job)[0] == [record]


def chunks(root: RootName, count: int) -> list[Record]:
    return [chain_of(root, LAYOUT, text(number, 4))[0] for number in range(count)]


@pytest.mark.parametrize("is_damaged", [False, True])
def test_while_a_kind_is_unknown_its_parts_stay_and_its_clears_hold(
    place: Place, monkeypatch: pytest.MonkeyPatch, is_damaged: bool
) -> None:
    """No header of it can be got, or is one; others are found meanwhile. It is looked for again
    soon."""
    monkeypatch.setattr(listing, "AGAIN_S", 0.0)
    mine, other = chunks(ROOT, TRIES_MAX + 1), chunks(OTHER, 1)
    kept(place, [*mine, *other])
    parts = place.parts()
    heads = [place.bucket.objects_of(record)[0] for record in mine]
    contents = [bytes(obstore.get(place.bucket.store, name).bytes()) for name in heads]
    mark = names.message_name(TOP, Message(1, "00000000000000cd", "clear", scope=EVERYTHING))
    obstore.put(place.bucket.store, mark, b"")
    if is_damaged:
        for name in heads:
            obstore.put(place.bucket.store, name, bytes(1000))
    else:
        place.front.unreadable = tuple(heads)
    assert place.look() == (0 if is_damaged else TRIES_MAX)
    assert found(place, other[0])
    assert not found(place, mine[0])
    assert place.parts() == parts
    assert mark in place.bucket.names(f"{TOP}/m")
    for name, content in zip(heads, contents, strict=True):
        obstore.put(place.bucket.store, name, content)
    place.front.unreadable = "?"
    place.look()
    assert all(found(place, record) for record in mine)
    assert place.parts() == parts
    assert mark not in place.bucket.names(f"{TOP}/m")


def test_records_that_go_while_they_are_looked_at_say_nothing_of_their_kind(place: Place) -> None:
    """Another node evicts what is oldest; what is left is found, and what they left goes."""
    mine = chunks(ROOT, TRIES_MAX + 2)
    kept(place, mine)
    heads = place.records()
    place.front.unreadable = tuple(heads[:-1])
    place.front.fault = (404, "NoSuchKey")
    left = names.part_name(TOP, names.written(mine[0], 1, bytes(16)), 1)
    obstore.put(place.bucket.store, left, b"")
    assert place.look() == 0
    last = names.parse_record(TOP, heads[-1])
    assert last is not None
    assert [found(place, record) for record in mine if record.key == last.key] == [True]
    assert left not in place.parts()


def test_one_damaged_header_says_nothing_of_its_kind(place: Place) -> None:
    """What is of that kind beside it is found, counted, and kept in order."""
    mine = chunks(ROOT, 2)
    kept(place, mine)
    obstore.put(place.bucket.store, place.records()[0], bytes(1000))
    left = names.part_name(TOP, names.written(mine[0], 1, bytes(16)), 1)
    obstore.put(place.bucket.store, left, b"")
    assert place.look() == 0
    assert any(found(place, record) for record in mine)
    assert left not in place.parts()


def test_a_bucket_of_many_salts_works_at_once(place: Place) -> None:
    """Each is a kind, whose header takes long to come: other work does not wait for all."""
    salted = [chain_of(root_of(salt=str(n)), LAYOUT, text(1, 4))[0] for n in range(SALTS)]
    kept(place, salted)
    place.front.delay_s = 0.3
    limits = Limits(call_s=2.0, put_s=20.0)
    port = place.front.server_address[1]
    with driven(port, bytes_max=128 * MiB, limits=limits) as tier:
        assert tier.tier.statistics().state == "on"
        until(tier, lambda: all(tier.find([record]) == [record] for record in salted))
        place.front.delay_s = 0.0

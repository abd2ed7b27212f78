"""The infinistore tier keeps the promises of a tier, on a real server and on the edge of one."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import ClassVar

import pytest

from kvtide.core.records import Record
from kvtide.testing.proxy import Proxy
from kvtide.testing.tier_suite import TierTests
from kvtide.tiers.base import Tier
from kvtide.tiers.remote.tier import RemoteTier
from tests.tiers.infinistore_place import (
    QUEUE_BYTES_MAX,
    WAIT_S,
    flip,
    needs_server,
    open_infinistore,
    running,
)

EVICTS = "the server evicts by itself, what nobody got for longest, and tells nobody what"
LISTS = "the server neither lists nor counts: a node knows what it has stored itself"


class Promises(TierTests):
    """The suite, through a proxy that can go away."""

    tier_type = RemoteTier
    kind: ClassVar[str]
    queue_bytes_max = QUEUE_BYTES_MAX
    wait_s = WAIT_S
    narrowed: ClassVar[dict[str, str]] = {
        "test_the_cap_holds_at_all_times_and_what_is_new_finds_room": EVICTS,
        "test_leaves_are_evicted_before_what_they_hang_on": EVICTS,
        "test_a_chain_longer_than_the_cap_keeps_its_beginning": EVICTS,
        "test_its_numbers_add_up": LISTS,
        "test_stores_come_back_after_a_restart": LISTS,
        "test_a_damaged_record_is_never_loaded_and_is_gone": "what lies behind it stays, unfound",
        "test_a_name_of_other_content_is_not_taken_for_what_is_held": "a name has the root in it",
    }

    @pytest.fixture(autouse=True)
    def _server(self, tmp_path: Path) -> Iterator[None]:
        with running(self.kind, tmp_path) as self.server:
            self.proxy = Proxy("127.0.0.1", self.server.port)
            yield
            self.proxy.close()

    def make_tier(self, tmp_path: Path, *, bytes_max: int) -> Tier:
        return open_infinistore(self.proxy.port, self.wake)

    def reopen(self, tier: Tier) -> Tier | None:
        return open_infinistore(self.proxy.port, self.wake)

    def stalled(self, tier: Tier) -> AbstractContextManager[None]:
        return self.server.stopped()

    def failing(self, tier: Tier) -> AbstractContextManager[None]:
        return self.proxy.absent()

    def damage(self, tier: Tier, record: Record) -> None:
        flip(self.server.port, record)


@pytest.mark.long
class TestEdge(Promises):
    """On the edge of a server."""

    kind = "edge"


@needs_server
@pytest.mark.long
class TestInfiniStore(Promises):
    """On a real one."""

    kind = "server"

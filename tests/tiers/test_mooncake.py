"""The mooncake tier keeps the promises of a tier, on a real store."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import ClassVar

import pytest

from kvtide.core.records import Record
from kvtide.testing import mooncake_servers
from kvtide.testing.mooncake_servers import OWNED_BYTES_MIN
from kvtide.testing.proxy import Proxy
from kvtide.testing.tier_suite import TierTests
from kvtide.tiers.base import Tier
from kvtide.tiers.mooncake.names import names_of
from kvtide.tiers.remote.tier import RemoteTier
from tests.tiers.mooncake_place import PREFIX, QUEUE_BYTES_MAX, WAIT_S, needs_client, open_mooncake

EVICTS = "the store evicts by itself, what nobody asked for longest, and tells nobody what"


@needs_client
@pytest.mark.long
class TestMooncake(TierTests):
    """The suite, through a proxy of the master that can go away."""

    tier_type = RemoteTier
    cap_bytes = OWNED_BYTES_MIN
    queue_bytes_max = QUEUE_BYTES_MAX
    wait_s = WAIT_S
    narrowed: ClassVar[dict[str, str]] = {
        "test_the_cap_holds_at_all_times_and_what_is_new_finds_room": EVICTS,
        "test_leaves_are_evicted_before_what_they_hang_on": EVICTS,
        "test_a_chain_longer_than_the_cap_keeps_its_beginning": EVICTS,
        "test_a_damaged_record_is_never_loaded_and_is_gone": "what lies behind it stays, unfound",
        "test_a_name_of_other_content_is_not_taken_for_what_is_held": "a name has the root in it",
    }

    @pytest.fixture(autouse=True)
    def _server(self, tmp_path: Path) -> Iterator[None]:
        with mooncake_servers.running(tmp_path / "store") as store:
            self.store = store
            self.proxy = Proxy("127.0.0.1", store.port)
            yield
            self.proxy.close()

    def make_tier(self, tmp_path: Path, *, bytes_max: int) -> Tier:
        self.store.add_owner(max(bytes_max, OWNED_BYTES_MIN))
        return open_mooncake(self.store, self.proxy.port, self.wake)

    def reopen(self, tier: Tier) -> Tier | None:
        return open_mooncake(self.store, self.proxy.port, self.wake)

    def bytes_taken(self, tier: Tier) -> int:
        return self.store.numbers().bytes_used

    def stalled(self, tier: Tier) -> AbstractContextManager[None]:
        return self.store.stopped()

    def failing(self, tier: Tier) -> AbstractContextManager[None]:
        return self.proxy.absent()

    def damage(self, tier: Tier, record: Record) -> None:
        self.store.flip(names_of(PREFIX, record).record(record.key), -5)

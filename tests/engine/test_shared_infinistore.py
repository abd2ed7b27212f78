"""Two engines that share an InfiniStore server: what others share by other places, and its loss.

A server holds all in memory, so one that was away is empty when it is back: what was there is
computed again, and is a hit from then on.
"""

from collections.abc import Iterator

import pytest

from kvtide.testing import infinistore_servers
from kvtide.testing.infinistore_servers import Server
from tests.engine import test_shared as shared
from tests.engine import test_shared_mooncake as in_memory
from tests.engine.nodes import Status
from tests.engine.shared_places import SharedPlace
from tests.tiers.infinistore_place import needs_server

pytestmark = [pytest.mark.places, needs_server]


class ServerPlace:
    """A server, killed and started again on its ports; it holds nothing then."""

    look_s = 0.0

    def __init__(self, server: Server) -> None:
        self.entry: dict[str, object] = {"type": "infinistore", "url": str(server.address)}
        self._server = server

    def is_seen(self, here: Status, there: Status) -> bool:
        return True  # it is asked each time

    def take_away(self) -> None:
        self._server.kill()

    def give_back(self) -> None:
        self._server.start()

    def lose(self) -> None:
        self.take_away()
        self.give_back()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedPlace]:
    with infinistore_servers.running(tmp_path_factory.mktemp("store") / "server") as server:
        yield ServerPlace(server)


nodes, engines = shared.nodes, shared.engines
test_what_one_engine_computed = shared.test_what_one_engine_computed_is_a_hit_on_the_other
test_hits_outlive_the_node = shared.test_hits_outlive_the_node_that_stored_them
test_only_the_same_salt_hits = shared.test_only_the_same_salt_hits_on_the_other
test_a_server_that_goes_costs_no_answer = (
    in_memory.test_a_store_that_goes_costs_no_answer_and_hits_resume_when_it_is_back
)
test_a_server_that_was_started_again = in_memory.test_a_store_that_was_started_again_is_filled_anew

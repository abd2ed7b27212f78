"""Fixtures for tests with a real node, and with links."""

from tests.node.fixtures import new_node, running_node, runtime_dir
from tests.wire.link_owner import make_link

__all__ = ["make_link", "new_node", "running_node", "runtime_dir"]

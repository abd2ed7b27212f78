"""Fixtures for tests with a real node."""

from tests.node.fixtures import new_node, running_node, runtime_dir

__all__ = ["new_node", "running_node", "runtime_dir"]

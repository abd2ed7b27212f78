"""Fixtures for tests with a real node."""

from tests.cli.runs import run
from tests.node.fixtures import new_node, running_node, runtime_dir

__all__ = ["new_node", "run", "running_node", "runtime_dir"]

"""The benchmark of the core speaks the messages of today."""

from benchmarks.paths_core import Node


def test_a_node_of_the_benchmark_can_be_filled() -> None:
    node = Node(1024).fill(64)
    assert node.machine.index.held_chunks == 64

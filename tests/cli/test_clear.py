"""What `kvtide clear` says is true of tiers too."""

from pathlib import Path

from kvtide.testing.fake_engine import FakeEngine, Loaded, make_tokens
from tests.cli.runs import Run
from tests.node.fixtures import StartNode
from tests.node.test_disk import disk_node, wait_written
from tests.node.test_runtime import broken_node

TOKENS = make_tokens(160, seed=1)


def test_clear_counts_what_only_a_disk_had(run: Run, new_node: StartNode, tmp_path: Path) -> None:
    """The node has just started: memory is empty, the disk is not."""
    node = disk_node(new_node, tmp_path / "disk")
    with FakeEngine(node.places, "one") as engine:
        engine.keep(TOKENS)
        wait_written(node, 3)
    node.end()
    node = disk_node(new_node, tmp_path / "disk")
    assert run("clear", "--salt", "mine").output == (
        "cleared 0 entries of this salt in memory, 0 in disk\n"
    )
    assert run("clear").output == "cleared 0 entries in memory, 3 in disk, all there were\n"
    assert "INFO cleared one salt: 0 entries in memory, 0 in disk (on)\n" in node.log()
    assert "INFO cleared all: 0 entries in memory, 3 in disk (on)\n" in node.log()
    with FakeEngine(node.places, "two") as engine:
        assert engine.load(TOKENS) == Loaded(0, 0)


def test_clear_says_where_more_may_be(run: Run, new_node: StartNode, tmp_path: Path) -> None:
    """A place that does not open, nor before the node ends: its log says what is left."""
    node = new_node(disk_path=tmp_path / "disk", disk_bytes_max="256MiB")
    patch = """
        import threading
        from kvtide.node import build, tiers
        from kvtide.tiers.disk import opening
        build.OPEN_S_MAX = 0.0
        tiers.CLOSE_S_MAX = 0.1
        opening.DiskTier = lambda *given, **named: threading.Event().wait()
    """
    with broken_node(node, patch) as child:
        assert run("clear").output == (
            "cleared 0 entries in memory, 0 in disk\n"
            "disk may have more (being opened): that is cleared as soon as it can be; if the node"
            " ends before, clear again\n"
        )
        assert run("stop").exit_code == 0
        assert child.wait(20) == 0
    assert "the tier disk was not open when it was cleared, nor at the end" in node.log()

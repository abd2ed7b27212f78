"""What another version of kvtide has written where machines share: misses that say why."""

from pathlib import Path

import pytest

from kvtide.codec import record
from kvtide.testing import redis_servers
from kvtide.testing.tier_records import chain_of, layout_of, root_of, text
from kvtide.tiers.base import LoadOutcome, StoreOutcome
from kvtide.tiers.redis import index
from kvtide.tiers.shared_dir import journal
from tests.tiers import redis_place
from tests.tiers.shared_place import driven, file_of, folder_of, look, shared_of, tails

VERSION_AT = 8
"""In the first bytes of a record, and of a journal."""
NEWER = (9).to_bytes(4, "little")


def write_over(file: Path, content: bytes) -> None:
    with file.open("r+b") as opened:
        opened.seek(VERSION_AT)
        opened.write(content)


def test_what_names_records_has_another_version_where_they_have() -> None:
    """So that nobody is led to a record that it cannot read: whoever raises the first raises the
    others, and with them these numbers."""
    assert (record.VERSION, index.VERSION, journal.VERSION) == (1, 2, 1)


def test_a_record_of_another_version_on_a_server_is_a_miss(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is in the way of ours, in an index of ours: it goes, and is stored again."""
    one, other = (chain_of(root_of(), layout_of(4096), text(n, 4))[0] for n in range(2))
    with (
        redis_servers.running("valkey", tmp_path / "server") as server,
        redis_place.driven(server.port) as tier,
    ):
        tier.keep([one, other])
        part = redis_place.part_names(server, one)[0]
        server.ask(b"SETRANGE", part, b"%d" % VERSION_AT, NEWER)
        assert [tier.load(one) for _ in range(2)] == [LoadOutcome.CORRUPT, LoadOutcome.ABSENT]
        assert f"record {one.key.hex()}: a shard has format version 9" in caplog.text
        assert "a bug" not in caplog.text
        assert tier.load(other) is LoadOutcome.LOADED
        assert tier.tier.statistics().loaded == {"corrupt": 1, "absent": 1, "loaded": 1}
        assert tier.tier.statistics().state == "on"
        assert tier.store([one]) == [StoreOutcome.STORED]
        assert tier.load(one) is LoadOutcome.LOADED


def test_a_record_of_another_version_in_a_folder_is_a_miss_and_stays(
    kv: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is its owner's: nobody else changes anything of it."""
    one, other = tails(2)
    with driven(kv) as here, driven(kv) as there:
        there.keep([one, other])
        look(here)
        write_over(file_of(shared_of(there), one), NEWER)
        assert [here.load(one) for _ in range(2)] == [LoadOutcome.CORRUPT, LoadOutcome.ABSENT]
        assert "a shard has format version 9" in caplog.text
        assert here.load(other) is LoadOutcome.LOADED
        assert here.tier.statistics().state == "on"
        assert file_of(shared_of(there), one).exists()


def test_a_journal_of_another_version_is_told_of_once(
    kv: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing of that folder is found; all else is."""
    with driven(kv) as here, driven(kv) as there:
        there.keep(tails(2))
        with driven(kv) as other:
            other.keep(tails(1, first=9))
            write_over(folder_of(shared_of(there)) / "journal", NEWER)
            for _ in range(3):
                look(here)
            assert not here.is_there(tails(1)[0])
            assert here.is_there(tails(1, first=9)[0])
            assert here.tier.statistics().state == "on"
            told = [one.message for one in caplog.records if "format version 9" in one.message]
            assert len(told) == 1, told
            assert folder_of(shared_of(there)).name in told[0]

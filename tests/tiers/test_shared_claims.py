"""Folders of a shared directory that are taken by half, and what is left of that."""

import errno
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from kvtide.testing.faulty_files import Call, FaultyFiles
from kvtide.tiers.files import SystemFiles
from kvtide.tiers.shared_dir.members import SILENT_S, FolderLost, Place, this_process
from kvtide.tiers.shared_dir.ops import AliveOp, ClaimOp, SweepOp, claimed
from tests.tiers.shared_place import driven, files_of, folder_of, shared_of, tails, wait_quiet


def test_a_folder_that_was_not_kept_is_not_ours(kv: Path) -> None:
    """It was taken by half and could not be given back: nothing of it is swept, and ours is still
    the one that was lost."""
    with driven(kv) as here:
        with driven(kv) as there:
            there.keep(tails(4))
            taken = folder_of(shared_of(there))
        here.tier.clear(None)
        wait_quiet(here)
        shutil.rmtree(folder_of(shared_of(here)))
        files, hands = files_of(shared_of(here)), shared_of(here)._hands
        files.fail(Call.SYNC, errno.EIO, count=1, path_part="journal")
        files.fail(Call.UNLINK, errno.EIO, count=1, path_part="owner")
        ended = hands.run(ClaimOp(shared_of(here)._others.cleared))
        assert "no other folder" in str(ended.error)
        assert (taken / "owner").exists()
        for op in (SweepOp(set()), AliveOp()):
            assert isinstance(hands.run(op).error, FolderLost)
        assert len(list(taken.glob("??/*"))) == 4


@pytest.mark.parametrize("path_part", ["journal", "owner"])
def test_a_contested_folder_that_could_not_be_taken_stays_contested(
    kv: Path, path_part: str
) -> None:
    """Who had it is silent and may wake up. Who took it could not write its journal anew, and has
    ended since: that proves nothing of the first, so the third waits, and writes it anew."""
    with driven(kv) as tier:
        tier.keep(tails(4))
        wanted = shared_of(tier)._place.own
    owner = kv / wanted.hex() / "owner"
    owner.write_text("incarnation boot namespace 1 1\n1\n")

    def fall_silent() -> None:
        os.utime(owner, (0, owner.stat().st_mtime - SILENT_S - 1))

    fall_silent()
    files = FaultyFiles()
    files.fail(Call.WRITE, errno.ENOSPC, count=1, path_part=f"{wanted.hex()}/{path_part}")
    second, third = Place(str(kv), files), Place(str(kv), SystemFiles())
    second._process = replace(this_process(), pid=2**22 + 1)
    claimed(second)
    assert files.injected
    assert second.own != wanted
    assert not third._has_freed(wanted, owner.stat().st_mtime), "it is not silent yet"
    fall_silent()
    claimed(third)
    assert third.own == wanted
    assert third.is_contested

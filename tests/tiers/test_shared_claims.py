"""Folders of a shared directory that are taken by half, and what is left of that."""

import errno
import shutil
from pathlib import Path

from kvtide.testing.faulty_files import Call
from kvtide.tiers.shared_dir.members import FolderLost
from kvtide.tiers.shared_dir.ops import AliveOp, ClaimOp, SweepOp
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

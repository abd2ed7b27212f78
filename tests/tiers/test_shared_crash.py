"""Members that are killed at any moment, and members that do anything in any order."""

import errno
import os
import random
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvtide.core.records import Record
from kvtide.testing.faulty_files import Call
from kvtide.testing.tier_drive import DrivenTier, Job
from kvtide.testing.tier_records import chain_of, root_of, text
from kvtide.tiers.base import LoadOutcome, StoreOutcome
from kvtide.tiers.shared_dir import journal
from kvtide.tiers.shared_dir import tier as tier_module
from kvtide.units import KiB, MiB
from tests.tiers.disk_place import flip, payload_offset
from tests.tiers.shared_place import (
    ROOT,
    SMALL,
    bytes_taken,
    driven,
    file_of,
    files_of,
    folder_of,
    look,
    shared_of,
    tails,
    wait_on,
    wait_quiet,
)

HOUSE = Path(__file__).parents[2]
CAP_BYTES = 4 * MiB


def run_until_killed(path: Path, seed: int, chains: int) -> list[int]:
    """Let a process store so many chains and a bit; the numbers that it said."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(HOUSE), os.environ.get("PYTHONPATH", "")])
    }
    command = [sys.executable, "-m", "tests.tiers.sharing", str(path), str(CAP_BYTES), str(seed)]
    child = subprocess.Popen(
        command, cwd=HOUSE, env=environment, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    with child, child.stdout as said:
        numbers = [int(said.readline()) for _ in range(chains)]
        child.send_signal(signal.SIGKILL)
        numbers += [int(line) for line in said if line.endswith("\n")]
    return numbers


def test_a_member_that_was_killed_is_followed_at_once_and_nothing_of_it_is_lost(kv: Path) -> None:
    """Its owner is proven dead; what it was writing goes, what it said to be stored is there."""
    draw = random.Random(1)
    with driven(kv, CAP_BYTES) as watcher:
        own = folder_of(shared_of(watcher))
        for turn in range(6):
            numbers = run_until_killed(kv, 100 * turn, draw.randint(1, 12))
            chains = [chain_of(ROOT, SMALL, text(number, 10)) for number in numbers]
            look(watcher)
            with driven(kv, CAP_BYTES) as follower:
                folders = {path for path in kv.iterdir() if path.is_dir()}
                assert folders == {own, folder_of(shared_of(follower))}, (
                    "its folder is taken again"
                )
                for chain in chains:
                    for member in (watcher, follower):
                        assert member.find(chain[:2], chain[2].digests) == chain
                        assert {member.load(record) for record in chain} == {LoadOutcome.LOADED}
                follower.keep(tails(1, first=5000 + turn))
                folder = folder_of(shared_of(follower))
                assert not list(folder.rglob("*.tmp"))
                files = [path for path in folder.glob("??/*") if path.is_file()]
                assert len(files) == sum(1 for _ in shared_of(follower)._view.own_rows())
                assert bytes_taken(folder) <= CAP_BYTES
                shared_of(follower).check_integrity()
            shared_of(watcher).check_integrity()


SALTS = ("", "one", "two")
CHAINS = [
    chain_of(root_of(salt=salt), SMALL, text(number, 10)) for salt in SALTS for number in range(6)
]

FAILING = [Call.OPEN, Call.WRITE, Call.READ, Call.SYNC, Call.SIZE, Call.SIZE_AT, Call.NAMES]
FAILING += [Call.UNLINK, Call.RENAME, Call.TRUNCATE, Call.MAKE_DIRECTORY]
CODES = [errno.EIO, errno.ESTALE, errno.ENOSPC, errno.EACCES]


NEVER = chain_of(ROOT, SMALL, text(9_999, 10))
CALLS_MAX = 300
"""Of a member from one poll to the next: a look makes four for each other, a sweep one for each of
256 directories."""


class World:
    """Three members, and what each must not find."""

    load_outcomes = (LoadOutcome.LOADED, LoadOutcome.ABSENT, LoadOutcome.CORRUPT)

    def __init__(self, stack: ExitStack, kv: Path, seed: int) -> None:
        self.draw = random.Random(seed)
        self.kv = kv
        self._stack = stack
        self.members: list[DrivenTier] = []
        self.cleared: list[set[bytes]] = []
        for _ in range(3):
            self.members.append(self.open())
            self.cleared.append(set())

    def open(self) -> DrivenTier:
        return self._stack.enter_context(driven(self.kv, MiB))

    def wait(self, member: DrivenTier, jobs: Sequence[Job]) -> None:
        """Until they have ended."""
        member.wait(jobs)

    def store(self, member: DrivenTier, records: list[Record]) -> list[StoreOutcome]:
        outcomes = []
        for record in records:
            job = member.submit_store(record)
            self.wait(member, [job])
            outcomes.append(member.stored(job))
        return outcomes

    def find(self, member: DrivenTier, chain: list[Record]) -> list[Record]:
        job = member.ask(chain[:2], chain[2].digests)
        self.wait(member, [job])
        return member.found(job).records

    def load(self, member: DrivenTier, record: Record) -> LoadOutcome:
        job = member.submit_load(record)
        self.wait(member, [job])
        return member.loaded(job)

    def step(self) -> None:
        at = self.draw.randrange(len(self.members))
        member = self.members[at]
        chain = self.draw.choice(CHAINS)
        part = chain[: self.draw.randint(1, len(chain))]
        what = self.draw.choice(["store"] * 8 + ["load"] * 8 + ["look"] * 6 + ["rare"])
        if what == "store":
            for record, outcome in zip(part, self.store(member, part), strict=True):
                if outcome is not StoreOutcome.HELD:  # what failed may be told of for a moment
                    for cleared in self.cleared:
                        cleared.discard(record.key)
        elif what == "load":
            self.use(at, chain)
        elif what == "look":
            member.pass_time(100)
            self.find(member, NEVER)
        else:
            self.rare(at, chain)

    def restart(self, at: int) -> None:
        own = folder_of(shared_of(self.members[at]))
        self.members[at].close(30)
        self.members[at] = self.open()
        assert folder_of(shared_of(self.members[at])) == own, "the only one that is free"

    def use(self, at: int, chain: list[Record]) -> None:
        """What is found was not cleared, and is right."""
        for record in self.find(self.members[at], chain):
            assert record.key not in self.cleared[at], "it was cleared"
            assert self.load(self.members[at], record) in self.load_outcomes

    def rare(self, at: int, chain: list[Record]) -> None:
        """A clear, a new start, or a file that is damaged or removed."""
        member = self.members[at]
        what = self.draw.choice(["clear", "restart", "damage", "remove"])
        file = file_of(shared_of(member), self.draw.choice(chain))
        if what == "clear":
            digest = self.draw.choice([None, chain[0].root.salt_digest])
            member.tier.clear(digest)
            roots = (one for one in CHAINS if digest in (None, one[0].root.salt_digest))
            self.cleared[at] |= {record.key for one in roots for record in one}
        elif what == "restart":
            self.restart(at)
        elif file.exists():
            if what == "damage":
                flip(file, payload_offset(chain[0]) + 5)
            else:
                file.unlink()


@pytest.mark.parametrize("seed", range(6))
def test_whatever_members_do_promises_are_kept(kv: Path, seed: int) -> None:
    """Every byte that is loaded is right, nothing that was cleared is found, caps hold; at the
    end all agree on what is there."""
    with ExitStack() as stack:
        world = World(stack, kv, seed)
        for _ in range(150):
            world.step()
        for member in world.members:
            look(member)
            shared_of(member).check_integrity()
            assert bytes_taken(folder_of(shared_of(member))) <= MiB
        for at, member in enumerate(world.members):
            for chain in CHAINS:
                for record in member.find(chain[:2], chain[2].digests):
                    assert record.key not in world.cleared[at]


class Trouble(World):
    """The same, where calls fail now and then, and time passes."""

    load_outcomes = tuple(set(LoadOutcome) - {LoadOutcome.CLOSED})

    def wait(self, member: DrivenTier, jobs: Sequence[Job]) -> None:
        """A thread that spins would make calls by the thousand meanwhile."""
        calls = files_of(shared_of(member)).calls
        before, polls = calls.total(), 1
        while not all(map(member.has_ended, jobs)):
            member.pass_time(50)
            member.poll_for(0.005)
            polls += 1
        assert calls.total() - before < CALLS_MAX * polls

    def step(self) -> None:
        at = self.draw.randrange(len(self.members))
        member = self.members[at]
        what = self.draw.choice(["fault"] * 4 + ["trouble"] * 2 + ["time"] * 2 + ["step"] * 14)
        if what == "trouble":
            self.trouble(at, self.draw.choice(CHAINS))
        elif what == "fault":
            call, code = self.draw.choice(FAILING), self.draw.choice(CODES)
            where = self.draw.choice(["", "/", "journal", "owner"])
            count = self.draw.randint(1, 3)
            files_of(shared_of(member)).fail(call, code, count=count, path_part=where)
        elif what == "time":
            member.pass_time(self.draw.choice([1_000, 30_000]))
            member.poll()
        else:
            super().step()

    def trouble(self, at: int, chain: list[Record]) -> None:
        """What stays until somebody mends it: it costs no more than what it is about."""
        self.well()
        what = self.draw.choice(["unreadable", "gone", "hangs", "directory", "journal"])
        if what == "unreadable":
            self.make_unreadable(at)
            self.serves(at, chain)
        elif what == "gone":
            self.restart(at)
            files = files_of(shared_of(self.members[at]))
            files.fail(Call.NAMES, errno.ENOENT, nth=self.draw.randint(1, 3))
            self.use(at, chain)
            files.vanish()
            self.use(at, chain)
            files.heal()
        elif what == "hangs":
            call = self.draw.choice([Call.NAMES, Call.OPEN, Call.SIZE])
            with files_of(shared_of(self.members[at])).stalled(call):
                self.members[at].pass_time(1_000)
                for _ in range(3):
                    self.find(self.members[at], chain)
        elif what == "directory":
            folder = folder_of(shared_of(self.members[at]))
            for name in ("@eaDir", ".nfs.tmp"):
                above = self.draw.choice([folder, folder / chain[0].key.hex()[:2]])
                (above / name / "full").mkdir(parents=True, exist_ok=True)
            self.restart(at)
            self.serves(at, chain)
        else:
            self.spoil_journal(at, folder_of(shared_of(self.members[at])) / "journal")

    def make_unreadable(self, at: int) -> None:
        """The journals of one other member, or of both."""
        files = files_of(shared_of(self.members[at]))
        call, code = self.draw.choice([Call.OPEN, Call.READ]), self.draw.choice(CODES)
        others = [one for one in self.members if one is not self.members[at]]
        for other in self.draw.sample(others, self.draw.randint(1, 2)):
            files.fail(call, code, path_part=f"{folder_of(shared_of(other)).name}/journal")

    def serves(self, at: int, chain: list[Record]) -> None:
        """Stores, clears and looks are carried out, and nothing stops and goes on by turns."""
        member = self.members[at]
        if self.draw.random() < 0.5:
            member.tier.clear(chain[0].root.salt_digest)
            self.cleared[at] |= {
                record.key for one in CHAINS for record in one if one[0].root == chain[0].root
            }
        for _ in range(7):
            member.pass_time(1_000)
            wait_quiet(member)
            assert member.tier.statistics().state == "on"
        assert not shared_of(member)._clears
        for record, outcome in zip(chain, self.store(member, chain), strict=True):
            assert outcome not in (StoreOutcome.FAILED, StoreOutcome.BROKEN)
            for cleared in self.cleared:
                cleared.discard(record.key)

    def spoil_journal(self, at: int, path: Path) -> None:
        """Its owner takes another folder, in which what it has cleared is cleared too."""
        member = self.members[at]
        if self.draw.random() < 0.5:
            path.unlink()
        else:
            good_bytes = shared_of(member)._hands.journal_bytes  # what failed may follow
            with path.open("r+b") as file:
                file.truncate(self.draw.randrange(good_bytes))
        while folder_of(shared_of(member)) == path.parent:
            member.pass_time(1_000)
            wait_quiet(member)

    def rare(self, at: int, chain: list[Record]) -> None:
        for member in self.members:  # a start that fails is another matter
            files_of(shared_of(member)).heal()
        super().rare(at, chain)

    def well(self) -> None:
        """Let all of them work."""
        for member in self.members:
            files_of(shared_of(member)).heal()
            wait_on(member)
            wait_quiet(member)

    def heal(self) -> None:
        self.well()
        for member in self.members:
            self.store(member, tails(1, first=99))  # which has what is left behind swept
            member.pass_time(1_000)
            wait_quiet(member)


@pytest.mark.parametrize("seed", range(6))
def test_whatever_the_place_does_promises_are_kept(
    kv: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As above while it fails, often with more to read; once it works again, nothing is left that
    counts to no cap."""
    monkeypatch.setattr(journal, "PIECE_BYTES", 3 * KiB)
    monkeypatch.setattr(tier_module, "START_S_MAX", 0)
    with ExitStack() as stack:
        world = Trouble(stack, kv, seed)
        for _ in range(120):
            world.step()
        world.heal()
        for at, member in enumerate(world.members):
            look(member)
            wait_quiet(member)
            tier = shared_of(member)
            tier.check_integrity()
            there = {path.name for path in folder_of(tier).glob("??/*") if path.is_file()}
            assert there <= {row.key.hex() for row in tier._view.own_rows()}
            assert bytes_taken(folder_of(tier)) <= MiB
            for chain in CHAINS:
                for record in member.find(chain[:2], chain[2].digests):
                    assert record.key not in world.cleared[at]

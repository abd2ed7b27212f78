"""Who has which folder of the directory: a member writes in a folder of its own alone.

    DIRECTORY/<32 hex digits>/owner       who writes there; not there: nobody does
                              journal     what is there: `journal.py`
                              xx/<key>    records, by the first two digits of their keys

A folder has a random name that was never anybody's, made by whoever finds none that is
free; so hosts of one name, and disk images that were copied, do not meet in one. Who starts takes
one that is free: its owner ended in order, or is proven dead (this boot, these processes), or has
not written to `owner` for two minutes by the server's own clock, though it would four times. So
what a node leaves is found, evicted and counted by the next one, and a directory that nobody
takes stays readable.

Taking is one step that only one can win, on any file system: `owner` is made where there is none,
or renamed away by name. Silence proves nothing, so who wrote there may wake up: each write looks
first whether `owner` is still the file that it made. What two do at the same moment none the less
ends as rows or records that do not prove themselves: misses. Whoever has lost a folder that way,
or because somebody removed it, takes another.
"""

import logging
import os
import secrets
import stat
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvtide.core.layout import CELL_ALIGN_BYTES
from kvtide.errors import ConfigError
from kvtide.tiers import shared_names
from kvtide.tiers.files import REFUSED, Files, FileSize, page_memory, read_fully, write_fully
from kvtide.tiers.shared_dir.journal import JOURNAL, MEMBER_BYTES

logger = logging.getLogger("kvtide.shared_dir")

OWNER = shared_names.OWNER
PROBE = ".tmp"
"""Of a file that is written and removed at a start, beside the folders."""
ALIVE_MS = 30_000
"""So often an owner writes that it is there."""
SILENT_S = 120
"""Whoever has not for so long is taken for dead; a reboot takes longer."""
MEMBERS_MAX = 1024
"""Read of one directory; each costs a look at every lookup that is not answered at once."""
OWNER_BYTES_MAX = 1024
_NAME = shared_names.MEMBER


class FolderLost(OSError):
    """The own folder is another's by now, or it or its journal is gone; the directory is well."""

    def __init__(self, what: str) -> None:
        """This has happened."""
        super().__init__(f"{what}; this node takes another folder by itself")


@dataclass(frozen=True, slots=True)
class Process:
    """A process by what nobody else has at its time: the boot, its namespace, number and start."""

    boot: str
    namespace: str
    pid: int
    start: str

    def __str__(self) -> str:
        return f"{self.boot} {self.namespace} {self.pid} {self.start}"

    def is_seen_dead(self, by: "Process") -> bool:
        """Whether this other process can tell, by /proc, that it has ended."""
        is_near = (self.boot, self.namespace) == (by.boot, by.namespace)
        return is_near and _start_of(self.pid) != self.start


def this_process() -> Process:
    """The one that asks."""
    pid = os.getpid()
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    namespace = str(Path("/proc/self/ns/pid").stat().st_ino)
    return Process(boot, namespace, pid, _start_of(pid))


def _start_of(pid: int) -> str:
    """When a process started, in ticks since the boot; empty if there is none, or it has ended and
    nobody has asked how, which some containers never do."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
        words = text.rpartition(")")[2].split()
        has_ended = words[0] in "ZX" and len(os.listdir(f"/proc/{pid}/task")) == 1
    except OSError:
        return ""
    return "" if has_ended else words[19]


def _seen(file: FileSize) -> tuple[int, float]:
    return file.inode, file.modified_s


def _parsed(text: str) -> Process | None:
    words = text.split("\n")[0].split(" ")
    if len(words) != 5 or not words[3].isdecimal():
        return None
    return Process(words[1], words[2], int(words[3]), words[4])


class Place:
    """The directory, and the member that this tier is.

    Ownership: the opening thread until it is claimed; then any thread reads, and `claim`, `alive`
    and `free` belong to the writing threads, one at a time.
    """

    def __init__(self, path: str, files: Files) -> None:
        self.path = path
        self.files = files
        self.own = b""
        self.is_contested = False
        """Whether who had it before may still write there, being silent only."""
        self.is_made = False
        """Whether nobody had it before."""
        self.direct = os.O_DIRECT
        """Flag for records: past the page cache, where the file system takes that, else 0."""
        self._incarnation = secrets.token_hex(16)
        self._process = this_process()
        self._seen = (0, 0.0)  # inode and time of the file that we wrote last
        self._device = 0
        self._beats = 0

    def at(self, member: bytes, name: str = "") -> str:
        """Path of something of a member; of its directory."""
        return f"{self.path}/{member.hex()}/{name}" if name else f"{self.path}/{member.hex()}"

    def members(self) -> list[bytes]:
        """All that are there, a bounded number. Raises OSError."""
        names = sorted(filter(_NAME.fullmatch, self.files.names(self.path)))
        return [bytes.fromhex(name) for name in names[:MEMBERS_MAX]]

    # ---- becoming one

    def claim(self, but: Collection[bytes] = ()) -> None:
        """Become the owner of a free folder, the fullest first, or of one that is made; of none of
        these.

        Raises:
            OSError: nothing can be written there.
            ConfigError: others may write there.
        """
        self.files.make_directory(self.path)
        self._require_own()
        self.is_contested = self.is_made = False
        now_s = self._server_time_s()
        self._remove_probes(now_s)
        sizes = dict.fromkeys(set(self.members()).difference(but), 0)
        for member in sizes:
            with suppress(OSError):  # killed before it wrote one, or not for us to see
                sizes[member] = self.files.size_at(self.at(member, JOURNAL)).length_bytes
        for member in sorted(sizes, key=lambda one: -sizes[one]):
            with suppress(OSError):
                if self._has_freed(member, now_s) and self._make_owner(member):
                    self.own = member
                    return
            self.is_contested = False
        self.is_made = True
        while True:
            member = secrets.token_bytes(MEMBER_BYTES)
            self.files.make_directory(self.at(member))
            if self._make_owner(member):  # else somebody who looks for a free one was quicker
                self.own = member
                return

    def _require_own(self) -> None:
        """Nobody else may write there: records are proven against damage, not against forgery.

        Raises:
            ConfigError: somebody may.
        """
        found = self.files.size_at(self.path)
        self._device = found.device
        wrong = ""
        if found.owner != os.geteuid():
            wrong = f"belongs to user {found.owner}, and the node runs as user {os.geteuid()}"
        elif found.mode & (stat.S_IWGRP | stat.S_IWOTH):
            wrong = f"may be written to by others (its mode is {stat.S_IMODE(found.mode):o})"
        if wrong:
            raise ConfigError(
                f"{self.path} {wrong}; its records are trusted, so it has to be this user's alone"
                " on all machines: name a directory below it, which the node makes, or chown it"
                " and chmod it to 700"
            )

    def _server_time_s(self) -> float:
        """What the clock says by which files get their times; learns what `direct` has to be."""
        try:
            return self._probe()
        except OSError as error:
            if not self.direct or error.errno not in REFUSED:
                raise
        self.direct = 0
        return self._probe()

    def _remove_probes(self, now_s: float) -> None:
        """Those that were left by a kill."""
        for name in self.files.names(self.path):
            path = f"{self.path}/{name}"
            with suppress(OSError):
                is_probe = name.endswith(PROBE) and _NAME.fullmatch(name.removesuffix(PROBE))
                if is_probe and now_s - self.files.size_at(path).modified_s > SILENT_S:
                    self.files.unlink(path)

    def _probe(self) -> float:
        path = f"{self.path}/{self._incarnation}{PROBE}"
        page = page_memory(CELL_ALIGN_BYTES)
        try:
            descriptor = self.files.open(path, os.O_RDWR | os.O_CREAT | self.direct)
            try:
                write_fully(self.files, descriptor, [page], 0)
                self.files.sync(descriptor)
                read_fully(self.files, descriptor, [page], 0)
                return self.files.size(descriptor).modified_s
            finally:
                self.files.close(descriptor)
        finally:
            with suppress(FileNotFoundError):
                self.files.unlink(path)

    def _has_freed(self, member: bytes, now_s: float) -> bool:
        """Whether nobody owns it; who is dead does not from now on."""
        path = self.at(member, OWNER)
        try:
            text = self._read(path)
            age_s = now_s - self.files.size_at(path).modified_s
        except FileNotFoundError:
            return True
        process = _parsed(text)
        is_dead = process is not None and process.is_seen_dead(self._process)
        if not is_dead and age_s < SILENT_S:
            return False
        taken = f"{path}.{self._incarnation}.tmp"
        self.files.rename(path, taken)  # of all who try, one finds it
        if self._read(taken) != text:  # somebody else has been quicker, and owns it
            self.files.rename(taken, path)
            return False
        self.files.unlink(taken)
        self.is_contested = not is_dead
        logger.info(
            "shared_dir %s: the owner of %s is %s; it is taken over",
            self.path,
            member.hex()[:8],
            "dead" if is_dead else f"silent for {age_s:.0f} s",
        )
        return True

    def _make_owner(self, member: bytes) -> bool:
        """Whether it is ours now."""
        try:
            descriptor = self.files.open(
                self.at(member, OWNER), os.O_WRONLY | os.O_CREAT | os.O_EXCL
            )
        except FileExistsError:
            return False
        try:
            self._write(descriptor, self._nobody() if self.is_contested else self._text())
        except OSError:
            if not self.is_contested:  # else it would keep everybody away for two minutes
                with suppress(OSError):
                    self.files.unlink(self.at(member, OWNER))
            raise
        finally:
            self.files.close(descriptor)
        return True

    def _write(self, descriptor: int, text: bytes) -> None:
        write_fully(self.files, descriptor, [text], 0)
        self.files.sync(descriptor)
        self._seen = _seen(self.files.size(descriptor))

    def _text(self) -> bytes:
        self._beats += 1
        return f"{self._incarnation} {self._process}\n{self._beats}\n".encode()

    def _nobody(self) -> bytes:
        """No process: that ours has ended would prove nothing of who had it before."""
        return f"{self._incarnation}\n".encode()

    def _read(self, path: str) -> str:
        content = bytearray(OWNER_BYTES_MAX)
        descriptor = self.files.open(path, os.O_RDONLY)
        try:
            count = read_fully(self.files, descriptor, [memoryview(content)], 0)
        finally:
            self.files.close(descriptor)
        return content[:count].decode("ascii", "replace")

    # ---- being one

    def is_there(self) -> bool:
        """Whether the directory is: its mount may be gone. The own folder proves that it is, but
        may be removed."""
        with suppress(OSError):
            self.files.link_at(self.at(self.own))
            return True
        with suppress(OSError):
            return self.files.size_at(self.path).device == self._device
        return False

    def require(self) -> None:
        """Raises OSError where the own folder is not there, FolderLost where it is not ours."""
        path = self.at(self.own, OWNER)
        try:
            seen = _seen(self.files.link_at(path))
        except FileNotFoundError:
            if self.is_there():
                raise FolderLost(f"{self.at(self.own)} was removed") from None
            raise
        if seen != self._seen:
            if not self._read(path).startswith(self._incarnation):
                raise FolderLost(f"another node has taken {self.at(self.own)} over")
            self._seen = seen  # some file systems tell a file's time late

    def alive(self) -> None:
        """Say that we are; raises OSError."""
        self.require()
        descriptor = self.files.open(self.at(self.own, OWNER), os.O_WRONLY)
        try:
            self._write(descriptor, self._text())
        finally:
            self.files.close(descriptor)

    def let_go(self) -> None:
        """What was claimed could not be used. A contested folder stays so for the next one, who
        may have it when this file of ours has been silent for long enough."""
        if not self.is_contested:
            self.free()

    def free(self) -> None:
        """The next one may have it at once."""
        with suppress(OSError):
            self.require()
            self.files.unlink(self.at(self.own, OWNER))

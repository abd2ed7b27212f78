"""Digests of LoRA adapters: config and weights by content, found and confirmed in the background.

    digest(path)  ─► not known yet: None, and a look is asked for
                  └► known, and found unchanged within the last second, by a look that began after
                     the engine was asked for what it loads from there ─► the digest

The engine loads an adapter before any request names it to us, and may load it anew. So one whose
files, or the way to them, have changed since the engine's start is never known: the engine may
hold the old bytes or the new ones, and nothing tells which. Only blobs of a Hugging Face cache may
be younger, if they hold what their names say: the engine may just have fetched them.

Between the last look that found it unchanged and the first that does not, requests may have gone
by the old name and computed with new bytes. So what they may have stored is cleared, wherever it
is by then, with all that has their fingerprint and their salt. A look proves nothing of a step
that had not ended when it began: the engine may load an adapter at any moment of a step.

A file system may hang, and requests must not wait for it: everything that asks one is done by the
thread here. An adapter in use is looked at again and again; one that nobody has named for long is
not, and costs its next request a miss.

Ownership: `_adapters`, and of an adapter what `digest` reads, under `_lock`; its files and their
identities belong to the thread; the scheduler's thread counts steps.
"""

import contextlib
import hashlib
import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from kvtide.engines.vllm.file_digests import (
    FileChanged,
    FileDigests,
    FileIdentity,
    ReadStopped,
    blob_of,
    directory_may_be_another,
    file_may_be_another,
    holds_its_name,
    lower_priority,
)
from kvtide.processors import leave_binding

logger = logging.getLogger("vllm.kvtide")

ADAPTERS_MAX = 1024
"""Adapters an engine may name; those beyond are not cached, so that no caller grows the table."""
CONFIRMED_S_MAX = 1.0
"""So old may be the look that found an adapter unchanged."""
LOOK_S = 0.25
"""How often an adapter in use is looked at: a few system calls."""
IDLE_S_MAX = 600.0
"""An adapter that was not named for so long is not in use."""

_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")


@dataclass(slots=True)
class _Adapter:
    """One adapter directory.

    Attributes:
        path: as requests name it.
        used_s: when one did last.
        wanted_s: a look must have begun since then for the newest request that names it.
        confirmed_s: when the last look began that found it as the first one did.
        is_distrusted: for ever: the engine may hold other bytes than there are now.
        digest: of what the first look found, once it was read.
        files: what the engine reads of it, at the first look.
        identities: of those files.
        unproven: the salts (digests) of requests that go by its digest, with the last step that
            was planned when they did, as long as no look after that step has found it unchanged.
    """

    path: str
    used_s: float
    wanted_s: float = -math.inf
    confirmed_s: float = -math.inf
    is_distrusted: bool = False
    digest: bytes | None = None
    files: tuple[Path, ...] = ()
    identities: tuple[FileIdentity, ...] = ()
    unproven: dict[bytes, int] = field(default_factory=dict)


class AdapterDigests:
    """The digests of all adapters that requests name."""

    def __init__(
        self,
        digests: FileDigests,
        unchanged_since_ns: int,
        clear: Callable[[set[bytes]], None],
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`unchanged_since_ns`: the engine's start on the realtime clock, `process_began_ns()`.

        `clear`: called on the thread here for an adapter that is not what it was, with the salts
        (digests) under which its requests may have stored what is wrong.
        """
        self._digests = digests
        self._unchanged_since_ns = unchanged_since_ns
        self._clock_s = clock_s
        self._lock = threading.Lock()
        self._adapters: dict[str, _Adapter] = {}
        self._clear = clear
        self._changed: set[str] = set()
        self._planned_steps = self._ended_steps = 0
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._looked_s = -math.inf
        self._thread: threading.Thread | None = None

    def digest(self, path: str, asked_s: float = -math.inf) -> bytes | None:
        """The digest (32 bytes) of the adapter at this path, or None: not known now, or never.

        `asked_s`: when the engine was first asked for what it loads from there, by the clock of
        this object. Called for each request with an adapter, on the scheduler's thread; asks no
        file system.
        """
        now_s = self._clock_s()
        with self._lock:
            adapter = self._adapters.get(path)
            if adapter is None:
                if len(self._adapters) >= ADAPTERS_MAX:
                    return None
                adapter = self._adapters[path] = _Adapter(path, now_s)
            adapter.used_s = now_s
            adapter.wanted_s = max(adapter.wanted_s, asked_s)
            if adapter.is_distrusted:
                return None
            if now_s - adapter.confirmed_s > CONFIRMED_S_MAX or adapter.confirmed_s < asked_s:
                self._look_now()
                return None
            return adapter.digest

    def is_unchanged(self, path: str, salt: bytes) -> bool:
        """Whether nothing has been seen to change of an adapter whose digest was given before.

        Called for each of its requests in each step, once that is planned, which keeps it in use;
        `salt` is the digest of the request's, by which what it stores can be found and taken back.
        """
        now_s = self._clock_s()
        with self._lock:
            adapter = self._adapters.get(path)
            if adapter is None or adapter.is_distrusted:
                return False
            adapter.used_s, adapter.unproven[salt] = now_s, self._planned_steps
            if now_s - adapter.confirmed_s > CONFIRMED_S_MAX:
                self._look_now()
            return True

    def step_planned(self) -> None:
        """A step begins to be planned: from now on it may be the one that loads an adapter."""
        self._planned_steps += 1

    def step_ended(self) -> None:
        """The oldest of the steps under way has ended in all workers."""
        self._ended_steps = min(self._ended_steps + 1, self._planned_steps)

    def take_changed(self) -> set[str]:
        """Paths of adapters that were found changed since the last call, and whose requests may
        have gone by a wrong name until then."""
        if not self._changed:
            return set()
        with self._lock:
            changed, self._changed = self._changed, set()
        return changed

    def close(self, timeout_s: float = 1.0) -> None:
        """Stop reading, look once more at what was used, and join the thread; one that hangs in a
        file system is left behind."""
        self._stop.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _look_now(self) -> None:
        """Wake the thread, or start it; where none is to be had, the next request tries again."""
        self._wake.set()
        if self._thread is None and not self._stop.is_set():
            thread = threading.Thread(target=self._run, name="kvtide-adapters", daemon=True)
            with contextlib.suppress(RuntimeError):
                thread.start()
                self._thread = thread

    # ---- the thread

    def _run(self) -> None:
        leave_binding()
        lower_priority()
        while not self._stop.is_set():
            self._wake.clear()
            self._look_at_all()
            unread = self._next_unread()
            if unread is not None:
                self._guarded(unread, self._read)
            else:
                self._wake.wait(LOOK_S if self._in_use() else None)
        for adapter in self._in_use():
            if adapter.unproven:
                self._guarded(adapter, self._look)

    def _in_use(self) -> list[_Adapter]:
        oldest_s = self._clock_s() - IDLE_S_MAX
        with self._lock:
            return [
                adapter
                for adapter in self._adapters.values()
                if not adapter.is_distrusted and adapter.used_s >= oldest_s
            ]

    def _next_unread(self) -> _Adapter | None:
        unread = (one for one in self._in_use() if one.files and one.digest is None)
        return next(unread, None)

    def _guarded(self, adapter: _Adapter, work: Callable[[_Adapter], None]) -> None:
        """The boundary: what goes wrong with one adapter costs that one."""
        try:
            work(adapter)
        except ReadStopped:
            return
        except Exception as error:
            if not isinstance(error, FileChanged | OSError):
                logger.exception("kvtide: adapter %s is not cached", adapter.path)
            with self._lock:
                adapter.is_distrusted = True

    def _look_at_all(self) -> None:
        """Look at all that are in use and were not looked at just now."""
        self._looked_s = self._clock_s()
        for adapter in self._in_use():
            is_due = self._clock_s() - adapter.confirmed_s >= LOOK_S
            if (is_due or adapter.confirmed_s < adapter.wanted_s) and not self._stop.is_set():
                self._guarded(adapter, self._look)

    def _look(self, adapter: _Adapter) -> None:
        """Is it as it was? The first time: what is it?"""
        began_s, ended_steps = self._clock_s(), self._ended_steps
        try:
            files = _adapter_files(Path(adapter.path).expanduser())
            identities = tuple(FileIdentity.of(file) for file in files)
        except (OSError, RuntimeError):
            files = identities = ()
        is_first = not adapter.files
        is_young = is_first and self._is_young(files, identities)
        with self._lock:
            if not files:
                if is_first:  # no adapter, or not here: the table is for those that are
                    del self._adapters[adapter.path]
                return
            if is_first:
                adapter.files, adapter.identities = files, identities
            is_same = (adapter.files, adapter.identities) == (files, identities)
            adapter.is_distrusted |= is_young or not is_same
            adapter.confirmed_s = began_s
            adapter.unproven = {
                salt: step
                for salt, step in adapter.unproven.items()
                if step > ended_steps or not is_same
            }
            doubtful = set() if is_same else set(adapter.unproven)
            if doubtful:
                self._changed.add(adapter.path)
        if doubtful:
            self._clear(doubtful)

    def _is_young(self, files: tuple[Path, ...], identities: tuple[FileIdentity, ...]) -> bool:
        """Whether the engine may hold older bytes than there are, whatever the names say: those
        of other files, or of another directory."""
        if not files:
            return False
        since_ns = self._unchanged_since_ns
        are_blobs = [blob_of(file) is not None for file in files]
        if directory_may_be_another(files[0].parent, since_ns, is_of_blobs=all(are_blobs)):
            return True
        return any(
            not is_blob and file_may_be_another(file, identity, since_ns)
            for file, identity, is_blob in zip(files, identities, are_blobs, strict=True)
        )

    def _read(self, adapter: _Adapter) -> None:
        digest = self._content_digest(adapter)
        with self._lock:
            adapter.digest = digest
            adapter.is_distrusted |= digest is None

    def _content_digest(self, adapter: _Adapter) -> bytes | None:
        """Names count here: they say which bytes are the config and which the weights.

        None where a file is not the one that was looked at, or a young blob not what it is called.
        """
        whole = hashlib.sha256()
        for path, identity in zip(adapter.files, adapter.identities, strict=True):
            digest = self._digests.find(identity)
            if digest is None:
                read, digest = self._digests.read(path, self._stopped)
                if read != identity:
                    return None
            is_new = file_may_be_another(path, identity, self._unchanged_since_ns)
            if is_new and not holds_its_name(path, digest):
                return None
            whole.update(b"%b\0%b" % (path.name.encode(), digest))
        return whole.digest()

    def _stopped(self) -> bool:
        """Asked every few MiB of a read: time to look after the other adapters, too."""
        if self._clock_s() - self._looked_s >= LOOK_S:
            self._look_at_all()
        return self._stop.is_set()


def _adapter_files(directory: Path) -> tuple[Path, ...]:
    """What vLLM reads of an adapter: its config and the first kind of weights that is there."""
    for name in _WEIGHTS:
        weights = directory / name
        if weights.is_file():
            return (directory / "adapter_config.json", weights)
    return ()

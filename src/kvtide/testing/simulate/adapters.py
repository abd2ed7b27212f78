"""Adapters whose files are replaced while engines run: what stands for `AdapterDigests`.

    replaced ─► engines compute with what is there now ─► each notices: its salts are cleared
                 └─ until then by the old name, with the new bytes: nobody can judge that ─┘

What was stored in between has a wrong name. It must be gone before the old bytes are back, and
with them engines that go by their name.
"""

from typing import TYPE_CHECKING

from kvtide.testing.simulate.kernel import Kernel

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtide.testing.simulate.engine import Engine

LOOK_S_MAX = 0.3
"""From a replacement until an engine notices."""
PAUSE_US = 1_000_000
"""Between two replacements, at least."""


class AdapterFiles:
    """What is at each path: one of two contents."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self.versions: dict[str, int] = {}
        self.replaced_us: dict[str, int] = {}
        self._engines: dict[str, list[Engine]] = {}
        """Those that lived when it was replaced last."""

    def digest(self, path: str) -> bytes:
        """Of what is there."""
        return f"{path} {self.versions.get(path, 0)}".encode().rjust(32)

    def replace(self, path: str, engines: list["Engine"]) -> bool:
        """The other content is there from now on; False while it may be told by a wrong name."""
        now_us = self._kernel.now_us
        is_late = now_us - self.replaced_us.get(path, 0) >= PAUSE_US
        if not is_late or not all(one.owes_no_clear(path) for one in self._engines.get(path, ())):
            return False
        self.versions[path] = 1 - self.versions.get(path, 0)
        self.replaced_us[path] = now_us
        self._engines[path] = list(engines)
        return True


class ToyAdapters:
    """As `AdapterDigests`, of one engine: a path stands for its content, once that was read."""

    def __init__(self, kernel: Kernel, files: AdapterFiles) -> None:
        self._kernel = kernel
        self._files = files
        self._began_us = kernel.now_us
        self._loaded = dict(files.versions)
        self._known: dict[str, bytes] = {}
        self._distrusted: set[str] = set()
        self._unnoticed: set[str] = set()
        self._changed: set[str] = set()
        self._salts: dict[str, set[bytes]] = {}
        self.clear: Callable[[set[bytes]], None] = lambda salts: None

    # ---- as the engine asks

    def digest(self, path: str, asked_s: float) -> bytes | None:
        if path in self._distrusted or path in self._known:
            return None if path in self._distrusted else self._known[path]
        if self._files.replaced_us.get(path, 0) >= self._began_us:
            self._distrusted.add(path)
        else:
            self._known[path] = self._files.digest(path)
        return None

    def is_unchanged(self, path: str, salt: bytes) -> bool:
        if path in self._distrusted or path not in self._known:
            return False
        self._salts.setdefault(path, set()).add(salt)
        return True

    def step_planned(self) -> None:
        """Nothing is looked at here that steps prove."""

    def step_ended(self) -> None:
        """As above."""

    def take_changed(self) -> set[str]:
        changed, self._changed = self._changed, set()
        return changed

    def close(self, timeout_s: float) -> None:
        for path in sorted(self._unnoticed):
            self._notice(path)

    # ---- as files change

    def version(self, path: str) -> int:
        """What the engine has loaded from there."""
        return self._loaded.get(path, 0)

    def is_behind(self, path: str) -> bool:
        """Whether requests go by the name of what is not there any more."""
        return path in self._unnoticed and path in self._known

    def has_noticed(self, path: str) -> bool:
        """Whether it knows of the last replacement, and has said so."""
        return path not in self._unnoticed

    def told(self, path: str) -> None:
        """Another content is there: from now on its name may be wrong."""
        self._unnoticed.add(path)

    def reload(self, path: str) -> None:
        """The engine computes with what is there from now on."""
        self._loaded[path] = self._files.versions[path]

    def look(self, path: str) -> None:
        """On a thread of its own: notice, after a while."""
        self._kernel.sleep(self._kernel.draw.random() * LOOK_S_MAX)
        self._notice(path)

    def _notice(self, path: str) -> None:
        if path not in self._unnoticed:
            return
        if path in self._known and path not in self._distrusted:
            self._distrusted.add(path)
            salts = self._salts.pop(path, set())
            if salts:
                self._changed.add(path)
                self.clear(salts)
        self._unnoticed.discard(path)

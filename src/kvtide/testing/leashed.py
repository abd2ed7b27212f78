"""A program that runs on a leash (see `leash.py`): started, watched, and gone afterwards.

It runs in a session of its own: it ends with whoever started it, even if that is killed, and a
Ctrl-C in the terminal reaches only the owner, who then ends it in order. No thread is started.

Invariant: after `stop()` or `kill()` no process of the session runs, and what it left in its
temporary directory is gone: killed programs leave sockets and files. (They stay where leash and
owner are killed in one moment: nobody else knows of them.)
"""

import contextlib
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from kvtide.errors import KVTideError
from kvtide.testing import leash

STOP_GRACE_S = 20.0  # vLLM gives its own children 5 s and more, one after the other
IDLE_WINDOW_S = 0.25
IDLE_S_MAX = 30.0
LOG_LINE_COUNT_SHOWN, CAUSE_COUNT_SHOWN = 15, 3


class ProgramError(KVTideError):
    """A program under a leash did not do what it was started for; its log's end is in the text."""


@dataclass(frozen=True, slots=True)
class End:
    """How a program ended."""

    exit_code: int  # 128 + n after signal n
    was_killed: bool  # true if not everything ended by itself in time


class LeashedProgram:
    """One program and all that it starts, but for what leaves its session on purpose."""

    def __init__(self, log: Path, *, grace_s: float = STOP_GRACE_S) -> None:
        """Output goes to `log`, appended; `stop()` kills after `grace_s`."""
        self.log = log
        self.scratch = Path(tempfile.gettempdir()) / f"kvtide-{secrets.token_hex(4)}"
        """Its temporary directory (TMPDIR), there while it runs; short, as sockets need it."""
        self._grace_s = grace_s
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def launch(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start the program; returns at once."""
        assert self._process is None, "this program was started before"
        self._log_start_bytes = self.log.stat().st_size if self.log.exists() else 0
        own = (f"{self._grace_s}", str(self.scratch))
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*(sys.executable, "-I", "-S", leash.__file__), *own, *command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**environment, "TMPDIR": str(self.scratch)},
                start_new_session=True,
            )

    def stop(self) -> End:
        """Ask the program to end, kill what has not in time, and see that nothing is left.

        May be called again, and after it has died; Ctrl-C is held back meanwhile.
        """
        return self._end(lambda process: process.terminate())

    def kill(self) -> End:
        """SIGKILL for all of its processes at once, as a crash would."""
        return self._end(lambda process: leash.kill_session(process.pid))

    def _end(self, order: Callable[[subprocess.Popen[bytes]], object]) -> End:
        process = self._running()
        wait_s = self._grace_s + 2 * leash.LEFT_GRACE_S + leash.TRACKER_GRACE_S
        with _signals_held_back():
            if process.poll() is None:
                order(process)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(wait_s)
            left = leash.kill_session(process.pid)
            code = process.wait()
            assert process.stdin is not None
            process.stdin.close()
            shutil.rmtree(self.scratch, ignore_errors=True)
        was_killed = bool(left) or any(leash.KILLED in line for line in self.log_lines())
        return End(128 - code if code < 0 else code, was_killed or code < 0)

    def _running(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "this program was not started"
        return self._process

    @property
    def session(self) -> int:
        """The session of all its processes, which is the leash's pid."""
        return self._running().pid

    def is_alive(self) -> bool:
        """Whether the program itself, apart from its children, still runs."""
        return self._running().poll() is None

    def processes(self) -> dict[int, str]:
        """Command lines of the live processes by pid, without the leash."""
        return {
            process.pid: process.command
            for process in leash.processes_of_session(self.session)
            if process.pid != self.session
        }

    def cpu_s(self) -> float:
        """CPU time that its live processes have used, in steps of 10 ms."""
        ticks = sum(p.cpu_ticks for p in leash.processes_of_session(self.session))
        return ticks / leash.TICKS_PER_S

    def wait_idle(self, wait_s_max: float = IDLE_S_MAX) -> None:
        """Wait until its processes use no CPU: vLLM's go on spinning for 1 s after a request."""
        until_s = time.monotonic() + wait_s_max
        before_s = self.cpu_s()
        while time.monotonic() < until_s:
            time.sleep(IDLE_WINDOW_S)
            now_s = self.cpu_s()
            if now_s - before_s < 1.5 / leash.TICKS_PER_S:
                return
            before_s = now_s
        raise ProgramError(f"the program still uses the CPU after {wait_s_max:g} s")

    def log_lines(self) -> list[str]:
        """Everything that it has written so far."""
        with self.log.open("rb") as log:
            log.seek(self._log_start_bytes)
            return log.read().decode(errors="replace").splitlines()

    def log_end(self) -> str:
        """For an error message: the last lines, and before them the first that name an error.

        In vLLM's logs the cause stands far above the end, which is of the process above.
        """
        lines = self.log_lines()
        errors = [line for line in lines if "Error: " in line and "WARNING" not in line]
        causes = list(dict.fromkeys(errors))[:CAUSE_COUNT_SHOWN]
        last = lines[-LOG_LINE_COUNT_SHOWN:]
        return "\n  ".join([f"from its log ({self.log}):", *causes, "…", *last])


@contextlib.contextmanager
def _signals_held_back() -> Iterator[None]:
    """Hold Ctrl-C and its like back for the seconds that an end takes; delivered afterwards."""
    if threading.current_thread() is not threading.main_thread():  # which alone handles signals
        yield
        return
    held_back: list[int] = []
    before = {
        number: signal.signal(number, lambda number, frame: held_back.append(number))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for held in dict.fromkeys(held_back):
            signal.raise_signal(held)

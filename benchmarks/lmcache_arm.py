"""One of LMCache's adapters as an arm beside our tier: a process of its own environment."""

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path

from benchmarks.lmcache_server import PYTHON, VARIABLES, require_lmcache
from benchmarks.places import ROUND_BYTES
from kvtide.testing.leashed import ProgramError
from kvtide.testing.serving import environment

PROGRAM = Path(__file__).with_name("lmcache_adapter.py")
END_S_MAX = 20.0


class Adapter:
    """See `places.Arm`; `lmcache_adapter.py` does the work, on memory of its own."""

    def __init__(self, spec: Mapping[str, object], piece_bytes: int, log: Path) -> None:
        """Start it; ProgramError where it does not."""
        require_lmcache()
        self._log = log
        command = [PYTHON, PROGRAM, json.dumps(spec), str(piece_bytes), str(ROUND_BYTES)]
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment(**VARIABLES),
                text=True,
            )
        self._answer()

    def put(self, depth: int) -> None:
        self._move(f"put {depth}")

    def get(self, depth: int) -> None:
        self._move(f"get {depth}")

    def settle(self) -> None:
        """LMCache evicts elsewhere, or not at all: that is not what is compared."""
        self._ask("forget")

    def wipe(self) -> None:
        self._ask("wipe")

    def is_whole(self) -> bool:
        return self._ask("check") is True

    def cpu_s(self) -> float:
        answer = self._ask("cpu")
        if not isinstance(answer, float):
            raise ProgramError(f"LMCache's adapter says {answer!r} for its seconds of CPU")
        return answer

    def close(self) -> None:
        """End it by the end of what it is told."""
        try:
            self._process.communicate(timeout=END_S_MAX)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()

    def _move(self, command: str) -> None:
        if self._ask(command) is not True:
            raise ProgramError(f"LMCache's adapter did not {command} for all; see {self._log}")

    def _ask(self, command: str) -> object:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{command}\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> object:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self.close()
            end = "\n  ".join(self._log.read_text(errors="replace").splitlines()[-15:])
            raise ProgramError(f"LMCache's adapter has ended; from its log:\n  {end}")
        answer: object = json.loads(line)
        return answer

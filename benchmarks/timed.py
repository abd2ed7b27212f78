"""kvtide's connector with a stop-watch around every hook, for the benchmark of its overhead.

A class of its own, so that the connector pays for no clock. It runs in the engine's processes and
writes what it has seen to a file for each process, in the directory that REPORTS names, every
so many steps. Writing is not counted as time in a hook; that the clock is read is.
"""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.hook_reports import REPORTS
from kvtide.engines.vllm.connector import KVTideConnector

STEPS_BETWEEN_REPORTS = 32
ONCE = ("register_kv_caches", "bind_kv_cache_manager", "shutdown")
STEP_HOOKS = ("build_connector_meta", "wait_for_save")  # of the scheduler, of the worker


class TimedKVTideConnector(KVTideConnector):
    """Counts nanoseconds and steps; see `_hook` for how its hooks come to be."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        self._times_ns: dict[str, int] = {}
        self._step_count = 0
        self._report = Path(os.environ[REPORTS]) / f"{os.getpid()}-{id(self)}.json"
        super().__init__(*arguments, **keywords)

    def _note(self, name: str, took_ns: int) -> None:
        self._times_ns[name] = self._times_ns.get(name, 0) + took_ns
        if name in STEP_HOOKS:
            self._step_count += 1
            if self._step_count % STEPS_BETWEEN_REPORTS == 0:
                scratch = self._report.with_suffix(".new")
                report = {"steps": self._step_count, "times_ns": self._times_ns}
                scratch.write_text(json.dumps(report))
                scratch.replace(self._report)


def _hook(name: str) -> Callable[..., Any]:
    def hook(self: TimedKVTideConnector, *arguments: Any, **keywords: Any) -> Any:
        began_ns = time.perf_counter_ns()
        try:
            return getattr(super(TimedKVTideConnector, self), name)(*arguments, **keywords)
        finally:
            self._note(name, time.perf_counter_ns() - began_ns)

    return hook


for _name, _value in vars(KVTideConnector).items():
    if callable(_value) and not _name.startswith("_") and _name not in ONCE:
        setattr(TimedKVTideConnector, _name, _hook(_name))

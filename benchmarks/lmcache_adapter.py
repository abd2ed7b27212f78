"""One of LMCache's adapters to a place below its memory, driven as `lmcache bench l2` drives it.

    python lmcache_adapter.py SPEC PIECE_BYTES ROUND_BYTES

A program of LMCache's environment (scripts/setup_lmcache), so it imports nothing of ours;
`lmcache_arm.py` starts it. Commands come line by line on stdin, each is answered by a line of JSON
on stdout; it ends with the end of stdin.

    put N, get N    a round's pieces, N of them under way
    forget          take away all but the last round: nothing here evicts
    wipe, check     make the memory that is got into another; is it what was put?
    cpu             seconds that this process has used
"""

import argparse
import json
import os
import resource
import sys
from collections.abc import Callable

import torch
from lmcache.cli.commands.bench.l2_adapter_bench.data import (
    create_l1_memory_desc,
    make_aligned_tensor,
    make_memory_objects,
    make_object_keys,
    wait_eventfd,
)
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config

ALIGN_BYTES = 4096
WAIT_S_MAX = 60.0


class Driven:
    """An adapter, and a round's pieces."""

    def __init__(self, spec: str, piece_bytes: int, round_bytes: int) -> None:
        self._count = round_bytes // piece_bytes
        buffer = make_aligned_tensor(round_bytes, ALIGN_BYTES)
        described = create_l1_memory_desc(buffer, ALIGN_BYTES)
        self._objects = make_memory_objects(buffer, self._count, piece_bytes, 0)
        self._memory = buffer
        self._memory.random_(256)
        self._wanted = buffer.clone()
        (config,) = parse_args_to_l2_adapters_config(
            argparse.Namespace(l2_adapter=[spec])
        ).adapters
        self._adapter = create_l2_adapter(config, l1_memory_desc=described)
        self._round = 0
        self._before: list[object] = []
        self._keys: list[object] = []

    def put(self, depth: int) -> bool:
        """All of them, under names that are not there."""
        self._round += 1
        self._before += self._keys
        self._keys = make_object_keys(self._count, key_offset=self._round * self._count)
        adapter = self._adapter

        def ended(_: set[int]) -> dict[int, bool]:
            done = adapter.pop_completed_store_tasks()
            return {task: result.is_successful() for task, result in done.items()}

        return self._run(adapter.submit_store_task, adapter.get_store_event_fd(), ended, depth)

    def get(self, depth: int) -> bool:
        """Those of the last round."""
        adapter = self._adapter

        def ended(tasks: set[int]) -> dict[int, bool]:
            found = {task: adapter.query_load_result(task) for task in tasks}
            return {task: one.popcount() == 1 for task, one in found.items() if one is not None}

        return self._run(adapter.submit_load_task, adapter.get_load_event_fd(), ended, depth)

    def _run(
        self,
        submit: Callable[..., int],
        event: int,
        ended: Callable[[set[int]], dict[int, bool]],
        depth: int,
    ) -> bool:
        """One task for each piece; whether all went well."""
        under_way: set[int] = set()
        is_good = True
        for key, piece in [*zip(self._keys, self._objects, strict=True), (None, None)]:
            while len(under_way) > (depth - 1 if key is not None else 0):
                if not wait_eventfd(event, WAIT_S_MAX):
                    raise TimeoutError(f"{len(under_way)} tasks do not end")
                done = ended(under_way)
                under_way -= done.keys()
                is_good = is_good and all(done.values())
            if key is not None:
                under_way.add(submit([key], [piece]))
        return is_good

    def forget(self) -> bool:
        self._adapter.delete(self._before)
        self._before = []
        return True

    def wipe(self) -> bool:
        self._memory.zero_()
        return True

    def check(self) -> bool:
        return torch.equal(self._memory, self._wanted)

    def cpu(self) -> float:
        used = resource.getrusage(resource.RUSAGE_SELF)
        return used.ru_utime + used.ru_stime

    def close(self) -> None:
        self._adapter.close()


def main() -> None:
    """Until the end of stdin."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what LMCache prints is not an answer
    spec, piece_bytes, round_bytes = sys.argv[1:]
    driven = Driven(spec, int(piece_bytes), int(round_bytes))
    print(json.dumps(True), file=answers)
    for line in sys.stdin:
        command, *arguments = line.split()
        answer = getattr(driven, command)(*map(int, arguments))
        print(json.dumps(answer), file=answers)
    driven.close()


if __name__ == "__main__":
    main()

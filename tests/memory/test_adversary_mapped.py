"""Attacks of the second round on mapped regions."""

import os
import threading

import pytest

from kvtide.memory.mapped import MappedRegions


@pytest.mark.skipif(os.cpu_count() == 1, reason="needs two processors")
def test_populating_does_not_share_the_processor_of_the_thread_that_computes() -> None:
    """vLLM binds the worker's main thread to one core; whoever it starts inherits that."""
    every = os.sched_getaffinity(0)
    found: list[set[int]] = []

    def main_thread_of_a_worker() -> None:
        os.sched_setaffinity(0, {min(every)})
        regions = MappedRegions(lambda n: None, lambda n, why: None, lambda n: None)
        found.append(os.sched_getaffinity(regions._thread.native_id or 0))
        regions.close(1.0)

    thread = threading.Thread(target=main_thread_of_a_worker)
    thread.start()
    thread.join()
    assert len(found[0]) > 1, f"kvtide-map populates on processors {found[0]} alone"

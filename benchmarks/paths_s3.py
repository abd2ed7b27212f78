"""An s3 tier against plain loops of the library that it uses, and boto3, on the same server.

    python -m benchmarks.paths_s3 [--quick] [--server rclone|moto|radosgw]

A plain loop puts and gets an object for each record by obstore, so many at a time, and copies what
it got to where it is wanted; nothing is proven, listed or counted. One cuts each record into
objects as the tier does, which go by several connections. boto3 is used as its manual shows, by a
thread for each record that is under way. These delete what is two rounds old. The servers are
those that tests run on, beside it on the same machine: they, not the client, are most of what is
measured. How they are compared, and what is shown, says benchmarks/places.py.

`--quick` measures few rounds, of one size alone, and decides nothing.
"""

import asyncio
import sys
import tempfile
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import obstore
from obstore.store import S3Store

from benchmarks.paths_disk import as_in_the_node
from benchmarks.places import (
    DEPTHS,
    HEAD,
    HELD_ROUNDS,
    ROUND_BYTES,
    WAIT_S_MAX,
    Arm,
    Arms,
    Budgets,
    Cell,
    Extent,
    Here,
    Memory,
    Tier,
    closing,
    measured,
    parser_of,
)
from kvtide.testing import object_servers
from kvtide.testing.object_servers import ACCESS_KEY, BUCKET, MOTO, REGION, SECRET_KEY, Server
from kvtide.tiers.s3.names import PART_BYTES
from kvtide.units import KiB, MiB

CLIENT: dict[str, Any] = {"allow_http": True, "http1_only": True}
TIER_ROUNDS = 8
"""What the tier holds: it claims room for a thirty-second part at once, which takes five requests,
and real caps are thousands of times as large."""
CAP_BYTES_MIN = 64 * MiB
"""No tier takes a smaller one."""


class Objects(Here):
    """Records cut into objects of so many bytes, nothing else."""

    def __init__(
        self, server: Server, name: str, memory: Memory, piece_bytes: int, object_bytes: int
    ) -> None:
        super().__init__(memory)
        known: Any = {**server.config, "unsigned_payload": True}
        options: Any = CLIENT
        self._store = S3Store(BUCKET, config=known, client_options=options)
        self._name = name
        self._records = [
            [piece[at : at + object_bytes] for at in range(0, len(piece), object_bytes)]
            for piece in memory.pieces(piece_bytes)
        ]
        self._runner = asyncio.Runner()
        self._round = 0

    def _names(self, of_round: int) -> list[list[str]]:
        return [
            [f"{self._name}/{of_round}/{number}.{n}" for n in range(len(objects))]
            for number, objects in enumerate(self._records)
        ]

    def put(self, depth: int) -> None:
        self._round += 1
        names, old = self._names(self._round), self._names(self._round - HELD_ROUNDS)

        async def put(name: str, view: memoryview) -> None:
            await obstore.put_async(self._store, name, [view], use_multipart=False)

        async def put_all(number: int) -> None:
            each = zip(names[number], self._records[number], strict=True)
            await asyncio.gather(*(put(name, view) for name, view in each))
            if self._round > HELD_ROUNDS:
                await obstore.delete_async(self._store, old[number])

        self._run(depth, [put_all(number) for number in range(len(self._records))])

    def get(self, depth: int) -> None:
        names = self._names(self._round)

        async def get(name: str, view: memoryview) -> None:
            answer = await obstore.get_async(self._store, name)
            view[:] = memoryview(await answer.bytes_async())

        async def get_all(number: int) -> None:
            each = zip(names[number], self._records[number], strict=True)
            await asyncio.gather(*(get(name, view) for name, view in each))

        self._run(depth, [get_all(number) for number in range(len(self._records))])

    def _run(self, depth: int, calls: Sequence[Coroutine[Any, Any, None]]) -> None:
        async def bounded() -> None:
            ahead = asyncio.Semaphore(depth)

            async def one(call: Coroutine[Any, Any, None]) -> None:
                async with ahead:
                    await call

            await asyncio.gather(*map(one, calls))

        self._runner.run(bounded())

    def close(self) -> None:
        self._runner.close()


class Popular(Here):
    """boto3."""

    def __init__(self, server: Server, memory: Memory, piece_bytes: int) -> None:
        super().__init__(memory)
        sys.path.append(str(MOTO))  # it comes with moto, beside what kvtide is tested with
        import boto3
        from botocore.config import Config

        settings = Config(s3={"addressing_style": "path"}, max_pool_connections=max(DEPTHS))
        self._client = boto3.client(
            "s3",
            endpoint_url=server.endpoint,
            region_name=REGION,
            aws_access_key_id=ACCESS_KEY,
            aws_secret_access_key=SECRET_KEY,
            config=settings,
        )
        self._views = memory.pieces(piece_bytes)
        self._pool = ThreadPoolExecutor(max(DEPTHS))
        self._round = 0

    def _name(self, number: int, of_round: int) -> str:
        return f"popular/{of_round}/{number}"

    def put(self, depth: int) -> None:
        self._round += 1

        def put(share: int) -> None:
            for number in range(share, len(self._views), depth):
                name, body = self._name(number, self._round), bytes(self._views[number])
                self._client.put_object(Bucket=BUCKET, Key=name, Body=body)
                old = self._name(number, self._round - HELD_ROUNDS)
                if self._round > HELD_ROUNDS:
                    self._client.delete_object(Bucket=BUCKET, Key=old)

        list(self._pool.map(put, range(depth)))

    def get(self, depth: int) -> None:
        def get(share: int) -> None:
            for number in range(share, len(self._views), depth):
                name = self._name(number, self._round)
                answer = self._client.get_object(Bucket=BUCKET, Key=name)
                self._views[number][:] = answer["Body"].read()

        list(self._pool.map(get, range(depth)))

    def close(self) -> None:
        self._pool.shutdown()
        self._client.close()


class ReadyTier(Tier):
    """It has looked at the bucket: before that it stores nothing."""

    def __init__(self, server: Server, keys: Path, memory: Memory, piece_bytes: int) -> None:
        lines = (f"aws_access_key_id = {ACCESS_KEY}", f"aws_secret_access_key = {SECRET_KEY}")
        keys.write_text("\n".join(["[default]", *lines]))
        record_bytes = piece_bytes + 8 * KiB
        cap_bytes = TIER_ROUNDS * len(memory.view) // piece_bytes * record_bytes
        cap_bytes = max(cap_bytes, CAP_BYTES_MIN)
        super().__init__(
            memory,
            piece_bytes,
            type="s3",
            url=f"s3://{BUCKET}/{keys.name}",
            endpoint=server.endpoint,
            credentials_file=str(keys),
            bytes_max=cap_bytes,
        )
        while self._tier.statistics().state != "on":
            assert self._woken.wait(WAIT_S_MAX), self._tier.statistics()
            self._woken.clear()
            self._tier.poll()


def arms_of(server: Server, memory: Memory, piece_bytes: int) -> Arms:
    """All for one size."""
    plain: dict[str, Arm] = {
        "plain": Objects(server, "plain", memory, piece_bytes, piece_bytes),
        "plain, cut": Objects(server, "cut", memory, piece_bytes, PART_BYTES),
    }
    return Arms(
        plain,
        again=Objects(server, "again", memory, piece_bytes, piece_bytes),
        tier=ReadyTier(server, server.directory / f"tier{piece_bytes}", memory, piece_bytes),
        others={"boto3": Popular(server, memory, piece_bytes)},
    )


def run(program: str, extent: Extent, memory: Memory) -> list[Cell]:
    """All sizes on one server."""
    cells = []
    rounds = f"rounds of {ROUND_BYTES // MiB} MiB, medians of {extent.rounds}"
    print(f"{program}, {rounds}\n{HEAD}")
    for piece_bytes in extent.sizes:
        with (
            tempfile.TemporaryDirectory(prefix="kvtide-bench-") as directory,
            object_servers.running(program, Path(directory)) as server,
            closing(arms_of(server, memory, piece_bytes)) as arms,
        ):
            cells += measured(arms, piece_bytes, extent.rounds)
    return cells


def main(argv: Sequence[str]) -> int:
    """Measure; 1 where the goal is missed."""
    parser = parser_of(__doc__)
    parser.add_argument("--server", choices=list(object_servers.PROGRAMS), action="append")
    options = parser.parse_args(argv)
    memory, budgets = Memory(), Budgets()
    for program in options.server or ["rclone"]:
        with as_in_the_node():
            budgets.cells[program] = run(program, options.extent, memory)
    return budgets.show(options.extent)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

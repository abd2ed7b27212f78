"""An s3 tier against plain loops of the library that it uses, and boto3, on the same server.

    python -m benchmarks.paths_s3 [--quick] [--server rclone|moto|radosgw]

A plain loop puts and gets an object for each record by obstore, so many at a time, and copies what
it got to where it is wanted; nothing is proven, listed or counted. One cuts records into objects
as the tier does, which go by several connections. boto3 is used as its manual shows, by a
thread for each record that is under way. These delete what is two rounds old. LMCache's adapter
`s3`, by the client awscrt, runs in a process of its own on a server of its own, since it looks for
the bucket in the host's name alone; and not with records that awscrt sends by multipart upload,
because rclone's answer to that is not as it expects ("Upload Id not found"). The servers are those
that tests run on, beside it on the same machine: they, not the client, are most of what is
measured. How they are compared, and what is shown, says benchmarks/places.py.

`--quick` measures few rounds, of one size alone, and decides nothing.
"""

import asyncio
import sys
import tempfile
from collections.abc import Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import obstore
from obstore.store import S3Store

from benchmarks.lmcache_arm import Adapter
from benchmarks.lmcache_server import s3_below
from benchmarks.places import (
    DEPTHS,
    FULL,
    HELD_ROUNDS,
    WAIT_S_MAX,
    Arm,
    Arms,
    Cell,
    Extent,
    Here,
    Memory,
    Tier,
    closing,
    judge,
    measured,
    parser_of,
)
from kvtide.testing import object_servers
from kvtide.testing.object_servers import ACCESS_KEY, BUCKET, MOTO, REGION, SECRET_KEY, Server
from kvtide.tiers.s3.names import PART_BYTES
from kvtide.units import KiB, MiB

CLIENT: dict[str, Any] = {"allow_http": True, "http1_only": True}
ROUNDS = 12
"""Fewer than elsewhere: a gigabyte that is put costs the server five seconds of a core."""
TIER_ROUNDS = 8
"""What the tier holds: it claims room for a thirty-second part at once, which takes five requests,
and real caps are thousands of times as large."""
IN_MEMORY = "/dev/shm"
"""Where servers have their files: drives are not what is measured."""
CAP_BYTES_MIN = 64 * MiB
"""No tier takes a smaller one."""
LMCACHE_BYTES_MAX = 8 * MiB
"""Longer records awscrt sends by multipart upload."""
WHY_WITHOUT = "whose client gets along with rclone alone, and without multipart uploads"


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

    def __init__(self, server: Server, memory: Memory, piece_bytes: int) -> None:
        record_bytes = piece_bytes + 8 * KiB
        cap_bytes = TIER_ROUNDS * len(memory.view) // piece_bytes * record_bytes
        cap_bytes = max(cap_bytes, CAP_BYTES_MIN)
        super().__init__(
            memory,
            piece_bytes,
            type="s3",
            url=f"s3://{BUCKET}",
            endpoint=server.endpoint,
            credentials_file=str(server.write_keys()),
            bytes_max=cap_bytes,
        )
        while self._tier.statistics().state != "on":
            assert self._woken.wait(WAIT_S_MAX), self._tier.statistics()
            self._woken.clear()
            self._tier.poll()


@contextmanager
def bucket_in_hosts_name(directory: Path) -> Iterator[Server]:
    """A server of rclone that looks for the bucket there: of 127.0.0.1 it is the first number."""
    (directory / "data" / "127").mkdir(parents=True)
    server = object_servers.rclone(directory)
    server.commands[0].append("--force-path-style=false")
    server.start()
    try:
        yield server
    finally:
        server.kill()


def arms_of(server: Server, hosted: Server | None, memory: Memory, piece_bytes: int) -> Arms:
    """All for one size; LMCache on the second server."""
    others: dict[str, Arm] = {"boto3": Popular(server, memory, piece_bytes)}
    if hosted is not None:
        below = s3_below(hosted.port, ACCESS_KEY, SECRET_KEY)
        others["LMCache s3"] = Adapter(below, piece_bytes, hosted.directory / "lmcache.log")
    plain: dict[str, Arm] = {"plain": Objects(server, "plain", memory, piece_bytes, piece_bytes)}
    if piece_bytes > PART_BYTES:  # else it is the same
        plain["plain, cut"] = Objects(server, "cut", memory, piece_bytes, PART_BYTES)
    return Arms(
        plain,
        again=Objects(server, "again", memory, piece_bytes, piece_bytes),
        tier=ReadyTier(server, memory, piece_bytes),
        others=others,
    )


def run(program: str, extent: Extent) -> list[Cell]:
    """All sizes, each on a server of its own."""
    memory = Memory()

    @contextmanager
    def opened(piece_bytes: int) -> Iterator[Arms]:
        with ExitStack() as stack:
            files = tempfile.TemporaryDirectory(prefix="kvtide-bench-", dir=IN_MEMORY)
            below = Path(stack.enter_context(files))
            server = stack.enter_context(object_servers.running(program, below / "server"))
            hosted = None
            if program == "rclone" and piece_bytes <= LMCACHE_BYTES_MAX:
                hosted = stack.enter_context(bucket_in_hosts_name(below / "hosted"))
            else:
                print(f"{piece_bytes // MiB:>4} MiB: without LMCache s3, {WHY_WITHOUT}")
            yield stack.enter_context(closing(arms_of(server, hosted, memory, piece_bytes)))

    return measured(program, extent, opened)


def main(argv: Sequence[str]) -> int:
    """Measure; 1 where the goal is missed."""
    parser = parser_of(__doc__)
    parser.set_defaults(extent=Extent(FULL.sizes, ROUNDS))
    parser.add_argument("--server", choices=list(object_servers.PROGRAMS), action="append")
    options = parser.parse_args(argv)
    programs = options.server or ["rclone"]
    return judge({program: run(program, options.extent) for program in programs}, options.extent)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

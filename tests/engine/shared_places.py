"""Places that two nodes share, and that are taken away under them and given back."""

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import obstore
from obstore.store import S3Store

from kvtide.testing import object_servers, redis_servers
from kvtide.testing.object_servers import BUCKET
from kvtide.testing.redis_servers import Server
from kvtide.tiers.remote.tier import SURVEY_MS
from tests.mounts import mount, unmount

BYTES_MAX = 2**31
NO_SAVES = "3600 1000000"
"""A server saves when it is told to: without that, one that is killed has lost all."""


TierStatus = dict[str, Any]
"""What a node says of one of its tiers."""


class SharedPlace(Protocol):
    """One of them."""

    entry: dict[str, object]
    """Of `tiers`."""
    look_s: float
    """Nodes look so often for what others stored; 0: each time that they are asked, or nearly."""

    def is_seen(self, here: TierStatus, there: TierStatus) -> bool:
        """Whether two nodes that say this of it know all that both have stored."""

    def take_away(self) -> None:
        """Within a moment nobody reaches it; what it holds now is kept."""

    def give_back(self) -> None:
        """It is there again, with what it held."""

    def lose(self) -> None:
        """All at once it is there with nothing in it."""


class ServerPlace:
    """A Valkey server, killed and started again on its port."""

    look_s = 0.0

    def __init__(self, server: Server) -> None:
        self.entry: dict[str, object] = {
            "type": "redis",
            "bytes_max": BYTES_MAX,
            "url": f"redis://127.0.0.1:{server.port}",
        }
        self._server = server

    def is_seen(self, here: TierStatus, there: TierStatus) -> bool:
        return True

    def take_away(self) -> None:
        assert self._server.ask(b"SAVE") == b"OK"
        self._server.kill()

    def give_back(self) -> None:
        self._server.start()

    def lose(self) -> None:
        self._server.kill()
        (self._server.directory / "dump.rdb").unlink(missing_ok=True)
        self._server.start()


class BucketPlace:
    """A bucket of rclone, which keeps objects as files: killed and started again on its port."""

    look_s = SURVEY_MS / 1000

    def __init__(self, server: object_servers.Server) -> None:
        self.entry: dict[str, object] = {
            "type": "s3",
            "bytes_max": BYTES_MAX,
            "url": f"s3://{BUCKET}",
            "endpoint": server.endpoint,
            "credentials_file": str(server.write_keys()),
        }
        self._server = server
        self._store = S3Store(BUCKET, config=server.config, client_options={"allow_http": True})

    def is_seen(self, here: TierStatus, there: TierStatus) -> bool:
        return here["records"] == there["records"] == len(self._names("kvtide/1/r"))

    def take_away(self) -> None:
        self._server.kill()

    def give_back(self) -> None:
        self._server.start()

    def lose(self) -> None:
        """Somebody deletes all objects."""
        obstore.delete(self._store, self._names(None))

    def _names(self, folder: str | None) -> list[str]:
        return [one["path"] for one in obstore.list(self._store, folder).collect()]


class DirectoryPlace:
    """A directory: of a mount that goes and comes back, where mounts may be made, else renamed."""

    look_s = 0.0

    def __init__(self, below: Path) -> None:
        self._source, self._mount = below / "source", below / "mount"
        for path in (self._source, self._mount):
            path.mkdir()
        self._is_mounted = mount("-t", "tmpfs", "-o", f"size={BYTES_MAX}", "none", self._source)
        self._path = self._mount / "kv"
        self.entry: dict[str, object] = {
            "type": "shared_dir",
            "bytes_max": BYTES_MAX // 4,
            "path": str(self._path),
        }
        if self._is_mounted:
            assert mount("--bind", self._source, self._mount)

    def is_seen(self, here: TierStatus, there: TierStatus) -> bool:
        return bool(here["records"] == there["records"])

    def take_away(self) -> None:
        if self._is_mounted:
            unmount(self._mount)  # lazily: files that are open stay so, as on a stale mount
        else:
            self._path.rename(self._mount / "away")

    def give_back(self) -> None:
        if self._is_mounted:
            assert mount("--bind", self._source, self._mount)
        else:
            (self._mount / "away").rename(self._path)

    def lose(self) -> None:
        """Somebody removes all that is in there."""
        self._path.rename(self._mount / "lost")
        self._path.mkdir(mode=0o700)

    def close(self) -> None:
        """Leave nothing mounted."""
        if self._is_mounted:
            for path in (self._mount, self._source):
                unmount(path)


@contextmanager
def server_place(directory: Path) -> Iterator[SharedPlace]:
    """A Valkey server of its own."""
    with redis_servers.running("valkey", directory, "--save", NO_SAVES) as server:
        yield ServerPlace(server)


@contextmanager
def bucket_place(directory: Path) -> Iterator[SharedPlace]:
    """A server of its own with a bucket in it."""
    with object_servers.running("rclone", directory) as server:
        yield BucketPlace(server)


@contextmanager
def directory_place() -> Iterator[SharedPlace]:
    """Not among pytest's own directories: what is mounted there it could not remove, if this
    process were killed."""
    below = Path(tempfile.mkdtemp(prefix="kvt-shared-"))
    place = DirectoryPlace(below)
    try:
        yield place
    finally:
        with suppress(subprocess.CalledProcessError):
            place.close()
        shutil.rmtree(below, ignore_errors=True)

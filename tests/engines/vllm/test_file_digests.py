"""Digests that are kept between starts: found again, never believed blindly, bounded."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtide.engines.vllm import file_digests
from kvtide.engines.vllm.file_digests import FileDigests
from tests.engines.vllm.checkpoints import an_hour_ahead, digest_of


def test_only_a_file_whose_identity_changed_is_read_again(
    model: Path, digests: FileDigests, reads: list[str]
) -> None:
    """Same size, same mtime: the ctime still tells, because nobody can set it."""
    shard = model / "model-2.safetensors"
    before, times = digest_of(model, digests), shard.stat()
    content = bytearray(shard.read_bytes())
    content[5] ^= 1
    shard.write_bytes(content)
    os.utime(shard, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert shard.stat().st_mtime_ns == times.st_mtime_ns
    reads.clear()
    assert digest_of(model, digests) != before
    assert reads == ["model-2.safetensors"]


def test_a_file_written_a_moment_ago_is_not_kept(model: Path, tmp_path: Path) -> None:
    """A write within the same tick of the file system's clock would not be seen."""
    digests = FileDigests(tmp_path / "cache", time.time_ns)
    digest_of(model, digests)
    assert not list((tmp_path / "cache").glob("*"))


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[:-1],
        lambda content: b"\xff" * len(content),
        lambda content: b"[]",
        lambda content: b'{"sha256": 5}',
        lambda content: content.replace(b'"sha256": "', b'"sha256": "00', 1),
    ],
)
def test_a_damaged_kept_digest_is_ignored_and_written_anew(
    damage: Callable[[bytes], bytes], model: Path, tmp_path: Path, digests: FileDigests
) -> None:
    right = digest_of(model, digests)
    kept = {path: path.read_bytes() for path in (tmp_path / "cache").iterdir()}
    assert len(kept) == 2
    for path, content in kept.items():
        path.write_bytes(damage(content))
    assert digest_of(model, digests) == right
    assert {path: path.read_bytes() for path in (tmp_path / "cache").iterdir()} == kept


def test_every_flipped_bit_of_a_kept_digest_is_noticed(model: Path, tmp_path: Path) -> None:
    digests = FileDigests(tmp_path / "cache", an_hour_ahead)
    identity, digest = digests.read(model / "model-1.safetensors")
    (kept,) = (tmp_path / "cache").iterdir()
    content = kept.read_bytes()
    for bit in range(8 * len(content)):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        kept.write_bytes(flipped)
        assert digests.find(identity) in (None, digest)
        if json_equal(content, bytes(flipped)):
            continue
        assert digests.find(identity) is None, bit


def json_equal(left: bytes, right: bytes) -> bool:
    try:
        return bool(json.loads(left) == json.loads(right))
    except ValueError:
        return False


def test_a_kept_digest_that_others_could_write_is_not_believed(
    model: Path, tmp_path: Path, digests: FileDigests, reads: list[str]
) -> None:
    digest_of(model, digests)
    for path in (tmp_path / "cache").iterdir():
        assert path.stat().st_mode & 0o777 == 0o600
        path.chmod(0o666)
    reads.clear()
    digest_of(model, digests)
    assert len(reads) == 2


def test_a_cache_directory_that_cannot_be_made_costs_only_time(
    model: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way")
    digests = FileDigests(tmp_path / "file" / "cache", an_hour_ahead)
    assert digest_of(model, digests) == digest_of(model, digests)


def test_the_oldest_kept_digests_go_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_digests, "KEPT_MAX", 3)
    digests = FileDigests(tmp_path / "cache", an_hour_ahead)
    identities = []
    for number in range(5):
        path = tmp_path / f"{number}.bin"
        path.write_bytes(bytes([number]))
        identity, _ = digests.read(path)
        identities.append(identity)
        for age, kept in enumerate(identities):
            place = tmp_path / "cache" / f"{kept.device:x}-{kept.inode:x}.json"
            if place.exists():
                os.utime(place, ns=(age * 10**9, age * 10**9))
    assert [digests.find(identity) is not None for identity in identities] == [
        False,
        False,
        True,
        True,
        True,
    ]

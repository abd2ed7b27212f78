"""What tests of digests share: a small checkpoint, and readers of it."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtide.engines.vllm import file_digests
from kvtide.engines.vllm.file_digests import FileDigests, FileIdentity
from tests.engines.vllm.checkpoints import HeldReads, an_hour_ahead


@pytest.fixture
def digests(tmp_path: Path) -> FileDigests:
    return FileDigests(tmp_path / "cache", an_hour_ahead)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A checkpoint of two shards with an index, and files that are no weights."""
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "model-1.safetensors").write_bytes(bytes(range(256)) * 40)
    (directory / "model-2.safetensors").write_bytes(b"second shard" * 1000)
    weight_map = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    index = json.dumps({"weight_map": weight_map})
    (directory / "model.safetensors.index.json").write_text(index)
    (directory / "config.json").write_text("{}")
    return directory


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that were read, in order."""
    seen: list[str] = []
    real = file_digests._identity_and_digest

    def counted(
        path: Path, stopped: Callable[[], bool], progress: Callable[[int], None]
    ) -> tuple[FileIdentity, bytes]:
        seen.append(path.resolve().name)
        return real(path, stopped, progress)

    monkeypatch.setattr(file_digests, "_identity_and_digest", counted)
    return seen


@pytest.fixture
def held(tmp_path: Path) -> Iterator[HeldReads]:
    digests = HeldReads(tmp_path / "cache")
    yield digests
    digests.go.set()

"""Attacks of the second round on what a blob's name says."""

import hashlib
import os
import time
from pathlib import Path

from kvtide.engines.vllm.file_digests import FileDigests
from kvtide.engines.vllm.weights import AdapterDigests, Known, LocalWeights, WeightsDigest


def _linked(tmp_path: Path, place: Path, content: bytes) -> Path:
    blob = tmp_path / "blobs" / hashlib.sha256(content).hexdigest()
    blob.parent.mkdir(exist_ok=True)
    blob.write_bytes(content)
    place.parent.mkdir(exist_ok=True, parents=True)
    place.symlink_to(blob)
    return place


def test_a_blob_written_through_its_link_is_not_known_by_its_name(tmp_path: Path) -> None:
    """`save_pretrained(snapshot)` writes through the link; the next engine computes other KV."""
    file = _linked(tmp_path, tmp_path / "model" / "model.safetensors", os.urandom(64 << 20))
    time.sleep(2.2)  # so that its digest is kept
    digests = FileDigests(tmp_path / "kept")
    before = WeightsDigest(LocalWeights(file.parent), digests)
    before.start()
    digest = before.wait(20, verified=True)
    before.close()
    with file.open("r+b") as written:
        written.write(b"another model's weights")
    after = WeightsDigest(LocalWeights(file.parent), digests)
    after.start()
    first = after.wait(5)
    after.close()
    assert isinstance(digest, Known)
    assert first != digest, "serves, stores and loads under the digest of the old weights"


def test_an_adapter_written_through_its_link_after_it_was_loaded(tmp_path: Path) -> None:
    """The engine has the old bytes; the first request that names it comes after the edit."""
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    _linked(tmp_path, adapter / "adapter_config.json", b"{}")
    file = _linked(tmp_path, adapter / "adapter_model.safetensors", os.urandom(1 << 16))
    began_ns = time.time_ns()  # the engine starts, and loads the adapter (--lora-modules)
    time.sleep(0.1)
    with file.open("r+b") as written:
        written.write(b"another adapter")
    digests = AdapterDigests(FileDigests(tmp_path / "kept"), began_ns)
    until_s = time.monotonic() + 2
    while (digest := digests.digest(str(adapter))) is None and time.monotonic() < until_s:
        time.sleep(0.01)
    digests.close()
    assert digest is None, "KV of the old adapter is stored under the content of the new one"

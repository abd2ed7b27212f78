"""The weights digest: every byte counts, nothing is read twice, nothing is believed blindly."""

import hashlib
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtide.core.reasons import Off, OffReason
from kvtide.engines.vllm import file_digests
from kvtide.engines.vllm.file_digests import (
    FileDigests,
    FileIdentity,
)
from kvtide.engines.vllm.weights import (
    DummyWeights,
    Hashing,
    Known,
    LocalWeights,
    WeightsDigest,
    process_began_ns,
    weight_files,
)
from tests.engines.vllm.checkpoints import (
    WAIT_S,
    HeldReads,
    a_moment_after,
    a_snapshot,
    digest_of,
    off_of,
    settled,
)

SMOLLM2 = Path(__file__).parents[3] / ".venv" / "models" / "smollm2-135m-bf16"


def test_the_digest_is_that_of_the_sorted_list_of_file_digests(
    model: Path, digests: FileDigests
) -> None:
    parts = [hashlib.sha256(path.read_bytes()).digest() for path in model.glob("*.safetensors")]
    expected = hashlib.sha256(b"".join(sorted(parts))).digest()
    assert digest_of(model, digests) == expected


def test_golden_value_of_one_small_checkpoint(tmp_path: Path, digests: FileDigests) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"kvtide")
    assert digest_of(tmp_path, digests).hex() == (
        "77957bd30583914d8a3ac881b7521304a1fb7613c4859be247f9f4b35efe4109"
    )


@settings(suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_flipped_bit_of_any_weight_file_gives_another_digest(
    data: st.DataObject, model: Path, digests: FileDigests
) -> None:
    before = digest_of(model, digests)
    path = data.draw(st.sampled_from(sorted(model.glob("*.safetensors"))))
    content = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, len(content) - 1))
    content[at] ^= 1 << data.draw(st.integers(0, 7))
    original = path.read_bytes()
    path.write_bytes(content)
    try:
        assert digest_of(model, digests) != before
    finally:
        path.write_bytes(original)


def test_a_file_cut_short_or_grown_by_one_byte_gives_another_digest(
    model: Path, digests: FileDigests
) -> None:
    before = digest_of(model, digests)
    shard = model / "model-1.safetensors"
    content = shard.read_bytes()
    shard.write_bytes(content[:-1])
    assert digest_of(model, digests) != before
    shard.write_bytes(content + b"\0")
    assert digest_of(model, digests) != before


def test_a_copy_elsewhere_under_other_names_has_the_same_digest(
    model: Path, tmp_path: Path, digests: FileDigests
) -> None:
    copy = tmp_path / "somewhere" / "else"
    copy.mkdir(parents=True)
    for path in model.glob("*.safetensors"):
        (copy / f"renamed-{path.name}").write_bytes(path.read_bytes())
    assert digest_of(copy, digests) == digest_of(model, digests)


def test_a_second_start_reads_no_file(model: Path, digests: FileDigests, reads: list[str]) -> None:
    first = digest_of(model, digests)
    assert sorted(reads) == ["model-1.safetensors", "model-2.safetensors"]
    assert digest_of(model, digests) == first
    assert len(reads) == 2


@pytest.mark.engine
def test_a_second_start_with_a_real_model_takes_less_than_50_ms(
    digests: FileDigests,
) -> None:
    local = LocalWeights(SMOLLM2)
    first = settled(WeightsDigest(local, digests))
    began_s = time.perf_counter()
    weights = WeightsDigest(local, digests)
    weights.start()
    second = weights.wait(WAIT_S)
    elapsed_s = time.perf_counter() - began_s
    weights.close()
    assert second == first
    assert elapsed_s < 0.05


def test_two_processes_at_once_agree_and_leave_whole_files(model: Path, tmp_path: Path) -> None:
    program = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from kvtide.engines.vllm.file_digests import FileDigests\n"
        "from kvtide.engines.vllm.weights import LocalWeights, WeightsDigest\n"
        "late = lambda: time.time_ns() + 3600 * 10**9\n"
        "for _ in range(20):\n"
        "    files = FileDigests(Path(sys.argv[2]), late)\n"
        "    weights = WeightsDigest(LocalWeights(Path(sys.argv[1])), files)\n"
        "    weights.start()\n"
        "    print(weights.wait(30).digest.hex())\n"
        "    weights.close()\n"
        "    for kept in Path(sys.argv[2]).glob('*.json'):\n"
        "        kept.unlink(missing_ok=True)\n"
    )
    cache = tmp_path / "cache"
    running = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(model), str(cache)],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONHASHSEED": seed},
        )
        for seed in ("1", "2")
    ]
    said = {line for process in running for line in process.communicate()[0].split()}
    assert [process.returncode for process in running] == [0, 0]
    assert said == {digest_of(model, FileDigests(tmp_path / "other")).hex().encode()}
    assert not [path for path in cache.iterdir() if path.suffix != ".json"]


# --- which files count -----------------------------------------------------------------------


def names(directory: Path, load_format: str = "auto") -> list[str]:
    files = weight_files(LocalWeights(directory, load_format))
    assert not isinstance(files, Off), files
    return [path.name for path in files]


def with_files(directory: Path, *files: str) -> Path:
    for name in files:
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_bytes(name.encode())
    return directory


def test_files_are_chosen_as_the_loader_chooses_them(tmp_path: Path) -> None:
    def chosen(*files: str, load_format: str = "auto") -> list[str]:
        directory = tmp_path / str(len(list(tmp_path.iterdir())))
        directory.mkdir()
        return names(with_files(directory, *files), load_format)

    assert chosen("a.safetensors", "b.bin", "c.pt") == ["a.safetensors"]
    assert chosen("b.bin", "c.pt", "training_args.bin") == ["b.bin"]
    assert chosen("c.pt", "optimizer.pt", "scheduler.pt") == ["c.pt"]
    assert chosen("c.pt", "a.safetensors", load_format="pt") == ["c.pt"]
    assert chosen("a.safetensors", "b.bin", load_format="fastsafetensors") == ["a.safetensors"]
    both = ("consolidated.safetensors", "model.safetensors")
    assert chosen(*both) == ["consolidated.safetensors"]
    assert chosen(*both, load_format="hf") == ["consolidated.safetensors", "model.safetensors"]


def test_of_several_safetensors_files_only_those_in_the_index_count(
    model: Path, digests: FileDigests
) -> None:
    before = digest_of(model, digests)
    (model / "consolidated-copy.safetensors").write_bytes(b"not in the index")
    assert names(model, "hf") == ["model-1.safetensors", "model-2.safetensors"]
    assert digest_of(model, digests, "hf") == before


def test_a_directory_without_weights_and_an_unread_format_turn_caching_off(
    tmp_path: Path, model: Path, digests: FileDigests
) -> None:
    assert off_of(tmp_path / "absent", digests).reason is OffReason.WEIGHTS_NOT_LOCAL
    assert off_of(with_files(tmp_path, "x.txt"), digests).reason is OffReason.WEIGHTS_NOT_LOCAL
    off = off_of(model, digests, "runai_streamer")
    assert off.reason is OffReason.WEIGHTS_NOT_LOCAL
    assert "runai_streamer" in off.detail


@pytest.mark.parametrize("index", ["", "[]", '{"weight_map": 3}', '{"weight_map": {"a": "x"}}'])
def test_an_index_that_cannot_be_followed_turns_caching_off(
    index: str, model: Path, digests: FileDigests
) -> None:
    (model / "model.safetensors.index.json").write_text(index)
    off = off_of(model, digests)
    assert off.reason is OffReason.FIELD_UNKNOWN
    assert "model.safetensors.index.json" in off.detail


def test_dummy_weights_are_named_by_their_seed_and_config(digests: FileDigests) -> None:
    def digest(seed: int, config: bytes) -> bytes:
        state = settled(WeightsDigest(DummyWeights(seed, config), digests))
        assert isinstance(state, Known)
        return state.digest

    assert digest(0, b"c") == digest(0, b"c")
    assert len({digest(0, b"c"), digest(1, b"c"), digest(0, b"d"), digest(1, b" c")}) == 4


# --- while files are read --------------------------------------------------------------------


class ChangedMeanwhile(FileDigests):
    """Writes to a file just after it was opened, a given number of times."""

    changes_left = 0

    def read(
        self,
        path: Path,
        stopped: Callable[[], bool] = lambda: False,
        progress: Callable[[int], None] = lambda _: None,
    ) -> tuple[FileIdentity, bytes]:
        def meddle(byte_count: int) -> None:
            progress(byte_count)
            if byte_count > 0 and self.changes_left:
                self.changes_left -= 1
                os.utime(path, ns=(0, self.changes_left))

        return super().read(path, stopped, meddle)


def test_a_file_that_changes_while_it_is_read_is_read_once_more(
    model: Path, tmp_path: Path, digests: FileDigests
) -> None:
    meddled = ChangedMeanwhile(tmp_path / "cache")
    meddled.changes_left = 1
    assert digest_of(model, meddled) == digest_of(model, digests)
    assert meddled.changes_left == 0


def test_a_file_that_keeps_changing_turns_caching_off(model: Path, tmp_path: Path) -> None:
    meddled = ChangedMeanwhile(tmp_path / "cache")
    meddled.changes_left = 1000
    off = off_of(model, meddled)
    assert off.reason is OffReason.WEIGHTS_CHANGE
    assert "is being written" in off.detail


def test_a_file_changed_after_the_engine_began_turns_caching_off(
    model: Path, digests: FileDigests
) -> None:
    began_ns = a_moment_after(model)
    assert is_known(model, digests, began_ns)
    (model / "model-2.safetensors").write_bytes(b"other")
    assert not is_known(model, digests, began_ns)


@pytest.mark.parametrize(
    "way", ["link", "link to a link", "link above", "renamed", "file", "its link"]
)
def test_another_checkpoint_behind_the_same_path_turns_caching_off(
    way: str, model: Path, tmp_path: Path, digests: FileDigests
) -> None:
    """All of its files are older than the engine, which has loaded what was there before."""
    other, files = tmp_path / "other", [*model.glob("*.safetensors")]
    shutil.copytree(model, other)
    for file in other.glob("*.safetensors"):
        file.write_bytes(b"other")
    here, above = tmp_path / "here", tmp_path / "above"
    match way:
        case "link":
            here.symlink_to(model)
        case "link to a link":
            above.symlink_to(model)
            here.symlink_to(above)
        case "link above":
            shutil.copytree(model, tmp_path / "v1" / "model")
            shutil.copytree(other, tmp_path / "v2" / "model")
            above.symlink_to("v1")
            here = above / "model"
        case "renamed" | "file":
            here = model
        case "its link":
            here.mkdir()
            for file in files:
                (here / file.name).symlink_to(file)
    began_ns = a_moment_after(tmp_path)
    assert is_known(here, digests, began_ns)
    match way:
        case "link":
            here.unlink()
            here.symlink_to(other)
        case "link to a link":
            above.unlink()
            above.symlink_to(other)
        case "link above":
            above.unlink()
            above.symlink_to("v2")
        case "renamed":
            model.rename(tmp_path / "old")
            other.rename(model)
        case "file":
            (other / files[0].name).rename(files[0])
        case "its link":
            (here / files[0].name).unlink()
            (here / files[0].name).symlink_to(other / files[0].name)
    assert not is_known(here, digests, began_ns)


def test_a_name_of_the_hub_that_stands_for_another_snapshot_turns_caching_off(
    tmp_path: Path, digests: FileDigests
) -> None:
    """Another engine has fetched what is new there since ours has loaded what was there."""
    repository = tmp_path / "models--someone--model"
    first = a_snapshot(repository, b"weights")
    second = repository / "snapshots" / "def"
    shutil.copytree(first, second, symlinks=True)
    ref = repository / "refs" / "main"
    ref.parent.mkdir()
    ref.write_text("abc")
    began_ns = a_moment_after(ref)
    assert is_known(second, digests, began_ns)
    ref.write_text("def")
    assert not is_known(second, digests, began_ns)
    shutil.rmtree(first)
    assert is_known(second, digests, began_ns), "the engine has fetched it, there is no other"


def is_known(directory: Path, digests: FileDigests, began_ns: int) -> bool:
    """Whether an engine that began then has a digest of its weights."""
    state = settled(WeightsDigest(LocalWeights(directory), digests, unchanged_since_ns=began_ns))
    assert isinstance(state, Known) or state.reason is OffReason.WEIGHTS_CHANGE, state
    return isinstance(state, Known)


def test_the_start_of_a_process_is_known_to_a_tenth_of_a_second() -> None:
    before_ns = time.time_ns()
    program = "from kvtide.engines.vllm.weights import process_began_ns as began; print(began())"
    said = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, check=True)
    assert before_ns - 100_000_000 < int(said.stdout) < time.time_ns()
    assert process_began_ns() < before_ns


def test_an_unreadable_file_turns_caching_off_and_is_named(
    model: Path, tmp_path: Path, digests: FileDigests
) -> None:
    (model / "model-2.safetensors").unlink()
    (model / "model-2.safetensors").mkdir()
    off = off_of(model, digests)
    assert off.reason is OffReason.FIELD_UNKNOWN
    assert "model-2.safetensors" in off.detail


def test_until_the_digest_is_known_the_bytes_left_are_told(model: Path, held: HeldReads) -> None:
    weights = WeightsDigest(LocalWeights(model), held, thread_count=1)
    weights.start()
    assert held.began.wait(WAIT_S)
    total = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    assert weights.poll() == Hashing(0, total, None)
    held.go.set()
    assert isinstance(weights.wait(WAIT_S), Known)
    weights.close()


def test_close_ends_a_long_read_at_once(tmp_path: Path, digests: FileDigests) -> None:
    """The file is sparse and far larger than could be read in the time."""
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(1 << 40)
    weights = WeightsDigest(LocalWeights(tmp_path), digests)
    weights.start()
    while not (isinstance(state := weights.poll(), Hashing) and state.done_bytes):
        pass
    assert state.eta_s is None or state.eta_s > 0
    weights.close(timeout_s=WAIT_S)
    assert not any(thread.is_alive() for thread in weights._threads)


def test_reading_runs_at_the_lowest_priority(
    model: Path, digests: FileDigests, monkeypatch: pytest.MonkeyPatch
) -> None:
    levels: list[int] = []
    real = file_digests._identity_and_digest

    def noted(
        path: Path, stopped: Callable[[], bool], progress: Callable[[int], None]
    ) -> tuple[FileIdentity, bytes]:
        levels.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return real(path, stopped, progress)

    monkeypatch.setattr(file_digests, "_identity_and_digest", noted)
    before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    digest_of(model, digests)
    assert levels == [19, 19]
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before

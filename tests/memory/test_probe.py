"""The memory there is: recorded trees of hosts and containers, and this machine."""

import os
import resource
from pathlib import Path

import pytest

from kvtide.errors import HostMemoryError
from kvtide.memory import probe
from kvtide.memory.probe import KernelFeatures, Pressure
from kvtide.units import GiB, MiB

UNLIMITED_V1 = "9223372036854771712\n"

MEMINFO = """\
MemTotal:       24683652 kB
MemFree:        20739088 kB
MemAvailable:   20971520 kB
Buffers:          202260 kB
HugePages_Total:       0
"""  # 20 GiB available

MOUNTS_V2 = """\
22 27 0:21 / /proc rw,relatime - proc proc rw
31 23 0:28 / /sys/fs/cgroup rw,nosuid,nodev,relatime shared:9 - cgroup2 cgroup2 rw,nsdelegate
"""

# Recorded on a virtual machine: every controller in v1, v2 mounted beside them without memory.
MOUNTS_HYBRID = """\
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw,discard,resv_strict,resuid=65534,resgid=65534
31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu
34 31 0:31 / /sys/fs/cgroup/cpuset rw,relatime - cgroup cgroup rw,cpuset
35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
40 31 0:37 / /sys/fs/cgroup/systemd rw,relatime - cgroup cgroup rw,name=systemd
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
"""
GROUP_HYBRID = "9:name=systemd:/\n4:memory:/sandbox/a1\n3:cpuset:/\n2:cpuacct:/\n1:cpu:/\n0::/\n"


def tree(root: Path, files: dict[str, str]) -> Path:
    """A file system with these files below `root`, and /proc/meminfo."""
    for name, text in {"proc/meminfo": MEMINFO, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


def v2(
    directory: str, limit: str, used: int, inactive_file: int = 0, high: str = "max"
) -> dict[str, str]:
    at = f"sys/fs/cgroup{directory}"
    return {
        f"{at}/memory.max": f"{limit}\n",
        f"{at}/memory.high": f"{high}\n",
        f"{at}/memory.current": f"{used}\n",
        f"{at}/memory.stat": f"anon 5\nfile 7\ninactive_file {inactive_file}\n",
    }


def v1(
    directory: str, limit: str, used: int, inactive_file: int = 0, whole: str = UNLIMITED_V1
) -> dict[str, str]:
    at = f"sys/fs/cgroup/memory{directory}"
    return {
        f"{at}/memory.limit_in_bytes": limit,
        f"{at}/memory.usage_in_bytes": f"{used}\n",
        f"{at}/memory.stat": f"inactive_file 1\nhierarchical_memory_limit {whole.strip()}\n"
        f"hierarchical_memsw_limit {UNLIMITED_V1}total_inactive_file {inactive_file}\n",
    }


def test_without_any_limit_the_machine_decides(tmp_path: Path) -> None:
    found = probe.host_memory(tree(tmp_path, {}))
    assert (found.total_bytes, found.limit) == (24683652 * 1024, None)
    assert found.available_bytes == 20 * GiB


def test_a_v2_limit_counts_minus_usage_that_cannot_be_taken_back(tmp_path: Path) -> None:
    files = v2("/user.slice/job", str(8 * GiB), 3 * GiB, inactive_file=GiB)
    files |= {"proc/self/cgroup": "0::/user.slice/job\n", "proc/self/mountinfo": MOUNTS_V2}
    found = probe.host_memory(tree(tmp_path, files))
    assert found.limit is not None
    assert found.limit.directory == tmp_path / "sys/fs/cgroup/user.slice/job"
    assert found.limit.limit_bytes == 8 * GiB
    assert found.limit.used_bytes == 2 * GiB
    assert found.available_bytes == 6 * GiB


# The fields of a container that has just read a model of 6 GB, in v2 and v1; made up.
STAT_V2 = """\
anon 2147483648
file 6442450944
kernel 83886080
shmem 0
inactive_file 1073741824
active_file 5368709120
unevictable 0
slab_reclaimable 67108864
slab_unreclaimable 8388608
"""
STAT_V1 = """\
cache 1
rss 2
inactive_file 3
active_file 4
hierarchical_memory_limit 17179869184
total_cache 6442450944
total_rss 2147483648
total_inactive_file 1073741824
total_active_file 5368709120
"""


def test_files_that_were_read_are_not_used_up_memory(tmp_path: Path) -> None:
    """A model's weights stay in the group's page cache, as active files: half counts as free."""
    used = 8 * GiB + 512 * MiB
    files = v2("/job", str(16 * GiB), used) | {"sys/fs/cgroup/job/memory.stat": STAT_V2}
    files |= {"proc/self/cgroup": "0::/job\n", "proc/self/mountinfo": MOUNTS_V2}
    left = 16 * GiB - (used - GiB - 5 * GiB // 2 - 64 * MiB)
    assert probe.host_memory(tree(tmp_path, files)).available_bytes == left


def test_files_that_were_read_are_not_used_up_memory_in_v1(tmp_path: Path) -> None:
    at = "sys/fs/cgroup/memory/sandbox/a1/memory.stat"
    files = v1("/sandbox/a1", f"{16 * GiB}\n", 8 * GiB) | {at: STAT_V1}
    files |= {"proc/self/cgroup": GROUP_HYBRID, "proc/self/mountinfo": MOUNTS_HYBRID}
    left = 16 * GiB - (8 * GiB - GiB - 5 * GiB // 2)
    assert probe.host_memory(tree(tmp_path, files)).available_bytes == left


def test_statistics_of_groups_without_a_limit_are_not_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = v2("/pod", str(9 * GiB), GiB) | v2("/pod/box", "max", GiB)
    files |= {"proc/self/cgroup": "0::/pod/box\n", "proc/self/mountinfo": MOUNTS_V2}
    root, asked, read = tree(tmp_path, files), [], probe._read
    monkeypatch.setattr(probe, "_read", lambda path: asked.append(path) or read(path))
    assert probe.host_memory(root).available_bytes == 8 * GiB
    stats = [path for path in asked if path.name == "memory.stat"]
    assert stats == [root / "sys/fs/cgroup/pod/memory.stat"]


def test_reserve_is_of_the_machine_and_of_each_limit(tmp_path: Path) -> None:
    """The tightest counts after its reserve: a large group may leave less than a small one."""
    files = v2("/pod", str(18 * GiB), 2 * GiB) | v2("/pod/box", str(17 * GiB), GiB)
    files |= {"proc/self/cgroup": "0::/pod/box\n", "proc/self/mountinfo": MOUNTS_V2}
    found = probe.host_memory(tree(tmp_path, files))
    assert found.limit is not None
    assert found.limit.directory == tmp_path / "sys/fs/cgroup/pod"
    assert found.spare_bytes == 16 * GiB - probe.reserve_bytes(18 * GiB)
    assert probe.reserve_bytes(GiB) == probe.RESERVE_BYTES_MIN
    assert probe.reserve_bytes(100 * GiB) == 3 * GiB


def test_the_machine_counts_where_a_limit_leaves_more(tmp_path: Path) -> None:
    files = v2("/job", str(100 * GiB), GiB)
    files |= {"proc/self/cgroup": "0::/job\n", "proc/self/mountinfo": MOUNTS_V2}
    assert probe.host_memory(tree(tmp_path, files)).available_bytes == 20 * GiB


def test_of_nested_v2_groups_the_nearest_that_limits_counts(tmp_path: Path) -> None:
    files = v2("/pod", str(9 * GiB), 2 * GiB)
    files |= v2("/pod/box", "max", 2 * GiB) | v2("/pod/box/engine", "max", GiB)
    files |= {"proc/self/cgroup": "0::/pod/box/engine\n", "proc/self/mountinfo": MOUNTS_V2}
    found = probe.host_memory(tree(tmp_path, files))
    assert found.limit is not None
    assert found.limit.directory == tmp_path / "sys/fs/cgroup/pod"
    assert found.available_bytes == 7 * GiB


def test_a_sibling_that_used_up_the_parents_limit_is_seen(tmp_path: Path) -> None:
    files = v2("/pod", str(10 * GiB), 9 * GiB) | v2("/pod/engine", str(8 * GiB), GiB)
    files |= {"proc/self/cgroup": "0::/pod/engine\n", "proc/self/mountinfo": MOUNTS_V2}
    assert probe.host_memory(tree(tmp_path, files)).available_bytes == GiB


def test_a_throttling_mark_below_the_limit_is_the_limit(tmp_path: Path) -> None:
    files = v2("/pod", str(10 * GiB), GiB, high=str(4 * GiB))
    files |= {"proc/self/cgroup": "0::/pod\n", "proc/self/mountinfo": MOUNTS_V2}
    assert probe.host_memory(tree(tmp_path, files)).available_bytes == 3 * GiB


def test_usage_above_a_limit_leaves_nothing(tmp_path: Path) -> None:
    files = v2("/pod", str(GiB), 2 * GiB)
    files |= {"proc/self/cgroup": "0::/pod\n", "proc/self/mountinfo": MOUNTS_V2}
    assert probe.host_memory(tree(tmp_path, files)).available_bytes == 0


def test_a_v2_container_finds_its_limit_at_the_top_of_its_mount(tmp_path: Path) -> None:
    """Docker with a private cgroup namespace: the group is /, and / has files."""
    files = v2("", str(2 * GiB), GiB // 2, inactive_file=GiB // 4)
    files |= {"proc/self/cgroup": "0::/\n", "proc/self/mountinfo": MOUNTS_V2}
    assert probe.host_memory(tree(tmp_path, files)).available_bytes == 2 * GiB - GiB // 4


@pytest.mark.parametrize("group", ["/../../kubepods/pod1/box", "/docker/4f2a", "/.."])
def test_a_group_outside_the_mount_falls_back_to_the_mount(tmp_path: Path, group: str) -> None:
    """A process moved between cgroup namespaces, or a mount of another one's."""
    files = v2("", str(2 * GiB), GiB)
    files |= {"proc/self/cgroup": f"0::{group}\n", "proc/self/mountinfo": MOUNTS_V2}
    assert probe.host_memory(tree(tmp_path, files)).available_bytes == GiB


def test_a_mounted_part_of_a_v1_hierarchy_is_cut_off_the_groups_path(tmp_path: Path) -> None:
    """Docker with v1: the host's path in /proc/self/cgroup, and only that part mounted."""
    mounts = (
        "35 31 0:32 /docker/4f2a /sys/fs/cgroup/memory ro,nosuid master:15"
        " - cgroup cgroup rw,memory\n"
    )
    files = v1("", f"{4 * GiB}\n", GiB) | v1("/engine", UNLIMITED_V1, GiB // 2)
    files |= {
        "proc/self/cgroup": "4:memory:/docker/4f2a/engine\n1:name=systemd:/docker/4f2a\n",
        "proc/self/mountinfo": mounts,
    }
    found = probe.host_memory(tree(tmp_path, files))
    assert found.limit is not None
    assert found.limit.directory == tmp_path / "sys/fs/cgroup/memory"
    assert found.available_bytes == 3 * GiB


def test_of_two_mounts_the_one_that_shows_the_group_is_used(tmp_path: Path) -> None:
    mounts = (
        "34 31 0:32 /other /elsewhere rw - cgroup cgroup rw,memory\n"
        "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,cpu,memory\n"
    )
    files = v1("/othermost", f"{4 * GiB}\n", GiB)
    files |= {"proc/self/cgroup": "4:cpu,memory:/othermost\n", "proc/self/mountinfo": mounts}
    assert probe.host_memory(tree(tmp_path, files)).available_bytes == 3 * GiB


def test_a_mount_point_with_a_blank_is_found(tmp_path: Path) -> None:
    mounts = "31 23 0:28 / /sys/fs/c\\040group rw - cgroup2 cgroup2 rw\n"
    files = {name.replace("cgroup", "c group"): text for name, text in v2("", "4096", 0).items()}
    files |= {"proc/self/cgroup": "0::/\n", "proc/self/mountinfo": mounts}
    assert probe.host_memory(tree(tmp_path, files)).available_bytes == 4096


def test_the_largest_number_of_v1_is_no_limit(tmp_path: Path) -> None:
    files = v1("/sandbox/a1", UNLIMITED_V1, GiB) | v1("/sandbox", UNLIMITED_V1, 2 * GiB)
    files |= {"proc/self/cgroup": GROUP_HYBRID, "proc/self/mountinfo": MOUNTS_HYBRID}
    assert probe.host_memory(tree(tmp_path, files)).limit is None


def test_on_a_hybrid_host_the_v1_controller_is_found_and_walked_up(tmp_path: Path) -> None:
    files = v1("/sandbox/a1", UNLIMITED_V1, GiB, whole=str(5 * GiB))
    files |= v1("/sandbox", f"{5 * GiB}\n", 3 * GiB, inactive_file=GiB)
    files |= {"sys/fs/cgroup/unified/cgroup.procs": "1\n"}
    files |= {"proc/self/cgroup": GROUP_HYBRID, "proc/self/mountinfo": MOUNTS_HYBRID}
    found = probe.host_memory(tree(tmp_path, files))
    assert found.limit is not None
    assert found.limit.directory == tmp_path / "sys/fs/cgroup/memory/sandbox"
    assert found.available_bytes == 3 * GiB


def test_on_a_hybrid_host_the_v2_controller_is_found(tmp_path: Path) -> None:
    files = {
        name.replace("cgroup/", "cgroup/unified/"): text
        for name, text in v2("/job", str(6 * GiB), GiB).items()
    }
    group = GROUP_HYBRID.replace("4:memory:/sandbox/a1\n", "").replace("0::/", "0::/job")
    files |= {"proc/self/cgroup": group, "proc/self/mountinfo": MOUNTS_HYBRID}
    assert probe.host_memory(tree(tmp_path, files)).available_bytes == 5 * GiB


def test_a_v1_ancestor_outside_the_mount_limits_through_the_hierarchy(tmp_path: Path) -> None:
    files = v1("/sandbox/a1", UNLIMITED_V1, GiB, whole=str(3 * GiB))
    files |= {"proc/self/cgroup": GROUP_HYBRID, "proc/self/mountinfo": MOUNTS_HYBRID}
    assert probe.host_memory(tree(tmp_path, files)).available_bytes == 2 * GiB


def test_without_meminfo_the_error_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(HostMemoryError, match="mount /proc"):
        probe.host_memory(tmp_path)


def test_pressure_is_read_where_the_kernel_measures_it(tmp_path: Path) -> None:
    text = (
        "some avg10=12.50 avg60=3.00 avg300=0.10 total=92\n"
        "full avg10=0.25 avg60=0.00 avg300=0.00 total=5\n"
    )
    root = tree(tmp_path, {"proc/pressure/memory": text})
    assert probe.pressure(root) == Pressure(some_ratio=0.125, full_ratio=0.0025)


def test_pressure_is_unknown_elsewhere(tmp_path: Path) -> None:
    assert probe.pressure(tmp_path) is None
    assert probe.pressure(tree(tmp_path, {"proc/pressure/memory": "?\n"})) is None


def test_memlock_is_a_number_or_unlimited(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"now": (8 * MiB, 8 * MiB)}
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits["now"])
    assert probe.memlock_bytes() == 8 * MiB
    limits["now"] = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    assert probe.memlock_bytes() is None


def test_this_machine_can_be_probed() -> None:
    found = probe.host_memory()
    assert 0 < found.available_bytes <= found.total_bytes
    assert probe.available_bytes() > 0


def test_this_kernel_has_what_is_required() -> None:
    assert probe.kernel_features().missing == []


def test_a_feature_that_cannot_be_used_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> int:
        raise PermissionError

    monkeypatch.setattr(os, "pidfd_open", refuse)
    monkeypatch.setattr(os, "memfd_create", refuse)
    monkeypatch.setattr(probe, "advise", refuse)
    found = probe.kernel_features()
    assert found == KernelFeatures(sealed_memory_files=False, pidfd=False, populate_write=False)
    assert [text.split(" ")[0] for text in found.missing] == ["memory", "pidfd_open"]


def test_a_kernel_without_the_generations_seal_lacks_memory_files(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(probe, "F_SEAL_FUTURE_WRITE", 1 << 30)
    assert not probe.kernel_features().sealed_memory_files

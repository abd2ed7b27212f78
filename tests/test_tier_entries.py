"""The setting `tiers`, and the one disk that is given in short."""

import json
import re
from pathlib import Path

import pytest

from kvtide.core.checks import TEXT_CHARS_MAX
from kvtide.errors import ConfigError
from tests.test_config import TOKEN, read

DISK = {"type": "disk", "path": "/mnt/nvme", "bytes_max": "2TiB"}
IN_SHORT = {
    "KVTIDE_DISK_PATH": "/mnt/nvme",
    "KVTIDE_DISK_BYTES_MAX": "2TiB",
    "KVTIDE_DISK_WRITE": "through",
    "KVTIDE_DISK_SYNC": "each",
}


def test_a_disk_is_given_in_short_or_as_a_tier(tmp_path: Path) -> None:
    short = read(tmp_path, KVTIDE_DISK_PATH="/mnt/nvme", KVTIDE_DISK_BYTES_MAX="2TiB")
    listed = read(tmp_path, "tiers:\n  - type: disk\n    path: /mnt/nvme\n    bytes_max: 2TiB\n")
    by_variable = read(tmp_path / "none", KVTIDE_TIERS=json.dumps([DISK]))
    (disk,) = short.node.places
    options = {"path": Path("/mnt/nvme"), "bytes_max": 2 << 40, "sync": "sealed"}
    assert (disk.type, disk.name, disk.write) == ("disk", "disk", "through")
    assert disk.options == options
    assert listed.node.places == by_variable.node.places == (disk,)


@pytest.mark.parametrize("tiers", [[DISK], []])
@pytest.mark.parametrize("name", IN_SHORT)
def test_a_disk_that_is_given_twice_is_refused(
    tmp_path: Path, tiers: list[dict[str, str]], name: str
) -> None:
    """In part too, or as one of no tiers at all: what is given is never left out."""
    said = rf"KVTIDE_TIERS sets tiers, and .*{name} \w+, which is short for .* of an entry"
    with pytest.raises(ConfigError, match=said):
        read(tmp_path, KVTIDE_TIERS=json.dumps(tiers), **{name: IN_SHORT[name]})


@pytest.mark.parametrize("name", IN_SHORT)
def test_a_part_of_a_disk_is_refused(tmp_path: Path, name: str) -> None:
    """And each goes with both that a disk needs."""
    missing = "disk_bytes_max" if name == "KVTIDE_DISK_PATH" else "disk_path"
    with pytest.raises(ConfigError, match=f"{name} sets .*, but {missing} is not set"):
        read(tmp_path, **{name: IN_SHORT[name]})
    places = ("KVTIDE_DISK_PATH", "KVTIDE_DISK_BYTES_MAX", name)
    assert len(read(tmp_path, **{one: IN_SHORT[one] for one in places}).node.places) == 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"type": "dsik"}, "no tier has the type 'dsik'; did you mean disk"),
        ({"type": 7}, "an entry without a type, such as `type: disk`"),
        ({"pth": "/mnt"}, "a tier of type disk has no 'pth'; did you mean path"),
        (
            {"path": "nvme"},
            "sets tiers wrongly: entry 1: path 'nvme' of a tier of type disk: not an absolute"
            " path; give an absolute path$",
        ),
        ({"path": "file:///mnt"}, "path 'file:///mnt' of a tier of type disk: a URL, not a path"),
        ({"path": "file://mnt/x"}, "path 'file://mnt/x' of a tier of type disk: a URL, not a"),
        (
            {"bytes_max": "lots"},
            "bytes_max 'lots' of a tier of type disk: not a size; give a size such as 2TiB,"
            " or `auto`$",
        ),
        ({"write": "back"}, "write 'back' of a tier of type disk"),
        ({"name": "Fast disk"}, "name 'Fast disk' of a tier of type disk: not a word"),
        ({"bytes_max": "1MiB"}, "too little to be of use"),
        ({"sync": "always"}, "sync 'always' of a tier of type disk"),
    ],
)
def test_a_tier_that_cannot_be_meant_is_refused(
    tmp_path: Path, change: dict[str, str], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        read(tmp_path, KVTIDE_TIERS=json.dumps([DISK | change]))


@pytest.mark.parametrize("text", ["disk", "{}", "[1]"])
def test_what_is_no_list_of_tiers_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="KVTIDE_TIERS sets tiers "):
        read(tmp_path, KVTIDE_TIERS=text)


def test_who_writes_yaml_in_the_environment_is_shown_json_that_works(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="neither a list in YAML nor one in JSON") as raised:
        read(tmp_path, KVTIDE_TIERS="[{type: disk, path: /mnt/nvme, bytes_max: 2TiB}]")
    (shown,) = re.findall(r"environment JSON: `(.*)`$", str(raised.value))
    assert [one.type for one in read(tmp_path, KVTIDE_TIERS=shown).node.places] == ["disk"]


@pytest.mark.parametrize(
    ("entry", "missing"), [({"type": "disk"}, "path and bytes_max"), ({"path": "/mnt"}, "a type")]
)
def test_a_tier_that_lacks_something_is_refused(
    tmp_path: Path, entry: dict[str, str], missing: str
) -> None:
    with pytest.raises(ConfigError, match=f"without {missing}"):
        read(tmp_path, KVTIDE_TIERS=json.dumps([entry]))


@pytest.mark.parametrize("path", ["/mnt/\0kv", "mnt/kv", "file:///mnt/kv", 7])
def test_a_path_that_no_directory_can_have_is_refused(tmp_path: Path, path: object) -> None:
    with pytest.raises(ConfigError, match=r"path .* of a tier of type disk: .*an absolute path"):
        read(tmp_path, KVTIDE_TIERS=json.dumps([DISK | {"path": path}]))


def test_several_tiers_stand_in_their_order_and_have_names_of_their_own(tmp_path: Path) -> None:
    """Two of one type need a name; nine are too many."""
    shared = {"type": "shared_dir", "path": "/mnt/all", "bytes_max": "1TiB", "write": "on_reuse"}
    slow = DISK | {"name": "slow", "path": "/mnt/hdd"}
    found = read(tmp_path, KVTIDE_TIERS=json.dumps([DISK, slow, shared])).node.places
    assert [(one.type, one.name, one.write) for one in found] == [
        ("disk", "disk", "through"),
        ("disk", "slow", "through"),
        ("shared_dir", "shared_dir", "on_reuse"),
    ]
    with pytest.raises(
        ConfigError, match=r"two tiers are named 'disk'; give one of them a `name`"
    ):
        read(tmp_path, KVTIDE_TIERS=json.dumps([DISK, DISK]))
    beside = shared | {"path": DISK["path"]}
    for one, other in (
        (DISK, beside),
        (DISK, slow | {"path": DISK["path"]}),
        (shared, shared | {"name": "slow", "path": "/mnt//here/../all/"}),
    ):
        with pytest.raises(ConfigError, match=r"tiers .* and .* have one path, /mnt/\w+;"):
            read(tmp_path, KVTIDE_TIERS=json.dumps([one, other]))
    with pytest.raises(ConfigError, match="9 entries; 8 at most"):
        read(tmp_path, KVTIDE_TIERS=json.dumps([DISK | {"name": f"n{n}"} for n in range(9)]))


def test_long_tiers_are_shown_in_short(tmp_path: Path) -> None:
    """Engines are told a node's settings, and take no text without end."""
    entries = [DISK | {"name": f"n{n}", "path": f"/{n}" + "x" * 4000} for n in range(8)]
    found = read(tmp_path, KVTIDE_TIERS=json.dumps(entries))
    (shown,) = [one.value for one in found.effective if one.name == "tiers"]
    assert len(shown) < TEXT_CHARS_MAX
    assert all(f"n{n} (disk)" in shown for n in range(8))


def test_a_list_of_the_extra_config_reaches_a_node_that_is_started(tmp_path: Path) -> None:
    """As a variable, so as JSON."""
    found = read(tmp_path, extra={"kvtide.tiers": [DISK]})
    again = read(tmp_path / "none", **found.node_environment)
    assert again.node.places == found.node.places
    assert len(found.node.places) == 1


def test_tiers_are_shown_and_what_was_given_for_them_is_never_quoted(tmp_path: Path) -> None:
    """An entry may hold a password."""
    found = read(tmp_path, KVTIDE_TIERS=json.dumps([DISK | {"name": "fast"}]))
    (shown,) = [one.value for one in found.effective if one.name == "tiers"]
    assert shown == "fast (disk): path /mnt/nvme, bytes_max 2 TiB (2199023255552 bytes)"
    with pytest.raises(ConfigError) as raised:
        read(tmp_path, KVTIDE_TIERS=json.dumps([DISK | {"pasword": TOKEN}]))
    assert TOKEN not in str(raised.value)
    assert TOKEN not in repr(found.node)


def test_auto_is_a_disks_size(tmp_path: Path) -> None:
    found = read(tmp_path, KVTIDE_DISK_PATH="/mnt/nvme", KVTIDE_DISK_BYTES_MAX="auto")
    assert found.node.places[0].options["bytes_max"] == "auto"

"""Settings: three places, one table, and no setting that is silently ignored."""

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvtide import config
from kvtide.config import Config
from kvtide.errors import ConfigError
from kvtide.settings import EngineConfig, NodeConfig
from kvtide.units import GiB, MiB
from kvtide.values import HTTPAddress

ROOT = Path(__file__).resolve().parent.parent
TOKEN = "s3cr3t-and-long"


def read(
    tmp_path: Path,
    text: str | None = None,
    extra: dict[str, object] | None = None,
    **variables: str,
) -> Config:
    """Read with nothing from the real environment, and `text` as the user's own file."""
    if text is not None:
        (tmp_path / "kvtide.yaml").write_text(text, encoding="utf-8")
    return config.read(extra, environ={"XDG_CONFIG_HOME": str(tmp_path), **variables})


def test_the_bare_default_install_reads_and_does_not_contradict_itself(tmp_path: Path) -> None:
    found = read(tmp_path)
    assert found.node == NodeConfig(
        host_bytes=None,
        linger_s=600,
        http_address=None,
        http_token=None,
        disk_path=None,
        disk_bytes_max=None,
        disk_write="through",
        disk_sync="sealed",
        tiers=None,
        load_policy="estimate",
    )
    assert found.engine == EngineConfig(
        enabled=True,
        chunk_tokens=256,
        multimodal_ids="salted",
        weights_change="none",
        any_engine_version=False,
        start_node=True,
        canary_rate=0.001,
    )
    assert {shown.source for shown in found.effective} == {"default"}


def test_every_key_has_exactly_one_field_with_a_comment_or_a_plain_word() -> None:
    fields = {
        "node": [field.name for field in dataclasses.fields(NodeConfig)],
        "engine": [field.name for field in dataclasses.fields(EngineConfig)],
    }
    for owner, names in fields.items():
        assert names == [key.name for key in config.KEYS if key.owner == owner]
    assert len(config.KEYS) <= 40, "keys are budgeted: a new one replaces another"


def test_a_default_is_a_value_that_its_own_parser_gives() -> None:
    for key in config.KEYS:
        if key.default is not None:
            assert key.parse(key.default) == key.default
            assert key.parse(str(key.default).lower()) == key.default
            assert type(key.parse(key.default)) is type(key.default)


def test_later_places_win_and_the_source_of_each_value_is_told(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        "# mine\nhost_bytes: 2 GiB\nlinger_s: 1\nchunk_tokens: 32\n",
        {"kvtide.chunk_tokens": 128, "someone_else": 1},
        KVTIDE_LINGER_S="2.5",
        KVTIDE_CHUNK_TOKENS="64",
    )
    assert found.node.host_bytes == 2 * GiB
    assert found.node.linger_s == 2.5
    assert found.engine.chunk_tokens == 128
    shown = {one.name: (one.value, one.source, one.default) for one in found.effective}
    assert shown["host_bytes"] == (
        "2 GiB (2147483648 bytes)",
        f"{tmp_path}/kvtide.yaml, line 2",
        "auto",
    )
    assert shown["linger_s"] == ("2.5", "environment KVTIDE_LINGER_S", "600")
    assert shown["chunk_tokens"] == ("128", "extra config kvtide.chunk_tokens", "256")
    assert shown["enabled"] == ("true", "default", "true")


@pytest.mark.parametrize(
    ("raw", "wanted"),
    [
        ({"KVTIDE_HOST_BYTES": "auto"}, None),
        ({"KVTIDE_HOST_BYTES": "16GB"}, 16 * 10**9),
        ({"KVTIDE_HOST_BYTES": str(3 * GiB)}, 3 * GiB),
    ],
)
def test_host_bytes_is_auto_or_a_size(
    tmp_path: Path, raw: dict[str, str], wanted: int | None
) -> None:
    assert read(tmp_path, **raw).node.host_bytes == wanted


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("127.0.0.1:9470", HTTPAddress("127.0.0.1", 9470)),
        ("localhost:0", HTTPAddress("localhost", 0)),
        ("[::1]:65535", HTTPAddress("::1", 65535)),
    ],
)
def test_an_address_is_read_and_shown_alike(
    tmp_path: Path, text: str, wanted: HTTPAddress
) -> None:
    found = read(tmp_path, KVTIDE_HTTP_ADDRESS=text)
    assert found.node.http_address == wanted
    assert str(wanted) == text


@pytest.mark.parametrize(
    ("name", "raw"),
    [
        ("host_bytes", "16"),
        ("host_bytes", "16G"),
        ("host_bytes", ""),
        ("host_bytes", True),
        ("host_bytes", MiB - 1),
        ("linger_s", "soon"),
        ("linger_s", -1),
        ("linger_s", "nan"),
        ("linger_s", "inf"),
        ("linger_s", True),
        ("linger_s", [1]),
        ("http_address", 9470),
        ("http_address", "9470"),
        ("http_address", ":9470"),
        ("http_address", "localhost:"),
        ("http_address", "localhost:65536"),
        ("http_address", "localhost:-1"),
        ("http_address", "::1:9470"),
        ("http_address", "example.com:9470"),
        ("http_address", "127.1:9470"),
        ("http_address", "[::x]:9470"),
        ("http_address", "[]:9470"),
        ("http_address", "http://localhost:9470"),
        ("http_token", ""),
        ("http_token", "two words"),
        ("http_token", "line\n"),
        ("http_token", "é"),
        ("http_token", "x" * 1025),
        ("http_token", 123456),
        ("enabled", "yes"),
        ("enabled", 1),
        ("chunk_tokens", 15),
        ("chunk_tokens", 8193),
        ("chunk_tokens", 256.0),
        ("chunk_tokens", "256.0"),
        ("chunk_tokens", True),
        ("multimodal_ids", "trust"),
        ("weights_change", True),
        ("weights_change", ["none"]),
        ("canary_rate", "often"),
        ("canary_rate", -0.001),
        ("canary_rate", 1.5),
        ("canary_rate", "nan"),
        ("canary_rate", True),
    ],
)
def test_an_unusable_value_is_refused_with_place_value_and_what_to_give(
    tmp_path: Path, name: str, raw: object
) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, extra={f"kvtide.{name}": raw}, KVTIDE_HTTP_TOKEN=TOKEN)
    key = next(key for key in config.KEYS if key.name == name)
    message = str(caught.value)
    assert message.startswith(f"extra config kvtide.{name} sets {name} to ")
    assert message.endswith(f"give {key.accepts}")
    assert key.secret or repr(raw) in message


@pytest.mark.parametrize(
    ("name", "raw", "said"),
    [
        ("canary_rate", "1.5", "canary_rate to '1.5': not such a number; give a number from 0 to"),
        ("linger_s", "soon", "linger_s to 'soon': not a number of seconds; give seconds, 0 or"),
        ("host_bytes", "lots", "host_bytes to 'lots': not a size; give `auto`, or a size such"),
        ("disk_bytes_max", "9G", "disk_bytes_max to '9G': ambiguous; write GiB (binary) or GB"),
        (
            "http_address",
            "node:80",
            "http_address to 'node:80': an IP address is wanted, or local",
        ),
        (
            "http_address",
            "[::x]:9",
            "http_address to '[::x]:9': an IP address is wanted, or local",
        ),
        ("http_address", "[::1]:70000", "http_address to '[::1]:70000': no port is above 65535; "),
    ],
)
def test_a_value_is_told_once_and_in_words_of_ours(
    tmp_path: Path, name: str, raw: str, said: str
) -> None:
    with pytest.raises(
        ConfigError, match=re.escape(f"KVTIDE_{name.upper()} sets {said}")
    ) as caught:
        read(tmp_path, **{f"KVTIDE_{name.upper()}": raw})
    assert str(caught.value).count(raw) == 1


def test_whoever_asks_gets_all_that_can_be_read_and_each_fault(tmp_path: Path) -> None:
    faults: list[ConfigError] = []
    (tmp_path / "kvtide.yaml").write_text("chunk_token: 32\nlinger_s: 7\ntiers:\n", "utf-8")
    environ = {
        "XDG_CONFIG_HOME": str(tmp_path),
        "KVTIDE_HOST_BYTES": "lots",
        "KVTIDE_LOAD_POLICY": "always",
        "KVTIDE_HTTP_TOKEN": TOKEN,  # useless alone: but what it needs may be what is misspelt
        "KVTIDE_QQQ": "1",
    }
    extra = {"kvtide.enabled": False, "kvtide.zzz": 1, "tiers": []}
    found = config.read(extra, environ=environ, on_fault=faults.append)
    sources = {one.name: one.source for one in found.effective if one.source != "default"}
    assert sources == {
        "linger_s": f"{tmp_path}/kvtide.yaml, line 2",
        "load_policy": "environment KVTIDE_LOAD_POLICY",
        "http_token": "environment KVTIDE_HTTP_TOKEN",
        "enabled": "extra config kvtide.enabled",
    }
    assert found.node.host_bytes is None, "as if it were not given"
    told = "\n".join(str(fault) for fault in faults).splitlines()
    wanted = ["chunk_token", "tiers", "QQQ", "zzz", "extra config tiers", "'lots'"]
    assert [word in line for word, line in zip(wanted, told, strict=True)] == [True] * 6


@pytest.mark.parametrize("key", config.KEYS, ids=lambda key: key.name)
def test_every_key_with_a_letter_left_out_names_the_right_one_in_all_places(
    tmp_path: Path, key: config.Key
) -> None:
    typo = key.name[:-2] + key.name[-1]
    with pytest.raises(ConfigError, match=f"{key.variable}\\?"):
        read(tmp_path, **{f"KVTIDE_{typo.upper()}": "1"})
    with pytest.raises(ConfigError, match=f"did you mean kvtide.{key.name}\\?"):
        read(tmp_path, extra={f"kvtide.{typo}": 1})
    with pytest.raises(ConfigError, match=f"line 2.*did you mean {key.name}\\?"):
        read(tmp_path, f"\n{typo}: 1\n")


@pytest.mark.parametrize("key", config.KEYS, ids=lambda key: key.name)
def test_a_key_written_as_in_another_place_is_refused_and_named(
    tmp_path: Path, key: config.Key
) -> None:
    """Of the extra config what begins with our name is ours, though its prefix is another's."""
    for written in (key.name.upper(), key.variable, f"kvtide.{key.name}", f"KVTide-{key.name}"):
        with pytest.raises(ConfigError, match=f"line 1.*did you mean {key.name}\\?"):
            read(tmp_path, f"{written}: 1\n")
    (tmp_path / "kvtide.yaml").unlink()
    for written in (key.variable, f"kvtide_{key.name}", f"KVTIDE.{key.name}"):
        with pytest.raises(ConfigError, match=f"{written} .*did you mean kvtide.{key.name}\\?"):
            read(tmp_path, extra={written: 1})


def test_a_name_like_no_other_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"known are kvtide.host_bytes, "):
        read(tmp_path, extra={"kvtide.zzz": 1})
    with pytest.raises(ConfigError, match=r"KVTIDE_QQQ .* known are KVTIDE_HOST_BYTES, .*TORCH"):
        read(tmp_path, KVTIDE_QQQ="1")


def test_variables_that_are_not_keys_are_known(tmp_path: Path) -> None:
    variables = dict.fromkeys(config.OTHER_VARIABLES, "/nowhere")
    del variables[config.CONFIG_FILE]
    read(tmp_path, **variables)
    with pytest.raises(ConfigError, match="did you mean KVTIDE_RUNTIME_DIR"):
        read(tmp_path, KVTIDE_RUNTIMEDIR="/nowhere")


@pytest.mark.parametrize("name", ["chunk_tokens", "kvtide", "kvtide.", "kvtide.chunk.tokens"])
def test_a_key_written_wrongly_in_extra_config_is_not_ignored(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="is not a setting"):
        read(tmp_path, extra={name: 64})


def test_a_token_without_an_address_is_a_contradiction(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"environment KVTIDE_HTTP_TOKEN.*http_address is not set"
    ) as caught:
        read(tmp_path, KVTIDE_HTTP_TOKEN=TOKEN)
    assert TOKEN not in str(caught.value)


def test_a_secret_appears_in_no_text(tmp_path: Path) -> None:
    found = read(tmp_path, KVTIDE_HTTP_TOKEN=TOKEN, KVTIDE_HTTP_ADDRESS="localhost:1")
    assert found.node.http_token == TOKEN
    assert TOKEN not in repr(found)
    assert [one.value for one in found.effective if one.name == "http_token"] == ["set, not shown"]
    for text in (f'http_token: "{TOKEN} "', f'http_token: "{TOKEN}', f"http_token: {{{TOKEN}: ["):
        with pytest.raises(ConfigError) as caught:
            read(tmp_path, text)
        assert TOKEN not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("- host_bytes\n", "does not hold settings"),
        ("host_bytes\n", "does not hold settings"),
        ("linger_s: 1\nlinger_s: 2\n", "line 2 sets linger_s a second time"),
        ("linger_s: 1\nhost_bytes:\n", "line 2 names host_bytes without a value"),
        ("linger_s: 1\n\tx: 2\n", "line 2 is not YAML"),
        ("linger_s: !!python/object/apply:os.getcwd []\n", "line 1 is not YAML"),
        ("{a: 1}: 2\n", "is not a setting"),
        ("host_bytes: [1\n", "is not YAML"),
        ("http_address: [::1]:9470\n", r'quotes around a value .*"\[::1\]:9470"'),
        ("linger_s: \x00", "cannot be read"),
    ],
)
def test_a_damaged_file_is_refused_with_its_place(tmp_path: Path, text: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=hint) as caught:
        read(tmp_path, text)
    assert "kvtide.yaml" in str(caught.value)


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "kvtide.yaml").write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(ConfigError, match="cannot be read: it is not text"):
        read(tmp_path)


@pytest.mark.parametrize("text", ["", "# only a remark\n"])
def test_an_empty_file_sets_nothing(tmp_path: Path, text: str) -> None:
    assert {shown.source for shown in read(tmp_path, text).effective} == {"default"}


def test_a_file_that_was_asked_for_must_exist_and_hides_the_users_own(tmp_path: Path) -> None:
    asked = tmp_path / "other.yaml"
    with pytest.raises(ConfigError, match="is not a file"):
        read(tmp_path, "linger_s: 1", KVTIDE_CONFIG_FILE=str(asked))
    with pytest.raises(ConfigError, match="is not a file"):
        read(tmp_path, KVTIDE_CONFIG_FILE="")
    asked.write_text("chunk_tokens: 64", encoding="utf-8")
    found = read(tmp_path, KVTIDE_CONFIG_FILE=str(asked))
    assert (found.engine.chunk_tokens, found.node.linger_s) == (64, 600)


def test_the_users_own_file_is_below_home_where_nothing_else_is_said(tmp_path: Path) -> None:
    (tmp_path / ".config").mkdir()
    (tmp_path / ".config" / "kvtide.yaml").write_text("linger_s: 7", encoding="utf-8")
    for xdg in ({}, {"XDG_CONFIG_HOME": ""}, {"XDG_CONFIG_HOME": "relative"}):
        assert config.read(environ={"HOME": str(tmp_path), **xdg}).node.linger_s == 7


def test_the_runtime_directory_is_the_given_the_users_or_a_temporary_one(tmp_path: Path) -> None:
    per_user = f"kvtide-{os.getuid()}"
    given = {"KVTIDE_RUNTIME_DIR": "/run/kv", "XDG_RUNTIME_DIR": str(tmp_path)}
    assert read(tmp_path, **given).runtime_dir == Path("/run/kv")
    assert read(tmp_path, XDG_RUNTIME_DIR=str(tmp_path)).runtime_dir == tmp_path / "kvtide"
    gone = {"XDG_RUNTIME_DIR": str(tmp_path / "gone")}
    assert read(tmp_path, TMPDIR=str(tmp_path), **gone).runtime_dir == tmp_path / per_user
    assert read(tmp_path).runtime_dir == Path("/tmp") / per_user
    for wrong in ("", "kv"):
        with pytest.raises(ConfigError, match="absolute path"):
            read(tmp_path, KVTIDE_RUNTIME_DIR=wrong)


LINKS = {
    "KVTIDE_SERVICE_HOST": "10.96.0.17",
    "KVTIDE_SERVICE_PORT": "9470",
    "KVTIDE_SERVICE_PORT_HTTP": "9470",
    "KVTIDE_PORT": "tcp://10.96.0.17:9470",
    "KVTIDE_PORT_9470_TCP": "tcp://10.96.0.17:9470",
    "KVTIDE_PORT_9470_TCP_PROTO": "tcp",
    "KVTIDE_PORT_9470_TCP_PORT": "9470",
    "KVTIDE_PORT_9470_TCP_ADDR": "10.96.0.17",
    "KVTIDE_NODE_SERVICE_HOST": "fd00::17",
    "KVTIDE_NODE_PORT": "udp://[fd00::17]:1",
}
"""As Kubernetes writes them for the services kvtide and kvtide-node."""


def test_links_to_services_of_kubernetes_are_nobodys_settings(tmp_path: Path) -> None:
    assert read(tmp_path, **LINKS) == read(tmp_path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("KVTIDE_HTTP_PORT", "9470"),
        ("KVTIDE_PORT", "9470"),
        ("KVTIDE_SERVICE_HOST", "everywhere"),
        ("KVTIDE_PORT_9470", "tcp://10.96.0.17:9470"),
        ("KVTIDE_SERVICE", "1"),
    ],
)
def test_what_only_looks_like_a_link_is_refused(tmp_path: Path, name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"environment's {name} is not a setting"):
        read(tmp_path, **{name: value})


def test_home_of_somebody_else_has_no_settings_for_us(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container of uid 1000 with HOME=/root: what may not be looked at is not there."""

    def forbidden(path: object, **_: object) -> os.stat_result:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "stat", forbidden)
    found = config.read(environ={"HOME": "/root", "XDG_RUNTIME_DIR": "/root/run", "TMPDIR": "/t"})
    assert found.node.host_bytes is None
    assert found.runtime_dir == Path("/tmp") / f"kvtide-{os.getuid()}"
    with pytest.raises(ConfigError, match="which is not a file, or not for this user"):
        config.read(environ={"KVTIDE_CONFIG_FILE": "/root/k.yaml"})


def test_committed_pages_equal_the_tables() -> None:
    check = [sys.executable, str(ROOT / "scripts" / "make_docs"), "--check"]
    done = subprocess.run(check, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_the_cache_directory_follows_the_desktop_rules() -> None:
    """XDG_CACHE_HOME where it is absolute, else below the home."""
    home = {"HOME": "/home/u"}
    assert config.read(environ=home).cache_dir == Path("/home/u/.cache/kvtide")
    assert config.read(environ={**home, "XDG_CACHE_HOME": "/c"}).cache_dir == Path("/c/kvtide")
    assert config.read(environ={**home, "XDG_CACHE_HOME": "c"}).cache_dir == Path(
        "/home/u/.cache/kvtide"
    )

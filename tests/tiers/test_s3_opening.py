"""What entries of `tiers` say of a bucket, and what becomes of them."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from kvtide import s3_address, tier_values
from kvtide.errors import ConfigError
from kvtide.s3_address import Address
from kvtide.testing import object_servers
from kvtide.testing.object_servers import ACCESS_KEY, SECRET_KEY
from kvtide.testing.tier_drive import DrivenTier
from kvtide.testing.tier_records import chain_of, layout_of, root_of, text
from kvtide.tiers import registry
from kvtide.tiers.base import LoadOutcome, StoreOutcome
from kvtide.tiers.breaker import FAILURES_MAX
from kvtide.tiers.s3.opening import FileCredentials, place_of
from kvtide.units import MiB
from tests.tiers.redis_place import driving
from tests.tiers.s3_answers import Keys, served
from tests.tiers.s3_place import Bucket, until

CHAIN = chain_of(root_of(), layout_of(4096, 8192), text(1, 10))
WAIT_S = 30.0


@pytest.fixture(autouse=True)
def _no_keys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of whoever runs the tests."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "nobody"))
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:1")


def options(**given: Any) -> Any:
    """Of an entry, as they are parsed."""
    raw = {"type": "s3", "url": "s3://records", "bytes_max": "64MiB", **given}
    (entry,) = tier_values.parse_tiers([raw])
    return entry.options


def write_keys(path: Path, secret: str, profile: str = "default") -> None:
    lines = [f"[{profile}]", f"aws_access_key_id = {ACCESS_KEY}"]
    path.write_text("\n".join([*lines, f"aws_secret_access_key = {secret}", ""]))


def opened(**given: Any) -> DrivenTier:
    """The tier that an entry asks for."""
    woken = threading.Event()
    tier = registry.load("s3").open(options(**given), woken.set, 8 * MiB)
    return DrivenTier(tier, woken, WAIT_S)


# ---- the package


@pytest.mark.parametrize("is_there", [True, False])
def test_the_package_is_asked_for_by_this_tier_alone(is_there: bool) -> None:
    """A node runs without it, and says what to install to who wants a bucket; none needs torch."""
    code = f"""
import sys
if not {is_there}:
    sys.modules["obstore"] = None
import kvtide.node.main, kvtide.cli.main
from kvtide.errors import ConfigError
from kvtide.tiers import registry
assert not sys.modules.get("obstore")
try:
    registry.load("s3")
except ConfigError as error:
    print(error)
assert "torch" not in sys.modules
"""
    command = [sys.executable, "-c", code]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert ("pip install 'kvtide[s3]'" in said) != is_there, said


# ---- words


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("s3://records", Address("records", "kvtide")),
        ("s3://records/", Address("records", "kvtide")),
        ("s3://my.records-1/team_a", Address("my.records-1", "team_a")),
    ],
)
def test_a_url_names_a_bucket_and_what_names_begin_with(url: str, address: Address) -> None:
    assert s3_address.parse_address(url) == address
    assert s3_address.parse_address(str(address)) == address


@pytest.mark.parametrize(
    "url",
    ["", None, "records", "s3://", "s3:///x", "redis://x", "s3://a/b/c", "s3://a/..", "s3://a b"],
)
def test_what_names_no_bucket_is_refused(url: object) -> None:
    with pytest.raises(ValueError, match=r"s3://|prefix"):
        s3_address.parse_address(url)


@pytest.mark.parametrize("endpoint", ["host:9000", "http://u@h", "https://h/path", "ftp://h", 3])
def test_what_is_no_server_is_refused(endpoint: object) -> None:
    with pytest.raises(ValueError, match="https://host:port"):
        s3_address.parse_endpoint(endpoint)


@pytest.mark.parametrize(
    ("given", "endpoint", "is_host"),
    [
        ({}, None, True),
        ({"endpoint": "https://s3.example"}, "https://s3.example", False),
        ({"endpoint": "https://h:1/", "style": "path"}, "https://h:1", False),
        ({"endpoint": "https://h:1", "style": "host"}, "https://records.h:1", True),
        ({"style": "path"}, None, False),
    ],
)
def test_a_bucket_is_in_the_path_or_in_the_hosts_name(
    given: dict[str, str], endpoint: str | None, is_host: bool
) -> None:
    place = place_of(options(**given))
    assert place.get("endpoint") == endpoint
    assert place["virtual_hosted_style_request"] == is_host
    assert place["region"] == "us-east-1"


# ---- files


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"credentials_file": "/nowhere"}, "credentials_file /nowhere cannot be read"),
        ({"credentials_file": "/dev/null"}, "no profile 'default'"),
        ({"ca_file": "/nowhere"}, "ca_file /nowhere cannot be read"),
        ({"ca_file": "/dev/null"}, "holds no certificate"),
    ],
)
def test_a_file_that_cannot_be_used_is_said_at_once(given: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        opened(**given)


def test_keys_that_are_rotated_are_used_from_the_next_look_at_their_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong one fails in words; the right one works without a restart."""
    monkeypatch.setattr("kvtide.tiers.s3.opening.CREDENTIALS_S", 0)
    keys = tmp_path / "keys"
    write_keys(keys, "wrong")
    with object_servers.running("rclone", tmp_path / "server") as server:
        tier = opened(endpoint=server.endpoint, credentials_file=str(keys))
        try:
            assert tier.store(CHAIN[:1]) == [StoreOutcome.FAILED]
            assert "SignatureDoesNotMatch" in tier.tier.statistics().state
            write_keys(keys, SECRET_KEY)
            until(tier, lambda: tier.store(CHAIN[:1])[0].is_kept)
            assert tier.load(CHAIN[0]) is LoadOutcome.LOADED
        finally:
            tier.close(WAIT_S)


@pytest.mark.parametrize("way", ["file", "profile", "environment"])
def test_keys_are_found_in_the_usual_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """Names stand below the prefix of the URL."""
    if way == "environment":
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    else:
        profile = "other" if way == "profile" else "default"
        monkeypatch.setenv("AWS_PROFILE", profile)
        write_keys(tmp_path / "keys", SECRET_KEY, profile)
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "keys"))
    with object_servers.running("rclone", tmp_path / "server") as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
        tier = opened(url="s3://records/mine")
        try:
            until(tier, lambda: tier.store(CHAIN[:1])[0].is_kept)
            assert {name.split("/")[0] for name in Bucket(server.port).names()} == {"mine"}
        finally:
            tier.close(WAIT_S)


def test_keys_of_a_container_are_asked_for_again_before_they_expire(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store takes other ones from now on; what it is signed with follows by itself."""
    server = object_servers.rclone(tmp_path)
    server.start()
    keys = Keys(ACCESS_KEY, SECRET_KEY)
    with served(keys):
        (tmp_path / "token").write_text("of the pod")
        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", keys.url)
        monkeypatch.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", str(tmp_path / "token"))
        tier = opened(endpoint=server.endpoint)
        try:
            until(tier, lambda: tier.store(CHAIN[:1])[0].is_kept)
            asked = keys.asked
            server.kill()
            at = server.commands[0].index(f"{ACCESS_KEY},{SECRET_KEY}")
            server.commands[0][at] = "other,keys"
            server.start()
            keys.keys |= {"AccessKeyId": "other", "SecretAccessKey": "keys"}
            until(tier, lambda: tier.load(CHAIN[0]) is LoadOutcome.LOADED)
            assert keys.asked > asked
        finally:
            tier.close(WAIT_S)
            server.kill()


def test_a_file_of_keys_that_is_away_for_a_moment_costs_that_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says which file; nothing has to be restarted."""
    monkeypatch.setattr("kvtide.tiers.s3.opening.CREDENTIALS_S", 0)
    keys = tmp_path / "keys"
    write_keys(keys, SECRET_KEY)
    with object_servers.running("rclone", tmp_path / "server") as server:
        tier = opened(endpoint=server.endpoint, credentials_file=str(keys))
        try:
            until(tier, lambda: tier.store(CHAIN[:1])[0].is_kept)
            for content in (None, "[default]\naws_access_key_id = half\n", SECRET_KEY):
                keys.unlink()
                if content is not None:
                    keys.write_text(content)
                for _ in range(FAILURES_MAX):
                    assert tier.load(CHAIN[0]) is LoadOutcome.FAILED
                state = tier.tier.statistics().state
                assert str(keys) in state
                assert SECRET_KEY not in state
                write_keys(keys, SECRET_KEY)
                until(tier, lambda: tier.load(CHAIN[0]) is LoadOutcome.LOADED)
        finally:
            tier.close(WAIT_S)


def test_a_bucket_in_the_hosts_name_is_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that only the server itself takes for its own: it stands for a resolver here."""
    server = object_servers.rclone(tmp_path)
    server.commands[0].append("--force-path-style=false")
    server.start()
    monkeypatch.setenv("HTTP_PROXY", server.endpoint)
    write_keys(tmp_path / "keys", SECRET_KEY)
    given = {"endpoint": "http://s3.test", "style": "host"}
    tier = opened(**given, credentials_file=str(tmp_path / "keys"))
    try:
        until(tier, lambda: tier.store(CHAIN)[0].is_kept)
        assert tier.load(CHAIN[0]) is LoadOutcome.LOADED
    finally:
        tier.close(WAIT_S)
        server.kill()
    assert list((tmp_path / "data" / "records").glob("kvtide/1/r/*"))


def test_a_file_of_keys_says_when_it_is_to_be_read_again(tmp_path: Path) -> None:
    write_keys(tmp_path / "keys", "secret")
    found = FileCredentials(tmp_path / "keys")()
    assert (found["access_key_id"], found["secret_access_key"]) == (ACCESS_KEY, "secret")
    assert found["token"] is None
    assert found["expires_at"].timestamp() <= time.time() + 60


def test_a_server_that_is_away_costs_a_start_nothing() -> None:
    """The tier is there at once, and says what it is."""
    began_s = time.monotonic()
    with driving(opened(endpoint="http://127.0.0.1:1").tier) as tier:
        assert time.monotonic() - began_s < 1.0
        until(tier, lambda: "it has not worked yet" in tier.tier.statistics().state)
        assert tier.find(CHAIN[:1]) == []

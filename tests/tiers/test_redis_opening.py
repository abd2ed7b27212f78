"""What entries of `tiers` say of a server, and what becomes of them."""

import time
from pathlib import Path
from typing import Any

import pytest

from kvtide import tier_values
from kvtide.errors import ConfigError
from kvtide.testing import redis_servers
from kvtide.testing.tier_records import chain_of, layout_of, root_of, text
from kvtide.tiers import registry
from kvtide.tiers.base import LoadOutcome, StoreOutcome, Tier
from kvtide.units import MiB
from tests.tiers.redis_place import driving

CHAIN = chain_of(root_of(), layout_of(4096, 8192), text(1, 10))


def opened(**options: Any) -> Tier:
    """The tier that an entry asks for."""
    raw = {"type": "redis", "bytes_max": "64MiB", **options}
    (entry,) = tier_values.parse_tiers([raw])
    return registry.load("redis").open(entry.options, lambda: None, 8 * MiB)


def test_an_entry_opens_a_tier_with_a_password_from_a_file(tmp_path: Path) -> None:
    """Its first line; what the file holds is not part of what is shown."""
    secret = tmp_path / "secret"
    secret.write_text("Ge heim%\nmore\n")
    with redis_servers.running("valkey", tmp_path / "server") as server:
        server.ask(b"ACL", b"SETUSER", b"kv", b"on", b">Ge heim%", b"~*", b"+@all")
        url = f"redis://kv:other@127.0.0.1:{server.port}"
        with driving(opened(url=url, password_file=str(secret), prefix="p")) as tier:
            assert tier.store(CHAIN) == [StoreOutcome.STORED] * 3
            assert {tier.load(record) for record in CHAIN} == {LoadOutcome.LOADED}
            assert server.names(b"p:*") == server.names()
            assert tier.tier.statistics().state == "on"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"password_file": "/nowhere"}, "password_file /nowhere cannot be read"),
        ({"password_file": "/dev/null"}, "is empty"),
        ({"ca_file": "/nowhere"}, "TLS cannot be used"),
        ({"ca_file": "/dev/null"}, "TLS cannot be used"),
        ({"cert_file": "/nowhere"}, "TLS cannot be used"),
    ],
)
def test_a_file_that_cannot_be_used_is_said_at_once(options: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        opened(url="rediss://127.0.0.1:1", **options)


def test_a_server_that_is_away_costs_a_start_nothing() -> None:
    """Refused, or an address that nobody has: the tier is there at once, and says what it is."""
    for url in ("redis://127.0.0.1:1", "redis://192.0.2.1", "unix:///nowhere.sock"):
        began_s = time.monotonic()
        with driving(opened(url=url)) as tier:
            assert time.monotonic() - began_s < 1.0
            assert tier.load(CHAIN[0]) is LoadOutcome.FAILED
            assert "it has not worked yet" in tier.tier.statistics().state
            assert tier.find(CHAIN[:1]) == []

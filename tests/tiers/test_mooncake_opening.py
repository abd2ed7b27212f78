"""What entries of `tiers` say of a Mooncake Store, and what becomes of them."""

import logging
import time
from pathlib import Path
from typing import Any

import pytest

from kvtide import tier_values
from kvtide.errors import ConfigError
from kvtide.testing import mooncake_servers
from kvtide.testing.mooncake_servers import OWNED_BYTES_MIN
from kvtide.testing.tier_records import chain_of, layout_of, root_of, text
from kvtide.tiers import registry
from kvtide.tiers.base import LoadOutcome, StoreOutcome, Tier
from kvtide.tiers.mooncake import opening
from kvtide.units import MiB
from tests.tiers.mooncake_place import needs_client
from tests.tiers.redis_place import driving, heal

CHAIN = chain_of(root_of(), layout_of(4096, 8192), text(1, 10))


def opened(**options: Any) -> Tier:
    """The tier that an entry asks for."""
    (entry,) = tier_values.parse_tiers([{"type": "mooncake", **options}])
    return registry.load("mooncake").open(entry.options, lambda: None, 8 * MiB)


@needs_client
def test_an_entry_opens_a_tier(tmp_path: Path) -> None:
    """Its numbers are those of the whole store."""
    with mooncake_servers.running(tmp_path / "store", OWNED_BYTES_MIN) as store:
        url, port = f"mooncake://127.0.0.1:{store.port}", store.metrics_port
        with driving(opened(url=url, prefix="p", metrics_port=port)) as tier:
            while tier.tier.statistics().state == "connecting":
                tier.poll_for(0.01)
            assert tier.store(CHAIN) == [StoreOutcome.STORED] * 3
            heal(tier, CHAIN[0])
            assert {name[:4] for name in store.names()} == {"p:1:"}
            numbers = tier.tier.statistics()
            assert numbers.bytes_max == OWNED_BYTES_MIN
            assert 0 < numbers.bytes_used <= OWNED_BYTES_MIN


@pytest.mark.long
@needs_client
def test_a_master_that_tells_no_numbers_serves_all_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is said once."""
    with mooncake_servers.running(tmp_path / "store", OWNED_BYTES_MIN) as store:
        url = f"mooncake://127.0.0.1:{store.port}"
        with (
            caplog.at_level(logging.WARNING, "kvtide.tiers"),
            driving(opened(url=url, metrics_port=1)) as tier,
        ):
            tier.keep(CHAIN)
            for _ in range(3):
                tier.pass_time(20_000)  # another survey is due
                assert tier.find(CHAIN[:2], CHAIN[2].digests) == CHAIN
            assert tier.tier.statistics().bytes_max == 0
    told = [one for one in caplog.messages if "does not tell how much there is" in one]
    assert len(told) == 1, caplog.messages


@pytest.mark.long
@needs_client
def test_a_store_that_is_away_costs_a_start_nothing() -> None:
    """Refused, or an address that nobody has: the tier is there at once, and says what it is."""
    for url in ("mooncake://127.0.0.1:1", "mooncake://192.0.2.1"):
        began_s = time.monotonic()
        tier = opened(url=url)
        assert time.monotonic() - began_s < 2.0
        with driving(tier) as driven:
            assert driven.load(CHAIN[0]) is LoadOutcome.FAILED
            assert "it has not worked yet" in tier.statistics().state
            assert driven.find(CHAIN[:1]) == []


@needs_client
def test_a_machine_without_the_client_is_told_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as without:
        without.setattr(opening, "CLIENT", "no_such_package")
        with pytest.raises(ConfigError, match=r"pip install 'kvtide\[mooncake\]'"):
            opened(url="mooncake://127.0.0.1")
    monkeypatch.setattr(opening, "VERBS", "libnosuchthing.so.1")
    with pytest.raises(ConfigError, match="libibverbs1"):
        opened(url="mooncake://127.0.0.1")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"url": "mooncake://"}, "mooncake://host:port"),
        ({"url": "redis://host:1"}, "not mooncake://host:port"),
        ({"url": "mooncake://host:port"}, "Port could not be cast"),
        ({"url": "mooncake://host/path"}, "mooncake://host:port"),
        ({"url": "mooncake://user@host"}, "mooncake://host:port"),
        ({"url": "mooncake://host", "protocol": "ib"}, "protocol 'ib'"),
        ({"url": "mooncake://host", "metadata": "none"}, "P2PHANDSHAKE"),
        ({"url": "mooncake://host", "metrics_port": 70000}, "a port"),
        ({"url": "mooncake://host", "prefix": "a:b"}, "prefix 'a:b'"),
        ({"url": "mooncake://host", "bytes_max": "1GiB"}, "bytes_max"),
    ],
)
def test_what_cannot_be_meant_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        tier_values.parse_tiers([{"type": "mooncake", **options}])


def test_an_address_is_shown_as_it_is_given() -> None:
    for url, shown in (
        ("mooncake://host:1", "mooncake://host:1"),
        ("mooncake://host", "mooncake://host:50051"),
        ("mooncake://[::1]:7", "mooncake://[::1]:7"),
    ):
        (entry,) = tier_values.parse_tiers([{"type": "mooncake", "url": url}])
        assert str(entry.options["url"]) == shown

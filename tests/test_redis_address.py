"""URLs of servers: what each says, what none may say, and that no password comes back."""

import pytest

from kvtide import tier_values
from kvtide.redis_address import Address, parse_address

GOOD = {
    "redis://host": Address((("host", 6379),)),
    "redis://host:1/3": Address((("host", 1),), database=3),
    "rediss://host:1": Address((("host", 1),), is_tls=True),
    "redis://[::1]:7": Address((("::1", 7),)),
    "redis://:pw@host": Address((("host", 6379),), password="pw"),
    "redis://user:p%40s%2Fs%3A%23@host": Address(
        (("host", 6379),), username="user", password="p@s/s:#"
    ),
    "redis://user:p/w@host": Address((("host", 6379),), username="user", password="p/w"),
    "redis://user:a@b:c@host": Address((("host", 6379),), username="user", password="a@b:c"),
    "redis://a,b:2,[::1]": Address((("a", 6379), ("b", 2), ("::1", 6379))),
    "redis://a:26379,b:26379/main": Address((("a", 26379), ("b", 26379)), watched="main"),
    "unix:///run/r.sock": Address((), "/run/r.sock"),
    "unix://u:p@/run/r.sock?2": Address((), "/run/r.sock", username="u", password="p", database=2),
}
BAD = (
    *("", "host", "redis:host", "http://host", "redis://", "redis://host:0", "redis://host:99999"),
    *("redis://host:x", "redis://::1", "redis://[::1", "redis://user@host", "redis://a,,b"),
    *("redis://host/0/1", "redis://host/0?x=1", "unix://relative", "unix:///x?y", None, 7, ["x"]),
    *("redis://user:Geheim@host:1/a/b", "redis://user:Geheim@host:none", "Geheim://x"),
)


@pytest.mark.parametrize("url", GOOD)
def test_a_url_says_where_a_server_is(url: str) -> None:
    assert parse_address(url) == GOOD[url]


@pytest.mark.parametrize("url", GOOD)
def test_an_address_is_shown_as_a_url_without_its_password(url: str) -> None:
    shown = str(GOOD[url])
    again = parse_address(shown.replace("@", ":x@", 1) if "@" in shown else shown)
    assert (again.hosts, again.path) == (GOOD[url].hosts, GOOD[url].path)
    assert (again.database, again.watched) == (GOOD[url].database, GOOD[url].watched)
    password = GOOD[url].password
    assert not password or password not in shown.replace("redis", "")
    assert not password or repr(password) not in repr(GOOD[url])


@pytest.mark.parametrize("url", BAD)
def test_what_cannot_be_meant_is_refused_without_being_repeated(url: object) -> None:
    with pytest.raises(ValueError, match=r".") as refused:
        parse_address(url)
    assert "Geheim" not in str(refused.value)


def test_an_entry_of_tiers_never_shows_a_password() -> None:
    """Neither where it is right, nor in the error where something else of the URL is wrong."""
    entry = {"type": "redis", "url": "redis://u:Geheim@host", "bytes_max": "1GiB"}
    (parsed,) = tier_values.parse_tiers([entry])
    assert "redis://u@host:6379" in parsed.shown
    assert "Geheim" not in parsed.shown + repr(parsed)
    with pytest.raises(ValueError, match="url") as refused:
        tier_values.parse_tiers([{**entry, "url": "redis://u:Geheim@host:port"}])
    assert "Geheim" not in str(refused.value)


@pytest.mark.parametrize("prefix", ["", "a:b", "{a}", "a b", "x" * 65, 7])
def test_a_prefix_is_a_plain_word(prefix: object) -> None:
    with pytest.raises(ValueError, match="prefix"):
        tier_values.parse_tiers(
            [{"type": "redis", "url": "redis://h", "bytes_max": "1GiB", "prefix": prefix}]
        )

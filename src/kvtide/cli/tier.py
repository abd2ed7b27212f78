"""`kvtide tier test`: does a place below host memory take records, and give them back?"""

import threading
from urllib.parse import unquote, urlsplit

import click

from kvtide import config, tier_entries, tier_values
from kvtide.cli.here import printable
from kvtide.cli.trial import RECORD_BYTES, RECORDS, Trial
from kvtide.errors import ConfigError
from kvtide.node.build import OPEN_S_MAX, Opening
from kvtide.tier_entries import REQUIRED, Option, TierEntry
from kvtide.tiers import registry

BYTES_MAX = 1 << 60
"""The cap that a place which is given by its URL has here: none of what others keep there is to
be evicted for a trial."""
CLOSE_S_MAX = 5.0
QUEUE_BYTES_MAX = 2 * RECORDS * RECORD_BYTES


@click.group()
def command() -> None:
    """Try the places below host memory."""


@command.command("test")
@click.argument("place")
def test(place: str) -> None:
    """Put records at a place, find them, get them, verify each byte, delete them.

    PLACE is a URL (redis://…, s3://…), the path of a directory that machines share, or the name
    of a tier in the settings. A rate is told with each step; what others keep there is left alone.
    Ends with code 1 where a step fails, and says what is wrong.
    """
    entry = _entry_of(place)
    woken = threading.Event()
    opening = Opening(entry, QUEUE_BYTES_MAX, woken.set)
    tier = opening.wait()
    if tier is None:
        opening.take_back()
        raise ConfigError(f"{opening.entry.shown} has not answered for {OPEN_S_MAX:g} s")
    click.echo(f"opened {printable(opening.entry.shown)}")
    try:
        for step in Trial(tier, woken).steps():
            click.echo(printable(step.text))
    finally:
        tier.close(CLOSE_S_MAX)


def _entry_of(place: str) -> TierEntry:
    """What to open; raises ConfigError."""
    if place.startswith("/"):
        return _entry("shared_dir", {"path": place})
    if "://" in place:
        return _entry_of_url(place)
    entries = config.read().node.places
    for entry in entries:
        if entry.name == place:
            return entry
    names = ", ".join(entry.name for entry in entries) or "none"
    raise ConfigError(f"no tier of the settings is named {place!r}; there are: {names}")


def _entry_of_url(url: str) -> TierEntry:
    parts = urlsplit(url)
    failures: list[str] = []
    schemes: list[str] = []
    for name in registry.references():
        try:
            tier_type = registry.load(name)
        except ConfigError as error:
            failures.append(str(error))
            continue
        schemes += tier_type.schemes
        if parts.scheme in tier_type.schemes:
            option = tier_type.url_option
            value = unquote(parts.path) if option == "path" else url
            return _entry(name, {option: value})
    said = "".join(f"; {failure}" for failure in failures)
    raise ConfigError(
        f"no tier takes URLs of {parts.scheme}://; known are {', '.join(schemes)}{said}"
    )


def _entry(name: str, given: dict[str, object]) -> TierEntry:
    options = _options_of(name)
    raw = {"type": name, **given}
    if any(one.name == "bytes_max" and one.default is REQUIRED for one in options):
        raw["bytes_max"] = BYTES_MAX
    try:
        return tier_entries.parse(raw, tier_values.BUILT_IN, tier_entries.installed)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _options_of(name: str) -> tuple[Option, ...]:
    return tier_values.BUILT_IN.get(name) or registry.load(name).options

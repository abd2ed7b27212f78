"""`kvtide tier test`: does a place below host memory take records, and give them back?"""

import contextlib
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

import click

from kvtide import config, tier_entries, tier_values
from kvtide.cli.footprint import left_as_found
from kvtide.cli.here import printable
from kvtide.cli.trial import RECORD_BYTES, RECORDS, Trial
from kvtide.errors import ConfigError
from kvtide.node.build import OPEN_S_MAX, Opening
from kvtide.tier_entries import NAME, REQUIRED, Option, TierEntry
from kvtide.tiers import registry
from kvtide.tiers.base import NO_CAP_BYTES

CLOSE_S_MAX = 5.0
QUEUE_BYTES_MAX = 2 * RECORDS * RECORD_BYTES


@click.group()
def command() -> None:
    """Try the places below host memory."""


@command.command("test")
@click.argument("place")
def test(place: str) -> None:
    """Put, find, get, verify and delete records at a place.

    PLACE is a URL (redis://…, s3://…, mooncake://…, infinistore://…), the absolute path of a
    directory that machines share, or the name of a tier in the settings. A rate is told with each
    step; what others keep there is left alone, and what was not there before is taken away, but
    for the directory of a tier in the settings. A directory that holds something else is refused.
    Ends with code 1 where a step fails, and says what is wrong.
    """
    asked = _asked(place)
    with contextlib.ExitStack() as stack:
        if asked.path is not None:
            is_shared_dir = asked.entry.type == "shared_dir"
            stack.enter_context(left_as_found(asked.path, is_shared_dir=is_shared_dir))
        woken = threading.Event()
        opening = Opening(asked.entry, QUEUE_BYTES_MAX, woken.set)
        tier = opening.wait()
        shown = _shown(asked, opening.entry)
        if tier is None:
            opening.take_back()
            raise ConfigError(
                f"{shown} has not answered for {OPEN_S_MAX:g} s; see that it is mounted, or that"
                " its server runs"
            )
        stack.callback(tier.close, CLOSE_S_MAX)
        click.echo(f"opened {printable(shown)}")
        for step in Trial(tier, woken).steps():
            click.echo(printable(step.text))


@dataclass(frozen=True, slots=True)
class _Asked:
    """What to open.

    Attributes:
        entry: of the settings, or made for what was typed.
        option: the one that was typed; empty for an entry of the settings.
    """

    entry: TierEntry
    option: str = ""

    @property
    def path(self) -> Path | None:
        """One that was typed, and may be anything."""
        path = self.entry.options["path"] if self.option == "path" else None
        return None if path is None else Path(path)


def _shown(asked: _Asked, entry: TierEntry) -> str:
    """The entry, or of one that was made here what was typed."""
    for option in _options_of(entry.type):
        if option.name == asked.option:
            return f"{entry.type}: {option.name} {option.shown(entry.options[option.name])}"
    return entry.shown


def _asked(place: str) -> _Asked:
    """What was typed, as something to open; raises ConfigError where it is nothing of the kind."""
    if place.startswith("/"):
        return _Asked(_entry("shared_dir", {"path": place}), "path")
    if "://" in place:
        return _asked_by_url(place)
    entries = config.read().node.places
    for entry in entries:
        if entry.name == place:
            return _Asked(entry)
    if not NAME.fullmatch(place):
        raise ConfigError(
            f"{place!r} is no absolute path, no URL and no name of a tier; write"
            f" {os.path.abspath(place)!r} if it is a directory that machines share"
        )
    there_are = (
        f"there are: {', '.join(entry.name for entry in entries)}" if entries else "none is set"
    )
    raise ConfigError(
        f"no tier of the settings is named {place!r}; {there_are} (or give an absolute path, or"
        " a URL)"
    )


def _asked_by_url(url: str) -> _Asked:
    scheme = url.partition("://")[0]
    failures: list[str] = []
    schemes: list[str] = []
    for name in registry.references():
        try:
            tier_type = registry.load(name)
        except ConfigError as error:
            failures.append(str(error))
            continue
        schemes += tier_type.schemes
        if scheme in tier_type.schemes:
            option = tier_type.url_option
            value = _path_of(url) if option == "path" else url
            return _Asked(_entry(name, {option: value}), option)
    said = "".join(f"; {failure}" for failure in failures)
    raise ConfigError(f"no tier takes URLs of {scheme}://; known are {', '.join(schemes)}{said}")


def _path_of(url: str) -> str:
    """The path of a URL; raises ConfigError where a part of the URL would be dropped."""
    scheme, _, rest = url.partition("://")
    if not rest.startswith("/"):
        host = rest.partition("/")[0]
        raise ConfigError(
            f"{url!r} has {host!r} in the place of a host, and a path has none; write three"
            f" slashes and an absolute path: {scheme}:///…"
        )
    if "?" in rest or "#" in rest:
        raise ConfigError(f"{url!r} has more than a path; write ? as %3F and # as %23")
    return unquote(rest)


def _entry(name: str, given: dict[str, object]) -> TierEntry:
    options = _options_of(name)
    raw = {"type": name, **given}
    if any(one.name == "bytes_max" and one.default is REQUIRED for one in options):
        raw["bytes_max"] = NO_CAP_BYTES  # nothing that others keep there is evicted for a trial
    try:
        return tier_entries.parse(raw, tier_values.BUILT_IN, tier_entries.installed)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _options_of(name: str) -> tuple[Option, ...]:
    return tier_values.BUILT_IN.get(name) or registry.load(name).options

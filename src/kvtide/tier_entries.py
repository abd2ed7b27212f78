"""Entries of the setting `tiers`: one for each place below host memory, in the order of asking.

    {type: disk, name: …, write: …, and what the type's table of options names}

A type of ours has its table in `kvtide.tier_values`; one of another package brings its own with
the entry point that it is found by, in the group `kvtide.tiers`. Code of another package is loaded
by the node and by commands alone, never in an engine: there, and where settings are compared, its
options are raw, and none of their values is shown.
"""

import difflib
import importlib
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvtide import values

GROUP = "kvtide.tiers"
"""Of entry points: a tier's type by its name."""
TIERS_MAX = 8
"""Places in a row: each that is asked in vain makes a request wait for one more answer."""
SHOWN_CHARS_MAX = 400
"""Of one entry: all together fit what engines are told of settings."""
WRITE = ("through", "on_reuse", "on_eviction")
NAME = re.compile(r"[a-z][a-z0-9_]{0,39}")
"""Of a tier: a word that may be a label of metrics."""
_IN_DIRECTORIES = {"disk", "shared_dir"}
"""Types that have a path, which no two of a node share."""

REQUIRED = object()
"""In place of a default: the option has to be given."""


@dataclass(frozen=True, slots=True)
class Option:
    """One key of a type's entries. `parse` takes text, or a value of YAML or JSON, and raises
    ValueError; what it raises for a secret does not repeat the value. A secret is not shown, but
    for what a `show` of its own leaves of it."""

    name: str
    parse: Callable[[object], Any]
    accepts: str
    doc: str
    default: object = REQUIRED
    show: Callable[[object], str] = values.show
    secret: bool = False

    def shown(self, value: object) -> str:
        """The value as logs and status may print it."""
        is_hidden = self.secret and self.show is values.show
        return values.show_secret(value) if is_hidden else self.show(value)


def _parse_name(raw: object) -> str:
    if not isinstance(raw, str) or not NAME.fullmatch(raw):
        raise ValueError("not a word of small letters, digits and _ (40 at most)")
    return raw


COMMON = (
    Option(
        "name",
        parse=_parse_name,
        accepts="a word",
        doc="What status and metrics call the place; by default its type. Two of one type need"
        " it.",
        default=None,
    ),
    Option(
        "write",
        parse=values.one_of(*WRITE),
        accepts="`through`, `on_reuse` or `on_eviction`",
        doc="When a chunk is written there: as soon as it is stored; when it is matched for the"
        " first time; when host memory becomes short.",
        default="through",
    ),
)
"""Options that entries of every type have."""


@dataclass(frozen=True, slots=True)
class TierEntry:
    """One place, as the settings ask for it.

    Attributes:
        type: what kind of place.
        name: what status and metrics call it; no two have the same.
        write: when a chunk is written there, of `WRITE`.
        options: values by the names of the type's options, each of them there; raw, as they were
            given, where the type is another package's and was not loaded. May hold secrets.
        shown: in words that may be printed.
    """

    type: str
    name: str
    write: str
    options: Mapping[str, Any] = field(repr=False)
    shown: str


def parse(
    raw: object, types: Mapping[str, Sequence[Option]], more_types: Callable[[], Iterable[str]]
) -> TierEntry:
    """An entry: of a type whose options are known, or of one of `more_types`, left raw.

    Raises:
        ValueError: it is of no type, or cannot be meant.
    """
    if not isinstance(raw, dict) or not isinstance(raw.get("type"), str):
        raise ValueError("an entry without a type, such as `type: disk`")  # noqa: TRY004 - as all
    kind: str = raw["type"]
    given = {str(name): value for name, value in raw.items() if name != "type"}
    common = {option.name for option in COMMON}
    if kind in types:
        return _parsed(kind, given, types[kind])
    others = sorted(more_types())
    if kind not in others:
        known = [*types, *others]
        raise ValueError(f"no tier has the type {values.in_short(kind)}; {_nearest(kind, known)}")
    own = {name: value for name, value in given.items() if name not in common}
    entry = _parsed(kind, {name: given[name] for name in common & given.keys()}, ())
    shown = _shown(entry, [f"{name} given" for name in own])
    return replace(entry, options=own, shown=shown)


def complete(entry: TierEntry, options: Sequence[Option]) -> TierEntry:
    """An entry that was left raw, by the options of its type; raises ValueError."""
    common = {"name": entry.name, "write": entry.write}
    return _parsed(entry.type, {**entry.options, **common}, options)


def _parsed(kind: str, given: Mapping[str, object], options: Sequence[Option]) -> TierEntry:
    by_name = {option.name: option for option in (*options, *COMMON)}
    for name in given:
        if name not in by_name:
            shown = values.in_short(name)
            raise ValueError(f"a tier of type {kind} has no {shown}; {_nearest(name, by_name)}")
    missing = [o.name for o in options if o.default is REQUIRED and o.name not in given]
    if missing:
        raise ValueError(f"a tier of type {kind} without {' and '.join(missing)}")
    found = {option.name: option.default for option in by_name.values()}
    for name, raw in given.items():
        try:
            found[name] = by_name[name].parse(raw)
        except ValueError as error:
            said = "" if by_name[name].secret else f" {values.in_short(raw)}"
            give = by_name[name].accepts
            raise ValueError(
                f"{name}{said} of a tier of type {kind}: {error}; give {give}"
            ) from None
    name, write = str(found.pop("name") or kind), str(found.pop("write"))
    entry = TierEntry(kind, name, write, found, shown="")
    words = [f"{o.name} {o.shown(found[o.name])}" for o in options if found[o.name] != o.default]
    return replace(entry, shown=_shown(entry, words))


def _shown(entry: TierEntry, words: Sequence[str]) -> str:
    label = entry.type if entry.name == entry.type else f"{entry.name} ({entry.type})"
    write = [f"write {entry.write}"] if entry.write != "through" else []
    shown = f"{label}: {', '.join([*words, *write]) or 'by default'}"
    return shown if len(shown) <= SHOWN_CHARS_MAX else f"{shown[: SHOWN_CHARS_MAX - 1]}…"


def checked_together(entries: Sequence[TierEntry]) -> tuple[TierEntry, ...]:
    """The entries as they are; raises ValueError where they cannot stand beside one another."""
    if len(entries) > TIERS_MAX:
        raise ValueError(f"{len(entries)} entries; {TIERS_MAX} at most")
    for at, entry in enumerate(entries):
        for other in entries[:at]:
            if entry.name == other.name:
                raise ValueError(f"two tiers are named {entry.name!r}; give one of them a `name`")
            if not {entry.type, other.type} <= _IN_DIRECTORIES:
                continue
            paths = [os.path.normpath(one.options["path"]) for one in (other, entry)]
            if paths[0] == paths[1]:
                raise ValueError(
                    f"the tiers {other.name!r} and {entry.name!r} have one path, {paths[0]}; give"
                    " each of them a directory of its own"
                )
    return tuple(entries)


def installed() -> dict[str, str]:
    """Types that other packages have: name and reference of each; none of them is loaded."""
    metadata = importlib.import_module("importlib.metadata")  # a third of a start, for few
    return {point.name: point.value for point in metadata.entry_points(group=GROUP)}


def show(value: object) -> str:
    """Each in a few words."""
    if not isinstance(value, tuple) or not value:
        return "not set"
    return "; ".join(entry.shown for entry in value)


def _nearest(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"

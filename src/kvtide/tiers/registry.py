"""Types of tiers by name: what an entry of `tiers` becomes.

    entry ──► reference ──load──► TierType ──► options parsed ──► open ──► Tier

One way for all. A type is named by a reference, `module:attribute`, to its `TierType`: those that
come with kvtide in a table, so that they are there however it was installed; those of other
packages by an entry point of the group `kvtide.tiers`. A module is imported when an entry asks for
it. The names of ours cannot be taken by others.
"""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvtide import tier_entries
from kvtide.errors import ConfigError
from kvtide.tier_entries import Option, TierEntry
from kvtide.tiers.base import Tier


@dataclass(frozen=True, slots=True)
class TierType:
    """What an entry point of `kvtide.tiers` names.

    Attributes:
        options: what an entry of this type may say, besides what entries of all types may.
        open: opens the place. Gets the values of `options` by name, the tier's `wake` (to be
            called from any thread when `poll` has something to give) and how many bytes of stores
            may wait in it. May block; raises ConfigError or OSError where the place cannot be
            used at all. A node's start waits five seconds for it, and takes it in later if it
            takes longer; a server that is away for now is a matter of the tier's breaker.
        schemes: of URLs that `kvtide tier test` takes for this type.
        url_option: the option that gets such a URL; where that is `path`, the URL's path.
    """

    options: tuple[Option, ...]
    open: Callable[[Mapping[str, Any], Callable[[], None], int], Tier]
    schemes: tuple[str, ...] = ()
    url_option: str = "url"


BUILT_IN = {
    "disk": "kvtide.tiers.disk.opening:TYPE",
    "shared_dir": "kvtide.tiers.shared_dir.opening:TYPE",
    "redis": "kvtide.tiers.redis.opening:TYPE",
    "s3": "kvtide.tiers.s3.opening:TYPE",
    "mooncake": "kvtide.tiers.mooncake.opening:TYPE",
    "infinistore": "kvtide.tiers.infinistore.opening:TYPE",
}
"""References of ours; their options stand in `kvtide.tier_values`, where settings are read."""


def references() -> dict[str, str]:
    """All types that are there: name and reference of each, ours first; none is loaded."""
    return BUILT_IN | tier_entries.installed() | BUILT_IN


def load(name: str) -> TierType:
    """The type of this name.

    Raises:
        ConfigError: there is none, its package cannot be imported, or it is no `TierType`.
    """
    found = BUILT_IN if name in BUILT_IN else references()
    if name not in found:
        raise ConfigError(f"no tier has the type {name!r}; known are {', '.join(found)}")
    module, _, attribute = found[name].partition(":")
    try:
        loaded = getattr(importlib.import_module(module.strip()), attribute.strip())
    except Exception as error:  # whatever code of another package does when it is imported
        raise ConfigError(
            f"tiers of type {name} cannot be used: {found[name]} cannot be imported"
            f" ({type(error).__name__}: {error})"
        ) from error
    if not isinstance(loaded, TierType):
        raise ConfigError(
            f"tiers of type {name} cannot be used: {found[name]} is no kvtide TierType"
        )
    return loaded


def complete(entry: TierEntry, tier_type: TierType) -> TierEntry:
    """The entry with its options parsed, whoever's type it is.

    Raises:
        ConfigError: it cannot be meant.
    """
    if entry.type in BUILT_IN:
        return entry
    try:
        return tier_entries.complete(entry, tier_type.options)
    except ValueError as error:
        raise ConfigError(f"tiers: {error}") from None

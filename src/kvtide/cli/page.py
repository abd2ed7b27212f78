"""The status as a page for people: a title, and what there is to say of it, a line each."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from kvtide.cli.here import counted, printable
from kvtide.metrics import BUCKETS_US
from kvtide.node.health import ON
from kvtide.units import format_bytes

TITLE_CHARS = 12
NOTHING = "none"

Status = Mapping[str, Any]


def page(status: Status, directory: str) -> str:
    """The whole page."""
    sections: dict[str, Iterable[str]] = {
        "node": _node(status["node"], directory),
        "ALARM": [one["text"] for one in status["quarantined"]],
        "host": _host(status["host"]),
        "entries": _entries(status["entries"], status["host"]),
        "regions": _regions(status["host"]["regions"]),
        "engines": _engines(status["engines"]),
        "not shared": _not_shared(status["not_shared"]),
        "tokens": _tokens(status["counts"]),
        "loads": _copies(status["counts"], "loaded", "load"),
        "stores": _copies(status["counts"], "stored", "store"),
        "canaries": _canaries(status["counts"], status["canary_difference"]),
        "misses": _by_reason(status["counts"], "miss."),
        "drops": _by_reason(status["counts"], "drop."),
        "evictions": [_listed(status["evicted"])],
    }
    tiers = [
        (name, _tier(name, tier, status["counts"], status["node"]["uptime_s"]))
        for name, tier in status["tiers"].items()
    ]
    return "\n".join(_laid_out([*sections.items(), *tiers]))


def _laid_out(sections: Iterable[tuple[str, Iterable[str]]]) -> Iterator[str]:
    for title, lines in sections:
        shown = title if len(title) < TITLE_CHARS else f"{title} "
        for line in lines:
            yield f"{shown:<{TITLE_CHARS}}{line}".rstrip()
            shown = ""


def _node(node: Mapping[str, Any], directory: str) -> Iterator[str]:
    yield f"process {node['pid']}, kvtide {node['version']}, up {duration(node['uptime_s'])}"
    yield directory


def _host(host: Mapping[str, Any]) -> Iterator[str]:
    limit = ""
    if host["limit_bytes"] < host["size_bytes"]:
        limit = f", now {format_bytes(host['limit_bytes'])} because memory is short"
    elif host["refusal"]:
        reachable = format_bytes(host["reachable_bytes"])
        limit = f", for now {reachable}: {printable(host['refusal'])}"
    yield f"{format_bytes(host['size_bytes'])} at most{limit}"
    yield (
        f"{format_bytes(host['allocated_bytes'])} allocated: {format_bytes(host['held_bytes'])}"
        f" held, {format_bytes(host['free_bytes'])} free,"
        f" {format_bytes(host['storing_bytes'] + host['loose_bytes'])} in between"
    )
    yield (
        f"{counted(host['grants'], 'grant')} ({format_bytes(host['granted_bytes'])},"
        f" {format_bytes(host['quarantine_bytes'])} of it in quarantine),"
        f" {counted(host['leases'], 'lease')}, {counted(host['loads'], 'load')} running"
    )


def _entries(entries: Mapping[str, int], host: Mapping[str, Any]) -> Iterator[str]:
    yield (
        f"{counted(entries['chunks'], 'chunk')}, {counted(entries['tails'], 'tail')},"
        f" {entries['storing']:,} being stored;"
        f" {format_bytes(host['evictable_bytes'])} may be evicted"
    )


def _regions(regions: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """One line for each layout."""
    of_layout: dict[str, list[Mapping[str, Any]]] = {}
    for region in regions:
        of_layout.setdefault(region["layout"], []).append(region)
    if not of_layout:
        yield NOTHING
    for layout, own in of_layout.items():
        states: dict[str, int] = {}
        for region in own:
            states[region["state"]] = states.get(region["state"], 0) + 1
        engines = sorted({printable(engine) for region in own for engine in region["open_to"]})
        yield (
            f"layout {layout}, {counted(own[0]['shards'], 'shard')}: {len(own)} of"
            f" {format_bytes(own[0]['bytes'])} ({_listed(states)});"
            f" open to {', '.join(engines) or 'nobody'}"
        )


def _engines(engines: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    found = False
    for engine in engines:
        found = True
        pid = engine["pid"] if engine["pid"] is not None else "gone"
        fingerprint = f", fingerprint {engine['fingerprint']}…" if engine["fingerprint"] else ""
        yield (
            f"{printable(engine['engine_id'])}: {engine['state']}, process {pid},"
            f" {counted(len(engine['workers']), 'worker')}{fingerprint}"
        )
        if engine["label"]:
            yield f"  {printable(engine['label'])}"
        if engine["off"]:
            yield f"  off: {printable(engine['off'])}"
        if _with(engine["counts"], "tokens."):
            yield f"  tokens: {_sources(engine['counts'])}"
        if misses := _with(engine["counts"], "miss."):
            yield f"  misses: {_listed(misses)}"
        if engine["grants"] or engine["leases"] or engine["loads"]:
            yield (
                f"  {counted(engine['grants'], 'grant')}, {counted(engine['leases'], 'lease')},"
                f" {counted(engine['loads'], 'load')}"
            )
    if not found:
        yield NOTHING


def _not_shared(pairs: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Engines with the same weights that do not share, and why."""
    for pair in pairs:
        one, other = (printable(engine) for engine in pair["engines"])
        yield f"{one} and {other} have the same weights, but differ in"
        for name, (mine, theirs) in sorted(pair["fields"].items()):
            yield f"  {printable(name)}: {printable(mine)} ≠ {printable(theirs)}"


def _tokens(counts: Mapping[str, int]) -> Iterator[str]:
    yield _sources(counts)
    if counts.get("recomputed_tokens"):
        yield f"{counts['recomputed_tokens']:,} computed again after a preemption"


def _sources(counts: Mapping[str, int]) -> str:
    """Prompt tokens by where their KV came from."""
    named = {"external": "from kvtide", "local": "from the engine's own cache"}
    tokens = _with(counts, "tokens.")
    return _listed({named.get(name, name): value for name, value in tokens.items()})


def _copies(counts: Mapping[str, int], past: str, timer: str) -> Iterator[str]:
    blocks, size = counts.get(f"{past}_blocks", 0), counts.get(f"{past}_bytes", 0)
    failed = counts.get("failed_blocks", 0) if past == "loaded" else 0
    parts = [counted(blocks, "block"), format_bytes(size)]
    copies = sum(counts.get(f"{timer}.us.{bound}", 0) for bound in (*BUCKETS_US, "inf"))
    seconds = counts.get(f"{timer}.us.sum", 0) / 1e6
    if copies:
        parts.append(f"{counted(copies, 'copy', 'copies')} in {seconds:.3g} s")
    if copies and seconds and size:
        parts.append(f"{size / seconds / 1e9:.2g} GB/s")
    if failed:
        parts.append(f"{counted(failed, 'block')} failed, computed instead")
    yield ", ".join(parts)


def _canaries(counts: Mapping[str, int], difference: float) -> Iterator[str]:
    verdicts = _with(counts, "canaries.")
    near = f"; of equal ones at most {difference:.2%} apart" if verdicts.get("equal") else ""
    yield f"{_listed(verdicts)}{near}"


def _by_reason(counts: Mapping[str, int], prefix: str) -> Iterator[str]:
    yield _listed(_with(counts, prefix))


def _with(counts: Mapping[str, int], prefix: str) -> dict[str, int]:
    return {
        name.removeprefix(prefix): value
        for name, value in counts.items()
        if name.startswith(prefix)
    }


def _tier(
    name: str, tier: Mapping[str, Any], counts: Mapping[str, int], uptime_s: int
) -> Iterator[str]:
    """One place below the host."""
    state = "" if tier["state"] == ON else f"; {printable(tier['state'])}"
    yield (
        f"{format_bytes(tier['bytes_used'])} of {format_bytes(tier['bytes_max'])},"
        f" {counted(tier['records'], 'record')},"
        f" {format_bytes(tier['queued_bytes'])} waiting{state}"
    )
    for what, past in (("loads", "loaded"), ("stores", "stored")):
        size = format_bytes(counts.get(f"tier_{past}_bytes.{name}", 0))
        yield f"{what}: {_listed(_with(counts, f'tier_{what}.{name}.'))}; {size}"
    found, absent = (counts.get(f"tier_lookups.{name}.{w}", 0) for w in ("found", "absent"))
    if asked := found + absent:
        questions = counted(asked, "question")
        yield f"hits: {found:,} of {questions} ({found / asked:.0%}) found something"
    if stored := counts.get(f"tier_stored_bytes.{name}", 0):
        rate = int(stored / max(1, uptime_s))
        yield f"written {format_bytes(rate)} a second since the node's start"
    if tier["evicted"]:
        yield f"{counted(tier['evicted'], 'record')} evicted"


def _listed(values: Mapping[str, int]) -> str:
    """Values that are not zero, largest first."""
    ordered = sorted(values.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{printable(n)} {value:,}" for n, value in ordered if value) or NOTHING


def duration(seconds: int) -> str:
    """A time for people, in its two largest units."""
    units = ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))
    parts: list[str] = []
    for size, name in units:
        count, seconds = divmod(seconds, size)
        if count or (name == "s" and not parts):
            parts.append(f"{count} {name}")
    return " ".join(parts[:2])

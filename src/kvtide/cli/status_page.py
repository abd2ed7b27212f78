"""The page of `kvtide status`: the same values as `--json`, for a person's eyes."""

from collections.abc import Iterator, Mapping
from typing import Any

from kvtide.units import format_bytes


def page(status: Mapping[str, Any]) -> str:
    """The whole page."""
    lines = [*_node(status["node"]), *_host(status), *_engines(status["engines"])]
    lines += [*_not_shared(status["not_shared"]), *_counts(status["counts"], status["evicted"])]
    return "\n".join(lines)


def _node(node: Mapping[str, Any]) -> Iterator[str]:
    yield f"node {node['pid']}, kvtide {node['version']}, up {_duration(node['uptime_s'])}"


def _duration(seconds: int) -> str:
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds // size} {unit}"
    return f"{seconds} s"


def _host(status: Mapping[str, Any]) -> Iterator[str]:
    host, entries = status["host"], status["entries"]
    yield (
        f"host memory   {format_bytes(host['held_bytes'])} held, "
        f"{format_bytes(host['allocated_bytes'])} allocated, "
        f"at most {format_bytes(host['limit_bytes'])}"
    )
    yield (
        f"entries       {entries['chunks']} chunks, {entries['tails']} tails, "
        f"{entries['storing']} being stored"
    )
    yield (
        f"in use        {host['leases']} leases, {host['loads']} loads, {host['grants']} grants "
        f"({format_bytes(host['granted_bytes'])}, {format_bytes(host['quarantine_bytes'])} of it "
        "in quarantine)"
    )
    layouts: dict[str, list[int]] = {}
    for region in host["regions"]:
        of_layout = layouts.setdefault(region["layout"], [0, 0, 0])
        of_layout[0] += 1
        of_layout[1] += region["bytes"]
        of_layout[2] += region["free_bytes"]
    for name, (count, size, free) in sorted(layouts.items()):
        yield (
            f"layout {name}  {count} regions, {format_bytes(size)}, "
            f"{format_bytes(free)} of it free"
        )


def _engines(engines: list[Mapping[str, Any]]) -> Iterator[str]:
    if not engines:
        yield "\nno engine is connected"
    for engine in engines:
        yield ""
        name = f"{engine['label']} (process {engine['pid']})"
        if engine["off"]:
            yield f"engine {name}: off, {engine['off']}"
        else:
            yield f"engine {name}: {engine['state']}, fingerprint {engine['fingerprint'] or '-'}"
        counts = engine["counts"]
        tokens = {source: counts.get(f"tokens.{source}", 0) for source in _SOURCES}
        if sum(tokens.values()):
            shares = ", ".join(f"{tokens[source]} {text}" for source, text in _SOURCES.items())
            yield f"  prompt tokens   {shares}"
        misses = _by_reason(counts, "miss.")
        if misses:
            yield f"  misses          {misses}"


_SOURCES = {
    "external": "from kvtide",
    "local": "from the engine's own cache",
    "computed": "computed",
}


def _not_shared(pairs: list[Mapping[str, Any]]) -> Iterator[str]:
    for pair in pairs:
        one, other = (engine[:8] for engine in pair["engines"])
        differ = "; ".join(
            f"{name} {mine} ≠ {theirs}" for name, (mine, theirs) in pair["fields"].items()
        )
        yield f"\nengines {one} and {other} have the same weights but will not share: {differ}"


def _counts(counts: Mapping[str, int], evicted: Mapping[str, int]) -> Iterator[str]:
    yield ""
    yield f"stored        {counts.get('stored_blocks', 0)} blocks{_mean(counts, 'store')}"
    yield f"loaded        {counts.get('loaded_blocks', 0)} blocks{_mean(counts, 'load')}"
    failed = counts.get("failed_blocks", 0)
    if failed:
        yield f"failed loads  {failed} blocks, computed by the engine"
    drops = _by_reason(counts, "drop.")
    if drops:
        yield f"not stored    {drops} (blocks)"
    gone = ", ".join(f"{number} {cause}" for cause, number in evicted.items() if number)
    if gone:
        yield f"evicted       {gone} (entries)"


def _by_reason(counts: Mapping[str, int], prefix: str) -> str:
    return ", ".join(
        f"{number} {name.removeprefix(prefix)}"
        for name, number in sorted(counts.items())
        if name.startswith(prefix)
    )


def _mean(counts: Mapping[str, int], name: str) -> str:
    """Bytes and the mean time of a copy, where there was one."""
    size = counts.get("loaded_bytes" if name == "load" else "stored_bytes", 0)
    prefix = f"{name}.us."
    copies = sum(
        number
        for key, number in counts.items()
        if key.startswith(prefix) and not key.endswith(".sum")
    )
    if not copies:
        return ""
    mean_ms = counts.get(f"{prefix}sum", 0) / copies / 1000
    return f", {format_bytes(size)} in {copies} copies of {mean_ms:.1f} ms"

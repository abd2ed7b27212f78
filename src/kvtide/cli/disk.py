"""`kvtide disk`: what the directory of a disk tier holds, and whether it can be proven."""

import itertools
import shlex
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import click

from kvtide.cli.here import counted
from kvtide.errors import ConfigError, KVTideError
from kvtide.tiers.disk.check import Checked, check, listed, segments_of
from kvtide.tiers.disk.repair import opened
from kvtide.tiers.disk.tier import DiskTier
from kvtide.tiers.disk_names import is_of_a_disk
from kvtide.units import format_bytes

FAULTS_SHOWN = 20
"""Lines for records that are damaged; the rest is counted."""

DIRECTORY = click.Path(exists=True, file_okay=False, path_type=Path)


@click.group()
def command() -> None:
    """Look at the directory of a disk tier, and prove it.

    Safe beside a running node, which is not asked.
    """


@command.command("show")
@click.argument("path", type=DIRECTORY)
def show(path: Path) -> None:
    """List what a directory holds: models, layouts, chains and sizes.

    Nothing is read but what stands beside the records, and their headers where that is damaged.
    Keys and salts never appear.
    """
    _require_disk(path)
    segments = segments_of(path)
    taken = sum(segments.values())
    click.echo(f"{path}: {counted(len(segments), 'segment')}, {format_bytes(taken)}")
    for line in _lines(listed(path)):
        click.echo(line)


def _require_disk(path: Path) -> None:
    """Nothing is said of, or made in, a directory that is something else. Raises ConfigError."""
    if not is_of_a_disk(path):
        raise ConfigError(
            f"no disk tier is in {path}; give the directory that the setting disk_path names, or"
            " the path of an entry of tiers whose type is disk"
        )


def _lines(records: Iterable[Checked]) -> Iterator[str]:
    """One for each fingerprint and layout, the largest first."""
    found: dict[tuple[str, str], list[int]] = {}
    for one in records:
        if one.record is None:
            yield f"segment {one.segment}: {one.fault}"
            continue
        root, layout = one.record.root, one.record.layout
        sums = found.setdefault((root.fingerprint.hex()[:8], layout.name), [0, 0, 0, 0])
        sums[0] += 1
        sums[1] += not one.record.is_whole
        sums[2] += one.record.parent == root.key
        sums[3] += one.length_bytes
    for (fingerprint, layout_name), sums in sorted(found.items(), key=lambda item: -item[1][3]):
        records_, tails, chains, size = sums
        yield (
            f"fingerprint {fingerprint}…, layout {layout_name}: {counted(records_, 'record')}"
            f" ({counted(tails, 'tail')}) in {counted(chains, 'chain')}, {format_bytes(size)}"
        )
    if not found:
        yield "no records"


@command.command("check")
@click.argument("path", type=DIRECTORY)
@click.option(
    "--repair",
    is_flag=True,
    help="Mend or remove what is damaged; only while no node has the directory.",
)
@click.option(
    "--from-segment",
    type=click.IntRange(min=0),
    default=0,
    help="Begin there: where a check that was interrupted told to go on.",
)
def check_command(path: Path, repair: bool, from_segment: int) -> None:
    """Prove each record: header, key, and each byte by its checksum.

    Ends with code 1 where something is damaged and was not removed. A node removes what it meets
    damaged by itself, and its start mends what stands beside the records; this finds it before.
    """
    _require_disk(path)
    found = _Found(from_segment, from_segment)
    is_interrupted = False
    with opened(path) if repair else nullcontext() as tier:
        try:
            _check(path, found)
        except KeyboardInterrupt:
            is_interrupted = True
        removed = _finish(found, tier)
    if removed is not None:
        click.echo(f"removed {counted(removed, 'record')}, what lay behind included")
    if is_interrupted:
        raise KVTideError(_how_to_go_on(path, found.at, is_repairing=repair))
    if any(one.record is None or not repair for one in found.faults):
        raise click.exceptions.Exit(1)


@dataclass(slots=True)
class _Found:
    """What a check has found so far.

    Attributes:
        first: segment that it began at.
        at: segment that it is at: those before it are done.
        count: records.
    """

    first: int
    at: int
    count: int = 0
    faults: list[Checked] = field(default_factory=list)


def _check(path: Path, found: _Found) -> None:
    """Check with a bar."""
    extents = {n: size for n, size in segments_of(path).items() if n >= found.first}
    done_bytes, total_bytes = 0, sum(extents.values())
    before = dict(zip(extents, itertools.accumulate(extents.values(), initial=0), strict=False))
    with click.progressbar(length=total_bytes, label="proving", width=24) as bar:
        for one in check(path, found.first):
            if one.segment != found.at:
                done = before.get(one.segment, total_bytes)  # else it was begun meanwhile
                bar.update(max(0, done - done_bytes))
                found.at, done_bytes = one.segment, max(done, done_bytes)
            found.count += one.record is not None
            step = min(one.length_bytes, total_bytes - done_bytes)
            bar.update(step)
            done_bytes += step
            if one.fault:
                found.faults.append(one)
        bar.update(total_bytes - done_bytes)


def _finish(found: _Found, tier: DiskTier | None) -> int | None:
    """Say what was found, and take away what is damaged if a tier has the directory for that; how
    many records that were, None where nothing was to be taken away."""
    for one in found.faults[:FAULTS_SHOWN]:
        at = "" if one.offset_bytes is None else f", byte {one.offset_bytes}"
        click.echo(f"segment {one.segment}{at}: {one.fault}")
    if len(found.faults) > FAULTS_SHOWN:
        click.echo(f"… and {len(found.faults) - FAULTS_SHOWN} more")
    verdict = f"{counted(len(found.faults), 'fault')}" if found.faults else "all proven"
    behind = f" from segment {found.first} on" if found.first else ""
    click.echo(f"{counted(found.count, 'record')}{behind}, {verdict}")
    keys = [one.record.key for one in found.faults if one.record is not None]
    return tier.remove(keys) if tier is not None and keys else None


def _how_to_go_on(path: Path, segment: int, *, is_repairing: bool) -> str:
    """After an interruption."""
    options = ["--repair"] if is_repairing else []
    command = ["kvtide", "disk", "check", *options, str(path), "--from-segment", str(segment)]
    done = "has been removed" if is_repairing else "stands above"
    return (
        f"interrupted; what is damaged before segment {segment} {done}; go on with:"
        f" {shlex.join(command)}"
    )

"""`kvtide disk`: what the directory of a disk tier holds, and whether it can be proven."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import click

from kvtide.errors import KVTideError
from kvtide.tiers.disk.check import Checked, check, listed, segments_of
from kvtide.tiers.disk.repair import remove
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

    Nothing is read but what stands beside the records. Keys and salts never appear.
    """
    segments = segments_of(path)
    taken = sum(segments.values())
    click.echo(f"{path}: {_count(len(segments), 'segment')}, {format_bytes(taken)}")
    for line in _lines(listed(path)):
        click.echo(line)


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
            f"fingerprint {fingerprint}…, layout {layout_name}: {_count(records_, 'record')}"
            f" ({_count(tails, 'tail')}) in {_count(chains, 'chain')}, {format_bytes(size)}"
        )
    if not found:
        yield "no records"


@command.command("check")
@click.argument("path", type=DIRECTORY)
@click.option(
    "--repair", is_flag=True, help="Remove what is damaged; only while no node has the directory."
)
@click.option(
    "--from-segment",
    type=click.IntRange(min=0),
    default=0,
    help="Begin there: where a check that was interrupted told to go on.",
)
def check_command(path: Path, repair: bool, from_segment: int) -> None:
    """Prove every record: its header, its key, and each byte by its checksum.

    Ends with code 1 where something is damaged and was not removed. A node removes what it meets
    damaged by itself; this finds it before.
    """
    faults = _check(path, from_segment)
    damaged = [one for one in faults if one.record is not None]
    if repair and damaged:
        keys = [one.record.key for one in damaged if one.record is not None]
        click.echo(f"removed {_count(remove(path, keys), 'record')}, what lay behind included")
        faults = [one for one in faults if one.record is None]
    if faults:
        raise click.exceptions.Exit(1)


def _check(path: Path, first_segment: int) -> list[Checked]:
    """Check with a bar; what is damaged."""
    extents = {n: size for n, size in segments_of(path).items() if n >= first_segment}
    faults: list[Checked] = []
    count = done_bytes = 0
    at, total_bytes = first_segment, sum(extents.values())
    with click.progressbar(length=total_bytes, label="proving", width=24) as bar:
        try:
            for one in check(path, first_segment):
                if one.segment != at:
                    done = sum(size for number, size in extents.items() if number < one.segment)
                    bar.update(max(0, done - done_bytes))
                    at, done_bytes = one.segment, max(done, done_bytes)
                count += one.record is not None
                step = min(one.length_bytes, total_bytes - done_bytes)
                bar.update(step)
                done_bytes += step
                if one.fault:
                    faults.append(one)
        except KeyboardInterrupt:
            _say(faults, count)
            raise KVTideError(
                f"interrupted; what is damaged before segment {at} stands above; go on with:"
                f" kvtide disk check {path} --from-segment {at}"
            ) from None
    _say(faults, count)
    return faults


def _say(faults: list[Checked], count: int) -> None:
    """What was found."""
    for one in faults[:FAULTS_SHOWN]:
        at = "" if one.offset_bytes is None else f", byte {one.offset_bytes}"
        click.echo(f"segment {one.segment}{at}: {one.fault}")
    if len(faults) > FAULTS_SHOWN:
        click.echo(f"… and {len(faults) - FAULTS_SHOWN} more")
    verdict = f"{_count(len(faults), 'fault')}" if faults else "all proven"
    click.echo(f"{_count(count, 'record')}, {verdict}")


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"

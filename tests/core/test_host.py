"""How much memory a layout gets, and which region it must give up."""

from kvtide.core.host import LEAVE_MS_MAX, REGION_BYTES_MAX, Host, Region
from kvtide.core.layout import KVLayout
from kvtide.units import GiB, KiB, MiB

SMALL = KVLayout(2, 8, (4 * KiB,))  # chunks of 16 KiB
WIDE = KVLayout(2, 8, (8 * KiB,))
OTHER = KVLayout(4, 16, (4 * KiB,))


def host_of(slots: int) -> Host:
    return Host(slots * SMALL.chunk_bytes, first_region=7)


def grow(host: Host, layout: KVLayout) -> Region:
    region = host.make(layout)
    region.is_ready = True
    host.check_integrity()
    return region


def leave(region: Region, now_ms: int) -> None:
    region.is_leaving = True
    region.leaving_since_ms = now_ms


def test_a_region_is_a_32nd_of_the_host_in_whole_slots() -> None:
    host = Host(64 * MiB + 12345, first_region=0)
    assert host.region_slots(SMALL) == 64 * MiB // 32 // SMALL.chunk_bytes
    assert grow(host, SMALL).bytes <= host.size_bytes // 32


def test_a_region_has_four_slots_at_least_and_a_gibibyte_at_most() -> None:
    assert host_of(16).region_slots(SMALL) == 4
    assert Host(1024 * GiB, 0).region_bytes(SMALL) == REGION_BYTES_MAX


def test_a_layout_needs_four_regions() -> None:
    assert host_of(16).needed_bytes(SMALL) == 16 * SMALL.chunk_bytes
    huge = KVLayout(16, 256, (1 * GiB,))
    assert Host(64 * GiB, 0).needed_bytes(huge) == 16 * huge.chunk_bytes


def test_numbers_of_regions_are_never_used_twice() -> None:
    host = host_of(64)
    first = grow(host, SMALL)
    host.remove(first)
    assert (first.number, grow(host, SMALL).number) == (7, 8)


def test_a_region_is_wanted_when_less_than_half_of_one_is_free() -> None:
    host = host_of(64)
    assert host.wants_region(SMALL)
    region = host.make(SMALL)
    assert not host.wants_region(SMALL), "one is being made"
    region.is_ready = True
    assert not host.wants_region(SMALL)
    region.cells.take(4)
    region.cells.take(4)
    assert not host.wants_region(SMALL), "half of it is free"
    region.cells.take(1)
    assert host.wants_region(SMALL)


def test_what_is_leaving_is_neither_free_nor_usable() -> None:
    host = host_of(64)
    region = grow(host, SMALL)
    leave(region, 0)
    assert host.free_bytes(SMALL) == 0
    assert host.usable(SMALL) == []
    assert host.wants_region(SMALL)


def test_room_ends_at_the_limit() -> None:
    host = host_of(10)
    assert host.has_room(SMALL)
    grow(host, SMALL)
    grow(host, SMALL)
    assert not host.has_room(SMALL)
    host.limit(100 * SMALL.chunk_bytes)
    assert host.limit_bytes == host.size_bytes, "a limit never exceeds the size"
    host.limit(8 * SMALL.chunk_bytes)
    assert not host.has_room(SMALL)


def test_a_region_that_was_refused_is_not_asked_for_again_at_once() -> None:
    """Until the pause is over, or the limit is set anew: memory may have become free."""
    host = host_of(64)
    grow(host, SMALL)
    host.not_made(host.make(SMALL), 1_000, "no memory")
    assert not host.has_room(SMALL)
    assert host.reachable_bytes == host.allocated_bytes == 4 * SMALL.chunk_bytes
    host.limit(host.limit_bytes)
    assert host.has_room(SMALL)


def test_the_pause_after_a_refusal_doubles_until_the_machine_gives_something() -> None:
    host = host_of(64)
    now_ms, pauses = 0, []
    for _ in range(8):
        host.not_made(host.make(SMALL), now_ms, "no memory")
        assert (host.reachable_bytes, host.refusal) == (0, "no memory")
        start_ms = now_ms
        while not host.reachable_bytes:
            now_ms += 1_000
            host.forget_refusal(now_ms)
        pauses.append((now_ms - start_ms) // 1_000)
    assert pauses == [10, 20, 40, 80, 160, 320, 320, 320]
    host.made(host.make(SMALL), now_ms)
    assert host.refusal == ""
    host.not_made(host.make(SMALL), now_ms, "no memory")
    host.forget_refusal(now_ms + 10_000)
    assert host.has_room(SMALL)


def test_room_moves_from_the_region_used_longest_ago() -> None:
    host = host_of(16)
    regions = [grow(host, SMALL) for _ in range(4)]
    for used_ms, region in zip((3, 1, 2, 4), regions, strict=True):
        region.used_ms = used_ms
    assert host.surplus(WIDE, 0) is regions[1]


def test_room_moves_only_from_layouts_above_their_fair_share() -> None:
    """Sixteen slots for two: the first gives until it holds eight, and gets none back."""
    host = host_of(16)
    for _ in range(4):
        grow(host, SMALL)
    for _ in range(2):
        region = host.surplus(OTHER, 0)
        assert region is not None
        assert region.layout == SMALL
        host.remove(region)
        grow(host, OTHER)
    assert host.surplus(OTHER, 0) is None
    assert host.surplus(SMALL, 0) is None


def test_what_one_does_not_need_is_not_fought_over() -> None:
    """Twelve regions, one of an idle layout: the others have five and six, and keep them."""
    host = host_of(48)
    idle = KVLayout(8, 32, (4 * KiB,))
    for layout, count in ((idle, 1), (SMALL, 5), (OTHER, 6)):
        for _ in range(count):
            grow(host, layout)
    assert host.surplus(SMALL, 0) is None
    assert host.surplus(OTHER, 0) is None


def test_room_that_would_not_be_enough_is_not_given_up() -> None:
    """The second layout's region needs two of the first's, and only one may go: so none does."""
    host = host_of(17)
    for _ in range(4):
        grow(host, SMALL)
    middle = KVLayout(2, 12, (4 * KiB,))
    assert host.region_bytes(middle) == 96 * KiB
    assert host.surplus(middle, 0) is None
    assert host.surplus(OTHER, 0) is not None


def test_the_fair_share_is_of_what_the_machine_gave() -> None:
    """Three regions, then no more memory: the second layout gets one of them."""
    host = host_of(64)
    for _ in range(3):
        grow(host, SMALL)
    host.not_made(host.make(OTHER), 0, "no memory")
    region = host.surplus(OTHER, 0)
    assert region is not None
    host.remove(region)
    grow(host, OTHER)
    assert host.surplus(OTHER, 0) is None, "or the room would move to and fro"
    assert host.surplus(SMALL, 0) is None


def test_to_come_below_the_limit_any_layout_gives() -> None:
    host = host_of(16)
    regions = [grow(host, SMALL), grow(host, OTHER)]
    regions[0].used_ms = 5
    assert host.surplus(None, 0) is regions[1]


def test_regions_go_one_by_one() -> None:
    host = host_of(16)
    regions = [grow(host, SMALL) for _ in range(4)]
    leave(regions[0], 100)
    assert host.surplus(None, 100) is None
    assert host.surplus(None, 100 + LEAVE_MS_MAX - 1) is None


def test_a_stuck_region_holds_up_only_those_of_the_same_workers() -> None:
    """The worker that hangs has two of three regions: only the third can be of use."""
    host = host_of(16)
    regions = [grow(host, SMALL) for _ in range(3)]
    regions[0].mapped = {1, 2}
    regions[1].offered = {1}
    regions[2].mapped = {2}
    leave(regions[0], 0)
    regions[0].mapped = {1}
    assert host.surplus(None, LEAVE_MS_MAX) is regions[2]


def test_a_region_that_is_being_made_cannot_be_given_up() -> None:
    host = host_of(16)
    host.make(SMALL)
    assert host.surplus(None, 0) is None


def test_regions_of_one_layout_are_not_those_of_another() -> None:
    host = host_of(32)
    mine, other = grow(host, SMALL), grow(host, OTHER)
    assert list(host.of(SMALL)) == [mine]
    assert list(host.of(OTHER)) == [other]
    assert list(host.of(WIDE)) == []
    assert host.allocated_bytes == mine.bytes + other.bytes

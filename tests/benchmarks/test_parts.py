"""The parts of the engine benchmark on made-up measurements: tables, and budgets judged."""

from pathlib import Path

import pytest

from benchmarks import chat, engine, overhead, place_hits, reuse
from benchmarks.arms import Arm
from benchmarks.hook_reports import hook_us
from benchmarks.overhead import Way
from benchmarks.prompts import Prompts
from benchmarks.report import Section, Verdict
from benchmarks.reuse import Taken
from kvtide.units import MiB


def verdicts(section: Section) -> dict[str, Verdict]:
    return {check.budget: check.verdict for check in section.checks}


def words(text: str) -> list[int]:
    return [sum(word.encode()) for word in text.split()]


def test_prompts_have_their_length_differ_and_are_the_same_for_a_seed() -> None:
    one, other = Prompts(words, seed=1), Prompts(words, seed=1)
    made = [one.make(length) for length in (300, 300, 6008)]
    assert [len(prompt) for prompt in made] == [300, 300, 6008]
    assert made[0][:20] != made[1][:20]
    assert made == [other.make(length) for length in (300, 300, 6008)]


def reuse_section(added_ms: float, pairs: int, external_tokens: int = 1920) -> Section:
    own = [100.0 + number for number in range(pairs)]
    ours = Taken([], own, [value + added_ms for value in own], {1920}, {external_tokens})
    theirs = Taken([], own, [value + 100 for value in own], {1920}, {1792})
    table = {2008: {Arm.NONE: Taken([1500.0]), Arm.LMCACHE: theirs, Arm.KVTIDE: ours}}
    size = reuse.Size((2008,), pairs // 2, 0, 1)
    return reuse._section(size, table, {2008: {1: 9.0, 2: 8.0}})


def test_a_hit_that_adds_little_meets_all_budgets() -> None:
    found = verdicts(reuse_section(added_ms=18.0, pairs=20))
    assert len(found) == 4
    assert set(found.values()) == {Verdict.MET}


def test_a_hit_that_adds_too_much_misses_the_budget_of_copies_alone() -> None:
    found = verdicts(reuse_section(added_ms=18.2, pairs=20))
    assert found["2008: added by a hit"] is Verdict.MISSED
    assert found["2008: added by a hit, against LMCache"] is Verdict.MET


def test_too_few_pairs_decide_nothing_but_wrong_hits_are_wrong() -> None:
    found = verdicts(reuse_section(added_ms=1.0, pairs=18, external_tokens=1792))
    assert found.pop("2008: tokens hit") is Verdict.MISSED
    assert set(found.values()) == {Verdict.OPEN}


def test_the_noise_of_a_hit_is_the_second_own_one_minus_the_first() -> None:
    """Own hits here are each 1 ms slower than the one before; an arm without any has no noise."""
    section = reuse_section(added_ms=18.0, pairs=20)
    place = section.header.index("noise")
    assert [row[place] for row in section.rows] == ["", *["+1.0 (+1.0 to +1.0)"] * 2]


@pytest.mark.parametrize("judged", ["step", "whole request"])
@pytest.mark.parametrize(
    ("factor", "wobble", "verdict"),
    [(1.01, 0.0, Verdict.MET), (1.04, 0.0, Verdict.MISSED), (1.0, 0.2, Verdict.OPEN)],
)
def test_overhead_is_judged_only_when_the_interval_is_narrow(
    judged: str, factor: float, wobble: float, verdict: Verdict
) -> None:
    base = overhead.Taken([300.0] * 24, [18.0] * 24, [1500.0] * 24)
    ours = overhead.Taken([300.0] * 24, [18.0] * 24, [1500.0] * 24)
    columns = {"step": ours.step_ms, "whole request": ours.total_ms}
    columns[judged][:] = [
        value * factor * (1 + wobble * (number % 2))
        for number, value in enumerate(columns[judged])
    ]
    table = dict.fromkeys(Way, base) | {Way.ON: ours}
    section = overhead._section(table, {"vllm:kvtide_x": 1.0, "vllm:other": 2.0})
    wanted = dict.fromkeys(columns, Verdict.MET) | {judged: verdict}
    assert verdicts(section) == {
        f"overhead by {name}, against {Way.OFF.value}": found for name, found in wanted.items()
    }
    assert section.data["kvtide_metrics"] == {"vllm:kvtide_x": 1.0}


def test_time_in_hooks_is_taken_between_two_readings() -> None:
    before = {"worker": {"steps": 10, "times_ns": {"wait_for_save": 5000}}}
    after = {
        "worker": {"steps": 20, "times_ns": {"wait_for_save": 25000}},
        "scheduler": {"steps": 4, "times_ns": {"build_connector_meta": 8000}},
    }
    assert hook_us(before, after) == {"wait_for_save": 2.0, "build_connector_meta": 2.0}


def hits_section(
    subject: place_hits.Subject = place_hits.DISK,
    *,
    cold_ms: float = 900.0,
    tokens: int = 384,
    theirs_ms: float = 140.0,
    rounds: int = 20,
) -> Section:
    own = [45.0 + number for number in range(rounds)]
    ours = place_hits.Taken(
        [cold_ms] * 5,
        [value + 55 for value in own],
        [value + 5 for value in own],
        own,
        {tokens},
        {384},
        [9 * MiB] * rounds,
    )
    base = [45.0] * rounds
    theirs = place_hits.Taken(
        [], [theirs_ms] * rounds, base, base, {256}, {384}, [6 * MiB] * rounds
    )
    by_arm = {arm: ours if arm in subject.rivals else theirs for arm in subject.arms}
    return place_hits.section(place_hits.FULL, subject, {508: by_arm})


def test_hits_from_disk_are_shown_beside_all_others() -> None:
    ours, theirs = hits_section().rows
    assert ours[5:7] == ("59.5 (54.8 to 64.2)", "+5.0 (+5.0 to +5.0)")
    assert ours[7:] == ("109.5 (104.8 to 114.2)", "384", "+55.0 (+55.0 to +55.0)", "9.0")
    assert theirs[2:5] == ("", "45.0 (45.0 to 45.0)", "384")
    assert theirs[7:] == ("140.0 (140.0 to 140.0)", "256", "+95.0 (+95.0 to +95.0)", "6.0")


WHOLE = "508: a hit of kvtide with a disk"
RIVAL = "508: added by kvtide with a disk, against LMCache 0.5.6 with fs_native"


def test_a_hit_from_disk_must_be_whole_beat_computing_and_add_no_more_than_lmcaches() -> None:
    assert verdicts(hits_section()) == {WHOLE: Verdict.MET, RIVAL: Verdict.MET}
    assert verdicts(hits_section(tokens=256))[WHOLE] is Verdict.MISSED
    assert verdicts(hits_section(cold_ms=109.0))[WHOLE] is Verdict.MISSED
    assert verdicts(hits_section(theirs_ms=99.0))[RIVAL] is Verdict.MISSED
    assert verdicts(hits_section(rounds=19))[RIVAL] is Verdict.OPEN


def test_each_place_that_machines_share_is_held_against_its_rival_where_there_is_one() -> None:
    assert set(verdicts(hits_section(place_hits.REMOTE))) == {
        "508: a hit of kvtide with Valkey",
        "508: a hit of kvtide with shared_dir",
        "508: added by kvtide with Valkey, against LMCache 0.5.6 with resp",
    }


def test_the_chats_exceed_the_engines_cache_several_times() -> None:
    assert chat.FULL.users == 8
    assert chat.FULL.tokens_at_end >= 3 * chat.FULL.engine_tokens
    longest = chat.FULL.tokens_at_end // chat.FULL.users
    assert longest * chat.FULL.at_once < chat.FULL.engine_tokens


def test_a_chat_is_compared_with_no_cache_and_each_arm_with_itself() -> None:
    """Eight users; of each two neighbours the second waits 1 % longer, whatever their order."""
    users, rounds = range(chat.FULL.users), range(1, 3)

    def answers(ttft_ms: float, cached: int) -> list[chat.Answer]:
        return [
            chat.Answer(number, ttft_ms * (1 + user % 2 / 100), 2000.0, 100, cached)
            for number in rounds
            for user in chat._order(len(users), number)
        ]

    assert chat._order(len(users), 1) != chat._order(len(users), 2)
    first = chat.Answer(0, 9000.0, 9000.0, 100, 0)
    table = {
        Arm.NONE: chat.Chat([], answers(1000.0, 0), [1.0, 2.0]),
        Arm.KVTIDE: chat.Chat([], [first, *answers(500.0, 50)], [1.0, 0.5]),
    }
    row = chat._section(chat.FULL, table).rows[1]
    assert row[:3] == ("kvtide", "502.5 (500.0 to 505.0)", "505.0")
    assert row[3:] == ("50.0%", "0.5", "2.0 times faster", "+1.0 % (+1.0 to +1.0)")


def test_an_unknown_part_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        engine.main(["--only", "chatt", "--results", str(tmp_path)])
    assert "no such part: chatt" in capsys.readouterr().err

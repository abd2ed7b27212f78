"""Chunks on their way up: what a lookup finds in a tier is loaded before the lookup is answered.

    lookup ─► host match ends early ─► AskTier ─► found: LoadFrom … loaded, chunk by chunk ─► Match
                                          └─ nothing: the next tier, then the match as it is

A chunk being loaded is an entry like one being stored, its cells lent to the tier: it matches once
it is held, nobody stores it meanwhile, and whoever wants it too waits for the same load. The chain
is loaded in order, a bounded number of bytes ahead; the deepest entry of it is pinned and counts
as leased, so nothing of it is evicted before the answer has leased it. Where a load fails, the
next tier is asked for what is behind the last that did not.

What is asked for too long is answered with what is held by then. Running loads go on: their cells
are the tier's until it says that they ended, and what they bring is there for the next request.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeGuard

from kvtide.bounds import T_LOAD_MS
from kvtide.core import messages as m
from kvtide.core.effects import AskTier, Effect, LoadFrom
from kvtide.core.estimate import Choice
from kvtide.core.host import Host
from kvtide.core.index import Entry, Index, Matched, Root
from kvtide.core.instances import Instance
from kvtide.core.keys import INNER_DIGEST_BYTES, KEY_BYTES
from kvtide.core.layout import KVLayout
from kvtide.core.leases import PINNED_RATIO_MAX
from kvtide.core.lending import Grant, Lending
from kvtide.core.promotion import Name, Promotion, Question
from kvtide.core.reasons import CutReason
from kvtide.core.records import Record
from kvtide.core.tiering import TierPlan
from kvtide.units import MiB

WAIT_MS_MAX = T_LOAD_MS
"""So long a lookup waits without a chunk of its chain having come."""
TELL_MS = 100
"""The engine is told that it waits by then, and again as often, while chunks come."""
READ_AHEAD_BYTES = 64 * MiB
"""Of one chain that is being loaded at once: deep enough for any device, small beside the host."""
PROMOTING_RATIO_MAX = 0.25
"""Of the host that may be lent to tiers: what else is wanted then is answered as it is."""
LOAD_MS_MIN = 200
"""So long a load may take whatever computing would: twice what the clock of these bounds shows."""
COMPUTE_MS_MAX = 3_600_000
"""Nobody computes longer; what an engine counts is its own word, and may be anything."""
SILENCES_MAX = 5
"""After so many lookups in a row that waited for a tier in vain it is left alone."""
SILENT_MS = 5_000
"""So long a tier is left alone, or until a load of it ends: what hangs shall cost a few requests,
not all."""
CALM_MS = 300
"""So long after a load has ended whoever waited for it still has use for each core."""
PROMOTIONS_MAX = 1024
"""Lookups of one engine that may wait for tiers; those above get what is held."""


@dataclass(frozen=True, slots=True)
class _Load:
    """One record on its way from a tier."""

    tier: int
    grant: Grant


class _Silence:
    """Whether a tier says nothing."""

    def __init__(self) -> None:
        self._count = 0
        self._since_ms = 0

    def note(self, now_ms: int) -> None:
        """A lookup has waited in vain."""
        self._count += 1
        self._since_ms = now_ms

    def end(self) -> None:
        """It has said something."""
        self._count = 0

    def lasts(self, now_ms: int) -> bool:
        """Whether it is to be left alone."""
        return self._count >= SILENCES_MAX and now_ms - self._since_ms < SILENT_MS


class Promotions:
    """All lookups that wait for tiers, and all loads of tiers."""

    def __init__(
        self,
        tiers: Sequence[TierPlan],
        index: Index,
        host: Host,
        lending: Lending,
        emit: Callable[[Effect], None],
        send: Callable[[int | None, m.Message], None],
        count: Callable[[str, int], None],
        now: Callable[[], int],
    ) -> None:
        """`now` tells the time of the event that is being handled, in ms."""
        self._now = now
        self._tiers = tiers
        self._index = index
        self._host = host
        self._lending = lending
        self._emit = emit
        self._send = send
        self._count = count
        self.answer: Callable[[Promotion], None] = _answer_nobody
        """Answers a lookup with what is held now."""
        self._waiting: dict[Name, Promotion] = {}
        self._asked: dict[int, Promotion] = {}  # by the number of the question to a tier
        self._loads: dict[int, _Load] = {}  # by number
        self._loading_bytes = 0
        self._loaded_ms = -CALM_MS
        self._choices = [Choice() for _ in tiers]
        self._silences = [_Silence() for _ in tiers]
        self._joined: dict[Entry, list[Promotion]] = {}
        self._next_number = 1
        lending.on_settled = self._settled

    # ---- lookups

    @property
    def are_waiting(self) -> bool:
        """Whether a lookup waits for tiers, or they have something to do."""
        return bool(self._waiting or self._asked or self._loads)

    def is_waiting(self, instance: Instance, number: int) -> bool:
        """Whether this lookup waits for tiers already."""
        return Name(instance.engine_id, number) in self._waiting

    def begin(
        self,
        instance: Instance,
        question: Question,
        parent: Entry | Root | None,
        matched: Matched,
    ) -> bool:
        """Look below for what the host lacks; whether the answer waits for that.

        `parent` is where the match began: the root, or a probe's parent; None if it is not there.
        """
        if not self._tiers or parent is None or instance.layout is None:
            return False
        if not _is_short(question, matched):
            return False
        if sum(name.engine_id == instance.engine_id for name in self._waiting) >= PROMOTIONS_MAX:
            self._cut(CutReason.TOO_MANY)
            return False
        trail = matched.entries[: matched.chunks]
        promotion = Promotion(instance, question, parent, trail, self._now())
        self._pass_silent(promotion)
        if promotion.tier == len(self._tiers):
            return False
        deepest = promotion.deepest
        more_bytes = self._index.unleased_bytes(deepest) if isinstance(deepest, Entry) else 0
        if not self._may_keep(more_bytes):
            self._cut(CutReason.NO_MEMORY)
            return False
        self._waiting[promotion.name] = promotion
        self._keep(deepest)
        self._ask(promotion)
        return True

    def _may_keep(self, more_bytes: int) -> bool:
        """Whether so much more may be kept from being evicted; what is kept already costs none."""
        kept_bytes = self._index.leased_bytes + more_bytes
        return not more_bytes or kept_bytes <= self._host.limit_bytes * PINNED_RATIO_MAX

    def _pass_silent(self, promotion: Promotion) -> None:
        """Pass over tiers that say nothing, to the next that may answer, or behind the last."""
        for silence in self._silences[promotion.tier :]:
            if not silence.lasts(self._now()):
                return
            self._cut(CutReason.SILENT)
            promotion.tier += 1

    def _ask(self, promotion: Promotion) -> None:
        """Ask a tier for what is behind the deepest that is there."""
        question, deepest = promotion.question, promotion.deepest
        layout = promotion.instance.layout
        assert layout is not None, promotion.name
        keys = question.keys[promotion.chunks * KEY_BYTES :] if _has_keys(question) else b""
        number = self._take_number()
        self._asked[number] = promotion
        promotion.is_asking = True
        root, parent = deepest.root.name, deepest.key
        self._emit(AskTier(promotion.tier, number, root, parent, keys, question.digests, layout))

    def found(self, number: int, records: Sequence[Record], *, may_go_on: bool) -> None:
        """A tier's answer. It comes once; by then nobody may want it any more."""
        promotion = self._asked.pop(number, None)
        if promotion is None or self._waiting.get(promotion.name) is not promotion:
            return
        promotion.is_asking = False
        name, outcome = self._tiers[promotion.tier].name, "found" if records else "absent"
        self._count(f"tier_lookups.{name}.{outcome}", 1)
        promotion.may_go_on = promotion.may_go_on or may_go_on
        promotion.progress_ms = self._now()
        promotion.is_loading, promotion.ends_ms = False, None
        if self._is_worth_it(promotion, records):
            promotion.todo.extend(records)
        self._advance(promotion)

    def _is_worth_it(self, promotion: Promotion, records: Sequence[Record]) -> bool:
        """Whether loading these beats computing them, as far as is known."""
        if not records or self._tiers[promotion.tier].loads_always:
            return True
        size_bytes = sum(record.payload_bytes for record in records)
        tokens = sum(record.blocks * record.layout.block_tokens for record in records)
        choice, prefill = self._choices[promotion.tier], promotion.instance.prefill
        if choice.is_worth_loading(size_bytes, tokens, prefill):
            compute_ms = prefill.ms_for(tokens)
            if compute_ms is not None:
                wait_ms = int(min(max(compute_ms, LOAD_MS_MIN), COMPUTE_MS_MAX))
                promotion.ends_ms = self._now() + wait_ms
            return True
        self._cut(CutReason.SLOWER_THAN_COMPUTE)
        promotion.may_go_on = False
        return False

    def _advance(self, promotion: Promotion) -> None:
        """Load as far ahead as may be; once all has ended, ask the next tier, or answer."""
        layout = promotion.instance.layout
        if not _is_there(promotion.start):  # whatever comes, nobody finds it behind that
            self._cut(CutReason.TAKEN_AWAY)
            self._finish(promotion)
            return
        if layout is None:  # it is off by now: what it would get is of no use
            promotion.todo.clear()
        self._go_back(promotion)
        promotion.waits_for_memory = False
        ahead_bytes = sum(entry.bytes for entry in promotion.running)
        while promotion.todo and ahead_bytes < READ_AHEAD_BYTES:
            record = promotion.todo.popleft()
            entry = self._entry_of(promotion, record)
            if entry is None:
                if promotion.waits_for_memory:
                    promotion.todo.appendleft(record)
                else:
                    promotion.todo.clear()
                break
            self._keep(entry)
            self._keep_no_more(promotion.deepest)
            promotion.trail.append(entry)
            if not entry.is_copied:  # what is copied waits for one before it, as we do
                promotion.running.add(entry)
                self._joined.setdefault(entry, []).append(promotion)
                ahead_bytes += record.payload_bytes
        if promotion.running or promotion.waits_for_memory:
            self._tell(promotion)
            return
        self._measure(promotion)
        if layout is None:
            self._finish(promotion)
            return
        promotion.tier += 1
        self._pass_silent(promotion)
        if promotion.tier < len(self._tiers):
            self._ask(promotion)
        else:
            self._finish(promotion)

    def _go_back(self, promotion: Promotion) -> None:
        """Where a load has failed, return to the deepest that is there, the start at worst."""
        before, trail = promotion.deepest, promotion.trail
        while trail and not trail[-1].is_attached:
            trail.pop()
        if promotion.deepest is not before:
            self._keep(promotion.deepest)
            self._keep_no_more(before)

    def _measure(self, promotion: Promotion) -> None:
        """Loads of a lookup tell how quick the tier is; those that it joined are another's."""
        if promotion.is_loading:
            self._choices[promotion.tier].measure(self._now())
            promotion.is_loading = False

    def _entry_of(self, promotion: Promotion, record: Record) -> Entry | None:
        """The entry of a record: held, on its way already, or from now on; None: it cannot be."""
        parent = promotion.deepest
        known = self._index.find(record.key)
        if known is not None:
            if not isinstance(known, Entry) or known.parent is not parent:
                self._cut(CutReason.TAKEN_AWAY)
                return None
            if not self._may_keep(self._index.unleased_bytes(known)):
                self._cut(CutReason.NO_MEMORY)
                return None
            return known
        if record.parent != parent.key:
            self._cut(CutReason.TAKEN_AWAY)
            return None
        bound = int(self._host.limit_bytes * PROMOTING_RATIO_MAX)
        if self._loading_bytes + record.payload_bytes > bound and self._loads:
            self._cut(CutReason.NO_MEMORY)
            return None
        if not self._may_keep(record.payload_bytes):
            self._cut(CutReason.NO_MEMORY)
            return None
        entry = Entry(record.key, record.digests, parent, record.layout, self._now())
        entry.kept |= 1 << promotion.tier
        grant = self._lending.lend_to_tier(entry, parent, promotion.instance)
        if grant is None:
            promotion.waits_for_memory = self._lending.is_growing(entry, promotion.instance)
            if not promotion.waits_for_memory:
                self._cut(CutReason.NO_MEMORY)
            return None
        number = self._take_number()
        self._loads[number] = _Load(promotion.tier, grant)
        self._choices[promotion.tier].began(number, self._now())
        self._loading_bytes += grant.bytes
        promotion.is_loading = True
        self._emit(LoadFrom(promotion.tier, number, record, entry.run))
        return entry

    def loaded(self, number: int, outcome: str, *, is_ok: bool) -> None:
        """A load has ended; the tier does not touch its cells any more."""
        load = self._loads.pop(number)
        self._loading_bytes -= load.grant.bytes
        self._loaded_ms = self._now()
        self._silences[load.tier].end()
        loaded_bytes = load.grant.bytes if is_ok else 0
        self._choices[load.tier].ended(number, loaded_bytes, self._now())
        name = self._tiers[load.tier].name
        self._count(f"tier_loads.{name}.{outcome}", 1)
        self._count(f"tier_loaded_bytes.{name}", loaded_bytes)
        self._lending.answered_by_tier(load.grant, is_ok=is_ok)

    @property
    def are_loading(self) -> bool:
        """Whether a load runs, or one ended so lately that who waited for it has use for cores."""
        return bool(self._loads) or self._now() - self._loaded_ms < CALM_MS

    def chunks_to_load(self, layout: KVLayout) -> int:
        """How many chunks that were found have no cells yet."""
        waiting = (one for one in self._waiting.values() if one.instance.layout == layout)
        return sum(len(one.todo) for one in waiting)

    def _settled(self, entry: Entry) -> None:
        """An entry that somebody waits for is held, or copied behind one that is not, or gone."""
        for promotion in self._joined.pop(entry, ()):
            promotion.running.discard(entry)
            promotion.progress_ms = self._now()
            if not entry.is_attached:
                promotion.todo.clear()
            self._advance(promotion)

    def _finish(self, promotion: Promotion) -> None:
        """Answer with what is held; only then may it be evicted again."""
        self._waiting.pop(promotion.name)
        self._unlease(promotion.deepest)  # in the lease of the answer it counts as the engine's
        self.answer(promotion)
        self._let_go(promotion)

    def _let_go(self, promotion: Promotion) -> None:
        for entry in promotion.running:
            self._joined[entry].remove(promotion)
            if not self._joined[entry]:
                del self._joined[entry]
        promotion.running.clear()
        promotion.todo.clear()
        self._unpin(promotion.deepest)

    def _tell(self, promotion: Promotion) -> None:
        """Say that the answer takes a while; again while there is progress."""
        now_ms, told_ms = self._now(), promotion.told_ms
        if told_ms is not None and now_ms - told_ms < TELL_MS:
            return
        if told_ms is None or promotion.progress_ms > told_ms:
            promotion.told_ms = now_ms
            self._send(promotion.instance.connection, m.Pending(promotion.question.number))

    def expire(self) -> None:
        """Tell who waits; answer whoever has waited for too long."""
        for promotion in list(self._waiting.values()):
            now_ms, ends_ms = self._now(), promotion.ends_ms
            is_silent = now_ms - promotion.progress_ms >= WAIT_MS_MAX
            if is_silent or (ends_ms is not None and now_ms >= ends_ms):
                if is_silent:
                    for tier in self._owing(promotion):
                        self._silences[tier].note(now_ms)
                self._cut(CutReason.TOO_LATE)
                self._measure(promotion)
                self._finish(promotion)
            elif promotion.waits_for_memory and not promotion.running:
                self._advance(promotion)
            else:
                self._tell(promotion)

    def _owing(self, promotion: Promotion) -> set[int]:
        """Tiers that a lookup waits for; none where it waits for memory, or for an engine."""
        loads = self._loads.values()
        tiers = {load.tier for load in loads if load.grant.entry in promotion.running}
        return tiers | ({promotion.tier} if promotion.is_asking else set())

    def regions_opened(self, instance: Instance) -> None:
        """There is more memory to load into."""
        for promotion in list(self._waiting.values()):
            if promotion.instance is instance and promotion.waits_for_memory:
                promotion.progress_ms = self._now()
                self._advance(promotion)

    def forget(self, engine_id: str) -> None:
        """The scheduler's connection has ended: nobody waits any more."""
        for name in [name for name in self._waiting if name.engine_id == engine_id]:
            promotion = self._waiting.pop(name)
            self._unlease(promotion.deepest)
            self._let_go(promotion)

    def _cut(self, reason: CutReason) -> None:
        """A lookup gets less than tiers have."""
        self._count(f"promotions.{reason}", 1)

    def _keep(self, holder: Entry | Root) -> None:
        """It and what it hangs on is not evicted, and counts as leased."""
        if isinstance(holder, Entry):
            self._index.lease(holder)
            self._lending.pin(holder)

    def _keep_no_more(self, holder: Entry | Root) -> None:
        self._unlease(holder)
        self._unpin(holder)

    def _unlease(self, holder: Entry | Root) -> None:
        if isinstance(holder, Entry):
            self._index.unlease(holder)

    def _unpin(self, holder: Entry | Root) -> None:
        if isinstance(holder, Entry):
            self._lending.unpin(holder)

    def _take_number(self) -> int:
        self._next_number += 1
        return self._next_number - 1

    def pinned(self) -> list[Entry]:
        """Entries that waiting lookups keep, each as often as it is pinned."""
        deepest = (promotion.deepest for promotion in self._waiting.values())
        return [entry for entry in deepest if isinstance(entry, Entry)]

    def check_integrity(self, instances: Mapping[str, Instance]) -> None:
        """Assert that whoever waits is there, and waits for something that will end."""
        asked = set(map(id, self._asked.values()))
        for name, promotion in self._waiting.items():
            assert promotion.name == name, (promotion.name, name)
            instance = instances[name.engine_id]
            assert instance is promotion.instance, f"{name} waits for another instance"
            assert instance.connection is not None, f"{name} waits, and is not connected"
            is_waiting = promotion.running or promotion.waits_for_memory or promotion.is_asking
            assert is_waiting, f"{name} waits for nothing"
            assert promotion.is_asking == (id(promotion) in asked), f"{name} has no answer"
            for entry in promotion.running:
                assert promotion in self._joined[entry], f"{name} will not be told"
        for entry, joined in self._joined.items():
            assert all(entry in promotion.running for promotion in joined), entry.key
        loading = sum(load.grant.bytes for load in self._loads.values())
        assert loading == self._loading_bytes, (loading, self._loading_bytes)
        lent = {number for number, grant in self._lending.grants.items() if grant.is_loading}
        assert lent == {load.grant.number for load in self._loads.values()}, lent


def _has_keys(question: Question) -> TypeGuard[m.Lookup]:
    return isinstance(question, m.Lookup)


def _is_short(question: Question, matched: Matched) -> bool:
    """Whether more could be there than the host has."""
    wanted = len(question.keys) // KEY_BYTES if _has_keys(question) else 0
    return matched.chunks < wanted or matched.blocks < len(question.digests) // INNER_DIGEST_BYTES


def _is_there(holder: Entry | Root) -> bool:
    """Whether what is behind it can be found."""
    is_attached = holder.is_attached if isinstance(holder, Entry) else True
    return is_attached and not holder.root.is_cleared


def _answer_nobody(promotion: Promotion) -> None:
    raise AssertionError(f"nobody answers {promotion.name}")

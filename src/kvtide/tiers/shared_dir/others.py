"""What was read of the other members' journals, and what of it a clear has taken away.

A clear is this node's: the records of others stay theirs, but those that a clear means are not
found here any more, up to the number that each member had come to. While that is being noted,
nothing of its scope is taken in: what comes then waits for what the note says. Of a member whose
journal could not be read then, the clear means all; once a look that began later has read it to
its end, what it had come to by then.

Ownership: the node's owner thread.
"""

from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

from kvtide.codec.record import stored_bytes
from kvtide.tiers.kinds import Kind
from kvtide.tiers.scope import Scope
from kvtide.tiers.shared_dir.journal import (
    EVERY_NUMBER,
    Cleared,
    ClearedRow,
    GoneRow,
    KeptRow,
    KindRow,
    Piece,
    Position,
    Row,
)
from kvtide.tiers.shared_dir.ops import Ended, LookOp
from kvtide.tiers.shared_dir.own import LiveRows
from kvtide.tiers.shared_dir.view import Gone, View

if TYPE_CHECKING:
    from collections.abc import Iterator

OWN_RECORDS = 1024
"""Taken in at a time: some five milliseconds of the owner."""


@dataclass(slots=True)
class _Member:
    """One member's journal. `cleared`: what it has cleared of its own; `stale`: keys that the
    journal before it told of, and it has not yet."""

    position: Position = field(default_factory=Position)
    sequence: int = 0
    kinds: dict[int, Kind] = field(default_factory=dict)
    cleared: Cleared = field(default_factory=Cleared)
    waiting: dict[bytes, KeptRow] = field(default_factory=dict)
    stale: set[bytes] | None = None


class Others:
    """All that is known of the members."""

    def __init__(self, view: View) -> None:
        self.cleared = Cleared()
        self.clearing: list[Scope] = []
        self.are_more = False
        """Whether journals have rows that were not read yet."""
        self.is_taking = False
        """Whether there are own records that were not taken in yet."""
        self._unread: set[tuple[Scope, bytes]] = set()
        self._own_rows: Iterator[KeptRow] = iter(())
        self._own_kinds: dict[int, Kind] = {}
        self._is_settled = False
        self._view = view
        self._members: dict[bytes, _Member] = {}

    def __len__(self) -> int:
        return len(self._members)

    def look(self) -> LookOp:
        """What reads on."""
        positions = {member: one.position for member, one in self._members.items()}
        return LookOp(self._view.own, positions, frozenset(self._unread))

    def known(self) -> dict[bytes, tuple[Position, int]]:
        """How far each member's journal was read, and the last number of each."""
        return {member: (one.position, one.sequence) for member, one in self._members.items()}

    def take_own(self, live: LiveRows) -> None:
        """What the own journal says when its folder is taken; `take_more` takes its records in."""
        for scope, up_to in live.cleared.items():
            self._note(scope, up_to)
        self._own_kinds, self._own_rows = live.kinds, iter(live.kept.values())
        self.is_taking = True

    def take_more(self) -> list[Gone]:
        """The next own records, a bounded number; those that were cleared meanwhile."""
        own, cleared = self._view.own, []
        rows = list(islice(self._own_rows, OWN_RECORDS))
        for row in rows:
            kind = self._own_kinds[row.kind]
            if self._is_clearing(kind) or self.cleared.means(own, kind.root, row.sequence):
                cleared.append((row.key, stored_bytes(kind.layout, row.blocks)))
            else:
                self._view.add(own, kind, row)
        self.is_taking = len(rows) == OWN_RECORDS
        return cleared

    def change_own(self, own: bytes) -> None:
        """The own folder is another one from now on; what the lost one has is its new owner's to
        tell."""
        for member in (self._view.own, own):
            self._members.pop(member, None)
            for key in self._view.keys_of(member):
                self._view.forget(member, key)
        self._view.own = own
        self._is_settled = False

    def take(self, ended: Ended) -> list[Gone]:
        """What a look has brought; own records that nobody can reach any more by that."""
        gone: list[Gone] = []
        for member in self._members.keys() & set(ended.missing):
            del self._members[member]
            for key in self._view.keys_of(member):
                gone += self._view.forget(member, key)
        for member, piece in ended.pieces.items():
            if member != self._view.own:  # which it may have become meanwhile
                gone += self._take_piece(member, piece)
        assert isinstance(ended.op, LookOp), ended.op
        for scope, member in ended.op.unread:
            if member in ended.pieces and not ended.pieces[member].has_more:
                self._limit(scope, member)
        is_other = ended.op.own != self._view.own  # what the folder that was lost has is not read
        has_more = any(one.has_more for one in ended.pieces.values())
        self.are_more = is_other or ended.has_more or has_more
        is_partial = self.are_more or ended.is_partial or self.is_taking
        if not (is_partial or self._is_settled):
            self._is_settled = True  # what hangs on nothing now hangs on what others evicted
            gone += self._view.take_own_aside()
        return gone

    def _take_piece(self, member: bytes, piece: Piece) -> list[Gone]:
        one = self._members.get(member)
        if one is None:
            one = self._members[member] = _Member()
        elif piece.is_anew:
            one.stale = set(self._view.keys_of(member))
            one.kinds, one.cleared, one.waiting = {}, Cleared(), {}
        one.position = piece.position
        one.sequence = max(one.sequence, piece.sequence)
        gone: list[Gone] = []
        for row in piece.rows:
            gone += self._take_row(member, one, row)
        if one.stale is not None and not piece.has_more:
            for key in one.stale:
                gone += self._view.forget(member, key)
            one.stale = None
        return gone

    def _take_row(self, member: bytes, one: _Member, row: Row) -> list[Gone]:
        match row:
            case KindRow(number, kind):
                one.kinds[number] = kind
            case KeptRow():
                one.sequence = max(one.sequence, row.sequence)
                self._take_kept(member, one, row)
            case GoneRow(keys):
                for key in keys:
                    one.waiting.pop(key, None)
                return [gone for key in keys for gone in self._view.forget(member, key)]
            case ClearedRow(scope, up_to):
                if member in up_to:  # what it cleared elsewhere is its own affair
                    one.cleared.note(scope, {member: up_to[member]})
        return []

    def _take_kept(self, member: bytes, one: _Member, row: KeptRow) -> None:
        kind = one.kinds.get(row.kind)
        if kind is None or not row.is_of(kind):
            return
        if any(
            cleared.means(member, kind.root, row.sequence)
            for cleared in (self.cleared, one.cleared)
        ):
            return
        if self._is_clearing(kind):
            one.waiting[row.key] = row
            return
        self._view.add(member, kind, row)
        if one.stale is not None:
            one.stale.discard(row.key)

    def _is_clearing(self, kind: Kind) -> bool:
        return any(scope.has(kind.root) for scope in self.clearing)

    def noted(self, scope: Scope, up_to: dict[bytes, int]) -> None:
        """The end of a clear: it means what has numbers up to these, and nothing else."""
        self.clearing.remove(scope)
        self._note(scope, up_to)
        for member, one in self._members.items():
            waiting, one.waiting = one.waiting, {}
            for row in waiting.values():
                self._take_kept(member, one, row)

    def _note(self, scope: Scope, up_to: dict[bytes, int]) -> None:
        self.cleared.note(scope, up_to)
        self._unread |= {(scope, one) for one, number in up_to.items() if number == EVERY_NUMBER}

    def _limit(self, scope: Scope, member: bytes) -> None:
        """A clear that meant all of a member means what it has come to."""
        if member == self._view.own:
            return
        self._unread.discard((scope, member))
        up_to = self.cleared.get(scope, {})
        if up_to.get(member) == EVERY_NUMBER:
            up_to[member] = self._members[member].sequence

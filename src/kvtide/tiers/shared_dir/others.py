"""What was read of the other members' journals, and what of it a clear has taken away.

A clear is this node's: the records of others stay theirs, but those that a clear means are not
found here any more, up to the number that each member had come to. While that is being noted,
nothing of its scope is taken in at all.

Ownership: the node's owner thread.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvtide.tiers.disk.rows import Kind
from kvtide.tiers.shared_dir.journal import (
    Cleared,
    ClearedRow,
    GoneRow,
    KeptRow,
    KindRow,
    Live,
    Piece,
    Position,
    Row,
)
from kvtide.tiers.shared_dir.ops import Ended
from kvtide.tiers.shared_dir.view import Gone, View

if TYPE_CHECKING:
    from kvtide.tiers.scope import Scope


@dataclass(slots=True)
class _Member:
    """One member's journal. `stale`: keys that one before it told of, and it has not yet."""

    position: Position = field(default_factory=Position)
    sequence: int = 0
    kinds: dict[int, Kind] = field(default_factory=dict)
    stale: set[bytes] | None = None


class Others:
    """All that is known of the members."""

    def __init__(self, view: View) -> None:
        self.cleared = Cleared()
        self.clearing: list[Scope] = []
        self.are_more = False
        """Whether journals have rows that were not read yet."""
        self._is_settled = False
        self._view = view
        self._members: dict[bytes, _Member] = {}

    def positions(self) -> dict[bytes, Position]:
        """Where to read on."""
        return {member: one.position for member, one in self._members.items()}

    def known(self) -> dict[bytes, tuple[Position, int]]:
        """The same, with the last number of each."""
        return {member: (one.position, one.sequence) for member, one in self._members.items()}

    def take_own(self, live: Live) -> None:
        """What the own journal says when its folder is taken."""
        for scope, up_to in live.cleared.items():
            self.cleared.note(scope, up_to)
        for row in live.kept.values():
            self._view.add(self._view.own, live.kinds[row.kind], row)

    def change_own(self, own: bytes) -> None:
        """The own folder is another one from now on; what the lost one has is its new owner's to
        tell."""
        for member in (self._view.own, own):
            self._members.pop(member, None)
            for key in self._view.keys_of(member):
                self._view.forget(member, key)
        self._view.own = own

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
        self.are_more = any(piece.has_more for piece in ended.pieces.values())
        if not self.are_more and not self._is_settled:
            self._is_settled = True  # what hangs on nothing now hangs on what others evicted
            gone += self._view.take_own_aside()
        return gone

    def _take_piece(self, member: bytes, piece: Piece) -> list[Gone]:
        one = self._members.get(member)
        if one is None:
            one = self._members[member] = _Member()
        elif piece.is_anew:
            one.stale = set(self._view.keys_of(member))
            one.kinds = {}
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
                of_kind = one.kinds.get(row.kind)
                if of_kind and not self._is_cleared(member, of_kind, row.sequence):
                    self._view.add(member, of_kind, row)
                    if one.stale is not None:
                        one.stale.discard(row.key)
            case GoneRow(keys):
                return [gone for key in keys for gone in self._view.forget(member, key)]
            case ClearedRow(scope, up_to):
                if member in up_to:  # what it cleared elsewhere is its own affair
                    self.cleared.note(scope, {member: up_to[member]})
                    keys = self._view.keys_of(member, scope)
                    return [gone for key in keys for gone in self._view.forget(member, key)]
        return []

    def _is_cleared(self, member: bytes, kind: Kind, sequence: int) -> bool:
        is_clearing = any(scope.has(kind.root) for scope in self.clearing)
        return is_clearing or self.cleared.means(member, kind.root, sequence)

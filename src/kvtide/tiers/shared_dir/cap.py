"""How much the own folder may take: the cap, or less, where the place has less room than that.

Others fill it, or a quota ends before. Only a write that finds no room shows it: own records make
some, those that were used least, and for a minute no more is used than then; then it is tried
whether there is more by now. Where what goes makes no room (a snapshot keeps it, others take it),
that ends after a few tries, and what is there stays.

Ownership: the node's owner thread.
"""

import logging

from kvtide.units import format_bytes

logger = logging.getLogger("kvtide.shared_dir")

REFUSED_MS = 60_000
"""So long after a write that found no room none is tried beyond what was used then."""
VAIN_MAX = 8
"""Writes in a row that found no room though records went for the one before."""
VAIN_MS = 600_000
"""So long after that records go for one more."""


class Cap:
    """Of one folder; `place` is what warnings name it."""

    def __init__(self, place: str, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        """Never more, whatever room there is."""
        self.now_ms = 0
        self._place = place
        self._refused_bytes: int | None = None
        self._refused_ms = 0
        self._known_sequence = 0
        self._vain_count = 0
        self._vain_ms = 0
        self._is_told = False

    @property
    def bytes_now(self) -> int:
        """So much may be taken now."""
        is_past = self.now_ms - self._refused_ms >= REFUSED_MS
        if self._refused_bytes is None or is_past:
            return self.bytes_max
        return min(self.bytes_max, self._refused_bytes)

    @property
    def may_make_room(self) -> bool:
        """Whether records go for new ones where the place has less than the cap."""
        return self._vain_count < VAIN_MAX or self.now_ms - self._vain_ms >= VAIN_MS

    @property
    def is_vain(self) -> bool:
        """Whether what went for the last write that found no room has made none, so far."""
        return self._vain_count > 1

    def refused(self, used_bytes: int, begun: int, last: int) -> bool:
        """A store found no room; whether records are to go for the next one.

        Args:
            used_bytes: without it.
            begun: its number.
            last: that of the last one that has begun: those up to it show nothing more.
        """
        if begun <= self._known_sequence:
            return False
        is_to_make_room = self.may_make_room
        self._known_sequence = last
        self._refused_bytes, self._refused_ms = min(self.bytes_now, used_bytes), self.now_ms
        if is_to_make_room:
            self._vain_count += 1
            self._vain_ms = self.now_ms
        if not self._is_told:
            self._is_told = True
            logger.warning(
                "%s: there is no room for the cap of %s: a write beyond %s was refused; what was"
                " used least makes room for what is new, as far as need be",
                self._place,
                format_bytes(self.bytes_max),
                format_bytes(used_bytes),
            )
        return is_to_make_room

    def stored(self) -> None:
        """A store found room."""
        self._vain_count = 0

    def begin_anew(self) -> None:
        """For another folder, whose stores have other numbers."""
        self._refused_bytes = None
        self._known_sequence = self._vain_count = 0

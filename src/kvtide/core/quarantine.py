"""Fingerprints whose bytes are not what engines compute: nobody is served under them.

    Compared, "differs" ─► alarm ─► its entries are cleared, in every tier ─► its engines are off
    kvtide clear        ─► nothing is quarantined ─► they are on again

What is kept under such a fingerprint was written, moved or read wrongly, and nobody knows by whom:
so nothing more is taken or given until somebody has looked. What lies in tiers is cleared at once
and for good, so a node that starts later finds nothing of it; where the fault is still there, that
node's canaries raise the alarm again. (Cells of a silent writer are in another quarantine, that of
`core.lending`.)

Rejected: a list of fingerprints on disk, since what it would keep out is cleared, or has ended
with the node; quarantining a chunk alone, since what is wrong in one is wrong in most.
"""

from collections.abc import Iterator

from kvtide.core import checks
from kvtide.core import messages as m
from kvtide.core.effects import Alarm
from kvtide.core.instances import Instance
from kvtide.core.parts import Parts
from kvtide.core.presence import Presence
from kvtide.core.reasons import Verdict

QUARANTINED_MAX = 256
"""Of fingerprints; the one quarantined longest ago is let go for another."""
SHOWN_DIGITS = 8
"""Of a fingerprint, as in `status`."""


class Quarantine:
    """Takes what workers say of canaries."""

    def __init__(self, parts: Parts, presence: Presence) -> None:
        self._parts = parts
        self._presence = presence
        self.greatest_difference = 0.0
        """Of those that were found equal: how near to a false alarm this node has come."""

    def compared(self, connection: int, message: m.Compared) -> None:
        """A worker has compared a chunk; raises WireError for what no worker of ours says."""
        worker = self._presence.worker(connection)
        checks.check_compared(message)
        self._parts.count(f"canaries.{message.verdict}", 1)
        if message.verdict == Verdict.EQUAL:
            self.greatest_difference = max(self.greatest_difference, message.difference)
        if message.verdict != Verdict.DIFFERS:
            return
        quarantined, fingerprint = self._parts.quarantined, message.fingerprint
        identity = self._presence.instances[worker.engine_id].identity
        if identity is not None and identity.fingerprint != fingerprint:
            return  # of what it was before, or of somebody else, who will say so
        text = (
            f"rank {worker.rank} of {worker.engine_id} computed a chunk that differs by"
            f" {message.difference:.3g} from the one that is kept"
        )
        if fingerprint in quarantined:
            return
        if len(quarantined) >= QUARANTINED_MAX:
            del quarantined[next(iter(quarantined))]
        quarantined[fingerprint] = text
        entries = self._parts.clear(None, fingerprint)
        self._parts.emit(
            Alarm(
                f"fingerprint {fingerprint.hex()[:SHOWN_DIGITS]} is quarantined: {text}."
                f" Its {entries} entries are cleared, in tiers too, and its engines are off until"
                " `kvtide clear`; what they generated after hits may be wrong"
            )
        )
        for instance in self._of(fingerprint):
            self._parts.lookups.forget(instance.engine_id)
            self._parts.promotions.forget(instance.engine_id)
            self._identify(instance)

    def lift(self) -> None:
        """Everything was cleared by somebody's order: all may begin anew."""
        lifted = list(self._parts.quarantined)
        self._parts.quarantined.clear()
        for fingerprint in lifted:
            for instance in self._of(fingerprint):
                self._identify(instance)

    def _of(self, fingerprint: bytes) -> Iterator[Instance]:
        """Connected engines that are, or would be, served under a fingerprint."""
        for instance in list(self._presence.instances.values()):
            identity = instance.identity
            if instance.connection is None or identity is None or identity.off_reason:
                continue
            if identity.fingerprint == fingerprint:
                yield instance

    def _identify(self, instance: Instance) -> None:
        """Judge an engine as when it said what it is."""
        assert instance.connection is not None, instance.engine_id
        assert instance.identity is not None, instance.engine_id
        self._presence.identity(instance.connection, instance.identity)

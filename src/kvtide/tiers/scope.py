"""Which records a clear means."""

from dataclasses import dataclass

from kvtide.core.records import RootName


@dataclass(frozen=True, slots=True)
class Scope:
    """Records of one salt, of one fingerprint, of both: None stands for any."""

    salt_digest: bytes | None
    fingerprint: bytes | None

    def has(self, root: RootName) -> bool:
        """Whether records of this root are meant."""
        return self.covers(root.fingerprint, root.salt_digest)

    def covers(self, fingerprint: bytes, salt_digest: bytes) -> bool:
        """The same, by what of a root matters."""
        return self.salt_digest in (None, salt_digest) and self.fingerprint in (None, fingerprint)


EVERYTHING = Scope(None, None)

"""Records that a drive does not give back: a bad spot costs the record on it, and nothing else.

A load that fails may mean the record or the place. So a record is given up only once its loads
have failed twice in a row, and another was read well in between: then it is the record, and to
keep it would cost each request for it a load in vain. A mount that fails takes nothing with it.

Ownership: the node's owner thread.
"""

import errno
from collections.abc import Container

from kvtide.errors import CorruptRecord
from kvtide.tiers.disk.ops import LoadOp

SUSPECTS_MAX = 1024
"""Records that are remembered; of more the first are forgotten, to fail twice again."""
_UNREADABLE = (errno.EIO, errno.EILSEQ, errno.EBADMSG, errno.EUCLEAN)
"""How drives and file systems say that what lies there cannot be read."""


class Unreadable:
    """Which records could not be read when they were loaded last."""

    def __init__(self) -> None:
        self._suspects: dict[bytes, int] = {}  # by key: what had been read well by then
        self._read_count = 0

    @property
    def suspects(self) -> Container[bytes]:
        """Their keys."""
        return self._suspects

    def was_read(self, key: bytes | None) -> None:
        """A record was read well; None: the place was, whatever record."""
        self._read_count += 1
        if key is not None:
            self._suspects.pop(key, None)

    def judged(self, op: LoadOp, error: Exception | None) -> Exception | None:
        """Why a load failed, None if it did not; CorruptRecord where the record has to go."""
        key = op.job.record.key
        if not isinstance(error, OSError) or error.errno not in _UNREADABLE:
            return error
        before = self._suspects.setdefault(key, self._read_count)
        if before < self._read_count:
            del self._suspects[key]
            return CorruptRecord(
                f"segment {op.place.segment} at byte {op.place.offset_bytes} cannot be read, twice"
                f" in a row, where others can: errno {error.errno} ({error.strerror})"
            )
        if len(self._suspects) > SUSPECTS_MAX:
            del self._suspects[next(iter(self._suspects))]
        return error

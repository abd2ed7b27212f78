"""Records that a drive does not give back: a bad spot costs the record on it, and nothing else.

A load that fails may mean the record or the place. So a record is given up only once its loads
have failed twice in a row, and another was read well in between: then it is the record, and to
keep it would cost each request for it a load in vain. What was read well speaks against one record
only: a drive that reads now and then, and a mount that fails, take next to nothing with them.

A probe that fails may mean its record too: the next one is of another.

Ownership: the node's owner thread.
"""

import errno
from math import inf

from kvtide.errors import CorruptRecord
from kvtide.tiers.disk.catalog import Catalog, Place
from kvtide.tiers.disk.ops import LoadOp

SUSPECTS_MAX = 1024
"""Records that are remembered; of more the first are forgotten, to fail twice again."""
_UNREADABLE = (errno.EIO, errno.EILSEQ, errno.EBADMSG, errno.EUCLEAN)
"""How drives and file systems say that what lies there cannot be read."""


class Unreadable:
    """Which records could not be read when they were loaded last."""

    def __init__(self) -> None:
        # By key: what had been read well when a load of it failed; infinite: only a probe has.
        self._suspects: dict[bytes, float] = {}
        self._read_count = 0
        self._probed_key: bytes | None = None

    def place_to_probe(self, catalog: Catalog) -> Place | None:
        """Of a record that could be read, as far as is known; None: there is none."""
        index = catalog.index
        self._probed_key = next((key for key in index if key not in self._suspects), None)
        return None if self._probed_key is None else catalog.place(index[self._probed_key])

    def was_probed_badly(self) -> None:
        """The probe of that record failed, for whatever reason."""
        if self._probed_key is not None:
            self._suspect(self._probed_key, inf)

    def _suspect(self, key: bytes, read_count: float) -> None:
        self._suspects[key] = read_count
        if len(self._suspects) > SUSPECTS_MAX:
            del self._suspects[next(iter(self._suspects))]

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
        before = min(self._suspects.get(key, inf), self._read_count)
        if before < self._read_count:
            del self._suspects[key]
            self._suspects = {
                other: max(count, self._read_count) for other, count in self._suspects.items()
            }
            return CorruptRecord(
                f"segment {op.place.segment} at byte {op.place.offset_bytes} cannot be read, twice"
                f" in a row, where others can: errno {error.errno} ({error.strerror})"
            )
        self._suspect(key, before)
        return error

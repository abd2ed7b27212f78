"""madvise(2) and mmap(2) by ctypes, which lets other Python threads run meanwhile.

Rejected: `mmap.mmap.madvise`. It holds the interpreter's lock until the kernel is done, which for
populating is a quarter of a second for each GiB.
"""

import ctypes
import mmap
import os

MADV_DONTDUMP = 16
MADV_POPULATE_WRITE = 23  # since Linux 5.14; EINVAL before

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.madvise.restype = ctypes.c_int
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
_libc.mmap.restype = ctypes.c_void_p
_MAP_FIXED = 0x10
_PROT_NONE = 0


def address_of(mapping: mmap.mmap) -> int:
    """Where a writable mapping begins; holds until the mapping is closed."""
    return ctypes.addressof(ctypes.c_char.from_buffer(mapping))


def advise(address: int, length_bytes: int, advice: int) -> None:
    """Advise the kernel on whole pages; may block for as long as it takes to fill them.

    Raises:
        OSError: EINVAL where the kernel does not know the advice, ENOMEM where memory is short.
    """
    if _libc.madvise(address, length_bytes, advice) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def map_nothing(address: int, length_bytes: int) -> None:
    """Put nothing in the place of a mapping: its memory is let go of, its addresses stay taken."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
    _libc.mmap(address, length_bytes, _PROT_NONE, flags, -1, 0)

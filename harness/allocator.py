"""The C allocator: memory of tensors that are freed stays with the process, for the next ones."""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h of glibc
_MMAPPED_FROM = 32 << 20  # bytes; the most glibc takes
_KEPT = 256 << 20


def keep_freed_memory() -> bool:
    """Whether the C library can be told. As it comes, glibc gives tensors of a few MiB back to the system and fetches them again at every
    step of the reference, page by page, which takes as long as computing them."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(_M_MMAP_THRESHOLD, _MMAPPED_FROM)) and bool(mallopt(_M_TRIM_THRESHOLD, _KEPT))

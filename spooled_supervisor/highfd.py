"""Descriptors of ours under numbers so high that no handler which closes "3 and above" by habit meets them.

Apart from `kernel`, as handler authors load this and should not load ctypes.
"""

from __future__ import annotations

import fcntl
import os

HIGH_FD = 300


def duplicate_high(fd: int) -> int:
    """The same description under a high number, close-on-exec; any other where RLIMIT_NOFILE allows none so high."""
    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, HIGH_FD)
    except OSError:  # EINVAL
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)


def move_high(fd: int) -> int:
    """As `duplicate_high`, and the old number is closed."""
    high = duplicate_high(fd)
    os.close(fd)
    return high

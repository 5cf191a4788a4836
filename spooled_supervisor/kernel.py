"""The few prctl(2) calls and the process title that the standard library has no words for.

Cheap to import; both the supervisor and its children use it. `set_title` never fails and never shows payload or
secrets, as callers give it none.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found] # it has no stubs
import ctypes
import mmap
import os
from collections.abc import Callable, Iterable

# What `signal.signal`, `getsignal` and `pthread_sigmask` call themselves. Those make enums of all numbers: 1 us each,
# after every job, and in each child some 200 KB of pages that it would otherwise share with its siblings.
set_handler: Callable[[int, object], object] = _signal.signal
getsignal: Callable[[int], object] = _signal.getsignal
SIG_DFL: object = _signal.SIG_DFL  # known to `set_handler` by identity
pthread_sigmask: Callable[[int, Iterable[int]], set[int]] = _signal.pthread_sigmask

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_NAME = 15
PR_SET_CHILD_SUBREAPER = 36
PR_GET_CHILD_SUBREAPER = 37

_libc = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), f"prctl({option}, {value})")


def set_parent_death_signal(number: int) -> None:
    """Be sent this signal when the parent ends; 0 for none. It is lost on fork (prctl(2), PR_SET_PDEATHSIG)."""
    _prctl(PR_SET_PDEATHSIG, number)


def set_child_subreaper(on: bool) -> None:
    """Become the parent of descendants whose own parent ends (prctl(2), PR_SET_CHILD_SUBREAPER)."""
    _prctl(PR_SET_CHILD_SUBREAPER, int(on))


def is_child_subreaper() -> bool:
    """Whether this process is one."""
    value = ctypes.c_int()
    if _libc.prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(value), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_GET_CHILD_SUBREAPER)")
    return bool(value.value)


def has_children() -> bool:
    """Whether this process has any, alive or dead. One system call, where looking through /proc would be hundreds.

    `os.waitid` says so with an exception, which takes twice as long (a warm 0.5 us more, after every job).
    """
    # Nobody to be waited for is all that can go wrong here (waitid(2), ECHILD).
    return bool(_libc.waitid(os.P_ALL, 0, None, os.WEXITED | os.WNOHANG | os.WNOWAIT) == 0)


def set_dumpable(on: bool) -> None:
    """Off: same-user processes can read neither this one's memory nor its environment (prctl(2), PR_SET_DUMPABLE)."""
    _prctl(PR_SET_DUMPABLE, int(on))


def set_name(name: str) -> None:
    """What the kernel calls this process, 15 bytes: forks inherit it, and it outlives the process, which a title does
    not (prctl(2), PR_SET_NAME). Setting a title sets it as well."""
    _libc.prctl(PR_SET_NAME, ctypes.c_char_p(name.encode()[:15]), 0, 0, 0)


SIGNAL_STACK_BYTES = 256 * 1024


class _SignalStack(ctypes.Structure):
    """`stack_t` of sigaltstack(2)."""

    _fields_ = (("sp", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t))


_stack_memory = mmap.mmap(-1, SIGNAL_STACK_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # nothing until it is used


def widen_signal_stack() -> None:
    """Room for all signals at once, for this thread: six together, as to a process that was stopped, killed it.

    Python's handlers run on the alternate stack, if there is one (PyOS_setsig), and faulthandler makes one of some 11
    kB when it is first used. The kernel puts a frame of 2 to 4 kB there for each signal that is pending, and where the
    next one finds no room that is a SIGSEGV (sigaltstack(2)). Call it after faulthandler has made its own.
    """
    address = ctypes.addressof(ctypes.c_char.from_buffer(_stack_memory))
    if _libc.sigaltstack(ctypes.byref(_SignalStack(address, 0, SIGNAL_STACK_BYTES)), None) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), "sigaltstack")


def _load_title_setter() -> Callable[[str], None]:
    # SPT_NOENV: without it the title is written over the environment as others see it in /proc/PID/environ, where
    # the marker that a later start looks for has to stay readable.
    had = os.environ.get("SPT_NOENV")
    os.environ["SPT_NOENV"] = "1"
    try:
        import setproctitle

        setproctitle.getproctitle()  # the library reads its switches on first use
    finally:
        if had is None:
            del os.environ["SPT_NOENV"]
        else:
            os.environ["SPT_NOENV"] = had
    return setproctitle.setproctitle


_set_title: Callable[[str], None] | None = None


def set_title(title: str) -> None:
    """What `ps` shows for this process."""
    global _set_title
    if _set_title is None:
        _set_title = _load_title_setter()
    _set_title(title)

"""A clean child for every job: what a handler has changed in its process is put back, or the child is replaced.

A baseline is taken once: most of it before the fork, the rest when the start hooks have run. After every job each thing
is compared, and put back where it differs; standard descriptors, directory and umask are put back unseen, as os.fstat
takes 0.8 us, os.stat 1.8 and to put back 0.4. What cannot be put back (a thread that lives on, a lowered hard limit, a
raised nice value, more descriptors than a few) makes the child unfit: it answers this job and leaves. Processes that a
job has left behind are killed, or kept and counted. Nothing changed is the usual case; it costs some 15 us.

Not looked at, as it is the app's own state and may be meant to last: modules and their globals, caches, connections,
the random generators, native threads of numeric libraries. What `reconfigure(newline=...)` has made of a stream cannot
be looked at: a `TextIOWrapper` does not tell it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import io
import logging
import operator
import os
import resource
import signal
import socket
import sys
import threading
import time
from _thread import _count as thread_count  # those below the threading module too
from collections.abc import Callable

from spooled_supervisor import family, kernel, processes
from spooled_supervisor.highfd import duplicate_high, move_high

MAX_NEW_FDS = 32
"""A few connections may be kept on purpose; more than this is a leak that ends in EMFILE."""
THREAD_GRACE_S = 0.02
"""A thread that is just ending is waited for this long."""
REAP_LIMIT_S = 0.1
LIMITS = (
    resource.RLIMIT_AS,
    resource.RLIMIT_CORE,
    resource.RLIMIT_CPU,
    resource.RLIMIT_DATA,
    resource.RLIMIT_FSIZE,
    resource.RLIMIT_MEMLOCK,
    resource.RLIMIT_NOFILE,
    resource.RLIMIT_NPROC,
    resource.RLIMIT_SIGPENDING,
    resource.RLIMIT_STACK,
)
"""Those that a handler may change for a reason; each takes 0.5 us a job."""
SIGNALS = tuple(map(int, signal.valid_signals()))
TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
STREAM_SETTINGS = ("encoding", "errors", "line_buffering", "write_through")
"""What `TextIOWrapper.reconfigure` changes and an attribute tells."""
LOOP_THREADS = "asyncio_"
"""The default executor of the event loop that async handlers share: its threads are the child's own."""


class Baseline:
    """How the process was before its first job. For the main thread only."""

    def __init__(self, *, on_signals_lost: Callable[[], None], kill_leftovers: bool) -> None:
        """`on_signals_lost` installs our own signal handling again, where a handler has replaced it.

        For the fork server: what is looked at here is shared by all children; `take` does the rest in each.
        """
        self._on_signals_lost = on_signals_lost
        self._kills_leftovers = kill_leftovers
        self._helpers: list[tuple[int, int]] = []
        self._steps = (
            self._restore_limits,  # first: with RLIMIT_NOFILE at zero not even dup2 works
            self._restore_streams,
            self._restore_signals,
            self._restore_surroundings,
            self._restore_interpreter,
            self._look_at_threads,
            self._look_at_fds,
            self._look_at_multiprocessing,
        )
        self._home_fd = -1
        self._take_what_is_inherited()

    def take(self, *, hooks_have_run: bool) -> None:
        """For the child, before its first job: what its birth has changed, and code of the app that has run in it."""
        if hooks_have_run:
            self._take_what_is_inherited()
            if kernel.has_children():  # started by the hooks: they stay
                self._helpers = [(stat.pid, stat.start) for stat in processes.descendants(os.getpid())]
        self._std = {fd: duplicate_high(fd) for fd in (0, 1, 2)}
        self._handlers = [*map(kernel.getsignal, SIGNALS)]
        self._mask = kernel.pthread_sigmask(signal.SIG_BLOCK, ())
        self._nice = os.getpriority(os.PRIO_PROCESS, 0)
        self._affinity = os.sched_getaffinity(0)
        self._policy = (os.sched_getscheduler(0), os.sched_getparam(0))
        self._lowest_fd = _lowest_free_fd()

    def _take_what_is_inherited(self) -> None:
        if self._home_fd >= 0:
            os.close(self._home_fd)
        # Not its name: a deployment may remove the directory that we run in.
        self._home_fd = move_high(os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))
        self._umask = os.umask(0)
        os.umask(self._umask)
        self._environ = dict(_raw_environ())
        self._streams = (sys.stdin, sys.stdout, sys.stderr)
        texts = (stream for stream in (sys.stdout, sys.stderr) if isinstance(stream, io.TextIOWrapper))
        self._stream_settings = [(stream, _stream_settings(stream)) for stream in texts]
        self._limits = {limit: resource.getrlimit(limit) for limit in LIMITS}
        self._recursion = sys.getrecursionlimit()
        self._hooks = (sys.gettrace(), sys.getprofile())
        self._threads = set(threading.enumerate())
        self._thread_count = thread_count()

    def restore(self) -> str | None:
        """Put everything back; why this child is unfit for another job, in a word, if it is."""
        unfit = None
        for step in self._steps:
            try:
                unfit = step() or unfit
            except Exception as error:  # whatever a handler has broken: this process is not to be trusted
                unfit = f"{step.__name__.strip('_')} failed: {type(error).__name__}"
        return unfit

    def _restore_streams(self) -> str | None:
        if (sys.stdin, sys.stdout, sys.stderr) != self._streams:
            sys.stdin, sys.stdout, sys.stderr = self._streams
        for fd, copy in self._std.items():
            os.dup2(copy, fd)
            if not os.get_blocking(fd):  # programs that a job has run leave it so, too
                os.set_blocking(fd, True)
        for stream, before in self._stream_settings:
            if _stream_settings(stream) != before:
                stream.reconfigure(**dict(zip(STREAM_SETTINGS, before, strict=True)))
        return "closed stream" if any(stream is not None and stream.closed for stream in self._streams) else None

    def _restore_signals(self) -> str | None:
        for timer in TIMERS:
            if signal.getitimer(timer) != (0.0, 0.0):
                signal.setitimer(timer, 0)
        # By identity, which takes 0.8 us more than to compare lists: a handler may be equal to anything.
        if any(map(operator.is_not, map(kernel.getsignal, SIGNALS), self._handlers)):
            for number, before in zip(SIGNALS, self._handlers, strict=True):
                if kernel.getsignal(number) is not before:
                    kernel.set_handler(number, kernel.SIG_DFL if before is None else before)
            self._on_signals_lost()
            self._handlers = [*map(kernel.getsignal, SIGNALS)]  # ours are bound methods, and so new objects
        if kernel.pthread_sigmask(signal.SIG_BLOCK, ()) != self._mask:
            kernel.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        return None

    def _restore_surroundings(self) -> str | None:
        os.umask(self._umask)
        os.fchdir(self._home_fd)
        if _raw_environ() != self._environ:
            for name in set(os.environb) - set(self._environ):
                del os.environb[name]
            os.environb.update(self._environ)
            time.tzset()  # the C library keeps what TZ was
        return None

    def _restore_interpreter(self) -> str | None:
        gc.enable()
        faulthandler.cancel_dump_traceback_later()
        if logging.root.manager.disable:
            logging.disable(logging.NOTSET)
        if socket.getdefaulttimeout() is not None:
            socket.setdefaulttimeout(None)
        if sys.getrecursionlimit() != self._recursion:
            sys.setrecursionlimit(self._recursion)
        if (sys.gettrace(), sys.getprofile()) != self._hooks:
            sys.settrace(self._hooks[0])
            sys.setprofile(self._hooks[1])
        return None

    def _restore_limits(self) -> str | None:
        unfit = self._restore_rlimits()
        if os.getpriority(os.PRIO_PROCESS, 0) != self._nice:
            try:
                os.setpriority(os.PRIO_PROCESS, 0, self._nice)
            except OSError:
                unfit = "nice"
        if os.sched_getscheduler(0) != self._policy[0]:
            try:
                os.sched_setscheduler(0, *self._policy)
            except OSError:
                unfit = "scheduling policy"
        if os.sched_getaffinity(0) != self._affinity:
            os.sched_setaffinity(0, self._affinity)
        return unfit

    def _restore_rlimits(self) -> str | None:
        unfit = None
        for limit, before in self._limits.items():
            if resource.getrlimit(limit) != before:
                try:
                    resource.setrlimit(limit, before)
                except (ValueError, OSError):  # a lowered hard limit stays lowered
                    unfit = "resource limit"
        return unfit

    def _look_at_threads(self) -> str | None:
        if thread_count() <= self._thread_count:
            return None
        ours = self._thread_count
        for thread in threading.enumerate():
            if thread not in self._threads and thread.name.startswith(LOOP_THREADS):
                ours += 1
            elif thread not in self._threads:
                thread.join(THREAD_GRACE_S)
                if thread.is_alive():
                    return "thread"
        return "thread" if thread_count() > ours else None

    def _look_at_fds(self) -> str | None:
        return "descriptors" if _lowest_free_fd() > self._lowest_fd + MAX_NEW_FDS else None

    def _look_at_multiprocessing(self) -> str | None:
        """Its fork server was killed with the rest, and it would wait for that one before it starts another."""
        module = sys.modules.get("multiprocessing.forkserver")
        pid = getattr(getattr(module, "_forkserver", None), "_forkserver_pid", None)
        return "multiprocessing" if pid is not None and not os.path.exists(f"/proc/{pid}") else None

    # --- processes that the job has started ----------------------------------------------------------------------

    def clear_leftovers(self) -> family.Swept:
        """Reap what the job has left dead; kill what it has left alive, or keep and count it."""
        if not kernel.has_children():
            return NOTHING_LEFT
        self._restore_rlimits()  # without a free descriptor nobody would be found
        _reap(time.monotonic())
        swept = family.kill_descendants(os.getpid(), spare=self._helpers, kill=self._kills_leftovers)
        # What ended by itself between the two is in no list and yet a zombie, or about to be one.
        all_end = self._kills_leftovers and not self._helpers
        _reap(time.monotonic() + (REAP_LIMIT_S if swept.killed or all_end else 0.0))
        return swept


NOTHING_LEFT = family.Swept()


_stream_settings = operator.attrgetter(*STREAM_SETTINGS)  # 0.1 us; asking for one after the other is no faster


def _reap(until: float) -> None:
    """Reap all that is dead, and wait until `until` for those that are dying. Everything that this job has started is
    ours: its `Popen` objects have ended with it."""
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, _ = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                if time.monotonic() >= until:
                    return
                time.sleep(0.001)


def _lowest_free_fd() -> int:
    """The number that the next descriptor will get (open(2)). What is left open fills the numbers from below, so this
    grows with every leak; it takes two system calls, where listing /proc/self/fd takes dozens."""
    fd = os.dup(0)
    os.close(fd)
    return fd


def _raw_environ() -> dict[bytes, bytes]:
    """What `os.environ` is made of. Comparing that takes 1 us; through its interface every name and value would be
    decoded after every job, which takes 40."""
    return os.environ._data  # type: ignore[attr-defined, no-any-return] # has had this name since it exists

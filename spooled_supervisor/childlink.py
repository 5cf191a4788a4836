"""The supervisor's end of one child: its descriptors, its state, the one run it holds.

It moves bytes and keeps the child's state; what to do about what it tells is decided in `pool.py`. Nothing blocks: a
frame that the child does not take waits here, at most one job at a time. Descriptors are raw and non-blocking, with
add_reader and add_writer: a third of the CPU that asyncio's pipe transports take per round trip. The child's end is its
exit status (pidfd), never the end of a pipe, which a process of its own may hold open for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass

from spooled_supervisor import exits, frames
from spooled_supervisor.child import ABORT_SIGNAL, STACK_SIGNAL
from spooled_supervisor.childcgroups import ChildCgroup
from spooled_supervisor.errors import ProtocolError
from spooled_supervisor.forkclient import STACK_BYTES, NewBorn
from spooled_supervisor.job import Job, Outcome
from spooled_supervisor.leases import Lease
from spooled_supervisor.lifecycle import CHILD, ChildEvent, ChildState, advance
from spooled_supervisor.output import OutputPipe
from spooled_supervisor.wording import PACKAGE_DIR

READ_BYTES = 64 * 1024
"""All that a pipe holds (pipe(7)). From 128 kB on, a buffer is mapped and given back for each read: 12 us."""
MAX_DRAIN_READS = 64
MAX_STACK_CHARS = 1500
MAX_STACK_FRAMES = 100
"""So many of each thread faulthandler writes; not every Python has dots after them."""
OWN_FRAMES = (PACKAGE_DIR, 'File "<string>"')
"""Lines of a stack that say nothing about the handler: ours, and the fork server's command line below them."""


@dataclass(slots=True, eq=False)
class Run:
    """One execution of one lease. `verdict` is decided before the execution is over, where we end it ourselves."""

    number: int
    lease: Lease
    claimed_at: float
    timeout_s: float
    given_at: float = 0.0
    started_at: float | None = None
    ended_at: float | None = None
    verdict: Outcome | None = None
    is_lost: bool = False  # the lease is gone: nothing will be reported
    abort_reason: str | None = None
    percent: float | None = None
    message: str | None = None
    is_isolated: bool = False  # in a fresh child that runs no other job: this one has killed its child before
    times_given: int = 0
    slot: int | None = None  # of the child that has it
    sent_percent: tuple[float | None, str | None] = (None, None)  # what `progress.py` has told the service
    sent_at: float = 0.0
    stack: str = ""
    base_memory_bytes: int = 0  # of its child when it was given
    cpu_s: float = 0.0

    @property
    def job(self) -> Job:
        return self.lease.job

    def believable_start(self, said: float, read_at: float) -> float:
        """When it has begun: what its child says of that, if it can be true, else when we have read it."""
        return said if self.given_at <= said <= read_at else read_at


class ChildLink:
    """One child as the supervisor sees it. `pool.Pool` alone calls it; times are instants on `timing.now`."""

    def __init__(
        self,
        born: NewBorn,
        *,
        born_at: float,
        cgroup: ChildCgroup | None = None,
        on_message: Callable[[ChildLink, frames.FromChild], None],
        on_broken: Callable[[ChildLink, str, bool], None],
        on_exit: Callable[[ChildLink], None],
        on_line: Callable[[ChildLink, str], None],
        on_dropped: Callable[[ChildLink, int], None],
    ) -> None:
        self.slot = born.slot
        self.generation = born.generation
        self.pid = born.pid
        self.born_at = born_at
        self.cgroup = cgroup  # its own, if it has one
        self.state = ChildState.STARTING
        self.deadline: float | None = None  # of the state it is in
        self.run: Run | None = None
        self.ready_at: float | None = None
        self.jobs_done = 0
        self.jobs_limit: int | None = None
        self.base_memory_bytes = 0
        self.leave_reason: str | None = None  # it is to leave after its job
        self.kill_reason: str | None = None
        self.boot_error: str | None = None
        self.broken: str | None = None  # what was wrong with its pipe
        self._born = born
        self._on_message = on_message
        self._on_broken = on_broken
        self._on_exit = on_exit
        self._decoder = frames.decoder_of_child()
        self._unsent = bytearray()
        self._reads = True
        self._loop = asyncio.get_running_loop()
        self.output = OutputPipe(
            born.output_fd, lambda line: on_line(self, line), lambda dropped: on_dropped(self, dropped)
        )
        self._loop.add_reader(born.pidfd, on_exit, self)
        self._loop.add_reader(born.reports_fd, self.look)

    def __repr__(self) -> str:
        return f"<child {self.slot}/{self.generation} pid {self.pid} {self.state.name}>"

    @property
    def is_usable(self) -> bool:
        """Whether it runs jobs, or will."""
        return self.state in (ChildState.IDLE, ChildState.BUSY, ChildState.ABORTING) and self.leave_reason is None

    def advance(self, event: ChildEvent, deadline: float | None = None) -> None:
        """Take the event; the state it leads to has this deadline."""
        self.state = advance(CHILD, self.state, event)
        self.deadline = deadline

    # --- to the child --------------------------------------------------------------------------------------------

    def send(self, message: frames.ToChild) -> None:
        """Write a frame, or as much of it as the pipe takes now; the rest follows when the child reads."""
        data = frames.encode_frame(message)
        if self._unsent:
            self._unsent += data
            return
        try:
            written = os.write(self._born.jobs_fd, data)
        except BlockingIOError:
            written = 0
        except BrokenPipeError:
            return  # its exit, which follows, says what became of it
        if written < len(data):
            self._unsent += data[written:]
            self._loop.add_writer(self._born.jobs_fd, self._on_writable)

    def _on_writable(self) -> None:
        try:
            written = os.write(self._born.jobs_fd, self._unsent[:READ_BYTES])
        except BlockingIOError:
            return
        except BrokenPipeError:
            written = len(self._unsent)
        del self._unsent[:written]
        if not self._unsent:
            self._loop.remove_writer(self._born.jobs_fd)

    def abort(self, run: int, reason: str) -> None:
        """Tell the running job to stop, and have its Python stack written down at this moment."""
        self.send(frames.Abort(run, reason))
        self.signal(ABORT_SIGNAL)

    def dump_stack(self) -> None:
        """Have the Python stacks of all its threads written down; `read_stack` gives them when they are there."""
        self.signal(STACK_SIGNAL)

    def signal(self, number: int) -> None:
        """By pidfd: a number that has passed on to somebody else is never hit."""
        if number in (ABORT_SIGNAL, STACK_SIGNAL):
            # One open file description is shared with the child, offset included: its dump begins where this points.
            os.lseek(self._born.stack_fd, 0, os.SEEK_SET)
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._born.pidfd, number)

    def read_stack(self) -> str:
        """The stack that the last `abort` or `dump_stack` has caused, the interrupted thread first; may be empty."""
        text = self._dump()
        lines = text[max(0, text.find("Current thread")) :].splitlines()
        return "\n".join(line for line in lines if not any(own in line for own in OWN_FRAMES))[:MAX_STACK_CHARS]

    def has_whole_stack(self) -> bool:
        """Whether the dump has come to its end, as faulthandler writes it in many pieces.

        The main thread is the last in it, and ends with a module unless it is deeper than is told.
        """
        text = self._dump()
        return text.endswith(" in <module>\n") or text.rpartition(" first):\n")[2].count("\n") >= MAX_STACK_FRAMES

    def _dump(self) -> str:
        length = min(os.lseek(self._born.stack_fd, 0, os.SEEK_CUR), STACK_BYTES)
        return os.pread(self._born.stack_fd, length, 0).decode("utf-8", "replace")

    # --- from the child ------------------------------------------------------------------------------------------

    def ignore(self) -> None:
        """Do not be woken by its reports until `listen`: what it says meanwhile waits in the pipe."""
        if self._reads:
            self._loop.remove_reader(self._born.reports_fd)

    def listen(self) -> None:
        """Be woken by its reports again."""
        if self._reads:
            self._loop.add_reader(self._born.reports_fd, self.look)

    def look(self) -> None:
        """Take what it has said; one read, so that no child can keep the loop from the others."""
        if self._read_once() is None:
            self._stop_reading()
            self._on_broken(self, "it closed its report pipe", False)

    def drain_reports(self) -> None:
        """Take what a dead child has left in its report pipe."""
        for _ in range(MAX_DRAIN_READS):
            if not self._read_once():
                break
        self._stop_reading()

    def _read_once(self) -> int | None:
        """Read and take messages; how many bytes, 0 if there are none now, None at the end of the pipe."""
        if not self._reads:
            return 0
        try:
            data = os.read(self._born.reports_fd, READ_BYTES)
        except BlockingIOError:
            return 0
        try:
            for message in self._decoder.feed(data):
                self._on_message(self, message)
        except ProtocolError as error:
            self._stop_reading()
            self._on_broken(self, str(error), True)
        return len(data) or None

    def _stop_reading(self) -> None:
        if self._reads:
            self._reads = False
            self._loop.remove_reader(self._born.reports_fd)

    # --- its end -------------------------------------------------------------------------------------------------

    @property
    def pidfd(self) -> int:
        return self._born.pidfd

    def reap(self) -> exits.Reaped | None:
        """Take its status and what it used; None if somebody else did. Call it once, when the pidfd is readable."""
        return exits.reap(self.pid)

    def close(self) -> None:
        """Give all descriptors back. The last of the output is read first."""
        self._stop_reading()
        self._loop.remove_reader(self._born.pidfd)
        if self._unsent:
            self._loop.remove_writer(self._born.jobs_fd)
            self._unsent.clear()
        self.output.close()
        for fd in (self._born.jobs_fd, self._born.reports_fd, self._born.stack_fd, self._born.pidfd):
            os.close(fd)

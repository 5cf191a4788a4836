"""The messages between supervisor, fork server and child, and their bytes. No I/O.

    frame   = length (u32, little endian) | body (that many bytes)
    body    = one msgpack array: [tag, field, field, ...]

A pipe carries frames; the fork server's socket is SOCK_SEQPACKET and carries bodies. Payloads and results travel as
the JSON bytes they are. Every message about a job carries the number of its run, which is never used twice by one
supervisor, whatever the slot or generation: a late frame of an earlier run, or one made up for another child's run,
can be told apart by that number alone. Nothing that a child sends is trusted: lengths, types and text sizes are
bounded here, and what does not fit is a ProtocolError.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Generic, TypeVar

import msgspec
from msgspec import Meta, Struct

from spooled_supervisor.errors import ProtocolError
from spooled_supervisor.job import MAX_RESULT_BYTES

HEADER_BYTES = 4
MAX_TEXT = 16 * 1024
MAX_JOB_FRAME = 128 << 20
"""To a child: far above any payload the service takes (5 MiB), so that only our own mistakes meet it."""
MAX_REPORT_FRAME = MAX_RESULT_BYTES + 64 * 1024
"""From a child: a result at its limit, and the rest of the message."""
MAX_METRICS = 256 * 1024
"""One report of what the app's own metrics have counted."""
MAX_PACKET = 128 * 1024
"""On the fork server's socket; below the kernel's default for a datagram (net.core.wmem_default)."""

Text = Annotated[str, Meta(max_length=MAX_TEXT)]
Number = Annotated[int, Meta(ge=0)]


class _Message(Struct, frozen=True, array_like=True, tag=True):
    """Base: an array of the tag (the class name) and the fields."""


# --- supervisor to child --------------------------------------------------------------------------------------------


class Adopted(_Message, frozen=True, array_like=True, tag=1):
    """The first frame: the supervisor has this child in its books. Only now PDEATHSIG may be armed.

    `cgroup` is the directory of the control group to join, as the file system spells it; empty if there is none.
    """

    supervisor_pid: int
    cgroup: bytes = b""


class RunJob(_Message, frozen=True, array_like=True, tag=2):
    """Run this job. `payload` is JSON."""

    run: int
    job_id: str
    queue_name: str
    payload: bytes
    retry_count: int
    max_retries: int
    timeout_s: float


class Abort(_Message, frozen=True, array_like=True, tag=3):
    """Tell the running job to stop; ignored if that run is over."""

    run: int
    reason: str


class Leave(_Message, frozen=True, array_like=True, tag=4):
    """Leave after the current job, at once if there is none."""


ToChild = Adopted | RunJob | Abort | Leave

# --- child to supervisor --------------------------------------------------------------------------------------------


class Hello(_Message, frozen=True, array_like=True, tag=1):
    """Ready for the first job. `cgroup_error`: why it is not in the control group that it was to join."""

    slot: int
    generation: int
    pid: int
    cgroup_error: Text = ""


class BootFailed(_Message, frozen=True, array_like=True, tag=2):
    """A start hook raised; the child leaves."""

    error: Text


class Started(_Message, frozen=True, array_like=True, tag=3):
    """The job was taken from the pipe; from here on a death is the job's. `at`: when, by the child's `timing.now`."""

    run: Number
    at: float


class Progress(_Message, frozen=True, array_like=True, tag=4):
    """`ctx.progress`."""

    run: Number
    percent: float
    message: Text | None


class Log(_Message, frozen=True, array_like=True, tag=5):
    """`ctx.log` or a record of the standard `logging`; `run` 0 is outside of any job. `meta` is JSON text, cut."""

    run: Number
    severity: Annotated[str, Meta(max_length=16)]
    message: Text
    meta: Text | None
    source: Annotated[str, Meta(max_length=16)]


class LogsDropped(_Message, frozen=True, array_like=True, tag=6):
    """The child said more than its rate allows; this many of its log frames were not sent."""

    run: Number
    lines: Number


class Answer(_Message, frozen=True, array_like=True, tag=7):
    """The handler is done. Exactly one of `result` (JSON) and `error` is given.

    `aborted` tells that it ended by JobAborted; `leaving` that this child is not fit for another job, and why.
    `cpu_s` is the CPU time of this process in the job, in seconds; `left_behind` names processes that it had started
    and that were still there.
    """

    run: Number
    result: bytes | None = None
    error: Text | None = None
    retryable: bool = True
    aborted: Annotated[str, Meta(max_length=32)] | None = None
    leaving: Annotated[str, Meta(max_length=64)] | None = None
    cpu_s: float = 0.0
    left_behind: Annotated[list[Annotated[str, Meta(max_length=32)]], Meta(max_length=32)] = []


class Metrics(_Message, frozen=True, array_like=True, tag=8):
    """What the app's own metrics have counted; `childmetrics` says what stands in a report."""

    report: Annotated[bytes, Meta(max_length=MAX_METRICS)]


class Leaving(_Message, frozen=True, array_like=True, tag=9):
    """It leaves in peace, told to by us or by SIGTERM; its stop hooks run now."""


FromChild = Hello | BootFailed | Started | Progress | Log | LogsDropped | Answer | Metrics | Leaving

# --- supervisor to fork server and back -----------------------------------------------------------------------------


class Preload(_Message, frozen=True, array_like=True, tag=1):
    """Import the app and get ready to fork."""

    generation: int
    app: str
    queue_names: list[str]
    strict: bool
    child_nice: int
    kills_leftovers: bool
    pins_cpus: bool
    log_level: str
    on_abort: str = "signal"  # of a plain callable
    search_path: list[str] = []  # where to look for the app beside the usual places
    process_name: str = ""  # by which children are known before they are adopted, in a program that has others


class Fork(_Message, frozen=True, array_like=True, tag=2):
    """Fork a child for this slot; its four descriptors come along: jobs, reports, output, stack."""

    request: int
    slot: int


class Forget(_Message, frozen=True, array_like=True, tag=3):
    """This child is gone and reaped; its process group is not yours to kill any more."""

    pid: int


class Retire(_Message, frozen=True, array_like=True, tag=4):
    """Another generation has taken over: leave, and leave your children alone."""


ToForkServer = Preload | Fork | Forget | Retire


class Preloaded(_Message, frozen=True, array_like=True, tag=1):
    """The app is imported; `queue_names` are those it has handlers for, `threads` what it should not have started."""

    queue_names: list[str]
    threads: list[str]


class PreloadFailed(_Message, frozen=True, array_like=True, tag=2):
    """The app cannot be used; the fork server leaves."""

    error: str


class Forked(_Message, frozen=True, array_like=True, tag=3):
    """The child of this request runs; its pidfd comes along."""

    request: int
    pid: int


class ForkFailed(_Message, frozen=True, array_like=True, tag=4):
    """fork(2) failed; nothing runs for this request."""

    request: int
    error: str


FromForkServer = Preloaded | PreloadFailed | Forked | ForkFailed

# --- bytes ----------------------------------------------------------------------------------------------------------

M = TypeVar("M")
_encoder = msgspec.msgpack.Encoder()


def encode_frame(message: ToChild | FromChild) -> bytes:
    """A message as one frame."""
    body = _encoder.encode(message)
    return len(body).to_bytes(HEADER_BYTES, "little") + body


def encode_packet(message: ToForkServer | FromForkServer) -> bytes:
    """A message as one packet for the fork server's socket."""
    return _encoder.encode(message)


class Decoder(Generic[M]):
    """Bytes in, messages out; any split of the bytes gives the same messages.

    Holds at most one frame of at most `max_frame` bytes plus what one `feed` brought. Raises ProtocolError on the
    first thing that is no message; it must not be fed again after that.
    """

    def __init__(self, decoder: msgspec.msgpack.Decoder[M], max_frame: int) -> None:
        self._decoder = decoder
        self._max_frame = max_frame
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[M]:
        """All messages that are complete with `data`. They must be taken before the next call."""
        kept = self._buffer
        kept += data if kept else b""
        whole = kept or data  # the usual case, whole frames and nothing kept: not copied
        start = 0
        end = len(whole)
        while end - start >= HEADER_BYTES:
            body = start + HEADER_BYTES
            length = int.from_bytes(whole[start:body], "little")
            if length > self._max_frame:
                raise ProtocolError(f"a frame of {length} bytes, {self._max_frame} are allowed")
            if end - body < length:
                break
            yield self.decode(whole[body : body + length])
            start = body + length
        if kept:
            del kept[:start]
        else:
            kept += data[start:]

    def decode(self, body: bytes | bytearray) -> M:
        """One message from its body. Raises ProtocolError."""
        try:
            return self._decoder.decode(body)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise ProtocolError(f"not a message: {error}") from error

    @property
    def pending(self) -> int:
        """Bytes of a frame that is not complete yet."""
        return len(self._buffer)


# Made once, before anything is forked: each takes half a megabyte to build, which every child would own privately.
_from_child = msgspec.msgpack.Decoder(FromChild)
_to_child = msgspec.msgpack.Decoder(ToChild)
_from_fork_server = msgspec.msgpack.Decoder(FromForkServer)
_to_fork_server = msgspec.msgpack.Decoder(ToForkServer)


def decoder_of_child() -> Decoder[FromChild]:
    """For the supervisor's end of a report pipe."""
    return Decoder(_from_child, MAX_REPORT_FRAME)


def decoder_of_jobs() -> Decoder[ToChild]:
    """For the child's end of a job pipe."""
    return Decoder(_to_child, MAX_JOB_FRAME)


def decoder_of_fork_server() -> Decoder[FromForkServer]:
    """For the supervisor's end of the fork server's socket."""
    return Decoder(_from_fork_server, MAX_PACKET)


def decoder_of_requests() -> Decoder[ToForkServer]:
    """For the fork server's end of its socket."""
    return Decoder(_to_fork_server, MAX_PACKET)

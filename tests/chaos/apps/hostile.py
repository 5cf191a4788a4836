"""Handlers that attack the pipe on which their child reports. What they need for it any handler could find out."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec

from spooled_supervisor import App, JobContext, frames
from spooled_supervisor.child import Child

app = App()
attacks: dict[str, Callable[[int, int], object]] = {}


def attack(function: Callable[[int, int], object]) -> Callable[[int, int], object]:
    attacks[function.__name__] = function
    return function


@app.handler("hostile")
def hostile(ctx: JobContext) -> Any:
    note(ctx)
    return attacks[ctx.payload["attack"]](report_fd(), run_number())


@app.handler("plain")
def plain(ctx: JobContext) -> Any:
    note(ctx)
    time.sleep(ctx.payload.get("seconds", 0.0))
    return ctx.payload


def note(ctx: JobContext) -> None:
    line = {"what": "start", "at": time.monotonic(), "job": ctx.job_id, "run": os.getpid()}
    fd = os.open(os.environ["LEDGER"], os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        os.write(fd, json.dumps(line).encode() + b"\n")
    finally:
        os.close(fd)


def report_fd() -> int:
    """The pipe that can be written and is none of the standard streams."""
    output = os.fstat(1).st_ino
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        with contextlib.suppress(OSError):
            is_pipe = os.readlink(f"/proc/self/fd/{name}").startswith("pipe:")
            is_output = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_WRONLY
            if is_pipe and is_output and os.fstat(fd).st_ino != output:
                return fd
    raise AssertionError("there is no report pipe")


def run_number() -> int:
    frame = sys._getframe()
    while not isinstance(frame.f_locals.get("child"), Child):
        assert frame.f_back is not None
        frame = frame.f_back
    return int(frame.f_locals["child"]._run)


def write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def frame(*fields: Any) -> bytes:
    """Any array as a frame; the package's own classes would not let most of these through."""
    body = msgspec.msgpack.encode(list(fields))
    return len(body).to_bytes(4, "little") + body


def answer(run: int, **fields: Any) -> bytes:
    return frames.encode_frame(frames.Answer(run, **{"result": b"true", **fields}))


def for_ever() -> None:
    while True:
        time.sleep(0.01)


@attack
def nothing(fd: int, run: int) -> str:
    return "done"


# --- bytes that are no frames ---------------------------------------------------------------------------------------


@attack
def garbage(fd: int, run: int) -> None:
    write(fd, os.urandom(10_000))
    for_ever()


@attack
def garbage_and_return(fd: int, run: int) -> str:
    write(fd, b"\xff" * 64)
    return "done"


@attack
def empty_frames(fd: int, run: int) -> None:
    write(fd, b"\0" * 10_000)
    for_ever()


@attack
def half_frame(fd: int, run: int) -> None:
    write(fd, (1000).to_bytes(4, "little") + b"\x93")
    for_ever()


@attack
def half_frame_and_exit(fd: int, run: int) -> None:
    write(fd, answer(run)[:-2])
    os._exit(0)


@attack
def two_gigabytes_announced(fd: int, run: int) -> None:
    write(fd, (2 << 30).to_bytes(4, "little"))
    for_ever()


@attack
def two_gigabytes_sent(fd: int, run: int) -> None:
    block = os.urandom(1 << 20)
    for _ in range(2048):
        write(fd, block)


@attack
def a_frame_at_its_limit(fd: int, run: int) -> None:
    write(fd, frames.MAX_REPORT_FRAME.to_bytes(4, "little"))
    write(fd, b"\x01" * frames.MAX_REPORT_FRAME)
    for_ever()


@attack
def deep_nesting(fd: int, run: int) -> None:
    body = b"\x91" * 500_000
    write(fd, len(body).to_bytes(4, "little") + body)
    for_ever()


@attack
def closed_pipes(fd: int, run: int) -> str:
    os.closerange(3, 4096)
    return "done"


@attack
def closed_and_on(fd: int, run: int) -> None:
    os.closerange(3, 4096)
    for_ever()


# --- frames that are none of its business ---------------------------------------------------------------------------


@attack
def other_run(fd: int, run: int) -> None:
    write(fd, answer(run + 1))
    for_ever()


@attack
def earlier_run(fd: int, run: int) -> None:
    write(fd, frames.encode_frame(frames.Progress(run - 1 if run > 1 else 10**9, 5.0, "made up")))
    for_ever()


@attack
def second_hello(fd: int, run: int) -> None:
    write(fd, frames.encode_frame(frames.Hello(0, 1, os.getpid())))
    for_ever()


@attack
def hello_of_another(fd: int, run: int) -> None:
    write(fd, frames.encode_frame(frames.Hello(1, 1, os.getppid())))
    for_ever()


@attack
def started_twice(fd: int, run: int) -> None:
    write(fd, frames.encode_frame(frames.Started(run, 0.0)))
    for_ever()


@attack
def huge_run(fd: int, run: int) -> None:
    write(fd, frame(3, 2**64 - 1, 0.0))
    for_ever()


@attack
def negative_run(fd: int, run: int) -> None:
    write(fd, frame(3, -1, 0.0))
    for_ever()


@attack
def unknown_tag(fd: int, run: int) -> None:
    write(fd, frame(99, run))
    for_ever()


@attack
def long_text(fd: int, run: int) -> None:
    write(fd, frame(5, run, "info", "x" * 100_000, None, "log"))
    for_ever()


# --- answers --------------------------------------------------------------------------------------------------------


@attack
def answered_twice(fd: int, run: int) -> str:
    write(fd, answer(run))
    return "and once more"


@attack
def answered_twice_at_once(fd: int, run: int) -> None:
    write(fd, answer(run) + answer(run))
    for_ever()


@attack
def answered_and_stayed(fd: int, run: int) -> None:
    write(fd, answer(run))
    for_ever()


@attack
def neither_nor(fd: int, run: int) -> None:
    write(fd, answer(run, result=None))
    for_ever()


@attack
def both(fd: int, run: int) -> None:
    write(fd, answer(run, error="no"))
    for_ever()


@attack
def no_json(fd: int, run: int) -> None:
    write(fd, answer(run, result=b'1, "worker_id": "somebody else"'))
    os._exit(0)


@attack
def not_a_number(fd: int, run: int) -> None:
    write(fd, answer(run, result=b"NaN", cpu_s=float("nan")))
    os._exit(0)


@attack
def endless_cpu(fd: int, run: int) -> None:
    write(fd, answer(run, cpu_s=float("inf")))
    os._exit(0)


@attack
def negative_cpu(fd: int, run: int) -> None:
    write(fd, answer(run, cpu_s=-1e300))
    os._exit(0)


@attack
def odd_progress(fd: int, run: int) -> str:
    for percent in (float("nan"), float("inf"), -1.0, 1e300):
        write(fd, frames.encode_frame(frames.Progress(run, percent, "a\0b\x1b[31m\n\u2028")))
    return "done"


@attack
def odd_words(fd: int, run: int) -> str:
    write(fd, frames.encode_frame(frames.Log(run, "\n{}", '"\0\x1b[2J\n{"event": "made up"}', "no json", "\x00")))
    write(fd, frames.encode_frame(frames.BootFailed("made up")))
    return "done"


# --- too much of what is allowed ------------------------------------------------------------------------------------


def flood(fd: int, data: bytes, seconds: float = 3.0) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        write(fd, data)


@attack
def flood_of_logs(fd: int, run: int) -> str:
    flood(fd, frames.encode_frame(frames.Log(run, "info", "x" * 1000, None, "log")) * 100)
    return "done"


@attack
def flood_of_progress(fd: int, run: int) -> str:
    flood(fd, frames.encode_frame(frames.Progress(run, 1.0, None)) * 1000)
    return "done"


@attack
def flood_from_threads(fd: int, run: int) -> str:
    threads = [threading.Thread(target=flood, args=(fd, os.urandom(1000))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return "done"

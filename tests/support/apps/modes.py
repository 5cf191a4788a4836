"""The app of most end-to-end tests: what a job does is chosen by `mode` in its payload.

Queues: `q` (aborts set the signal), `q-raise` (aborts raise), `q-async`, `q-async-raise`, and `q2`, `q3` like `q`; all
begin with $QUEUE_PREFIX, so that tests can share a server. A mode is a function of the same name below.
"""

from __future__ import annotations

import array
import asyncio
import atexit
import contextlib
import ctypes
import datetime
import decimal
import faulthandler
import json
import logging
import math
import multiprocessing
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from spooled_supervisor import App, JobAborted, JobContext, NonRetryableError
from tests.support.apps.ledger import Run, note

PREFIX = os.environ.get("QUEUE_PREFIX", "")
RANDOM_AT_IMPORT = random.random()

app = App()
modes: dict[str, Callable[[JobContext, Run], Any]] = {}
async_modes: dict[str, Callable[[JobContext, Run], Any]] = {}


def mode(function: Callable[[JobContext, Run], Any]) -> Callable[[JobContext, Run], Any]:
    modes[function.__name__.rstrip("_")] = function
    return function


def async_mode(function: Callable[[JobContext, Run], Any]) -> Callable[[JobContext, Run], Any]:
    async_modes[function.__name__.rstrip("_").removeprefix("async_")] = function
    return function


def handle(ctx: JobContext) -> Any:
    run = Run(ctx)
    result = modes[ctx.payload["mode"]](ctx, run)
    run.end()
    return result


async def handle_async(ctx: JobContext) -> Any:
    run = Run(ctx)
    result = await async_modes[ctx.payload["mode"]](ctx, run)
    run.end()
    return result


for name in ("q", "q2", "q3"):
    app.handler(PREFIX + name)(handle)
app.handler(PREFIX + "q-raise", on_abort="raise")(handle)
app.handler(PREFIX + "q-async")(handle_async)
app.handler(PREFIX + "q-async-raise", on_abort="raise")(handle_async)


@app.on_child_stop
def note_the_stop() -> None:
    note("child_stop")


def spin_for(run: Run, seconds: float) -> None:
    """Pure Python, on the CPU."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        run.tick()


def die_late(run: Run, name: str, pid: int) -> None:
    """Tell of a process that must not outlive us; it dies by itself in the end, should it be forgotten."""
    run.note("process", name=name, process=pid)


# --- jobs as they should be ----------------------------------------------------------------------------------------


@mode
def ok(ctx: JobContext, run: Run) -> Any:
    return {"n": ctx.payload.get("n"), "pid": os.getpid(), "retry_count": ctx.retry_count}


@mode
def echo(ctx: JobContext, run: Run) -> Any:
    return ctx.payload["value"]


@mode
def length(ctx: JobContext, run: Run) -> Any:
    return len(ctx.payload["value"])


@mode
def spin(ctx: JobContext, run: Run) -> Any:
    spin_for(run, ctx.payload.get("seconds", 600))
    return "spun"


@mode
def sleep(ctx: JobContext, run: Run) -> Any:
    time.sleep(ctx.payload.get("seconds", 600))
    return "slept"


@mode
def gate(ctx: JobContext, run: Run) -> Any:
    """Wait until the file is there."""
    while not os.path.exists(ctx.payload["file"]):
        run.tick()
        time.sleep(0.005)
    return "through"


@mode
def cooperative(ctx: JobContext, run: Run) -> Any:
    """Stop when told to, by returning."""
    aborted = ctx.signal.wait(ctx.payload.get("seconds", 600))
    run.note("told", reason=ctx.signal.reason)
    return {"aborted": aborted, "reason": ctx.signal.reason}


@mode
def raise_if_aborted(ctx: JobContext, run: Run) -> Any:
    while True:
        run.tick()
        ctx.signal.raise_if_aborted()


@mode
def listener(ctx: JobContext, run: Run) -> Any:
    told: list[str | None] = []
    ctx.signal.add_listener(lambda: told.append(ctx.signal.reason))
    while not told:
        run.tick()
    return told


@mode
def finish_after_abort(ctx: JobContext, run: Run) -> Any:
    """Take notice of the abort, go on a little, and return a result all the same."""
    ctx.signal.wait(600)
    spin_for(run, ctx.payload.get("seconds", 0.2))
    return "finished all the same"


@mode
def progress(ctx: JobContext, run: Run) -> Any:
    for percent in ctx.payload["percents"]:
        ctx.progress(percent, f"at {percent}")
    ctx.signal.wait(ctx.payload.get("seconds", 0.0))
    return "reported"


@mode
def log(ctx: JobContext, run: Run) -> Any:
    ctx.log("warn", "said by ctx.log", pages=3, odd=object(), path="x\ny")
    logging.getLogger("app.part").info("said by logging: %s", "yes")
    print("said by print")
    print("and by stderr", file=sys.stderr)
    os.write(1, b"by os.write\n")
    subprocess.run(["/bin/sh", "-c", "echo by a subprocess"], check=True)
    return "logged"


# --- exceptions ----------------------------------------------------------------------------------------------------


class Own(Exception):
    pass


class OwnBase(BaseException):
    pass


class StrRaises(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text for you")

    __repr__ = __str__


class StrExits(Exception):
    def __str__(self) -> str:
        sys.exit(3)


class StrIsNone(Exception):
    def __str__(self) -> str:
        return None  # type: ignore[return-value]


class Oddly(Exception):
    pass


Oddly.__qualname__ = "Odd\ud800ly"


class TwoArguments(Exception):
    def __init__(self, a: object, b: object) -> None:
        super().__init__(a)
        self.b = b


@mode
def raise_(ctx: JobContext, run: Run) -> NoReturn:
    raise ValueError(ctx.payload.get("text", "as asked"))


@mode
def raise_odd(ctx: JobContext, run: Run) -> NoReturn:
    errors: dict[str, Callable[[], BaseException]] = {
        "own": lambda: Own("mine"),
        "own-base": lambda: OwnBase("mine"),
        "keyboard-interrupt": KeyboardInterrupt,
        "generator-exit": GeneratorExit,
        "cancelled": asyncio.CancelledError,
        "stop-iteration": StopIteration,
        "str-raises": StrRaises,
        "str-exits": StrExits,
        "str-is-none": StrIsNone,
        "huge": lambda: ValueError("x" * 50_000_000),
        "nul": lambda: ValueError("a\0b"),
        "surrogate": lambda: ValueError("a\ud800b"),
        "surrogate-name": lambda: Oddly("named oddly"),
        "empty": lambda: Exception(),
        "lock": lambda: Exception(threading.Lock()),
        "two-arguments": lambda: TwoArguments(1, threading.Lock()),
        "group": lambda: ExceptionGroup("several", [ValueError("one"), StrRaises(), TwoArguments(1, 2)]),
        "memory": MemoryError,
        "non-retryable": lambda: NonRetryableError("never again"),
        "forged-abort": lambda: JobAborted("shutdown"),
    }
    raise errors[ctx.payload["what"]]()


@mode
def chain(ctx: JobContext, run: Run) -> NoReturn:
    error: Exception = ValueError("the first")
    for n in range(10_000):
        following = ValueError(f"{n}")
        following.__cause__ = error
        error = following
    raise error


@mode
def recursion(ctx: JobContext, run: Run) -> Any:
    return recursion(ctx, run)


@mode
def out_of_memory(ctx: JobContext, run: Run) -> Any:
    """MemoryError under a limit of our own."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), resource.RLIM_INFINITY))
    try:
        return len(bytearray(1 << 30))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


@mode
def sys_exit(ctx: JobContext, run: Run) -> NoReturn:
    sys.exit(ctx.payload.get("argument"))


# --- ends of the process -------------------------------------------------------------------------------------------


@mode
def os_exit(ctx: JobContext, run: Run) -> NoReturn:
    os._exit(ctx.payload["status"])


@mode
def kill_self(ctx: JobContext, run: Run) -> Any:
    print("last words")
    os.kill(os.getpid(), ctx.payload.get("signal", signal.SIGKILL))
    time.sleep(600)


@mode
def segv(ctx: JobContext, run: Run) -> Any:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    return ctypes.string_at(0)


@mode
def abort(ctx: JobContext, run: Run) -> NoReturn:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.abort()


@mode
def stack_overflow(ctx: JobContext, run: Run) -> Any:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.disable()
    return faulthandler._stack_overflow()  # type: ignore[attr-defined]


@mode
def stop_self(ctx: JobContext, run: Run) -> Any:
    os.kill(os.getpid(), signal.SIGSTOP)
    return "went on"


@mode
def allocate(ctx: JobContext, run: Run) -> Any:
    block = bytearray(ctx.payload["bytes"])
    block[::4096] = b"x" * len(block[::4096])
    kept.append(block)
    return len(kept)


kept: list[bytearray] = []


@mode
def exhaust_memory(ctx: JobContext, run: Run) -> Any:
    """Grow to half a gigabyte and keep that; with `helper` it is a process that the job has started."""
    if ctx.payload.get("helper"):
        if (pid := os.fork()) == 0:
            grow(run)
        os.waitpid(pid, 0)
        return "outlived its helper"
    return grow(run)


def grow(run: Run) -> NoReturn:
    block = bytearray()
    while len(block) < 512 << 20:
        block += b"x" * (1 << 20)
        run.tick()
    while True:
        run.tick()
        time.sleep(0.01)


# --- results -------------------------------------------------------------------------------------------------------


class BadDict(dict[str, int]):
    def items(self) -> Any:
        raise RuntimeError("no items for you")


def circular() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


def deep(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


async def never_awaited() -> None:
    return None


RESULTS: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "text": lambda: "ünïcode \U0001f600",
    "nul": lambda: "a\0b",
    "tuple": lambda: (1, (2, 3)),
    "deep-enough": lambda: deep(90),
    "big-int-that-fits": lambda: 9007199254740993,
    "nan": lambda: {"a": [math.nan]},
    "infinity": lambda: [math.inf],
    "bytes": lambda: {"a": b"x"},
    "set": lambda: {1, 2},
    "date": datetime.datetime.now,
    "decimal": lambda: decimal.Decimal("1.5"),
    "object": object,
    "generator": lambda: (n for n in [1]),
    "coroutine": never_awaited,
    "array": lambda: array.array("i", [1]),
    "circular": circular,
    "int-keys": lambda: {1: 1, "1": 2},
    "tuple-keys": lambda: {(1, 2): 3},
    "nan-keys": lambda: {math.nan: 1},
    "bad-dict": lambda: BadDict(a=1),
    "deep": lambda: deep(5000),
    "big-int": lambda: 10**5000,
    "surrogate": lambda: "a\ud800b",
    "large": lambda: "x" * 1_000_000,
    "too-large": lambda: "x" * (1 << 20),
    "huge": lambda: "x" * 50_000_000,
    "list-of-many": lambda: list(range(100_000)),
}


@mode
def result(ctx: JobContext, run: Run) -> Any:
    return RESULTS[ctx.payload["what"]]()


# --- signals, threads, hooks ---------------------------------------------------------------------------------------


@mode
def ignore_signals(ctx: JobContext, run: Run) -> NoReturn:
    for number in range(1, 32):
        with contextlib.suppress(OSError):  # KILL and STOP
            signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    while True:
        try:
            spin_for(run, 600)
        except BaseException:
            continue


@mode
def swallow_everything(ctx: JobContext, run: Run) -> Any:
    """`except BaseException: continue`, twice: JobAborted must not come again and again."""
    for _ in range(2):
        try:
            spin_for(run, ctx.payload.get("seconds", 600))
        except BaseException as error:
            run.note("swallowed", error=type(error).__name__)
    return "swallowed it"


@mode
def abort_in_context_call(ctx: JobContext, run: Run) -> Any:
    """Nearly all the time is spent inside calls into the package."""
    while True:
        ctx.progress(1.0, "x" * 1000)


@mode
def c_call(ctx: JobContext, run: Run) -> Any:
    """One call that keeps the interpreter busy: no signal handler of Python's can run before it is over."""
    run.note("c_call")
    return (7**3_000_000 // 3).bit_length() if not ctx.payload.get("long") else (7**200_000_000).bit_length()


@mode
def lock_signals(ctx: JobContext, run: Run) -> Any:
    """What a handler's process and the programs that it starts have blocked and ignored."""
    child = subprocess.run(["/bin/cat", "/proc/self/status"], check=True, capture_output=True, text=True).stdout
    return {"own": masks(Path("/proc/self/status").read_text()), "program": masks(child)}


def masks(status: str) -> dict[str, str]:
    return {
        line.split(":")[0]: line.split()[1] for line in status.splitlines() if line.startswith(("SigBlk", "SigIgn"))
    }


@mode
def thread_left(ctx: JobContext, run: Run) -> Any:
    threading.Thread(target=time.sleep, args=(600,)).start()
    return "left a thread"


@mode
def atexit_hang(ctx: JobContext, run: Run) -> Any:
    atexit.register(time.sleep, 600)
    threading._register_atexit(time.sleep, 600)  # type: ignore[attr-defined]
    return "left a hook"


@mode
def thread_reports(ctx: JobContext, run: Run) -> Any:
    """A thread goes on to report after the job has ended."""

    def report() -> None:
        for _ in range(200):
            with contextlib.suppress(Exception):
                ctx.progress(50, "late")
                ctx.log("info", "late")
            time.sleep(0.01)

    threading.Thread(target=report, daemon=True).start()
    return "left a reporter"


@mode
def many_threads_report(ctx: JobContext, run: Run) -> Any:
    def report(number: int) -> None:
        for n in range(300):
            ctx.progress(n % 100, f"{number}:{n}")

    threads = [threading.Thread(target=report, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return "reported"


# --- other processes -----------------------------------------------------------------------------------------------


def born(run: Run, name: str) -> NoReturn:
    """In a forked process: say who we are, then live for long."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    die_late(run, name, os.getpid())
    signal.alarm(120)
    while True:
        time.sleep(1)


@mode
def family(ctx: JobContext, run: Run) -> Any:
    """Start what can be started: a program, one in a session of its own, a fork, a double fork, a daemon."""
    die_late(run, "program", subprocess.Popen(["sleep", "120"]).pid)
    die_late(run, "program in a session", subprocess.Popen(["sleep", "120"], start_new_session=True).pid)
    die_late(run, "program without environment", subprocess.Popen(["/bin/sleep", "120"], env={}).pid)
    if os.fork() == 0:
        born(run, "fork")
    if (pid := os.fork()) == 0:
        if os.fork() == 0:
            born(run, "double fork")
        os._exit(0)
    os.waitpid(pid, 0)
    if (pid := os.fork()) == 0:
        os.setsid()
        if os.fork() == 0:
            born(run, "daemon")
        os._exit(0)
    os.waitpid(pid, 0)
    then = ctx.payload.get("then", "return")
    wait_for_family(run, 6)
    if then == "return":
        return "left a family"
    if then == "raise":
        raise ValueError("left a family")
    if then == "exit":
        os._exit(1)
    if then == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    spin_for(run, 600)
    return None


def wait_for_family(run: Run, count: int) -> None:
    path = os.environ["LEDGER"]
    while True:
        with open(path) as file:
            lines = [json.loads(line) for line in file if line.endswith("\n")]
        if len([1 for line in lines if line["what"] == "process" and line["run"] == run.id]) >= count:
            return
        time.sleep(0.005)


@mode
def fork_holds_pipes(ctx: JobContext, run: Run) -> Any:
    """A fork keeps every descriptor while we leave."""
    if os.fork() == 0:
        born(run, "fork")
    wait_for_family(run, 1)
    if ctx.payload.get("then") == "return":
        return "left a fork"
    os._exit(1)


@mode
def fork_returns(ctx: JobContext, run: Run) -> Any:
    """A fork that comes back from the handler: there must be one answer, and it must be the child's own."""
    if os.fork() == 0:
        return "from the fork"
    time.sleep(0.2)
    return "from the child"


@mode
def fork_raises(ctx: JobContext, run: Run) -> Any:
    if os.fork() == 0:
        raise ValueError("from the fork")
    time.sleep(0.2)
    return "from the child"


@mode
def kill_parent(ctx: JobContext, run: Run) -> Any:
    os.kill(os.getppid(), signal.SIGKILL)
    spin_for(run, 600)
    return None


@mode
def pool(ctx: JobContext, run: Run) -> Any:
    with multiprocessing.Pool(2) as workers:
        values = workers.map(abs, [-1, 2])
        if ctx.payload.get("then") == "spin":
            run.note("pool", processes=[child.pid for child in multiprocessing.active_children()])
            spin_for(run, 600)
        return values


@mode
def terminate_process(ctx: JobContext, run: Run) -> Any:
    """A process that gives up for no exception is terminated; how it ended."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.Process(target=go_on_whatever_comes, args=(there,))
    process.start()
    here.recv()
    process.terminate()
    process.join(ctx.payload["patience_s"])
    return process.exitcode


def go_on_whatever_comes(ready: Any) -> None:
    while True:
        with contextlib.suppress(Exception):
            ready.send("go")
            while True:
                time.sleep(60)


@mode
def many_orphans(ctx: JobContext, run: Run) -> Any:
    """Double forks that end at once: somebody has to reap them."""
    for _ in range(ctx.payload["count"]):
        if (pid := os.fork()) == 0:
            if os.fork() == 0:
                os._exit(0)
            os._exit(0)
        os.waitpid(pid, 0)
    return "done"


@mode
def inheriting_program(ctx: JobContext, run: Run) -> Any:
    """A program that gets every descriptor that can be inherited, in a session of its own."""
    line = [sys.executable, "-ISc", "import time; print(flush=True); time.sleep(120)"]
    program = subprocess.Popen(line, close_fds=False, start_new_session=True, stdout=subprocess.PIPE)
    die_late(run, "program", program.pid)
    assert program.stdout is not None
    with program.stdout as said:
        said.readline()  # then it has loaded what it is made of, and closed those files
        return {"pid": program.pid, "fds": links(program.pid)}


# --- output --------------------------------------------------------------------------------------------------------


@mode
def flood(ctx: JobContext, run: Run) -> Any:
    for n in range(ctx.payload.get("lines", 100_000)):
        print(f"flood {n} " + "x" * 80)
    return "flooded"


@mode
def flood_for_ever(ctx: JobContext, run: Run) -> NoReturn:
    while True:
        os.write(1, b"flood " * 1000 + b"\n")


@mode
def log_flood(ctx: JobContext, run: Run) -> Any:
    for n in range(ctx.payload.get("lines", 50_000)):
        ctx.log("info", f"flood {n}")
    return "flooded"


@mode
def partial_line(ctx: JobContext, run: Run) -> Any:
    print(f"part {ctx.payload['n']}", end="")
    return "printed"


@mode
def binary(ctx: JobContext, run: Run) -> Any:
    os.write(1, b'\xff\xfe{"ok":true}\n')
    subprocess.run("head -c 300000 /dev/urandom", shell=True, check=True)
    return sys.stdin.read()


@mode
def long_line(ctx: JobContext, run: Run) -> Any:
    print("y" * 1_000_000)
    return "printed"


# --- what leaks into the next job ----------------------------------------------------------------------------------


@mode
def vandal(ctx: JobContext, run: Run) -> Any:
    """Change everything that a process has only once."""
    folder = tempfile.mkdtemp()
    os.chdir(folder)
    os.rmdir(folder)
    os.environ.clear()
    os.umask(0o777)
    sys.stdout = sys.stderr = None
    logging.disable(50)
    resource.setrlimit(resource.RLIMIT_NOFILE, (8, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    return "done"


@mode
def surroundings(ctx: JobContext, run: Run) -> Any:
    mask = os.umask(0)
    os.umask(mask)
    print("can print")
    return {"cwd": os.getcwd(), "path": os.environ.get("PATH"), "umask": mask}


@mode
def damage(ctx: JobContext, run: Run) -> Any:
    """Break what our own code may be standing on."""
    match ctx.payload["what"]:
        case "len":
            import builtins

            builtins.len = None  # type: ignore[assignment]
        case "json":
            json.dumps = json.loads = None  # type: ignore[assignment]
            sys.modules["json"] = None  # type: ignore[assignment]
        case "streams":
            sys.stdout = sys.stderr = None
        case "closed-streams":
            sys.stdout.close()
            sys.stderr.close()
        case "fds":
            os.closerange(0, 65536)
        case "low-fds":
            os.closerange(3, 256)
        case "reports":
            for fd in range(256, 400):
                with contextlib.suppress(OSError):
                    os.write(fd, b"\xff" * 64)
        case "time":
            time.monotonic = time.process_time = None  # type: ignore[assignment]
    return "done"


@mode
def read_all_fds(ctx: JobContext, run: Run) -> Any:
    """Steal what is in our own pipes."""
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError, ValueError):
            os.set_blocking(int(fd), False)
            os.read(int(fd), 65536)
    return "read"


# --- what can be seen ----------------------------------------------------------------------------------------------


def links(pid: int | str = "self") -> dict[str, str]:
    found = {}
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):  # the one of the listing itself
            found[fd] = os.readlink(f"/proc/{pid}/fd/{fd}")
    return found


@mode
def look(ctx: JobContext, run: Run) -> Any:
    """All that tests ask about a child."""
    return {
        "pid": os.getpid(),
        "ppid": os.getppid(),
        "sid": os.getsid(0),
        "pgid": os.getpgid(0),
        "nice": os.nice(0),
        "oom_score_adj": int(Path("/proc/self/oom_score_adj").read_text()),
        "cwd": os.getcwd(),
        "fds": links(),
        "program_fds": json.loads(
            subprocess.run(
                [sys.executable, "-c", "import os,json;print(json.dumps(os.listdir('/proc/self/fd')))"],
                check=True,
                capture_output=True,
                text=True,
                close_fds=False,
            ).stdout
        ),
        "environ": dict(os.environ),
        "argv": sys.argv,
        "cmdline": Path("/proc/self/cmdline").read_text(),
        "threads": threading.active_count(),
        "modules": sorted(set(sys.modules)),
        "random": [random.random(), RANDOM_AT_IMPORT],
        "stdin": sys.stdin.read() if sys.stdin else None,
        "timeout_s": ctx.timeout_s,
        "job_id": ctx.job_id,
        "max_retries": ctx.max_retries,
    }


@mode
def read_supervisor(ctx: JobContext, run: Run) -> Any:
    """What a handler can read of the supervisor: nothing that holds the key."""
    found = {}
    for name in ("environ", "mem", "maps"):
        try:
            with open(f"/proc/{os.getppid()}/{name}", "rb") as file:
                found[name] = len(file.read(1))
        except OSError as error:
            found[name] = -(error.errno or 0)
    return found


@mode
def connect_out(ctx: JobContext, run: Run) -> Any:
    with socket.create_connection(("127.0.0.1", ctx.payload["port"]), 5):
        return "connected"


@mode
def start_time(ctx: JobContext, run: Run) -> Any:
    run.note("began")
    spin_for(run, ctx.payload.get("seconds", 0.0))
    return time.monotonic()


# --- async ---------------------------------------------------------------------------------------------------------


@async_mode
async def async_ok(ctx: JobContext, run: Run) -> Any:
    await asyncio.sleep(0)
    return {"n": ctx.payload.get("n"), "loop": id(asyncio.get_running_loop())}


@async_mode
async def async_sleep(ctx: JobContext, run: Run) -> Any:
    await asyncio.sleep(ctx.payload.get("seconds", 600))
    return "slept"


@async_mode
async def async_cancel_self(ctx: JobContext, run: Run) -> Any:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(600)


@async_mode
async def async_raise_cancelled(ctx: JobContext, run: Run) -> Any:
    raise asyncio.CancelledError("by hand")


@async_mode
async def async_swallow(ctx: JobContext, run: Run) -> Any:
    try:
        await asyncio.sleep(600)
    except asyncio.CancelledError:
        run.note("swallowed", error="CancelledError")
    return "swallowed it"


@async_mode
async def async_leave_tasks(ctx: JobContext, run: Run) -> Any:
    async def goes_on() -> None:
        try:
            while True:
                run.note("tick")
                await asyncio.sleep(0.01)
        finally:
            run.note("task cancelled")

    background.append(asyncio.create_task(goes_on()))
    await asyncio.sleep(0.05)
    return "left a task"


background: list[asyncio.Task[None]] = []


@async_mode
async def async_stubborn_task(ctx: JobContext, run: Run) -> Any:
    """Leave a task that does not let itself be cancelled."""

    async def goes_on() -> None:
        while True:
            try:
                await asyncio.sleep(600)
            except asyncio.CancelledError:
                continue

    background.append(asyncio.create_task(goes_on()))
    await asyncio.sleep(0.01)
    return "left a stubborn task"


@async_mode
async def async_block(ctx: JobContext, run: Run) -> Any:
    """Never gives the loop a turn."""
    spin_for(run, 600)


@async_mode
async def async_to_thread(ctx: JobContext, run: Run) -> Any:
    await asyncio.to_thread(time.sleep, ctx.payload.get("seconds", 600))
    return "slept in a thread"


@async_mode
async def async_loop_stop(ctx: JobContext, run: Run) -> Any:
    asyncio.get_running_loop().stop()
    await asyncio.sleep(0.2)
    return "stopped the loop"


@async_mode
async def async_exit(ctx: JobContext, run: Run) -> Any:
    sys.exit("from a coroutine")


@async_mode
async def async_cooperative(ctx: JobContext, run: Run) -> Any:
    while not ctx.signal.aborted:  # noqa: ASYNC110 # as a handler's author may write it
        await asyncio.sleep(0.01)
    return {"reason": ctx.signal.reason}

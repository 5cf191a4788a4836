"""Handlers that leave something behind, and one that looks at all that could have been left.

`litter` runs the function that `payload["what"]` names; `look` tells everything that a process has only once.
"""
# ruff: noqa: B003, SIM115, T201  # it prints, leaves files open and spoils the environment on purpose

from __future__ import annotations

import _thread
import faulthandler
import gc
import io
import logging
import os
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
from typing import Any

from spooled_supervisor import App, JobContext

app = App()
things: dict[str, Callable[[], object]] = {}
kept: list[object] = []
LIMITS = [name for name in dir(resource) if name.startswith("RLIMIT_") and name not in ("RLIMIT_RSS",)]
LIBC_SIGNALS = 3 << 31
"""32 and 33 are the C library's own (nptl(7)); it catches them when the first thread or setuid(2) needs them."""
RT_ABORT, RT_STACK = signal.SIGRTMIN + 3, signal.SIGRTMIN + 4


def thing(function: Callable[[], object]) -> Callable[[], object]:
    things[function.__name__] = function
    return function


def outputs() -> tuple[Any, Any]:
    return sys.stdout, sys.stderr


@app.handler("litter")
def litter(ctx: JobContext) -> Any:
    print("littering", ctx.payload["what"])
    things[ctx.payload["what"]]()
    return os.getpid()


@app.handler("look")
def look(ctx: JobContext) -> Any:
    time.sleep(ctx.payload.get("seconds", 0.0))
    print("looking around", ctx.payload["n"])
    print("and by stderr", ctx.payload["n"], file=sys.stderr)
    os.write(1, b"on the raw descriptor %d\n" % ctx.payload["n"])
    logging.getLogger("app").warning("by logging %d", ctx.payload["n"])
    mask = os.umask(0)
    os.umask(mask)
    status = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "pid": os.getpid(),
        "cwd": os.getcwd(),
        "umask": mask,
        "environ": {name: value for name, value in os.environ.items() if name != "LEDGER"},
        "timers": [signal.getitimer(t) for t in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)],
        "signals": {name: f"{int(status[name], 16) & ~LIBC_SIGNALS:x}" for name in ("SigBlk", "SigIgn", "SigCgt")},
        "limits": {name: resource.getrlimit(getattr(resource, name)) for name in LIMITS},
        "nice": os.getpriority(os.PRIO_PROCESS, 0),
        "affinity": sorted(os.sched_getaffinity(0)),
        "streams": [stream is not None and not stream.closed for stream in (sys.stdin, sys.stdout, sys.stderr)],
        "texts": [[s.encoding, s.errors, s.line_buffering, s.write_through] for s in outputs()],
        "std": [os.fstat(0).st_dev, os.fstat(0).st_ino],
        "stdin": os.read(0, 10).decode(),
        "threads": len(os.listdir("/proc/self/task")),
        "logging": logging.root.manager.disable,
        "gc": gc.isenabled(),
        "recursion": sys.getrecursionlimit(),
        "socket": socket.getdefaulttimeout(),
        "children": Path(f"/proc/self/task/{os.getpid()}/children").read_text().split(),
        "program": subprocess.run(["/bin/echo", "works"], check=True, capture_output=True, text=True).stdout,
        "trace": [sys.gettrace() is None, sys.getprofile() is None],
    }


@app.handler("stuck", on_abort="raise")
def stuck(ctx: JobContext) -> Any:
    while True:
        time.sleep(0.01)


# --- things that can be put back ------------------------------------------------------------------------------------


@thing
def nothing() -> None: ...


@thing
def cwd() -> None:
    os.chdir("/tmp")


@thing
def cwd_removed() -> None:
    folder = tempfile.mkdtemp()
    os.chdir(folder)
    os.rmdir(folder)


@thing
def umask() -> None:
    os.umask(0o777)


@thing
def environ_cleared() -> None:
    os.environ.clear()


@thing
def environ_added() -> None:
    os.environ["LEFT_BEHIND"] = "yes"
    os.environ["PATH"] = "/nowhere"


@thing
def environ_replaced() -> None:
    os.environ = {}  # type: ignore[assignment]


@thing
def timer_real() -> None:
    signal.setitimer(signal.ITIMER_REAL, 0.2, 0.2)


@thing
def timer_virtual() -> None:
    signal.setitimer(signal.ITIMER_VIRTUAL, 0.01, 0.01)


@thing
def timer_prof() -> None:
    signal.setitimer(signal.ITIMER_PROF, 0.01, 0.01)


@thing
def alarm() -> None:
    signal.signal(signal.SIGALRM, lambda *_: os._exit(1))
    signal.alarm(1)


@thing
def signals_ignored() -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD, signal.SIGALRM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)


@thing
def signals_default() -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE, signal.SIGUSR1, signal.SIGTTIN):
        signal.signal(number, signal.SIG_DFL)


@thing
def real_time_ignored() -> None:
    for number in (RT_ABORT, RT_STACK):
        signal.signal(number, signal.SIG_IGN)


@thing
def real_time_default() -> None:
    for number in (RT_ABORT, RT_STACK):
        signal.signal(number, signal.SIG_DFL)


@thing
def real_time_raising() -> None:
    def raising(*_: object) -> None:
        raise ValueError("out of the blue")

    for number in (RT_ABORT, RT_STACK):
        signal.signal(number, raising)


@thing
def signals_blocked() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())


@thing
def soft_limits() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (8, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


@thing
def memory_limit() -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (4 << 20), resource.RLIM_INFINITY))


@thing
def streams_none() -> None:
    sys.stdin = sys.stdout = sys.stderr = None


@thing
def streams_replaced() -> None:
    sys.stdin, sys.stdout, sys.stderr = io.StringIO(), io.StringIO(), io.StringIO()


@thing
def streams_reconfigured() -> None:
    stdout, stderr = outputs()
    stdout.reconfigure(encoding="utf-16", errors="strict", line_buffering=False)
    stderr.reconfigure(encoding="ascii", write_through=True)


@thing
def streams_dup2() -> None:
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.close(null)


@thing
def stdin_from_file() -> None:
    fd = os.open("/etc/passwd", os.O_RDONLY)
    os.dup2(fd, 0)
    os.close(fd)


@thing
def descriptors_closed() -> None:
    for fd in (0, 1, 2):
        os.close(fd)


@thing
def logging_disabled() -> None:
    logging.disable(logging.CRITICAL)


@thing
def gc_disabled() -> None:
    gc.disable()


@thing
def recursion_limit() -> None:
    sys.setrecursionlimit(60)


@thing
def socket_timeout() -> None:
    socket.setdefaulttimeout(0.001)


@thing
def affinity() -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


@thing
def few_descriptors() -> None:
    kept.extend(open(os.devnull) for _ in range(5))


@thing
def thread_that_ends() -> None:
    threading.Thread(target=time.sleep, args=(0.005,)).start()


@thing
def zombies() -> None:
    kept.extend(subprocess.Popen(["/bin/true"]) for _ in range(3))
    while any(Path(f"/proc/{p.pid}/stat").read_text().split()[2] != "Z" for p in kept[-3:]):  # type: ignore[attr-defined]
        time.sleep(0.002)


@thing
def living_child() -> None:
    kept.append(subprocess.Popen(["sleep", "100"]))


@thing
def living_session() -> None:
    kept.append(subprocess.Popen(["sleep", "100"], start_new_session=True))


@thing
def double_fork() -> None:
    if (pid := os.fork()) == 0:
        os.setsid()
        if os.fork() == 0:
            os.execv("/bin/sleep", ["sleep", "100"])
        os._exit(0)
    os.waitpid(pid, 0)
    me = f"/proc/self/task/{os.getpid()}/children"
    while "sleep" not in [Path(f"/proc/{child}/comm").read_text().strip() for child in Path(me).read_text().split()]:
        time.sleep(0.002)  # until it is the program


@thing
def many_children() -> None:
    kept.extend(subprocess.Popen(["sleep", "100"]) for _ in range(20))


@thing
def tracing() -> None:
    sys.setprofile(lambda *_: None)
    sys.settrace(lambda *_: None)


# --- things that cannot: another child takes the next job -----------------------------------------------------------


@thing
def hard_limit() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))


@thing
def many_descriptors() -> None:
    kept.extend(open(os.devnull) for _ in range(100))


@thing
def thread() -> None:
    threading.Thread(target=time.sleep, args=(300,)).start()


@thing
def daemon_thread() -> None:
    threading.Thread(target=time.sleep, args=(300,), daemon=True).start()


@thing
def raw_thread() -> None:
    runs = threading.Event()

    def sleep() -> None:
        runs.set()
        time.sleep(300)

    _thread.start_new_thread(sleep, ())
    runs.wait()


@thing
def streams_closed() -> None:
    sys.stdout.close()
    sys.stderr.close()


@thing
def faulthandler_gone() -> None:
    faulthandler.unregister(RT_ABORT)
    faulthandler.unregister(RT_STACK)


@thing
def nice() -> None:
    os.nice(5)

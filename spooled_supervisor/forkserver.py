"""The process that imports the app once and forks children from it, and the hand-shake of adoption.

`main` runs in a fresh single-threaded interpreter; the supervisor's half is `forkclient.py`. They speak over one
SOCK_SEQPACKET pair (unix(7)); descriptors come along as SCM_RIGHTS.

Why not fork from the supervisor: after one DNS lookup it has threads, it holds TLS sockets and locks, and it would have
to import the user's code. Why not `multiprocessing`: it pickles across the boundary, hides the pipes, needs a resource
tracker, and its children are not the supervisor's to wait for.

Adoption, step by step, as each has a reason:
 1. The supervisor makes the child's pipes and sends the child's ends with the request.
 2. The fork server forks an intermediate, which forks the child. The intermediate opens a pidfd of the child: as its
    parent that never waits it cannot meet a recycled pid (pidfd_open(2)). It hands pid and pidfd over and leaves.
 3. The fork server waits for the intermediate. From then on the child is the supervisor's, which is a subreaper
    (prctl(2), PR_SET_CHILD_SUBREAPER) and the nearest one above: the fork server is none.
 4. The fork server closes its copies of the child's descriptors and answers with pid and pidfd.
 5. The supervisor notes the child and sends `Adopted`; only after that frame does the child arm PR_SET_PDEATHSIG.
    Armed earlier it would be killed when the intermediate leaves; end-of-file is never taken as adoption.

If the fork server dies, running children go on and the supervisor starts another one. If the supervisor dies, the fork
server sees the end of its socket and kills the groups of the children it forked, and what carries their environment
marker: each child dies by PDEATHSIG, and what its handler had started dies here.
"""

from __future__ import annotations

import argparse
import array
import contextlib
import gc
import inspect
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from spooled_supervisor import child, family, frames, kernel, processes
from spooled_supervisor.app import App, Handler, OnAbort, queue_name_problem
from spooled_supervisor.errors import AppError, ProtocolError
from spooled_supervisor.timing import now
from spooled_supervisor.wording import PACKAGE_DIR

CHILD_FDS = 4  # jobs, reports, output, stack
KILL_LIMIT_S = 2.0
"""After the supervisor's death: how long to go on killing what it has left."""
HAND_ON_LIMIT_S = 0.1
"""From the end of a dying process's descriptors until its children have another parent, at most."""
IS_CUT = int(socket.MSG_TRUNC | socket.MSG_CTRUNC)
ALL_SIGNALS = frozenset(map(int, signal.valid_signals()))
"""Plain numbers: what enums do on the way writes to their objects' pages, and each page written to between two forks is
memory that the child of the first has for itself, 100 kB in all."""
is_fork_server = False
"""Whether this process is one, or a child of one: there nobody may start a worker."""


@dataclass(slots=True)
class _Server:
    """State of the fork server's process."""

    control: socket.socket
    child: child.Child  # as every child is before it is born
    supervisor_pid: int
    groups: set[int]  # process groups of living children; the supervisor tells which are gone
    has_retired: bool = False  # another fork server has taken over; whom this one has forked is not its to kill

    def answer(self, message: frames.FromForkServer, fds: Sequence[int] = ()) -> None:
        send_packet(self.control, frames.encode_packet(message), fds)

    def serve(self) -> None:
        """Answer requests until the supervisor is gone."""
        decoder = frames.decoder_of_requests()
        while True:
            packet, fds = receive_packet(self.control)
            if not packet:
                return
            match decoder.decode(packet):
                case frames.Fork(request=request, slot=slot):
                    self.fork(request, slot, fds)
                case frames.Forget(pid=pid):
                    self.groups.discard(pid)
                case frames.Retire():
                    self.groups.clear()
                    self.has_retired = True
                    return
                case frames.Preload():
                    raise ProtocolError("a second Preload")

    def fork(self, request: int, slot: int, fds: Sequence[int]) -> None:
        """Steps 2 to 4 of the adoption."""
        try:
            pid, pidfd = self._fork_twice(slot, fds)
        except OSError as error:
            self.answer(frames.ForkFailed(request, f"{error.strerror} ({error.errno})"))
            return
        finally:
            for fd in fds:
                os.close(fd)
        self.groups.add(pid)
        try:
            self.answer(frames.Forked(request, pid), [pidfd])
        finally:
            os.close(pidfd)

    def kill_what_is_left(self) -> None:
        """The socket has ended. The groups of the children that live are killed; and if it has ended because the
        supervisor is dead, so is everything that carries its marker, before a new supervisor can have started any."""
        for group in self.groups:
            with contextlib.suppress(OSError):  # gone already
                os.killpg(group, signal.SIGKILL)
        if self.has_retired or not self._is_orphaned():
            return
        give_up_at = now() + KILL_LIMIT_S
        while family.kill_marked(os.environ.get(family.MARKER, "")).left and now() < give_up_at:
            os.sched_yield()

    def _is_orphaned(self) -> bool:
        """Whether the supervisor is dead or dying: the kernel closes its descriptors a moment before it hands on its
        children (exit_files, exit_notify), so getppid alone would say no. Where /proc does not show the supervisor
        (ProtectProc=invisible hides what is not dumpable) that moment is waited for."""
        give_up_at = now() + HAND_ON_LIMIT_S
        while os.getppid() == self.supervisor_pid:
            stat = processes.read_stat(self.supervisor_pid)
            if stat is not None:
                return stat.is_dying
            if now() > give_up_at:
                return False
            time.sleep(0.001)
        return True

    def _fork_twice(self, slot: int, fds: Sequence[int]) -> tuple[int, int]:
        _flush()  # what waits in a buffer now would be written by the child as well
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with here, there:
            # Blocked from before the fork until the child has installed its own handling: a signal in between would
            # be taken by handlers of a process that the child is not any more.
            old_mask = kernel.pthread_sigmask(signal.SIG_SETMASK, ALL_SIGNALS)
            try:
                intermediate = os.fork()
                if intermediate == 0:
                    self._be_intermediate(slot, fds, there, closing=(here, there, self.control))
            finally:
                kernel.pthread_sigmask(signal.SIG_SETMASK, old_mask)
            there.close()
            report, received = receive_packet(here)
            os.waitpid(intermediate, 0)
        if not received:
            raise OSError(int(report or b"11"), os.strerror(int(report or b"11")))
        return int(report), received[0]

    def _be_intermediate(
        self, slot: int, fds: Sequence[int], report: socket.socket, *, closing: Sequence[socket.socket]
    ) -> NoReturn:
        """Fork the child, tell who it is, leave. Never returns, whatever happens."""
        try:
            try:
                pid = os.fork()
            except OSError as error:
                report.send(str(error.errno).encode())
                os._exit(1)
            if pid == 0:
                for ours in closing:
                    ours.close()
                self.child.live(slot, fds)
            pidfd = os.pidfd_open(pid)
            send_packet(report, str(pid).encode(), [pidfd])
        finally:
            os._exit(0)


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Be the fork server on the socket whose number is the first argument."""
    parser = argparse.ArgumentParser(prog="spooled_supervisor.forkserver", description=main.__doc__)
    parser.add_argument("fd", type=int)
    parser.add_argument("package_parent", nargs="?")
    control = socket.socket(fileno=parser.parse_args(argv).fd)
    control.set_inheritable(False)
    be_fork_server(control)


def be_fork_server(control: socket.socket, app: App | None = None) -> NoReturn:
    """Wait for the order to preload, then serve. `app` is there already in a process that was forked from a program."""
    global is_fork_server
    is_fork_server = True
    status = 0
    try:
        become_fork_server("importing" if app is None else "standing by")
        packet, _ = receive_packet(control)
        settings = frames.decoder_of_requests().decode(packet) if packet else None
        if isinstance(settings, frames.Preload):
            status = preload_and_serve(control, settings, app)
    except ConnectionError:  # the supervisor's end is gone before an answer was taken: the end of the socket, as well
        status = 0
    except BaseException:
        traceback.print_exc()
        status = 1
    finally:
        _flush()
        os._exit(status)


def become_fork_server(what: str) -> None:
    """Signals as the supervisor wants them, whatever was inherited, and death with it while the app is imported."""
    _install_signals()
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    kernel.set_parent_death_signal(signal.SIGKILL)
    kernel.set_title(f"spooled-supervisor: fork server {what}")


def _install_signals() -> None:
    child.install_quiet_signals()  # SIGCHLD too: an inherited SIG_IGN would make waiting impossible
    kernel.set_handler(signal.SIGTERM, child.do_nothing)  # it leaves at the end of its socket, not by a signal


def preload_and_serve(control: socket.socket, settings: frames.Preload, app: App | None = None) -> int:
    """Import, tell how it went, fork until the supervisor is gone; the exit status."""
    pid, supervisor_pid = os.getpid(), os.getppid()
    try:
        if app is None:
            sys.path.extend(entry for entry in settings.search_path if entry not in sys.path)
            app = load_app(settings.app, settings.queue_names, "raise" if settings.on_abort == "raise" else "signal")
        for hook in app.preload_hooks:
            if inspect.iscoroutine(coroutine := hook()):
                coroutine.close()
                raise AppError(f"{settings.app}: an on_preload hook cannot be async: a loop does not survive a fork")
    except BaseException as error:
        if os.getpid() == pid:  # an app that forks at import must not answer twice
            text = str(error) if isinstance(error, AppError) else _app_error_text(settings.app, error)
            text = text[:8000].encode("utf-8", "backslashreplace").decode()  # a lone surrogate cannot be sent
            send_packet(control, frames.encode_packet(frames.PreloadFailed(text)))
        return 1
    if os.getpid() != pid:
        return 1
    child.install_logging(settings.log_level)
    make_streams_plain()
    _install_signals()  # again: the app may have changed them, and children find them as they are here
    kernel.widen_signal_stack()  # the app may have enabled faulthandler
    unborn = child.Child(app, settings)
    gc.collect()
    gc.freeze()
    gc.disable()  # a collection would write to the pages that all children share; each of them enables it again
    server = _Server(control, unborn, supervisor_pid, set())
    threads = _foreign_threads()
    if threads and settings.strict:
        names = ", ".join(threads)
        server.answer(frames.PreloadFailed(f"app {settings.app!r} starts threads while it is imported: {names}"))
        return 1
    kernel.set_parent_death_signal(0)  # from here on it sees the end of its socket, and has groups to kill then
    kernel.set_title("spooled-supervisor: fork server")
    if settings.process_name:
        kernel.set_name(settings.process_name)
    server.answer(frames.Preloaded(sorted(app.handlers), threads))
    try:
        server.serve()
    finally:
        server.kill_what_is_left()
    return 0


def make_streams_plain() -> None:
    """A line at a time, and no encoding that can fail: for all children, which inherit it."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        try:
            reconfigure = stream.reconfigure
        except AttributeError:  # there is none, or the app has one of its own
            continue
        try:
            reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)
        except OSError:  # in a copy of a program it was a file, and takes the pipe that it is now for one
            plain = os.fdopen(stream.fileno(), "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False)
            setattr(sys, name, plain)


def load_app(spec: str, queue_names: Sequence[str], on_abort: OnAbort = "signal") -> App:
    """The app that `pkg.module` or `pkg.module:name` names; a plain callable serves the one queue it is given.

    Raises AppError for what is not an app, and whatever the import raises.
    """
    from importlib import import_module

    module_name, _, attribute = spec.partition(":")
    sys.argv = [spec]  # an app that parses arguments at import must not read ours
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)
    module = import_module(module_name)
    target: object = module
    for part in (attribute or "app").split("."):
        try:
            target = getattr(target, part)
        except AttributeError:
            raise AppError(f"app {spec!r}: module {module_name!r} has no attribute {attribute or 'app'!r}") from None
    if isinstance(target, App):
        return _checked(target, spec, queue_names)
    if not callable(target):
        raise AppError(f"app {spec!r} is a {type(target).__name__}; it must be an App or a callable")
    if len(queue_names) != 1:
        raise AppError(f"app {spec!r} is a plain callable: say with exactly one --queue which queue it serves")
    app = App()
    app.handlers[queue_names[0]] = Handler(queue_names[0], target, on_abort)
    return app


def _checked(app: App, spec: str, queue_names: Sequence[str]) -> App:
    if not app.handlers:
        raise AppError(f"app {spec!r} has no handlers: decorate a function with @app.handler(QUEUE)")
    if problems := [p for name in app.handlers if (p := queue_name_problem(name))]:
        raise AppError(f"app {spec!r}: {problems[0]}")
    if missing := [name for name in queue_names if name not in app.handlers]:
        have = ", ".join(sorted(app.handlers))
        raise AppError(f"app {spec!r} has no handler for queue {missing[0]!r}; it has: {have}")
    return app


def _app_error_text(spec: str, error: BaseException) -> str:
    """What went wrong while the app was imported, with the last lines of its own traceback."""
    lines = traceback.format_exception(error)
    own = "".join(line for line in lines if "<frozen importlib" not in line and PACKAGE_DIR not in line)
    return f"app {spec!r} cannot be imported:\n{own[-4000:].rstrip()}"


def _foreign_threads() -> list[str]:
    """Names of the threads beside the main one; native ones that Python does not know are counted too."""
    named = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    native = len(os.listdir("/proc/self/task")) - 1 - len(named)
    return [name[:100] for name in named][:20] + [f"native thread {n + 1}" for n in range(min(native, 20))]


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # the app may have replaced or closed it
            stream.flush()


# --- packets --------------------------------------------------------------------------------------------------------


def send_packet(to: socket.socket, packet: bytes, fds: Sequence[int] = ()) -> None:
    """One packet with its descriptors. Raises OSError (EPIPE, EAGAIN on a non-blocking socket: nothing was sent)."""
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    to.sendmsg([packet], rights, socket.MSG_NOSIGNAL)


def receive_packet(source: socket.socket) -> tuple[bytes, list[int]]:
    """One packet and its descriptors, close-on-exec from the start; empty at the end. Raises ProtocolError if cut.

    Not `socket.recv_fds`: it ignores its flags and hands out descriptors that any exec would inherit.
    """
    space = socket.CMSG_SPACE(CHILD_FDS * array.array("i").itemsize)
    packet, ancillary, flags, _ = source.recvmsg(frames.MAX_PACKET, space, socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    if flags & IS_CUT:
        for fd in fds:
            os.close(fd)
        raise ProtocolError("a packet was cut: the process may have run out of descriptors (RLIMIT_NOFILE)")
    return packet, list(fds)

"""The supervisor's half of the fork server: start it, ask it for children, notice its end, start the next one.

`ForkServer` is one generation; `ForkServerKeeper` sees to it that there is one. Used from the loop's thread only. The
environment that the fork server, and so every child, gets is made here: without credentials.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import functools
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from spooled_supervisor import events as ev
from spooled_supervisor import exits, frames
from spooled_supervisor.errors import EX_CONFIG, EX_FAILURE, AppError, ProtocolError, SupervisorError
from spooled_supervisor.events import Events
from spooled_supervisor.family import MARKER
from spooled_supervisor.forkserver import receive_packet, send_packet
from spooled_supervisor.highfd import duplicate_high
from spooled_supervisor.output import OutputPipe
from spooled_supervisor.timing import Backoff, now
from spooled_supervisor.wording import PACKAGE_DIR

STACK_BYTES = 64 * 1024
BOOTSTRAP = "import sys; sys.path.append(sys.argv[2]); from spooled_supervisor.forkserver import main; main()"
"""Not `-m`: that would put the current directory first, and a `queue.py` of the app's would break our own imports. The
package's own place comes last, for a source tree that is not installed. (It also makes room for process titles, which
must fit into the space of the arguments that they replace.)"""
CLOSE_LIMIT_S = 1.0
RETIRE_LIMIT_S = 5.0
"""A fork server that another one has replaced is killed after this: while it stays, nobody notices the end of the next.
Its children live on."""
RESTART_FIRST_S = 0.1
RESTART_CAP_S = 30.0
SCRUBBED = (
    "SPOOLED_API_KEY",
    "SPOOLED_API_KEY_FILE",
    "CREDENTIALS_DIRECTORY",
    "NOTIFY_SOCKET",
    "WATCHDOG_PID",
    "WATCHDOG_USEC",
    "LISTEN_FDS",
    "LISTEN_PID",
    "LISTEN_FDNAMES",
)
NO_FILES = ("PROMETHEUS_MULTIPROC_DIR", "prometheus_multiproc_dir")
"""With one of these, which a web server's environment has, prometheus_client keeps what it counts in a file for every
process that ever lived. Children tell the supervisor instead (`childmetrics`)."""
THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "RAYON_NUM_THREADS",
)


def child_environment(env: Mapping[str, str], *, marker: str, threads: int) -> dict[str, str]:
    """`env` without credentials and what belongs to the supervisor alone, with the children's own settings.

    `threads` is each child's share of the CPUs, for the numeric libraries that would start one thread per CPU of the
    machine in every child; what the user has set stays.
    """
    clean = {
        name: value
        for name, value in env.items()
        if name not in (*SCRUBBED, *NO_FILES) and not name.startswith("SPOOLED_API_KEY")
    }
    for name in THREAD_VARIABLES:
        clean.setdefault(name, str(max(1, threads)))
    clean[MARKER] = marker
    return clean


class ForkServerGone(SupervisorError):
    """The fork server ended; what was asked of it will not be answered. `signal`: what has killed it, as in `Exit`."""

    def __init__(self, reason: str, *, signal: str | None = None) -> None:
        self.signal = signal
        super().__init__(reason)


class NoCopyLeft(SupervisorError):
    """All copies of the program are dead: nothing can be forked any more."""


class ForkRefused(SupervisorError):
    """It could not fork: the machine has no room for another process now."""


@dataclass(frozen=True, slots=True)
class NewBorn:
    """A forked and adopted child: the supervisor's ends of its pipes, all non-blocking and close-on-exec."""

    slot: int
    generation: int
    pid: int
    pidfd: int
    jobs_fd: int
    reports_fd: int
    output_fd: int
    stack_fd: int


@dataclass(frozen=True, slots=True)
class Spawned:
    """A process that waits for the order to preload: a child of ours, our end of its socket, what it prints."""

    pid: int
    control: socket.socket
    output_fd: int
    on_reaped: Callable[[], None] = lambda: None


Spawn = Callable[[Mapping[str, str]], Spawned]
"""Makes such a process with this environment. Raises OSError, or NoCopyLeft where there never will be another one."""


def link() -> tuple[socket.socket, socket.socket, int, int]:
    """Ours and theirs: the ends of a socket, and of a pipe for their output, of which ours does not block.

    All of them high: where a program has closed its standard streams they would come in their place, and be closed in
    the other process when that gets new ones. Raises OSError.
    """
    with contextlib.ExitStack() as low, contextlib.ExitStack() as high:
        sockets = [low.enter_context(end) for end in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)]
        pipe = os.pipe2(os.O_CLOEXEC)
        fds = []
        for fd in pipe:
            low.callback(os.close, fd)
        for fd in (*(end.fileno() for end in sockets), *pipe):
            fds.append(duplicate_high(fd))
            high.callback(os.close, fds[-1])
        os.set_blocking(fds[2], False)
        high.pop_all()
    return socket.socket(fileno=fds[0]), socket.socket(fileno=fds[1]), fds[2], fds[3]


def spawn_interpreter(env: Mapping[str, str]) -> Spawned:
    """Exec a fresh interpreter. Raises OSError if there is no room for it."""
    ours, theirs, output_fd, output = link()
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", BOOTSTRAP, str(theirs.fileno()), os.path.dirname(PACKAGE_DIR[:-1])],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
    except BaseException:
        ours.close()
        os.close(output_fd)
        raise
    finally:
        theirs.close()
        os.close(output)

    def on_reaped() -> None:
        process.returncode = 0  # taken by us, with more than subprocess would tell: it must not wait for it again

    return Spawned(process.pid, ours, output_fd, on_reaped)


class ForkServer:
    """One generation of the fork server, as the supervisor sees it. Used from the loop's thread only."""

    def __init__(self, generation: int) -> None:
        self.generation = generation
        self.pid = 0
        self.output_fd = -1
        self._on_reaped: Callable[[], None] = lambda: None
        self._pidfd = -1
        self._control: socket.socket | None = None
        self._decoder = frames.decoder_of_fork_server()
        self._next_request = 1
        self._waiting: dict[int, asyncio.Future[tuple[int, int]]] = {}
        self._preloaded: asyncio.Future[frames.Preloaded] | None = None
        self.exited: asyncio.Future[str] | None = None

    def start(self, settings: frames.Preload, env: Mapping[str, str], spawn: Spawn = spawn_interpreter) -> None:
        """Have a process and ask it to import the app. Raises OSError, NoCopyLeft."""
        loop = asyncio.get_running_loop()
        spawned = spawn(env)
        self.pid, self.output_fd, self._on_reaped = spawned.pid, spawned.output_fd, spawned.on_reaped
        ours = self._control = spawned.control
        ours.setblocking(False)
        self._preloaded = loop.create_future()
        self.exited = loop.create_future()
        self._pidfd = os.pidfd_open(self.pid)
        loop.add_reader(self._pidfd, self._on_exit)
        loop.add_reader(ours, self._on_readable)
        with contextlib.suppress(BrokenPipeError):  # a copy that has died meanwhile: its exit tells
            send_packet(ours, frames.encode_packet(settings))

    @property
    def open_requests(self) -> int:
        """Forks that were asked for and not answered: a new child may be adopted at any moment."""
        return len(self._waiting)

    @property
    def is_alive(self) -> bool:
        return self.exited is not None and not self.exited.done()

    async def preloaded(self) -> frames.Preloaded:
        """Wait until the app is imported. Raises AppError if it cannot be, ForkServerGone if the process ended."""
        assert self._preloaded is not None
        return await asyncio.shield(self._preloaded)

    async def fork(self, slot: int) -> NewBorn:
        """A new child for this slot, adopted (step 1 to 4; `Adopted` is the caller's to send).

        Raises ForkServerGone, ForkRefused. Not cancel-safe: a child that is born afterwards finds its pipes closed
        and leaves.
        """
        if self._control is None or not self.is_alive:
            raise ForkServerGone("the fork server is gone")
        request = self._next_request
        self._next_request += 1
        with contextlib.ExitStack() as theirs, contextlib.ExitStack() as ours:
            jobs_in, jobs_out = _pipe(reader=theirs, writer=ours)
            reports_in, reports_out = _pipe(reader=ours, writer=theirs)
            output_in, output_out = _pipe(reader=ours, writer=theirs)
            stack = _sealed_memory()
            ours.callback(os.close, stack)
            for fd in (jobs_out, reports_in, output_in):
                os.set_blocking(fd, False)
            answer = asyncio.get_running_loop().create_future()
            self._waiting[request] = answer
            try:
                packet = frames.encode_packet(frames.Fork(request, slot))
                send_packet(self._control, packet, [jobs_in, reports_out, output_out, stack])
                theirs.close()
                pid, pidfd = await answer
            except OSError as error:
                raise ForkRefused(f"the fork server does not take requests: {error.strerror}") from error
            except asyncio.CancelledError:
                if answer.done() and not answer.cancelled() and answer.exception() is None:
                    os.close(answer.result()[1])
                raise
            finally:
                self._waiting.pop(request, None)
            ours.pop_all()
            return NewBorn(slot, self.generation, pid, pidfd, jobs_out, reports_in, output_in, stack)

    def forget(self, pid: int) -> None:
        """This child is reaped; its group is not the fork server's to kill any more."""
        if self._control is not None and self.is_alive:
            with contextlib.suppress(OSError):  # gone, or busy importing: at worst it kills an empty group
                send_packet(self._control, frames.encode_packet(frames.Forget(pid)))

    def retire(self) -> None:
        """Let it go without its children: they go on, and another generation forks from now on.

        What was asked of it before is still answered: its socket is read until it has left.
        """
        if self._control is not None and self.is_alive:
            with contextlib.suppress(OSError):  # gone already
                send_packet(self._control, frames.encode_packet(frames.Retire()))

    def kill(self) -> None:
        """SIGKILL; `exited` tells when it is gone."""
        if self._pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):  # it was faster
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def close(self) -> None:
        """Let it go: it kills the groups of the children it still knows, and leaves at the end of its socket."""
        if self._control is not None:
            asyncio.get_running_loop().remove_reader(self._control)
            self._control.close()
            self._control = None

    def _on_readable(self) -> None:
        assert self._control is not None
        try:
            packet, fds = receive_packet(self._control)
            if packet:
                self._take(self._decoder.decode(packet), fds)
                return
        except BlockingIOError:
            return
        except (ProtocolError, ConnectionError):
            self.kill()
        self.close()

    def _take(self, message: frames.FromForkServer, fds: list[int]) -> None:
        assert self._preloaded is not None
        match message:
            case frames.Preloaded():
                if not self._preloaded.done():
                    self._preloaded.set_result(message)
            case frames.PreloadFailed(error=error):
                if not self._preloaded.done():
                    self._preloaded.set_exception(AppError(error))
            case frames.Forked(request=request, pid=pid) if fds:
                answer = self._waiting.get(request)
                if answer is None or answer.done():
                    os.close(fds[0])  # given up; the child finds its pipes closed
                else:
                    answer.set_result((pid, fds[0]))
            case frames.Forked(request=request):
                self._refuse(request, "no pidfd came along")
            case frames.ForkFailed(request=request, error=error):
                self._refuse(request, error)

    def _refuse(self, request: int, error: str) -> None:
        answer = self._waiting.get(request)
        if answer is not None and not answer.done():
            answer.set_exception(ForkRefused(f"fork failed: {error}"))

    def _on_exit(self) -> None:
        assert self.exited is not None
        assert self._preloaded is not None
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._pidfd = -1
        while self._control is not None and _is_readable(self._control):  # what it said last
            self._on_readable()
        self.close()
        reaped = exits.reap(self.pid)
        self._on_reaped()
        end = exits.decode(exits.UNKNOWN if reaped is None else reaped.status)
        cause = end.words()
        gone = ForkServerGone(f"the fork server {cause}", signal=end.signal)
        if not self._preloaded.done():
            self._preloaded.set_exception(gone)
            self._preloaded.exception()  # it may have nobody left who waits
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(gone)
        self.exited.set_result(cause)


class ForkServerKeeper:
    """Keeps one fork server at work: the first start is the caller's to judge, later ones are tried for ever."""

    def __init__(
        self,
        settings: Callable[[int], frames.Preload],
        env: Mapping[str, str],
        *,
        boot_timeout_s: float,
        events: Events,
        on_ready: Callable[[], None],
        spawn: Spawn = spawn_interpreter,
        on_spent: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_spent`: `spawn` has no process left, so there will never be another fork server."""
        self._spawn = spawn
        self._on_spent = on_spent
        self._settings = settings
        self._env = env
        self._boot_timeout_s = boot_timeout_s
        self._events = events
        self._on_ready = on_ready
        self._server: ForkServer | None = None
        self._booting: ForkServer | None = None
        self._retired: list[ForkServer] = []  # they may still answer what they were asked before
        self._output: OutputPipe | None = None
        self._is_ready = False
        self._watch: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()  # one new generation at a time
        self.generation = 0  # the one that forks
        self.last_generation = 0  # the last one that was tried
        self.queue_names: tuple[str, ...] = ()

    async def start(self) -> None:
        """Start the first one. Raises AppError if the app cannot be imported within the boot timeout."""
        await self._start_one()
        self._watch = asyncio.get_running_loop().create_task(self._keep(), name="fork server")

    async def close(self) -> None:
        """Let it go and wait until it is gone; killed if it takes longer than CLOSE_LIMIT_S."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        server = self._server
        if server is not None and server.exited is not None:
            server.close()
            try:
                async with asyncio.timeout(CLOSE_LIMIT_S):
                    await asyncio.shield(server.exited)
            except TimeoutError:
                server.kill()
                await server.exited
        self._close_output()

    @property
    def is_ready(self) -> bool:
        """Whether children can be forked now."""
        return self._is_ready and self._server is not None and self._server.is_alive

    @property
    def pid(self) -> int | None:
        return self._server.pid if self._server is not None and self._server.is_alive else None

    @property
    def pids(self) -> list[int]:
        """Of the one that forks, of one that still imports the app, and of those that have not left yet."""
        servers = (self._server, self._booting, *self._retired)
        return [server.pid for server in servers if server is not None and server.is_alive]

    @property
    def open_requests(self) -> int:
        """Forks that are not answered yet."""
        return sum(server.open_requests for server in (self._server, *self._retired) if server is not None)

    @property
    def failed(self) -> BaseException | None:
        """What ended the keeping of fork servers, if anything did: a bug of ours."""
        if self._watch is None or not self._watch.done() or self._watch.cancelled():
            return None
        return self._watch.exception()

    async def fork(self, slot: int) -> NewBorn:
        """As `ForkServer.fork`. One that does not answer within the boot timeout is killed, and replaced."""
        server = self._server
        if server is None or not self.is_ready:
            raise ForkServerGone("the fork server is not ready")
        try:
            async with asyncio.timeout(self._boot_timeout_s):
                return await server.fork(slot)
        except TimeoutError:
            server.kill()
            raise ForkServerGone(f"the fork server did not fork within {self._boot_timeout_s:g} s") from None

    def forget(self, pid: int) -> None:
        """This child is reaped."""
        if self._server is not None:
            self._server.forget(pid)

    async def reload(self) -> int:
        """Import the app anew, and fork from that from now on; the new generation's number.

        Raises AppError if it cannot be imported: then nothing has changed and the old one goes on forking.
        """
        async with self._starting:
            old = self._server
            await self._start_one()
            if old is not None:
                old.retire()
                asyncio.get_running_loop().call_later(RETIRE_LIMIT_S, old.kill)
                self._retired = [server for server in (*self._retired, old) if server.is_alive]
            return self.generation

    async def _start_one(self) -> None:
        """Start the next generation and let it take over once it is ready. Raises AppError, OSError."""
        self.last_generation += 1
        server = self._booting = ForkServer(self.last_generation)
        started_at = now()
        preload = self._settings(server.generation)
        server.start(preload, self._env, self._spawn)
        output = OutputPipe(server.output_fd, functools.partial(self._on_line, server.generation), lambda _lines: None)
        self._events.emit(ev.ForkServerStarted(server.generation, server.pid))
        try:
            preloaded = await self._preloaded(server, preload.app, output)
        except BaseException:
            server.kill()
            server.close()
            await _see_gone(server)
            output.close()
            raise
        self._close_output()
        self._server, self._booting, self._output, self._is_ready = server, None, output, True
        self.generation = server.generation
        self.queue_names = tuple(preloaded.queue_names)
        self._events.emit(
            ev.ForkServerReady(server.generation, server.pid, round(now() - started_at, 3), self.queue_names)
        )
        if preloaded.threads:
            self._events.emit(ev.ForkServerThreaded(server.generation, tuple(preloaded.threads)))
        self._on_ready()

    async def _preloaded(self, server: ForkServer, app: str, output: OutputPipe) -> frames.Preloaded:
        try:
            async with asyncio.timeout(self._boot_timeout_s):
                return await server.preloaded()
        except TimeoutError:
            limit = self._boot_timeout_s
            raise AppError(f"app {app!r}: importing it took longer than --boot-timeout {limit:g} s") from None
        except ForkServerGone as gone:
            output.drain()
            # For want of memory perhaps: unlike an app that is wrong, that is worth a restart.
            code = EX_FAILURE if gone.signal == signal.SIGKILL.name else EX_CONFIG
            text = f"app {app!r}: {gone} while it was imported\n{output.tail}".rstrip()
            raise AppError(text, exit_code=code) from None

    async def _keep(self) -> None:
        """Wait for the end of the current one, start the next; as long as there is one."""
        is_spent = False
        while not is_spent:
            server = self._server
            assert server is not None
            assert server.exited is not None
            cause = await asyncio.shield(server.exited)
            if self._server is server:  # else it has retired, and another one has taken over
                self._is_ready = False
                self._events.emit(ev.ForkServerExited(server.generation, server.pid, cause))
                is_spent = not await self._replace(server)
        self._on_spent()

    async def _replace(self, dead: ForkServer) -> bool:
        """Start another one, until that works or somebody else (`reload`) has done it; False if that can never be."""
        backoff = Backoff(RESTART_FIRST_S, RESTART_CAP_S)
        while True:
            await asyncio.sleep(backoff.next_delay())
            async with self._starting:
                if self._server is not dead:
                    return True
                try:
                    await self._start_one()
                    return True
                except NoCopyLeft:
                    return False
                except (AppError, OSError) as error:
                    self._events.emit(ev.ForkServerFailed(self.last_generation, str(error)))

    def _on_line(self, generation: int, line: str) -> None:
        self._events.emit(ev.ForkServerPrinted(generation, line))

    def _close_output(self) -> None:
        if self._output is not None:
            self._output.close()
            self._output = None


async def _see_gone(server: ForkServer) -> None:
    """It was killed: it is reaped, too."""
    if server.exited is not None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_LIMIT_S):
                await asyncio.shield(server.exited)


def _is_readable(sock: socket.socket) -> bool:
    """By poll: select(2) knows no descriptor from 1024 on, which a program that we are a guest in may well have."""
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(0))


def _pipe(*, reader: contextlib.ExitStack, writer: contextlib.ExitStack) -> tuple[int, int]:
    """A pipe whose ends are closed with these: from the start, as the next one may be a descriptor too many."""
    ends = os.pipe2(os.O_CLOEXEC)
    for fd, owner in zip(ends, (reader, writer), strict=True):
        owner.callback(os.close, fd)
    return ends


def _sealed_memory() -> int:
    """A memory file of fixed size for the child's stack dumps: no child can grow it, or cut it while we read."""
    fd = os.memfd_create("stack", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, STACK_BYTES)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
    except OSError:
        os.close(fd)
        raise
    return fd

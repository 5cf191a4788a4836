"""The control socket: one JSON object per line in, one out; for `spooled-supervisor ctl` and `status`.

    {"command": "scale", "n": 6}   ->  {"ok": true, "text": "6 children (2 started)"}
    {"command": "status"}          ->  {"ok": true, "status": {...}}
    anything else                  ->  {"ok": false, "text": "why not"}

A Unix socket of mode 0600 in a directory of the service's own. That keeps other users out; children of ours have the
same user, so peers that descend from us are refused by their pid (unix(7), SO_PEERCRED): a job must not stop its own
supervisor. It knows no command by itself: the supervisor hands them over.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import socket
import stat
import struct
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from spooled_supervisor.errors import ConfigError, SupervisorError
from spooled_supervisor.processes import read_stat

MAX_LINE = 64 * 1024
READ_TIMEOUT_S = 10.0
PROBE_LIMIT_S = 1.0
MAX_DEPTH = 64
MAX_PATH = 107
"""sun_path holds this many bytes and a NUL (unix(7)); a longer path is reached through /proc/self/fd."""

Command = Callable[[Mapping[str, Any]], Awaitable["Answer"]]


@dataclass(frozen=True, slots=True)
class Answer:
    """What a command did, or why not. `more` is added to the answer."""

    text: str
    ok: bool = True
    more: Mapping[str, Any] | None = None

    def line(self) -> bytes:
        return json.dumps({"ok": self.ok, "text": self.text, **(self.more or {})}).encode() + b"\n"


class Refused(SupervisorError):
    """A command that cannot be carried out; the message says why."""


class ControlSocket:
    """Listens while it is entered."""

    def __init__(self, path: Path, commands: Mapping[str, Command]) -> None:
        self._path = path
        self._commands = commands
        self._server: asyncio.Server | None = None
        self._inode: tuple[int, int] | None = None

    async def __aenter__(self) -> ControlSocket:
        """Bind. A socket file that nobody listens on is replaced. Raises ConfigError."""
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with reachable(self._path) as path:
                _remove_dead(path, self._path)
                listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                mask = os.umask(0o177)  # from the first moment on: bind makes the file
                try:
                    listener.bind(path)
                finally:
                    os.umask(mask)
            listener.listen(16)
            listener.setblocking(False)
            found = os.lstat(self._path)
            self._inode = (found.st_dev, found.st_ino)
        except OSError as error:
            raise ConfigError(
                f"control socket {self._path}: {error.strerror or error} (give --control-socket)"
            ) from error
        self._server = await asyncio.start_unix_server(self._serve, sock=listener, limit=MAX_LINE)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._server is not None:
            self._server.close()
        with contextlib.suppress(OSError):  # gone, or another one's by now
            found = os.lstat(self._path)
            if (found.st_dev, found.st_ino) == self._inode:
                os.unlink(self._path)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection: any number of requests. Whatever a peer does ends at most its own connection."""
        try:
            pid = _peer_pid(writer)
            while line := await asyncio.wait_for(reader.readline(), READ_TIMEOUT_S):
                refusal = _refusal_of(pid)
                answer = Answer(f"refused: {refusal}", ok=False) if refusal else await self._answer(line)
                writer.write(answer.line())
                await asyncio.wait_for(writer.drain(), READ_TIMEOUT_S)
        except (OSError, ValueError, TimeoutError):  # ValueError: a line without an end
            writer.transport.abort()  # what it does not read must not be kept for it
        finally:
            writer.close()

    async def _answer(self, line: bytes) -> Answer:
        try:
            request = json.loads(line)
        except (ValueError, RecursionError):
            return Answer("not a JSON object", ok=False)
        command = self._commands.get(str(request.get("command"))) if isinstance(request, dict) else None
        if command is None:
            return Answer(f"unknown command; the commands are: {', '.join(self._commands)}", ok=False)
        try:
            return await command(request)
        except Refused as refused:
            return Answer(str(refused), ok=False)


def _refusal_of(pid: int) -> str | None:
    """Why this peer may not command us, if so."""
    try:
        return "a job may not control its supervisor" if descends_from(pid, os.getpid()) else None
    except OSError as error:
        return f"who asks cannot be told from a job, as no file can be opened: {error.strerror}"


def descends_from(pid: int, ancestor: int) -> bool:
    """Whether the process is below this one (proc_pid_stat(5), ppid). Of another PID namespace, pid 0, it is not.

    One that has ended may have been: whoever has a right to ask waits for the answer. One that is hidden from us
    (proc(5), hidepid) is another user's, and our jobs are not; but a job can hide as well (PR_SET_DUMPABLE). Who may
    be signalled is of our own user, and not believed.

    Raises OSError where nothing can be read for want of a descriptor.
    """
    if pid == 0:
        return False
    at = pid
    for _ in range(MAX_DEPTH):
        found = read_stat(at)
        if found is None:
            os.close(os.open("/", os.O_PATH | os.O_CLOEXEC))  # EMFILE, ENFILE
            refusal = _signal_refusal(at)
            if refusal != errno.ESRCH or at == pid:
                return refusal != errno.EPERM
            at = pid  # a parent has ended meanwhile: its child has another one now
        elif found.ppid in (0, ancestor):
            return found.ppid == ancestor
        else:
            at = found.ppid
    return True  # deeper than anybody's shell: not one to trust


def _signal_refusal(pid: int) -> int:
    """Why it may not be signalled (kill(2)): ESRCH, it has ended; EPERM, it is another user's; 0, it may."""
    try:
        os.kill(pid, 0)
    except OSError as error:
        return error.errno or 0
    return 0


def _peer_pid(writer: asyncio.StreamWriter) -> int:
    sock: socket.socket = writer.get_extra_info("socket")
    pid, _, _ = struct.unpack("iII", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("iII")))
    return int(pid)


@contextlib.contextmanager
def reachable(path: Path) -> Iterator[str]:
    """The path as bind(2) and connect(2) take it, however long it is."""
    if len(os.fsencode(path)) <= MAX_PATH:
        yield str(path)
        return
    fd = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{path.name}"
    finally:
        os.close(fd)


def _remove_dead(path: str, shown: Path) -> None:
    """Remove the socket file of a killed supervisor. Raises OSError if somebody listens, or if it is no socket."""
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise FileExistsError(17, "is there and is no socket")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(PROBE_LIMIT_S)  # one that is stopped may have no room for another connection: it lives
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
    raise OSError(98, f"another supervisor listens on {shown.name}")


def may_listen(path: Path) -> bool:
    """Whether somebody may listen there: a killed supervisor leaves its file. Who cannot be asked may well live."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe, reachable(path) as name:
            probe.settimeout(PROBE_LIMIT_S)
            probe.connect(name)
    except (FileNotFoundError, ConnectionRefusedError):
        return False
    except OSError:
        return True
    return True


def ask(path: Path, request: Mapping[str, Any], *, timeout_s: float) -> dict[str, Any]:
    """For a command line: one request, its answer. Raises OSError (nobody is there), ValueError (no sense)."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock, reachable(path) as name:
        sock.settimeout(timeout_s)
        sock.connect(name)
        sock.sendall(json.dumps(request).encode() + b"\n")
        with sock.makefile("rb") as file:
            answer = json.loads(file.readline() or b"null")
    if not isinstance(answer, dict):
        raise ValueError("the supervisor closed the connection without an answer")
    return answer

"""The supervisor's half of the fork server, without one: descriptors, and who takes over from whom."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import resource
import socket
import subprocess
from collections.abc import Iterator, Mapping
from typing import cast

import pytest

from spooled_supervisor import forkclient, frames
from spooled_supervisor.errors import EX_CONFIG, EX_FAILURE, AppError
from spooled_supervisor.events import Events
from spooled_supervisor.forkclient import RETIRE_LIMIT_S, ForkServer, ForkServerGone, ForkServerKeeper, Spawned
from tests.support.clock import fake_time, run_in_fake_time


def open_descriptors() -> list[str]:
    return sorted(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("which", [1, 2, 3, "memfd_create", "ftruncate"])
def test_a_fork_that_gets_no_more_descriptors_gives_back_those_that_it_had(
    which: int | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = os.pipe2, 0

    def full(*_: object) -> tuple[int, int]:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    def pipe2(flags: int) -> tuple[int, int]:
        nonlocal calls
        calls += 1
        return full() if calls == which else real(flags)

    async def main() -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        server = ForkServer(1)
        server._control = ours
        server.exited = asyncio.get_running_loop().create_future()
        before = open_descriptors()
        with monkeypatch.context() as patched:
            patched.setattr(os, "pipe2", pipe2)
            if isinstance(which, str):
                patched.setattr(os, which, full)
            with pytest.raises(OSError, match="Too many open files"):
                await server.fork(0)
        assert open_descriptors() == before
        ours.close()
        theirs.close()

    asyncio.run(main())


@contextlib.contextmanager
def many_descriptors(count: int) -> Iterator[None]:
    """Allow this process so many."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(count, limits[0]), limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_whether_there_is_something_to_read_is_seen_with_any_descriptor() -> None:
    """A program that we are a guest in may have opened more than the 1024 that select(2) knows."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with many_descriptors(2048), ours, theirs:
        number = fcntl.fcntl(ours, fcntl.F_DUPFD_CLOEXEC, 1024)
        assert number >= 1024
        high = socket.socket(fileno=number)
        assert not forkclient._is_readable(high)
        theirs.send(b"x")
        assert forkclient._is_readable(high)
        high.recv(1)
        theirs.close()
        assert forkclient._is_readable(high), "its end, too"
        high.close()


PRELOAD = frames.Preload(1, "app", ["q"], False, 0, True, False, "info")
ENDS = {
    "kill -KILL $$": ("SIGKILL", "killed by SIGKILL", EX_FAILURE),
    "kill -SEGV $$": ("SIGSEGV", "killed by SIGSEGV", EX_CONFIG),
    "echo killed by SIGKILL; exit 137": (None, "exited with status 137", EX_CONFIG),
}


def spawn_shell(command: str) -> Spawned:
    """In the place of an interpreter."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    output_fd, output = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    process = subprocess.Popen(["/bin/sh", "-c", command], stdin=theirs.fileno(), stdout=output)
    theirs.close()
    os.close(output)
    return Spawned(process.pid, ours, output_fd, lambda: setattr(process, "returncode", 0))


@pytest.mark.parametrize("command", ENDS)
def test_what_ended_the_import_decides_whether_a_restart_is_worth_it_and_not_its_words(command: str) -> None:
    number, cause, code = ENDS[command]

    def spawn(_env: Mapping[str, str]) -> Spawned:
        return spawn_shell(command)

    async def main() -> None:
        server = ForkServer(1)
        server.start(PRELOAD, {}, spawn)
        with pytest.raises(ForkServerGone, match=cause) as gone:
            await server.preloaded()
        os.close(server.output_fd)
        assert gone.value.signal == number
        keeper = ForkServerKeeper(
            lambda generation: PRELOAD, {}, boot_timeout_s=60.0, events=Events(), on_ready=lambda: None, spawn=spawn
        )
        with pytest.raises(AppError, match=f"{cause} while it was imported") as error:
            await keeper.start()
        assert error.value.exit_code == code

    asyncio.run(main())


class FakeServer:
    """A fork server that imports at once; it hangs when it is told to leave."""

    def __init__(self, generation: int) -> None:
        self.generation = self.pid = generation
        self.output_fd = os.open(os.devnull, os.O_RDONLY)
        self.exited: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.retired_at: float | None = None
        self.killed_at: float | None = None

    def start(self, *_: object) -> None:
        return

    async def preloaded(self) -> frames.Preloaded:
        return frames.Preloaded(["q"], [])

    @property
    def is_alive(self) -> bool:
        return not self.exited.done()

    def retire(self) -> None:
        self.retired_at = asyncio.get_running_loop().time()

    def kill(self) -> None:
        if self.is_alive:
            self.killed_at = asyncio.get_running_loop().time()
            self.exited.set_result("killed by SIGKILL")

    def close(self) -> None:
        return


class FakePreload:
    app = "app"


class FakeOutput:
    """Nobody prints anything."""

    def __init__(self, fd: int, *_: object) -> None:
        self._fd = fd

    def close(self) -> None:
        os.close(self._fd)


def test_a_retired_fork_server_that_hangs_is_killed_so_that_the_end_of_the_next_one_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[FakeServer] = []

    def make(generation: int) -> FakeServer:
        made.append(FakeServer(generation))
        return made[-1]

    monkeypatch.setattr(forkclient, "ForkServer", make)
    monkeypatch.setattr(forkclient, "OutputPipe", FakeOutput)
    clock = fake_time(monkeypatch, forkclient)

    async def main() -> None:
        keeper = ForkServerKeeper(
            lambda generation: cast(frames.Preload, FakePreload()),
            {},
            boot_timeout_s=60.0,
            events=Events(),
            on_ready=lambda: None,
        )
        await keeper.start()
        await keeper.reload()
        old, new = made
        await asyncio.sleep(RETIRE_LIMIT_S - 1.0)
        assert old.is_alive, "what it was asked before it may still answer"
        await asyncio.sleep(2.0)
        assert old.retired_at is not None
        assert old.killed_at == pytest.approx(old.retired_at + RETIRE_LIMIT_S)
        assert new.is_alive
        new.kill()
        await asyncio.sleep(1.0)
        assert [server.generation for server in made] == [1, 2, 3]
        assert keeper.is_ready
        made[-1].kill()
        await keeper.close()

    run_in_fake_time(clock, main())

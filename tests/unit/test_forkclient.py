"""Requests to the fork server that fail before they are sent: nothing of them stays open."""

from __future__ import annotations

import asyncio
import errno
import os
import socket

import pytest

from spooled_supervisor.forkclient import ForkServer


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

"""A server that is some way off: a proxy between the daemon and the server that holds back what passes, in both
directions, by half of a round trip each.

    with away(server.port, 0.050) as port: ...

It runs in a process of its own, so that its CPU time is nobody's who is measured. Order and bytes stay as they are; the
handshake of a connection is not held back, as connections are kept. Two things that a real distance has are missing:
packet loss, and TCP's slow start.
"""

from __future__ import annotations

import contextlib
import heapq
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

from tests.bench.meters import die_with_parent

READ_BYTES = 1 << 16


@contextlib.contextmanager
def away(server_port: int, round_trip_s: float) -> Iterator[int]:
    """A port of this machine behind which the server is so far away."""
    process = subprocess.Popen(
        [sys.executable, "-m", __name__, str(server_port), str(round_trip_s / 2)],
        cwd=Path(__file__).resolve().parents[2],
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=die_with_parent,  # the benchmark has one thread
    )
    assert process.stdout is not None
    try:
        yield int(process.stdout.readline())
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


class Proxy:
    """Passes bytes on when they are due. One thread; select(2), as it alone counts microseconds."""

    def __init__(self, server_port: int, delay_s: float) -> None:
        self._server_port = server_port
        self._delay_s = delay_s
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._other_end: dict[socket.socket, socket.socket] = {}
        self._passing: list[tuple[float, int, socket.socket, bytes]] = []  # due when, in which order, to whom, what
        self._order = count()
        self.port: int = self._listener.getsockname()[1]

    def run(self) -> None:
        while True:
            wait_s = max(0.0, self._passing[0][0] - time.monotonic()) if self._passing else None
            readable, _, _ = select.select([self._listener, *self._other_end], [], [], wait_s)
            for end in readable:
                if end is self._listener:
                    self._accept()
                elif end in self._other_end:
                    self._take(end)
            while self._passing and self._passing[0][0] <= time.monotonic():
                _, _, end, data = heapq.heappop(self._passing)
                self._hand_on(end, data)

    def _accept(self) -> None:
        near, _ = self._listener.accept()
        far = socket.create_connection(("127.0.0.1", self._server_port))
        for end, other in ((near, far), (far, near)):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._other_end[end] = other

    def _take(self, end: socket.socket) -> None:
        try:
            data = end.recv(READ_BYTES)
        except ConnectionError:
            data = b""
        other = self._other_end[end] if data else self._other_end.pop(end)
        heapq.heappush(self._passing, (time.monotonic() + self._delay_s, next(self._order), other, data))

    def _hand_on(self, end: socket.socket, data: bytes) -> None:
        """Nothing is the end of what the other side says."""
        with contextlib.suppress(OSError):  # it has gone meanwhile
            if data:
                end.sendall(data)
            else:
                end.shutdown(socket.SHUT_WR)


if __name__ == "__main__":
    proxy = Proxy(int(sys.argv[1]), float(sys.argv[2]))
    print(proxy.port, flush=True)
    proxy.run()

"""A file descriptor that lines are written to and that never makes the writer wait.

Standard error may be a terminal with ^S pressed, a pipe whose reader stands still, a socket of a journald that is being
restarted, or closed. None of these may hold up the loop that renews leases, and a thread with a queue would be one more
thing to stop, to fork around and to lose at a crash. So a line goes out at once or not at all; `write` says which.
A line that the kernel took only half is finished before the next one begins, so lines are never torn.

We write to a descriptor of our own, as number 2 may be closed behind our back and then be somebody's database. Pipes
and terminals are opened anew through /proc/self/fd: that gives an open file description of our own, whose O_NONBLOCK
does not reach the processes that we share standard error with (open(2)).
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import stat

_NONBLOCKING = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


class LineStream:
    """Writes whole lines to what `fd` is now; `fd` itself stays the caller's and is not touched."""

    def __init__(self, fd: int) -> None:
        self._fd = -1
        self._socket: socket.socket | None = None
        self._poll: select.poll | None = None  # only where a write could wait
        self._rest = b""  # what the kernel did not take of the last line
        self.device_and_inode = ""
        with contextlib.suppress(OSError):  # closed: every write is refused
            self._open(fd)

    def _open(self, fd: int) -> None:
        status = os.fstat(fd)
        self.device_and_inode = f"{status.st_dev}:{status.st_ino}"
        if stat.S_ISSOCK(status.st_mode):
            self._socket = socket.socket(fileno=os.dup(fd))
        elif stat.S_ISFIFO(status.st_mode) or stat.S_ISCHR(status.st_mode):
            try:
                self._fd = os.open(f"/proc/self/fd/{fd}", _NONBLOCKING)
            except OSError:  # made by another user, no /proc, or a pipe without a reader
                self._fd = os.dup(fd)
                self._poll = select.poll()
                self._poll.register(self._fd, select.POLLOUT)
        else:
            self._fd = os.dup(fd)

    def write(self, line: bytes) -> bool:
        """Send one line, newline included; whether it was taken. Never waits, never raises."""
        if self._rest:
            self._rest = self._rest[self._send(self._rest) :]
            if self._rest:
                return False
        sent = self._send(line)
        if not sent:
            return False
        self._rest = line[sent:]
        return True

    def _send(self, data: bytes) -> int:
        """How many bytes of `data` the kernel takes now."""
        sent = 0
        with contextlib.suppress(OSError):  # full, broken or closed: the same to us, and it may work again later
            while sent < len(data):
                taken = self._send_some(data[sent:])
                if not taken:
                    break
                sent += taken
        return sent

    def _send_some(self, data: bytes) -> int:
        if self._socket is not None:
            return self._socket.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        if self._poll is None:
            return os.write(self._fd, data)
        # A pipe that polls writable has a free page, so PIPE_BUF bytes fit without waiting (pipe(7)); more might not.
        return os.write(self._fd, data[: select.PIPE_BUF]) if self._poll.poll(0) else 0

    def close(self) -> None:
        """Give our own descriptor back; later writes are refused."""
        if self._socket is not None:
            self._socket.close()
        elif self._fd >= 0:
            os.close(self._fd)
        self._fd, self._poll, self._rest = -1, None, b""

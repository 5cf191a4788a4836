"""What we tell systemd, over $NOTIFY_SOCKET (sd_notify(3)); nothing happens where there is none.

`Notifier.take(os.environ)` removes the variables from the environment: what we start afterwards cannot speak in our
name, and handlers do not see where to. Messages are single datagrams that are sent at once or not at all, as the loop
must not wait for the manager, whose queue may be full; verbs say whether the datagram went out. What the manager waits
for (`ready`, `reloading`, `stopping`) is kept until it did, and `repeat` tries again; the rest is soon said anew.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping, MutableMapping

MAX_STATUS_CHARS = 400
MAX_DUE = 3
"""A reload, its end and a stop: what came before these is no news any more."""

_TAKEN = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")


class Notifier:
    """Speaks to the service manager. `watchdog_interval_s` is how often `watchdog` is due, None where it is not."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._address = _address(env.get("NOTIFY_SOCKET", ""))
        self.watchdog_interval_s = _watchdog_interval_s(env) if self._address else None
        # Kept open for the process's life: with every descriptor in use, a watchdog that has to open one is late.
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) if self._address else None
        self._due: list[tuple[str, ...]] = []  # to be sent in this order

    @classmethod
    def take(cls, environ: MutableMapping[str, str]) -> Notifier:
        """A notifier from these variables, which are gone from `environ` afterwards."""
        return cls({name: environ.pop(name) for name in _TAKEN if name in environ})

    @property
    def is_connected(self) -> bool:
        """Whether somebody listens to what we tell."""
        return self._socket is not None

    def ready(self, status: str = "") -> bool:
        """Start-up, or a reload, is over."""
        return self._tell("READY=1", *_status(status))

    def status(self, text: str) -> bool:
        """One line for `systemctl status`."""
        return self._send(*_status(text))

    def stopping(self, status: str = "") -> bool:
        """The drain has begun."""
        return self._tell("STOPPING=1", *_status(status))

    def reloading(self) -> bool:
        """A reload has begun; `ready` ends it."""
        # Type=notify-reload compares this number with its own CLOCK_MONOTONIC: a message to it, not a clock of ours.
        return self._tell("RELOADING=1", f"MONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}")

    def watchdog(self) -> bool:
        """The loop turns."""
        return self._send("WATCHDOG=1")

    def extend_timeout(self, seconds: float) -> bool:
        """Grant the current start or stop this long from now, if it would time out earlier."""
        return self._send(f"EXTEND_TIMEOUT_USEC={max(0, int(seconds * 1_000_000))}")

    def repeat(self) -> bool:
        """Try again to tell what could not be told; whether all of it has been by now."""
        while self._due and self._send(*self._due[0]):
            del self._due[0]
        return not self._due

    def close(self) -> None:
        """Say nothing any more."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _tell(self, *lines: str) -> bool:
        """Tell of a new state, after those that are still due."""
        if self._socket is None:
            return False
        if self._due and self._due[-1][0] == lines[0]:
            self._due.pop()  # the same, with an older text
        self._due = [*self._due, lines][-MAX_DUE:]
        return self.repeat()

    def _send(self, *lines: str) -> bool:
        if self._socket is None or not lines:
            return False
        message = "\n".join(lines).encode()
        try:
            self._socket.sendto(message, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL, self._address)
        except OSError:  # no reader, its queue is full, or the path is gone: nothing that we could do better now
            return False
        return True


def _status(text: str) -> list[str]:
    # Each line of a message is a variable: a newline in a status text would be one more, MAINPID= for instance.
    line = "".join(char if char.isprintable() else " " for char in text)
    return [f"STATUS={line[:MAX_STATUS_CHARS]}"] if line.strip() else []


def _address(value: str) -> str:
    """A path, or an abstract name with its leading NUL; other families (vsock) are not for services on this machine."""
    if value.startswith("@"):
        return "\0" + value[1:]
    return value if value.startswith("/") else ""


def _watchdog_interval_s(env: Mapping[str, str]) -> float | None:
    """A third of the limit, so that a late ping or a lost one does no harm (sd_watchdog_enabled(3) advises half)."""
    try:
        limit_us = int(env.get("WATCHDOG_USEC", "0"))
        is_ours = int(env.get("WATCHDOG_PID", os.getpid())) == os.getpid()
    except ValueError:
        return None
    return limit_us / 3 / 1_000_000 if is_ours and limit_us > 0 else None

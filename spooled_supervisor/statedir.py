"""The state directory: one supervisor at a time, and what outlives it (its worker id).

It is locked with flock(2), which the kernel lets go of when the process ends, however it ends, and with it the forks
that it has made meanwhile. Local file systems only: a lock on a network file system may be known to this host alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from pathlib import Path
from types import TracebackType

from spooled_supervisor.errors import ConfigError

MAX_WORKER_ID = 128


class StateDir:
    """Use it as a context manager: made (mode 0700) and locked inside."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock_fd = -1

    def __enter__(self) -> StateDir:
        """Raises ConfigError if it cannot be made or written, or if another supervisor holds it (its pid is named)."""
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock_fd = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(
                f"state directory {self.path}: {error.strerror}; it must be a directory that this user may write "
                "(give --state-dir)"
            ) from error
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(self._lock_fd, 20, 0).decode("ascii", "replace").strip() or "another process"
            os.close(self._lock_fd)
            raise ConfigError(
                f"state directory {self.path} is in use by the supervisor with pid {holder}; "
                "for a second one beside it give --state-dir"
            ) from error
        with contextlib.suppress(OSError):  # a full disk: the lock holds all the same, the number is for people
            os.ftruncate(self._lock_fd, 0)
            os.pwrite(self._lock_fd, f"{os.getpid()}\n".encode(), 0)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with contextlib.suppress(OSError):
            os.ftruncate(self._lock_fd, 0)
        # The lock goes with the last copy of the descriptor, and a program that has forked meanwhile has one more.
        with contextlib.suppress(OSError):
            fcntl.flock(self._lock_fd, fcntl.LOCK_UN)
        os.close(self._lock_fd)

    def worker_id(self, hostname: str) -> str:
        """The id that was made at the first start, or a new one: `<hostname>-<random>`. Raises ConfigError.

        Random, as cloned machines and containers share host names and pids; kept, so that a restart is the same worker
        to the service and does not count against the plan's number of workers again.
        """
        file = self.path / "worker-id"
        try:
            kept = file.read_text("ascii").strip() if file.exists() else ""
            if kept and len(kept) <= MAX_WORKER_ID and all(c.isalnum() or c in "-_." for c in kept):
                return kept
            clean = "".join(c if c.isascii() and (c.isalnum() or c in "-_.") else "-" for c in hostname)
            made = f"{clean[: MAX_WORKER_ID - 17]}-{secrets.token_hex(8)}"
            draft = file.with_suffix(".new")
            draft.write_text(made + "\n", "ascii")
            draft.replace(file)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{file}: the worker id cannot be kept there: {error}") from error
        return made

"""The API key, read again from its file when that has changed: a rotated key needs no restart."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

from spooled_supervisor.config import ApiConfig, can_be_key, read_key
from spooled_supervisor.timing import now

LOOK_AGAIN_S = 5.0


class ApiKey:
    """Call it for the key as it is now; `on_new` hears of each before it is given out.

    Never raises: a file that is gone, or holds what cannot be a key, leaves the last one in place.
    """

    def __init__(self, config: ApiConfig, on_new: Callable[[str], None] = lambda _: None) -> None:
        self._key = config.key.reveal()
        self._file: Path | None = config.key_file
        self._stamp: tuple[int, int, int] | None = None  # unknown: it may have changed since the start read it
        self._looked_at = now() - LOOK_AGAIN_S
        self._on_new = on_new

    def __call__(self) -> str:
        if self._file is not None and now() - self._looked_at >= LOOK_AGAIN_S:
            self._looked_at = now()
            stamp = self._look()
            if stamp != self._stamp and stamp is not None:
                with contextlib.suppress(OSError):
                    self._take(read_key(self._file).strip())
                    self._stamp = stamp  # not before: one that cannot be read yet is looked at again
        return self._key

    def _take(self, text: str) -> None:
        if can_be_key(text) and text != self._key:
            self._on_new(text)
            self._key = text

    def _look(self) -> tuple[int, int, int] | None:
        if self._file is None:
            return None
        try:
            stat = self._file.stat()
        except OSError:
            return None
        return (stat.st_ino, stat.st_mtime_ns, stat.st_size)

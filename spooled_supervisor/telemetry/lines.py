"""What one event looks like as a line of text or of JSON; no I/O.

    text   2026-03-01T12:00:00.000Z INFO  child_exited pid=4711 signal=SIGKILL cause="killed by SIGKILL" uptime_s=12.4
    json   {"ts":"2026-03-01T12:00:00.000Z","level":"info","event":"child_exited","pid":4711,"signal":"SIGKILL",...}

Field values come from handlers and servers, so a line must survive all of them: it is one line, of printable
characters, of bounded length, without our secrets. Rendering is optimistic (once, by C code), the result is looked at,
and only a line that fails is made again with care. That keeps an ordinary line in the range of microseconds.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from spooled_supervisor import timing
from spooled_supervisor.telemetry.texts import utf8_text

MAX_BODY_BYTES = 8192 - len("<6>\n")
"""The longest line, less what the writer adds. One page of a pipe holds half of it; journald's own limit is 48 KiB."""

MASK = "***"
MAX_SECRETS = 16

Fields = Mapping[str, object]
Renderer = Callable[[str, str, str, Fields], bytes]

_encode = msgspec.json.Encoder().encode
_BARE = re.compile(r"""[^\s"'=\\]+""")
_SHORTER = (MAX_BODY_BYTES, 6000, 4000, 2000, 1000, 500, 200, 100, 30)


def level_name(level: int) -> str:
    """The word for a level of the standard `logging`; the same four words that `ctx.log` takes."""
    if level >= logging.ERROR:
        return "error"
    if level >= logging.WARNING:
        return "warn"
    return "info" if level >= logging.INFO else "debug"


class Lines:
    """Renders lines in one format (`text` or `json`) and keeps secrets out of them."""

    def __init__(self, form: str, secrets: Iterable[str] = ()) -> None:
        self._render: Renderer = _json if form == "json" else _text
        self._escape = _json_string if form == "json" else _text_escape
        self._latest: list[str] = []
        self._secrets: list[str] = []
        self._needles: list[bytes] = []
        for secret in secrets:
            self.keep_secret(secret)

    def keep_secret(self, secret: str) -> None:
        """Mask this one, too, from now on: a key was rotated. Of many the latest are masked, as each costs time."""
        if not secret or secret in self._latest:
            return
        self._latest = [*self._latest, secret][-MAX_SECRETS:]
        # The longest first: of two secrets one may be part of the other.
        self._secrets = sorted(self._latest, key=len, reverse=True)
        # Escaping works on single characters, so an escaped line holds the escaped secret wherever the value held it.
        self._needles = [self._escape(secret).encode() for secret in self._secrets]

    def line(self, level: int, name: str, fields: Fields) -> bytes:
        """One line without its newline, at most MAX_BODY_BYTES long. Never raises for what a field holds."""
        at, word = timing.timestamp(), level_name(level)
        try:
            line = self._render(at, word, name, fields)
        except Exception:  # a surrogate, a type that no encoder knows, a __str__ that raises
            return self._careful(at, word, name, fields)
        if len(line) > MAX_BODY_BYTES or any(needle in line for needle in self._needles):
            return self._careful(at, word, name, fields)
        return line

    def masked(self, fields: Fields) -> dict[str, object]:
        """The fields with the secrets masked in their texts."""
        return {key: _plain(value, self.mask) for key, value in fields.items()}

    def _careful(self, at: str, word: str, name: str, fields: Fields) -> bytes:
        # Masked before it is cut, as half a secret is one too.
        plain = {key: _plain(value, self.mask) for key, value in fields.items()}
        for limit in _SHORTER:
            line = self._render(at, word, name, {key: _cut(value, limit) for key, value in plain.items()})
            if len(line) <= MAX_BODY_BYTES:
                return line
        return self._render(at, word, name, {"cut": True})

    def mask(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, MASK)
        return text


def _json(at: str, word: str, name: str, fields: Fields) -> bytes:
    line = _encode({"ts": at, "level": word, "event": name, **fields})
    if line.isascii() and b"\x7f" not in line:
        return line  # JSON itself escapes the control characters below the space
    text = line.decode()
    return line if text.isprintable() else _escape_unprintable(text, _json_escape).encode()


def _text(at: str, word: str, name: str, fields: Fields) -> bytes:
    pairs = [f" {key}={_text_value(value)}" for key, value in fields.items() if value is not None]
    return f"{at} {word.upper():<5} {name}{''.join(pairs)}".encode()


def _text_value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, tuple)):
        value = ",".join(str(item) for item in value)
    text = value if isinstance(value, str) else str(value)
    return text if _BARE.fullmatch(text) and text.isprintable() else f'"{_text_escape(text)}"'


def _text_escape(text: str) -> str:
    text = text.replace("\\", "\\\\").replace('"', '\\"')
    return text if text.isprintable() else _escape_unprintable(text, lambda c: c.encode("unicode_escape").decode())


def _json_string(text: str) -> str:
    return _escape_unprintable(_encode(utf8_text(text)).decode()[1:-1], _json_escape)


def _json_escape(char: str) -> str:
    units = char.encode("utf-16-be")
    return "".join(f"\\u{units[n]:02x}{units[n + 1]:02x}" for n in range(0, len(units), 2))


def _escape_unprintable(text: str, escape: Callable[[str], str]) -> str:
    """Control characters, line and paragraph separators, and those that reorder or hide what a terminal shows."""
    return "".join(char if char.isprintable() else escape(char) for char in text)


def _plain(value: object, mask: Callable[[str], str]) -> object:
    """The same value out of types that every renderer knows, with its texts masked."""
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(item, mask) for item in value]
    try:
        text = value if isinstance(value, str) else str(value)
    except Exception as error:  # somebody's __str__; a log line is no place to fail for it
        text = f"<{type(value).__name__} without a text: {type(error).__name__}>"
    return utf8_text(mask(text))


def _cut(value: object, limit: int) -> object:
    """Texts of at most about `limit` characters: head and tail stay, as a traceback's point is at its end."""
    if isinstance(value, str) and len(value) > limit:
        half = limit // 2
        return f"{value[:half]}...[{len(value) - 2 * half} characters cut]...{value[-half:]}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        kept = [_cut(item, limit) for item in value[: max(1, limit // 30)]]
        return kept if len(kept) == len(value) else [*kept, f"...[{len(value) - len(kept)} more]"]
    return value

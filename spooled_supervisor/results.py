"""A handler's return value as JSON bytes, or the place and reason why it is none. No I/O.

Stricter than every encoder at hand: NaN, infinities, keys that are no strings, sets, bytes, lone surrogates and deep
nesting are refused by name, so that what was returned is what the service stores (RFC 8259, sections 4, 6, 8.1).
"""

from __future__ import annotations

import json
from math import isfinite
from typing import Any

MAX_DEPTH = 100
MAX_PATH = 200

_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, check_circular=False, separators=(",", ":")).encode


class NotJson(ValueError):
    """The message says where (`result.pages[3]`) and what. The place is put together only when something is wrong."""

    def __init__(self, what: str) -> None:
        self.what = what
        self._steps: list[str] = []
        super().__init__(what)

    def inside(self, step: str) -> NotJson:
        """The same, said of the container: `step` leads from it to the place."""
        self._steps.append(step)
        return self

    def __str__(self) -> str:
        return f"result{''.join(reversed(self._steps))}"[:MAX_PATH] + f" {self.what}"


def encode_result(value: Any) -> bytes:
    """One JSON value in UTF-8. Raises NotJson; whatever a dict subclass or a huge int makes raise is NotJson too."""
    if value is None:  # what most handlers return; to set the encoder up takes 1 us
        return b"null"
    try:
        _check(value, MAX_DEPTH)
        return _encode(value).encode("utf-8")
    except NotJson:
        raise
    except Exception as error:
        raise NotJson(f"cannot be encoded: {type(error).__name__}: {_text(error)[:200]}") from error


def _check(value: Any, depth: int) -> None:
    if value is None or isinstance(value, int):  # bool is an int
        return
    if isinstance(value, str):
        _check_text(value)
    elif isinstance(value, float):
        if not isfinite(value):
            raise NotJson(f"is {value!r}, and JSON has only finite numbers")
    elif isinstance(value, (dict, list, tuple)):
        if depth <= 0:
            raise NotJson(f"is nested deeper than {MAX_DEPTH} levels")
        if isinstance(value, dict):
            _check_dict(value, depth - 1)
        else:
            _check_list(value, depth - 1)
    else:
        raise NotJson(f"is of type {type(value).__name__}")


def _check_dict(value: dict[Any, Any], depth: int) -> None:
    for key, item in value.items():
        if not isinstance(key, str):
            raise NotJson(f"has the key {_short(key)} of type {type(key).__name__}, keys must be strings")
        _check_text(key)
        try:
            _check(item, depth)
        except NotJson as problem:
            raise problem.inside(f".{key}") from None


def _check_list(value: list[Any] | tuple[Any, ...], depth: int) -> None:
    for index, item in enumerate(value):
        try:
            _check(item, depth)
        except NotJson as problem:
            raise problem.inside(f"[{index}]") from None


def _check_text(text: str) -> None:
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise NotJson(f"is {_short(text)}, with a lone surrogate, which UTF-8 cannot carry") from None


def _short(value: object) -> str:
    return ascii(value)[:60]


def _text(error: Exception) -> str:
    try:
        return str(error)
    except Exception:
        return "its text cannot be made"

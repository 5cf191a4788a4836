"""A handler's return value as JSON bytes, or the place and reason why it is none. No I/O.

Stricter than every encoder at hand: NaN, infinities, keys that are no strings, sets, bytes, lone surrogates and deep
nesting are refused by name, so that what was returned is what the service stores (RFC 8259, sections 4, 6, 8.1).
"""

from __future__ import annotations

import json
from math import isfinite
from typing import Any

MAX_DEPTH = 100

_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, check_circular=False, separators=(",", ":")).encode


class NotJson(ValueError):
    """The message says where (`result.pages[3]`) and what."""


def encode_result(value: Any) -> bytes:
    """One JSON value in UTF-8. Raises NotJson; whatever a dict subclass or a huge int makes raise is NotJson too."""
    try:
        _check(value, "result", MAX_DEPTH)
        return _encode(value).encode("utf-8")
    except NotJson:
        raise
    except UnicodeEncodeError:
        raise NotJson("a string in it holds a lone surrogate, which UTF-8 cannot carry") from None
    except Exception as error:
        raise NotJson(f"{type(error).__name__}: {_text(error)[:200]}") from error


def _check(value: Any, path: str, depth: int) -> None:
    if value is None or isinstance(value, (str, int)):  # bool is an int
        return
    if isinstance(value, float):
        if not isfinite(value):
            raise NotJson(f"{path} is {value!r}, and JSON has only finite numbers")
    elif depth <= 0:
        raise NotJson(f"{path[:200]} is nested deeper than {MAX_DEPTH} levels")
    elif isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise NotJson(f"{path} has the key {_short(key)} of type {type(key).__name__}, keys must be strings")
            _check(item, f"{path}.{key}", depth - 1)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            _check(item, f"{path}[{index}]", depth - 1)
    else:
        raise NotJson(f"{path} is of type {type(value).__name__}")


def _short(value: object) -> str:
    return repr(value)[:60]


def _text(error: Exception) -> str:
    try:
        return str(error)
    except Exception:
        return "its text cannot be made"

"""Text from outside (handlers, queue names, the service) as UTF-8 and as JSON that cannot fail.

Python's strings may hold lone surrogates (PEP 383, JSON's \\ud800), which no encoder takes; here they are spelled out.
"""

from __future__ import annotations

import msgspec

_encode = msgspec.json.Encoder().encode


def utf8_text(text: str) -> str:
    """`text` with lone surrogates written as `\\udcff`, so that it can be encoded.

    >>> utf8_text("caf\\u00e9 \\udcff")
    'café \\\\udcff'
    """
    return text.encode("utf-8", "backslashreplace").decode()


def json_bytes(value: object) -> bytes:
    """One of our own values (frozen dataclasses, dicts, tuples, scalars) as JSON; NaN and infinities become null."""
    try:
        return _encode(value)
    except UnicodeEncodeError:
        return _encode(_utf8_value(msgspec.to_builtins(value)))


def _utf8_value(value: object) -> object:
    match value:
        case str():
            return utf8_text(value)
        case dict():
            return {_utf8_value(key): _utf8_value(item) for key, item in value.items()}
        case list() | tuple():
            return [_utf8_value(item) for item in value]
        case _:
            return value

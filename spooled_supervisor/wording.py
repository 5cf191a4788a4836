"""What a handler has raised, or said, in words that fit into a frame: bounded, never empty, whatever it does to us.

An exception's own `__str__` may raise, exit, return megabytes or lone surrogates; nothing here lets that through.
"""

from __future__ import annotations

import os

from spooled_supervisor.frames import MAX_TEXT

PACKAGE_DIR = os.path.dirname(os.path.abspath(__file__)) + os.sep
"""Frames of files below it are ours: they say nothing about a handler."""
FRAMES_SHOWN = 6


def safe_text(value: object) -> str:
    """`str(value)`, whatever that does."""
    try:
        return str(value)
    except BaseException:
        return f"<{type(value).__name__} whose text cannot be made>"


def clip_text(text: str) -> str:
    """`text` as a frame takes it: bounded, no lone surrogates."""
    return text[: MAX_TEXT // 4].encode("utf-8", "backslashreplace").decode("utf-8")[:MAX_TEXT]


def describe_error(error: BaseException) -> str:
    """`Type: message`, and the innermost frames. Never raises, never empty, bounded before it is built."""
    try:
        name = type(error).__qualname__
        if type(error).__module__ not in ("builtins", "__main__"):
            name = f"{type(error).__module__}.{name}"
        message = safe_text(error)[:1200]
        notes = "".join(f"\n{safe_text(note)[:200]}" for note in getattr(error, "__notes__", ())[:3])
        places = _innermost_frames(error)
        return f"{name}: {message}{notes}{places}" if message else f"{name}{notes}{places}"
    except BaseException:
        return f"{type(error).__name__} (its text cannot be made)"


def _innermost_frames(error: BaseException) -> str:
    places: list[str] = []
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if not code.co_filename.startswith(PACKAGE_DIR):
            places.append(f"\n  at {code.co_filename}:{trace.tb_lineno} in {code.co_name}")
            del places[:-FRAMES_SHOWN]
        trace = trace.tb_next
    return "".join(places)

"""Time that passes only when a test says so, or when the event loop would have slept.

`FakeClock` stands in for `timing.now`. `run_in_fake_time` runs a coroutine on the package's own event loop, whose
sleeps take no time: where nothing is ready the clock jumps to the next timer. A loop that would sleep for ever is a
failed test, not a hanging one.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from types import ModuleType
from typing import Any, TypeVar

import pytest

from spooled_supervisor import timing

T = TypeVar("T")


class FakeClock:
    """Call it for the instant, in seconds; it stands still between two calls."""

    def __init__(self, at: float = 1024.0) -> None:
        self.at = at

    def __call__(self) -> float:
        return self.at

    def advance(self, seconds: float) -> float:
        """Let time pass; the new instant."""
        self.at += seconds
        return self.at


class _JumpingSelector(selectors.DefaultSelector):
    """Looks at its files, and lets the clock jump instead of sleeping."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready:
            assert timeout is not None, "everybody waits for something that will never happen"
            self._clock.advance(max(0.0, timeout))
        return ready


def fake_time(monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> FakeClock:
    """A clock that `timing` and these modules (which import `now` by name) read from now on."""
    clock = FakeClock()
    for module in (timing, *modules):
        monkeypatch.setattr(module, "now", clock)
    return clock


def run_in_fake_time(clock: FakeClock, main: Coroutine[Any, Any, T]) -> T:
    """Run `main` on `timing.new_event_loop`, which must read `clock` already (`fake_time`)."""

    def new_loop() -> asyncio.AbstractEventLoop:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(selectors, "DefaultSelector", lambda: _JumpingSelector(clock))
            return timing.new_event_loop()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        return runner.run(main)

"""What children print: lines at a bounded rate, and a tail per job."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spooled_supervisor import rates, timing
from spooled_supervisor.output import (
    FLOOD_BYTES,
    FLOOD_PAUSE_S,
    MAX_LINE,
    TAIL_BYTES,
    OutputPipe,
)
from spooled_supervisor.rates import LINES_BURST, LINES_PER_S, LineRate
from tests.support.clock import FakeClock, fake_time, run_in_fake_time


class Printer:
    """A child that prints, and the supervisor that reads."""

    def __init__(self) -> None:
        read_fd, self.fd = os.pipe()
        os.set_blocking(read_fd, False)
        os.set_blocking(self.fd, False)
        self.lines: list[str] = []
        self.dropped: list[int] = []
        self.pipe = OutputPipe(read_fd, self.lines.append, self.dropped.append)

    def print(self, data: bytes) -> None:
        os.write(self.fd, data)

    def stop_printing(self) -> None:
        os.close(self.fd)
        self.fd = -1

    def close(self) -> None:
        self.pipe.close()
        if self.fd >= 0:
            os.close(self.fd)


Story = Callable[[Printer], Coroutine[Any, Any, None]]


def tell(story: Story, clock: FakeClock | None = None) -> Printer:
    """Run a story on a loop; what was read."""

    async def main() -> Printer:
        printer = Printer()
        try:
            await story(printer)
        finally:
            printer.close()
        return printer

    if clock is not None:
        return run_in_fake_time(clock, main())
    with asyncio.Runner(loop_factory=timing.new_event_loop) as runner:
        return runner.run(main())


def prints(*parts: bytes) -> Story:
    """Print these parts, each read before the next; then the job ends."""

    async def story(printer: Printer) -> None:
        for part in parts:
            printer.print(part)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        printer.pipe.drain()

    return story


# --- lines ------------------------------------------------------------------------------------------------------------


def test_each_line_is_told_without_its_end_and_blank_ones_are_not() -> None:
    assert tell(prints(b"one\ntwo\r\n\n   \nthree\n")).lines == ["one", "two", "three"]


def test_a_line_without_an_end_is_told_when_the_job_is_over() -> None:
    assert tell(prints(b"half a ", b"line")).lines == ["half a line"]


def test_bytes_that_are_no_utf_8_are_shown_as_far_as_they_can_be() -> None:
    assert tell(prints(b"caf\xe9 \xff\n")).lines == ["caf\ufffd \ufffd"]


def test_a_character_that_comes_in_two_parts_is_whole() -> None:
    assert tell(prints(b"caf\xc3", b"\xa9\n")).lines == ["caf\u00e9"]


@given(
    st.lists(
        st.sampled_from([b"a", b"bc d", b"\n", b"\r\n", b"x" * 700, b"y" * MAX_LINE, "\u00e9".encode()]), max_size=12
    ).map(b"".join),
    st.lists(st.integers(0, 20_000), max_size=4),
)
def test_any_split_of_what_is_printed_gives_the_same_lines_and_nothing_is_lost(data: bytes, cuts: list[int]) -> None:
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    parts = [data[a:b] for a, b in itertools.pairwise(edges) if a < b]
    whole, split = tell(prints(data) if data else prints()), tell(prints(*parts))
    assert split.lines == whole.lines
    assert split.pipe.tail == whole.pipe.tail
    assert all(len(line) <= MAX_LINE for line in whole.lines)
    if data.isascii():
        assert "".join(whole.lines) == data.decode().replace("\n", "").replace("\r", "")


def test_who_was_drained_after_the_loop_had_seen_output_is_still_listened_to() -> None:
    """Of two descriptors that are readable in the same turn of the loop, the report's handler drains the output."""

    async def story(printer: Printer) -> None:
        loop = asyncio.get_running_loop()
        report, report_end = os.pipe()

        def on_report() -> None:
            os.read(report, 10)
            printer.pipe.begin()

        loop.add_reader(report, on_report)
        try:
            for number in range(3):
                os.write(report_end, b"answer")
                printer.print(b"line %d\n" % number)
                await asyncio.sleep(0)
                await asyncio.sleep(0)
            printer.print(b"of the next job\n")
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert printer.lines[-1] == "of the next job"
        finally:
            loop.remove_reader(report)
            os.close(report)
            os.close(report_end)

    assert tell(story).lines == ["line 0", "line 1", "line 2", "of the next job"]


# --- the tail ---------------------------------------------------------------------------------------------------------


def test_the_tail_is_what_was_printed_last_since_the_job_began() -> None:
    async def story(printer: Printer) -> None:
        printer.print(b"of an earlier job\nand its half line")
        printer.pipe.begin()
        assert printer.pipe.tail == ""
        printer.print(b"of this job\nunfinished")
        printer.pipe.drain()
        assert printer.pipe.tail == "of this job\nunfinished"

    assert tell(story).lines == ["of an earlier job", "and its half line", "of this job", "unfinished"]


def test_the_tail_is_bounded_and_keeps_the_end() -> None:
    data = b"".join(b"line %d\n" % n for n in range(3000))
    tail = tell(prints(data)).pipe.tail
    assert len(tail) <= TAIL_BYTES
    assert tail.endswith("line 2999")


# --- floods -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    return fake_time(monkeypatch, rates)


def test_a_burst_of_lines_is_allowed_and_then_so_many_per_second() -> None:
    clock = FakeClock()
    rate = LineRate(clock)
    assert sum(rate.allows() for _ in range(int(LINES_BURST) + 50)) == LINES_BURST
    assert rate.take_dropped() == 50
    assert rate.take_dropped() == 0
    clock.advance(1.0)
    assert sum(rate.allows() for _ in range(1000)) == LINES_PER_S
    clock.advance(3600.0)
    assert sum(rate.allows() for _ in range(5000)) == LINES_BURST


def test_lines_beyond_the_rate_are_counted_and_told_once() -> None:
    clock = FakeClock()

    async def story(printer: Printer) -> None:
        printer.pipe._rate = LineRate(clock)
        printer.print(b"x\n" * 1500)
        printer.pipe.drain()
        printer.pipe.drain()

    told = tell(story)
    assert len(told.lines) == LINES_BURST
    assert told.dropped == [500]


def test_a_flood_is_read_slowly_but_goes_on(clock: FakeClock) -> None:
    line = b"z" * 4095 + b"\n"

    async def story(printer: Printer) -> None:
        begun = clock()
        rounds, sent = 0, 0
        while sent < 3 * FLOOD_BYTES:
            try:
                sent += os.write(printer.fd, line * 15)
            except BlockingIOError:
                await asyncio.sleep(FLOOD_PAUSE_S / 4)
                rounds += 1
            await asyncio.sleep(0)
        assert clock() - begun >= 2 * FLOOD_PAUSE_S * 0.9
        assert rounds > 0

    tell(story, clock)


def test_the_end_of_the_pipe_is_no_end_of_the_loops_work(clock: FakeClock) -> None:
    async def story(printer: Printer) -> None:
        printer.print(b"last words\n")
        printer.stop_printing()
        await asyncio.sleep(1.0)
        printer.pipe.drain()
        printer.pipe.begin()

    assert tell(story, clock).lines == ["last words"]


def test_closing_reads_what_is_there_and_may_be_done_twice(clock: FakeClock) -> None:
    async def story(printer: Printer) -> None:
        printer.print(b"unread")
        printer.pipe.close()
        printer.pipe.close()

    assert tell(story, clock).lines == ["unread"]


def test_closing_in_the_middle_of_a_flood_leaves_no_timer(clock: FakeClock) -> None:
    async def story(printer: Printer) -> None:
        for _ in range(2 * FLOOD_BYTES // 60_000):
            try:
                os.write(printer.fd, b"z" * 60_000)
            except BlockingIOError:
                break
            await asyncio.sleep(0)
        printer.pipe.close()
        await asyncio.sleep(10 * FLOOD_PAUSE_S)

    tell(story, clock)

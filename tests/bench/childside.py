"""What a job costs in the child that runs it: from the frame that brings it to the frame that answers.

A real child of a real fork server, but the supervisor's end of its pipes is here: it is given one no-op job after the
other, the next as soon as the last is answered. CPU time of the child, so that waiting for us does not count; reading
the frame, both frames that it writes and putting its process in order again do.

Twice: with both ends on one processor, and left to the scheduler. In between lies what it costs to wake an idle
processor; on a virtual machine that is more than all the rest, and it is charged to who was asleep.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import TypeVar

from spooled_supervisor import exits, frames, hosting, timing
from spooled_supervisor.events import Events
from spooled_supervisor.forkclient import ForkServerKeeper, NewBorn, child_environment
from tests.bench import app, meters
from tests.bench.figures import Figure, at_most
from tests.bench.scenario import Effort, Scenario
from tests.bench.stage import NotMeasured

QUEUE = "noop"
LIMIT_S = 60.0
READ_BYTES = 1 << 16

M = TypeVar("M", bound=frames.FromChild)


def run(effort: Effort) -> dict[str, float]:
    usable = os.sched_getaffinity(0)
    with hosting.subreaper(), asyncio.Runner(loop_factory=timing.new_event_loop) as runner:
        try:
            os.sched_setaffinity(0, {max(usable)})  # inherited by the fork server, and so by the child
            together_us = runner.run(_measure_us(effort))
        finally:
            os.sched_setaffinity(0, usable)
        return {"cpu_us": together_us, "apart_us": runner.run(_measure_us(effort))}


async def _measure_us(effort: Effort) -> float:
    environment = child_environment(os.environ, marker=f"bench {os.getpid()}", threads=1)
    keeper = ForkServerKeeper(_settings, environment, boot_timeout_s=LIMIT_S, events=Events(), on_ready=lambda: None)
    await keeper.start()
    try:
        child = _Child(await keeper.fork(0))
        try:
            for run in range(1, effort.warmup_jobs + 1):
                child.do(run)
            before = meters.cpu_s(child.pid)
            for run in range(effort.warmup_jobs + 1, effort.warmup_jobs + 1 + effort.frames):
                child.do(run)
            spent_s = meters.cpu_s(child.pid) - before
        finally:
            child.close()
    finally:
        await keeper.close()
    return 1e6 * spent_s / effort.frames


def _settings(generation: int) -> frames.Preload:
    return frames.Preload(
        generation,
        app.__name__,
        [QUEUE],
        strict=False,
        child_nice=0,
        kills_leftovers=True,
        pins_cpus=False,
        log_level="info",
    )


class _Child:
    """The supervisor's end of one child, which waits: there is nothing else to do."""

    def __init__(self, born: NewBorn) -> None:
        self.pid = born.pid
        self._born = born
        self._decoder = frames.decoder_of_child()
        for fd in (born.jobs_fd, born.reports_fd):
            os.set_blocking(fd, True)
        self._send(frames.Adopted(os.getpid()))
        self._wait_for(frames.Hello)

    def do(self, run: int) -> None:
        """One job, answered."""
        self._send(frames.RunJob(run, "job", QUEUE, b"null", 0, 0, LIMIT_S))
        answer = self._wait_for(frames.Answer)
        if answer.result is None:
            raise NotMeasured(f"the child answered {answer}")

    def close(self) -> None:
        """Ask it to leave, and see it gone."""
        with contextlib.suppress(BrokenPipeError):
            self._send(frames.Leave())
        os.waitid(os.P_PIDFD, self._born.pidfd, os.WEXITED | os.WNOWAIT)
        exits.reap(self.pid)
        born = self._born
        for fd in (born.pidfd, born.jobs_fd, born.reports_fd, born.output_fd, born.stack_fd):
            os.close(fd)

    def _send(self, message: frames.ToChild) -> None:
        os.write(self._born.jobs_fd, frames.encode_frame(message))

    def _wait_for(self, kind: type[M]) -> M:
        while data := os.read(self._born.reports_fd, READ_BYTES):
            for message in self._decoder.feed(data):
                if isinstance(message, kind):
                    return message
        raise NotMeasured("the child ended")


SCENARIOS = (
    Scenario(
        "child",
        (
            Figure("cpu_us", "child's CPU per no-op job, from frame to frame", "us", at_most(60)),
            Figure("apart_us", "the same with what it costs to wake its processor", "us"),
        ),
        run,
    ),
)

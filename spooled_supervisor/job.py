"""What a job is to us, and the closed set of ways its run can end.

A `Job` is one claimed execution: the same job claimed again is another `Job` with the same `id` and another `lease_id`.
The payload stays the bytes that the service sent; only the child that runs the handler decodes it. An outcome is a
value, decided once, and says all that its report needs. Nothing here does I/O.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

MAX_ERROR_CHARS = 2048
"""The service refuses a longer error text, and an empty one (POST /api/v1/jobs/{id}/fail)."""

MAX_RESULT_BYTES = 1 << 20
"""The service's limit for results over gRPC; kept over REST too, where the body limit is not written down."""


@dataclass(frozen=True, slots=True)
class Job:
    """A claimed job. `requested_at` is when the claim (or the last renewal) was *sent*, on `timing.now`."""

    id: str
    queue_name: str
    lease_id: str | None
    payload: bytes = field(repr=False)
    retry_count: int
    max_retries: int
    timeout_s: float
    lease_duration_s: float
    requested_at: float

    @property
    def key(self) -> tuple[str, str | None]:
        """What everything about a run is keyed by: two leases of one job must never be mixed up."""
        return (self.id, self.lease_id)

    @property
    def is_last_attempt(self) -> bool:
        """Whether a failure now is final at the service (`retry_count` may even be above `max_retries`)."""
        return self.retry_count >= self.max_retries


@dataclass(frozen=True, slots=True)
class Succeeded:
    """The handler returned; `result` is one JSON value in UTF-8."""

    result: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Failed:
    """The handler raised, or returned what is no JSON; the child lives on."""

    error: str
    retryable: bool = True


@dataclass(frozen=True, slots=True)
class TimedOut:
    """The job's deadline passed. `stack` is where the handler stood when it was told to stop, if that is known."""

    limit_s: float
    stack: str = ""


@dataclass(frozen=True, slots=True)
class Crashed:
    """The child went away, or had to be killed for what it did. `cause` is in words, `output` the last it printed."""

    cause: str
    output: str = ""


@dataclass(frozen=True, slots=True)
class Released:
    """Never started, or cut short by us: the job goes back. REST has no release, so it is a failure with retry."""

    why: str


Outcome: TypeAlias = Succeeded | Failed | TimedOut | Crashed | Released


def clip_error(text: str) -> str:
    """`text` as the service takes it: never empty, at most MAX_ERROR_CHARS characters, no lone surrogates, no NUL."""
    clean = text.replace("\x00", "\\x00").encode("utf-8", "backslashreplace").decode("utf-8").strip()
    if len(clean) <= MAX_ERROR_CHARS:
        return clean or "the job failed without a message"
    mark = " [...] "
    head = (MAX_ERROR_CHARS - len(mark)) * 3 // 4
    return clean[:head] + mark + clean[len(clean) - (MAX_ERROR_CHARS - head - len(mark)) :]


def error_text(outcome: Failed | TimedOut | Crashed | Released) -> str:
    """The text that the service is given for an outcome that is no success."""
    match outcome:
        case Failed(error=error):
            return clip_error(error)
        case TimedOut(limit_s=limit_s, stack=stack):
            text = f"timed out: the job ran longer than its limit of {limit_s:g} s and was stopped"
            return clip_error(f"{text}\n{stack}" if stack else text)
        case Crashed(cause=cause, output=output):
            return clip_error(f"{cause}\nlast output:\n{output}" if output else cause)
        case Released(why=why):
            return clip_error(why)

"""What a gRPC status, or an in-band error of ProcessJobs, means: the facts for the table of `answers`.

A gRPC status has fewer words than an HTTP answer: a lost lease and a job that is over share FAILED_PRECONDITION, a rate
limit and a plan quota share RESOURCE_EXHAUSTED, and only the message tells them apart. A proxy's HTTP error comes as a
status too, in the library's words. No I/O, and nothing of grpcio.
"""

from __future__ import annotations

import re

from spooled_supervisor.api.answers import (
    MAX_MESSAGE_CHARS,
    Answer,
    Body,
    Reading,
    error_of,
    masked,
    printable,
    retry_after_s,
)
from spooled_supervisor.errors import ApiRefused, ApiUnavailable, CredentialsRefused, LeaseLost, SupervisorError

STATUSES = {
    "OK": 200,
    "INVALID_ARGUMENT": 400,
    "INVALID_REQUEST": 400,
    "OUT_OF_RANGE": 400,
    "UNAUTHENTICATED": 401,
    "PERMISSION_DENIED": 403,
    "NOT_FOUND": 404,
    "ALREADY_EXISTS": 409,
    "FAILED_PRECONDITION": 409,
    "LEASE_EXPIRED": 409,
    "RATE_LIMIT_EXCEEDED": 429,
    "RESOURCE_EXHAUSTED": 429,
    "INTERNAL": 500,
    "UNKNOWN": 500,
    "DATA_LOSS": 500,
    "UNIMPLEMENTED": 501,
    "UNAVAILABLE": 503,
    "CANCELLED": 503,
    "ABORTED": 503,
    "DEADLINE_EXCEEDED": 504,
}
"""The HTTP status nearest to each (google.rpc.Code): so `answers.TABLE` knows them. ABORTED, CANCELLED pass."""

_LEASE_OVER = re.compile(r"^\W*lease expired|does not match the job's current lease", re.IGNORECASE)
_ALREADY = re.compile(r"\balready (?:been )?([a-z]+)", re.IGNORECASE)
_QUOTA = re.compile(r"\blimit reached\b", re.IGNORECASE)
_TOO_LARGE = re.compile(r"message larger than max", re.IGNORECASE)
_BY_PROXY = re.compile(r"Received http2 header with status|http2 error", re.IGNORECASE)


def facts(code: str, message: str, *, retry_after: str | None = None, secret: str = "") -> Answer:
    """The facts of a status: its name, its details, and `retry-after` of the trailing metadata."""
    status, word = STATUSES.get(code, 500), code
    text = masked(printable(message, MAX_MESSAGE_CHARS), secret)
    wait = retry_after_s(retry_after)
    if status == 409 and _LEASE_OVER.search(message):
        word = "LEASE_EXPIRED"
    elif status == 429 and _TOO_LARGE.search(message):
        status, word = 413, "PAYLOAD_TOO_LARGE"
    elif code == "RESOURCE_EXHAUSTED" and wait is None and _QUOTA.search(message):
        word = "QUOTA_EXCEEDED"
    already = _ALREADY.search(message) if status == 409 else None
    body = Body.FOREIGN if _BY_PROXY.search(message) else Body.CODED
    return Answer(status, body, word, text, already[1].lower() if already else "", wait)


def error_for(reading: Reading, answer: Answer, *, job_id: str = "") -> SupervisorError:
    """The exception for a reading that is no success, in words that do not speak of HTTP."""
    error = error_of(reading, answer, job_id=job_id)
    said = f"gRPC {answer.code}: {answer.message}" if answer.message else f"gRPC {answer.code}"
    match error:
        case CredentialsRefused() | ApiRefused():
            return type(error)(0, answer.code, answer.message)
        case LeaseLost():
            return LeaseLost(job_id, said)
        case ApiUnavailable():
            return ApiUnavailable(said, retry_after_s=error.retry_after_s, rate_limited=error.rate_limited)
        case _:
            return error

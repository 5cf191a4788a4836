"""What an HTTP answer means: one table, from the answer's facts to a `Reading`, and from there to our exceptions.

One status has several meanings. A 409 is a lost lease, or our own earlier success whose answer got lost; a 404 is a
lost lease, a route this service does not have, an unknown worker, or the landed first try of a failure report; a 429 is
a rate limit, which passes, or a plan quota, which does not; a 401 or 403 that the service did not write comes from a
proxy. So the table looks at who wrote the body as well. The first row that fits wins. No I/O.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC
from email.utils import parsedate_to_datetime
from enum import Enum, auto
from typing import Any

import msgspec

from spooled_supervisor import timing
from spooled_supervisor.errors import ApiRefused, ApiUnavailable, CredentialsRefused, LeaseLost, SupervisorError
from spooled_supervisor.job import clip_error

MALFORMED = (msgspec.MsgspecError, ValueError, RecursionError)
"""What decoding JSON may raise: UnicodeDecodeError is a ValueError, and msgspec's own are not in every version."""

MAX_RETRY_AFTER_S = 300.0
MAX_MESSAGE_CHARS = 300
EXCERPT_CHARS = 120


class Reading(Enum):
    """What an answer means for us."""

    OK = auto()  # done, if the body is what it should be
    ALREADY = auto()  # an earlier try of this very request had landed
    LOST = auto()  # the job is not ours any more
    UNKNOWN_WORKER = auto()  # register again
    NO_ROUTE = auto()  # this service does not know the request at all
    REFUSED = auto()  # the same request will be refused again
    CREDENTIALS = auto()  # the API key is not accepted
    RATE_LIMITED = auto()  # refused before it was looked at; the same request may be sent again later
    UNAVAILABLE = auto()  # no usable answer


class Body(Enum):
    """Who wrote the body of an error."""

    CODED = auto()  # the service: {"code": ..., "message": ...}
    LEGACY = auto()  # an older service: {"error": ...} or {"success": false, ...} without a code
    ROUTE = auto()  # the service's router: it knows no such path
    EMPTY = auto()  # an older service's router, or nobody
    FOREIGN = auto()  # a proxy, a login page, another server: HTML, text, or JSON that says nothing we know


@dataclass(frozen=True, slots=True)
class Answer:
    """The facts of one answer. `already` is the status word of "Job is already completed", in lower case."""

    status: int
    body: Body
    code: str = ""
    message: str = ""
    already: str = ""
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table; what is None does not matter."""

    reading: Reading
    statuses: range | frozenset[int]
    operations: frozenset[str] | None = None
    bodies: frozenset[Body] | None = None
    codes: frozenset[str] | None = None
    already: frozenset[str] | None = None
    replay: bool | None = None

    def fits(self, operation: str, answer: Answer, replay: bool) -> bool:
        """Whether this row speaks of this answer."""
        return (
            answer.status in self.statuses
            and (self.operations is None or operation in self.operations)
            and (self.bodies is None or answer.body in self.bodies)
            and (self.codes is None or answer.code in self.codes)
            and (self.already is None or answer.already in self.already)
            and (self.replay is None or replay is self.replay)
        )


def _only(*statuses: int) -> frozenset[int]:
    return frozenset(statuses)


def _of(*names: str) -> frozenset[str]:
    return frozenset(names)


ACKS = _of("complete", "fail")
LEASED = _of("complete", "fail", "renew")
BY_SERVICE = frozenset({Body.CODED, Body.LEGACY})
ANY = range(100, 1000)

TABLE: tuple[Row, ...] = (
    Row(Reading.OK, range(200, 300)),
    # The lease ran out and nobody swept the job yet, or another run of it has a newer lease.
    Row(Reading.LOST, _only(409), LEASED, codes=_of("LEASE_EXPIRED")),
    # The answer to our first try got lost; this is the same report once more.
    Row(Reading.ALREADY, _only(409), _of("complete"), BY_SERVICE, already=_of("completed"), replay=True),
    Row(Reading.ALREADY, _only(409), _of("fail"), BY_SERVICE, already=_of("failed", "deadletter"), replay=True),
    # Cancelled, dead-lettered, or completed by somebody who was not this report. No proxy makes a 409 of its own.
    Row(Reading.LOST, _only(409), LEASED),
    # A landed failure clears the worker, so that its own repetition is not found.
    Row(Reading.ALREADY, _only(404), _of("fail"), BY_SERVICE, replay=True),
    # Swept, claimed by another worker, deleted; older services say it of a landed complete too. Nothing is to be done.
    Row(Reading.LOST, _only(404, 410), LEASED, BY_SERVICE),
    Row(Reading.NO_ROUTE, _only(404, 405), _of("renew", "progress")),
    Row(Reading.UNKNOWN_WORKER, _only(404), _of("heartbeat"), BY_SERVICE | {Body.ROUTE, Body.EMPTY}),
    Row(Reading.ALREADY, _only(404), _of("deregister"), BY_SERVICE | {Body.ROUTE, Body.EMPTY}),
    Row(Reading.CREDENTIALS, _only(401), bodies=frozenset({Body.CODED})),
    Row(Reading.UNAVAILABLE, _only(401)),
    Row(Reading.REFUSED, _only(429), codes=_of("QUOTA_EXCEEDED")),
    Row(Reading.RATE_LIMITED, _only(429)),
    Row(Reading.UNAVAILABLE, _only(408, 425)),
    # Whoever refuses a report, a proxy with its body limit too, will refuse it again until the lease is over.
    Row(Reading.REFUSED, _only(400, 413, 415, 422), ACKS),
    Row(Reading.REFUSED, range(400, 500), bodies=BY_SERVICE),
    Row(Reading.UNAVAILABLE, ANY),
)


def read(operation: str, answer: Answer, *, replay: bool) -> Reading:
    """What `answer` means for `operation`. `replay`: an earlier try of the same request may have been carried out."""
    return next(row.reading for row in TABLE if row.fits(operation, answer, replay))


def error_of(reading: Reading, answer: Answer, *, job_id: str = "") -> SupervisorError:
    """The exception for a reading that is no success."""
    match reading:
        case Reading.LOST:
            return LeaseLost(job_id, _described(answer))
        case Reading.CREDENTIALS:
            return CredentialsRefused(answer.status, answer.code, answer.message)
        case Reading.REFUSED:
            return ApiRefused(answer.status, answer.code or "UNKNOWN", answer.message)
        case Reading.RATE_LIMITED:
            return ApiUnavailable(_described(answer), retry_after_s=answer.retry_after_s, rate_limited=True)
        case _:
            return ApiUnavailable(_described(answer), retry_after_s=answer.retry_after_s)


def failure_for_refused_result(refused: ApiRefused) -> str:
    """The error text that fails a job whose result the service will not take: small, printable, never empty."""
    return clip_error(f"the service refused the job's result: {refused}")


# --- facts ------------------------------------------------------------------------------------------------------------


def facts(
    status: int,
    body: bytes | None,
    *,
    retry_after: str | None = None,
    date: str | None = None,
    location: str | None = None,
    secret: str = "",
) -> Answer:
    """The facts of an answer; `body` is None where it could not be read, `secret` is never repeated in a message.

    `retry_after`, `date` and `location` are the headers of that name (RFC 9110).
    """
    if 200 <= status < 300:
        return Answer(status, Body.CODED)
    known = _error_object(body)
    wait = retry_after_s(retry_after, date=date)
    if known is None:
        kind = Body.EMPTY if body is not None and not body.strip() else Body.FOREIGN
        said = f"redirected to {location}" if location else excerpt(body)
        return Answer(status, kind, message=masked(said, secret), retry_after_s=wait)
    code, text = _first_text(known, "code").upper(), _first_text(known, "message", "error", "details")
    if wait is None:
        wait = _seconds(known.get("retry_after_secs"))
    if status == 429 and retry_after is None and _looks_like_quota(known):
        code = "QUOTA_EXCEEDED"
    kind = Body.CODED if code else Body.LEGACY
    if status == 404 and _NAMES_ROUTE.search(text):
        kind = Body.ROUTE
    already = _ALREADY.search(text)
    return Answer(status, kind, code, masked(text, secret), already[1].lower() if already else "", wait)


_ALREADY = re.compile(r"\balready (?:been )?([a-z]+)", re.IGNORECASE)
_NAMES_ROUTE = re.compile(r"\broute|/api/v1|/heartbeat|/renew-lease|/progress", re.IGNORECASE)
_KEY_LIKE = re.compile(r"\b(?:sp|sk)_(?:live|test)_\w+|\bBearer\s+\S+|\beyJ[\w-]+\.[\w.-]+", re.IGNORECASE)


def _error_object(body: bytes | None) -> dict[str, Any] | None:
    try:
        value = msgspec.json.decode(body or b"")
    except MALFORMED:
        return None
    if not isinstance(value, dict):
        return None
    spoken = isinstance(value.get("code"), str) or value.keys() & {"error", "message", "success"}
    return value if spoken else None


def _first_text(known: dict[str, Any], *keys: str) -> str:
    values = (known.get(key) for key in keys)
    return next((printable(value, MAX_MESSAGE_CHARS) for value in values if isinstance(value, str) and value), "")


def _looks_like_quota(known: dict[str, Any]) -> bool:
    return known.get("error") == "limit_exceeded" or {"resource", "current", "limit"} <= known.keys()


def _described(answer: Answer) -> str:
    words = f"HTTP {answer.status}"
    if answer.code:
        words += f" {answer.code}"
    if answer.body in (Body.EMPTY, Body.FOREIGN):
        words += ", not in the service's words" if answer.body is Body.FOREIGN else " with an empty body"
    return f"{words}: {answer.message}" if answer.message else words


def retry_after_s(value: str | None, *, date: str | None = None) -> float | None:
    """`Retry-After` as seconds within [0, MAX_RETRY_AFTER_S]; None if it is missing or senseless.

    An HTTP date is compared with the answer's own `Date`, so that our wall clock need not be right (RFC 9110, 10.2.3).
    """
    if value is None:
        return None
    try:
        return _seconds(float(value))
    except ValueError:
        at, now = _instant(value), _instant(date)
    if at is None:
        return None
    return _seconds(at - (timing.wall() if now is None else now))


def _instant(value: str | None) -> float | None:
    try:
        at = parsedate_to_datetime(value or "")
    except (ValueError, OverflowError):
        return None
    return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()


def _seconds(value: object) -> float | None:
    if not isinstance(value, (int, float)) or value != value:  # the latter: NaN
        return None
    return float(min(max(value, 0.0), MAX_RETRY_AFTER_S))


# --- words ------------------------------------------------------------------------------------------------------------


def printable(text: str, limit: int) -> str:
    """`text` on one line, without control characters, at most `limit` characters."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text[: 4 * limit]).split())
    return line if len(line) <= limit else line[: limit - 3] + "..."


def excerpt(body: bytes | None) -> str:
    """The beginning of a body that made no sense, for a log line. What begins like JSON may be a job: not shown."""
    if body is None:
        return "content-encoded"
    start = body.lstrip()[:1]
    if start in (b"{", b"[", b'"'):
        return f"{len(body)} bytes that begin like JSON"
    return masked(repr(printable(body[: 4 * EXCERPT_CHARS].decode("utf-8", "replace"), EXCERPT_CHARS)), "")


def masked(text: str, secret: str) -> str:
    """`text` without `secret`, and without anything that looks like an API key or a bearer token."""
    if len(secret) >= 4:  # a shorter one would mask letters everywhere and hide nothing
        text = text.replace(secret, "***")
    return _KEY_LIKE.sub("***", text)

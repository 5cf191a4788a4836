"""The table of answers, row by row as the service documents them, and what is made of each."""

from __future__ import annotations

import json

import pytest

from spooled_supervisor.api.answers import (
    ANY,
    MAX_MESSAGE_CHARS,
    MAX_RETRY_AFTER_S,
    TABLE,
    Answer,
    Body,
    Reading,
    error_of,
    excerpt,
    facts,
    failure_for_refused_result,
    masked,
    read,
    retry_after_s,
)
from spooled_supervisor.errors import ApiRefused, ApiUnavailable, CredentialsRefused, LeaseLost
from spooled_supervisor.job import MAX_ERROR_CHARS

KEY = "sp_live_abcdefghijklmnop"
OPERATIONS = ("register", "heartbeat", "deregister", "claim", "complete", "fail", "renew", "progress")
HTML = b"<html><body>502 Bad Gateway</body></html>"
FIRST, AGAIN = False, True


def coded(status: int, code: str, message: str = "no", **more: object) -> Answer:
    return facts(status, json.dumps({"code": code, "message": message} | more).encode())


EXPIRED = coded(409, "LEASE_EXPIRED", "lease expired")
NOT_MATCHING = coded(409, "LEASE_EXPIRED", "it does not match the job's current lease")
COMPLETED = coded(409, "CONFLICT", "Job is already completed")
CANCELLED = coded(409, "CONFLICT", "Job is already cancelled")
DEAD = coded(409, "CONFLICT", "Job is already deadletter")
NOT_FOUND = coded(404, "NOT_FOUND", "Resource not found")
NO_ROUTE = coded(404, "NOT_FOUND", "No route matches POST /api/v1/jobs/x/renew-lease")
OLD_MISS = facts(404, b'{"success": false, "error": "job_not_found_or_not_owned"}')
EMPTY_404 = facts(404, b"")
EMPTY_405 = facts(405, b"")

ACKS = [
    # situation                                answer        again  complete          fail               renew
    ("live, matching", facts(200, b"{}"), FIRST, "OK", "OK", "OK"),
    ("lease expired, not swept yet", EXPIRED, FIRST, "LOST", "LOST", "LOST"),
    ("lease expired, repeated", EXPIRED, AGAIN, "LOST", "LOST", "LOST"),
    ("another lease of the same worker", NOT_MATCHING, FIRST, "LOST", "LOST", "LOST"),
    ("swept, or another worker's", NOT_FOUND, FIRST, "LOST", "LOST", "LOST"),
    ("the same in the words of an older service", OLD_MISS, FIRST, "LOST", "LOST", "LOST"),
    ("my complete has landed", COMPLETED, AGAIN, "ALREADY", "LOST", "LOST"),
    ("somebody else's complete has landed", COMPLETED, FIRST, "LOST", "LOST", "LOST"),
    ("my fail has landed", NOT_FOUND, AGAIN, "LOST", "ALREADY", "LOST"),
    ("my last fail has landed, worker kept", DEAD, AGAIN, "LOST", "ALREADY", "LOST"),
    ("cancelled", CANCELLED, FIRST, "LOST", "LOST", "LOST"),
    ("cancelled, repeated", CANCELLED, AGAIN, "LOST", "LOST", "LOST"),
    ("a conflict without words", facts(409, b""), FIRST, "LOST", "LOST", "LOST"),
    ("gone", coded(410, "GONE"), FIRST, "LOST", "LOST", "LOST"),
    ("no such route", NO_ROUTE, FIRST, "UNAVAILABLE", "UNAVAILABLE", "NO_ROUTE"),
    ("no such route, older service", EMPTY_404, FIRST, "UNAVAILABLE", "UNAVAILABLE", "NO_ROUTE"),
    ("no such method", EMPTY_405, FIRST, "UNAVAILABLE", "UNAVAILABLE", "NO_ROUTE"),
    ("a proxy knows no such path", facts(404, HTML), AGAIN, "UNAVAILABLE", "UNAVAILABLE", "NO_ROUTE"),
    ("too large for the service", coded(413, "PAYLOAD_TOO_LARGE"), FIRST, "REFUSED", "REFUSED", "REFUSED"),
    ("too large for a proxy", facts(413, HTML), FIRST, "REFUSED", "REFUSED", "UNAVAILABLE"),
    ("not JSON to the service", coded(400, "INVALID_JSON"), FIRST, "REFUSED", "REFUSED", "REFUSED"),
    ("a field is missing", coded(422, "VALIDATION_ERROR"), FIRST, "REFUSED", "REFUSED", "REFUSED"),
    ("out of the key's scope", coded(403, "ACCESS_DENIED"), FIRST, "REFUSED", "REFUSED", "REFUSED"),
    ("a firewall's word", facts(403, HTML), FIRST, "UNAVAILABLE", "UNAVAILABLE", "UNAVAILABLE"),
]


@pytest.mark.parametrize(("situation", "answer", "again", "complete", "fail", "renew"), ACKS, ids=[r[0] for r in ACKS])
def test_what_an_ack_or_a_renewal_is_answered(
    situation: str, answer: Answer, again: bool, complete: str, fail: str, renew: str
) -> None:
    found = [read(operation, answer, replay=again).name for operation in ("complete", "fail", "renew")]
    assert found == [complete, fail, renew], situation


EVERYWHERE = [
    ("no key, or a revoked one", coded(401, "UNAUTHORIZED"), Reading.CREDENTIALS),
    ("a proxy wants a login", facts(401, HTML), Reading.UNAVAILABLE),
    ("JSON of somebody else", facts(401, b'{"detail": "who are you"}'), Reading.UNAVAILABLE),
    ("request rate", coded(429, "RATE_LIMIT_EXCEEDED"), Reading.RATE_LIMITED),
    ("request rate, older service", facts(429, b'{"error": "rate_limit_exceeded", "limit": 10}'), Reading.RATE_LIMITED),
    ("a proxy's rate limit", facts(429, HTML, retry_after="7"), Reading.RATE_LIMITED),
    ("a plan quota", coded(429, "QUOTA_EXCEEDED"), Reading.REFUSED),
    ("a quota by its looks", facts(429, b'{"error": "limit_exceeded", "resource": "workers"}'), Reading.REFUSED),
    ("quota-like, with a hint", facts(429, b'{"error": "limit_exceeded"}', retry_after="1"), Reading.RATE_LIMITED),
    ("request time-out", coded(408, "REQUEST_TIMEOUT"), Reading.UNAVAILABLE),
    ("a fault", coded(500, "INTERNAL_ERROR"), Reading.UNAVAILABLE),
    ("a proxy's fault", facts(502, HTML), Reading.UNAVAILABLE),
    ("a redirect", facts(302, b"", location="/login"), Reading.UNAVAILABLE),
    ("not modified", facts(304, b""), Reading.UNAVAILABLE),
    ("no status of HTTP", facts(799, b""), Reading.UNAVAILABLE),
]


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(("situation", "answer", "reading"), EVERYWHERE, ids=[row[0] for row in EVERYWHERE])
def test_what_is_answered_to_anything(situation: str, answer: Answer, reading: Reading, operation: str) -> None:
    for again in (FIRST, AGAIN):
        assert read(operation, answer, replay=again) is reading, situation


@pytest.mark.parametrize(
    ("operation", "answer", "reading"),
    [
        ("heartbeat", NOT_FOUND, Reading.UNKNOWN_WORKER),
        ("heartbeat", EMPTY_404, Reading.UNKNOWN_WORKER),
        ("heartbeat", facts(404, HTML), Reading.UNAVAILABLE),
        ("deregister", NOT_FOUND, Reading.ALREADY),
        ("deregister", facts(404, HTML), Reading.UNAVAILABLE),
        ("register", coded(409, "CONFLICT", "worker id is another organization's"), Reading.REFUSED),
        ("register", coded(422, "VALIDATION_ERROR"), Reading.REFUSED),
        ("register", facts(400, HTML), Reading.UNAVAILABLE),
        ("claim", coded(403, "ACCESS_DENIED"), Reading.REFUSED),
        ("claim", facts(413, HTML), Reading.UNAVAILABLE),
        ("claim", NOT_FOUND, Reading.REFUSED),
        ("progress", NO_ROUTE, Reading.NO_ROUTE),
        ("progress", EMPTY_405, Reading.NO_ROUTE),
        ("progress", NOT_FOUND, Reading.NO_ROUTE),
    ],
)
def test_what_single_operations_are_answered(operation: str, answer: Answer, reading: Reading) -> None:
    assert read(operation, answer, replay=FIRST) is reading


def test_every_row_is_the_first_for_something_and_the_last_takes_the_rest() -> None:
    assert TABLE[-1].statuses == ANY
    samples = [row[1] for row in ACKS] + [row[1] for row in EVERYWHERE]
    first = {
        next(n for n, row in enumerate(TABLE) if row.fits(operation, answer, again))
        for answer in samples
        for operation in OPERATIONS
        for again in (FIRST, AGAIN)
    }
    assert first == set(range(len(TABLE)))


@pytest.mark.parametrize("code", ["lease_expired", "Lease_Expired", "LEASE_EXPIRED"])
def test_codes_are_compared_without_case(code: str) -> None:
    assert read("complete", coded(409, code, "Job is already completed"), replay=AGAIN) is Reading.LOST


@pytest.mark.parametrize(
    "words", ["Job is already completed", "job already COMPLETED.", "Job has already been completed"]
)
def test_already_completed_is_read_from_the_text(words: str) -> None:
    for body in ({"code": "CONFLICT", "message": words}, {"error": words}):
        assert read("complete", facts(409, json.dumps(body).encode()), replay=AGAIN) is Reading.ALREADY


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (b'{"code": "X", "message": "y"}', Body.CODED),
        (b'{"error": "x"}', Body.LEGACY),
        (b'{"success": false}', Body.LEGACY),
        (b'{"code": 7, "message": "y"}', Body.LEGACY),
        (b'{"detail": "x"}', Body.FOREIGN),
        (b"", Body.EMPTY),
        (b" \n", Body.EMPTY),
        (b"null", Body.FOREIGN),
        (b"[]", Body.FOREIGN),
        (b'"\xff"', Body.FOREIGN),
        (b"[" * 100_000, Body.FOREIGN),
        (HTML, Body.FOREIGN),
        (None, Body.FOREIGN),
    ],
)
def test_who_wrote_the_body(body: bytes | None, kind: Body) -> None:
    assert facts(400, body).body is kind


# --- exceptions ------------------------------------------------------------------------------------------------------


def test_readings_become_exceptions() -> None:
    lost = error_of(Reading.LOST, EXPIRED, job_id="j1")
    assert isinstance(lost, LeaseLost)
    assert str(lost) == "job j1: lease lost: HTTP 409 LEASE_EXPIRED: lease expired"
    refused = error_of(Reading.REFUSED, coded(413, "PAYLOAD_TOO_LARGE", "result too large"))
    assert isinstance(refused, ApiRefused)
    assert (refused.status, refused.code, refused.message) == (413, "PAYLOAD_TOO_LARGE", "result too large")
    assert isinstance(error_of(Reading.CREDENTIALS, coded(401, "UNAUTHORIZED")), CredentialsRefused)
    limited = error_of(Reading.RATE_LIMITED, coded(429, "RATE_LIMIT_EXCEEDED", retry_after_secs=4))
    assert isinstance(limited, ApiUnavailable)
    assert (limited.rate_limited, limited.retry_after_s) == (True, 4.0)


@pytest.mark.parametrize("reading", [Reading.UNAVAILABLE, Reading.NO_ROUTE, Reading.UNKNOWN_WORKER])
def test_other_readings_are_unavailable(reading: Reading) -> None:
    error = error_of(reading, facts(503, HTML, retry_after="9"))
    assert isinstance(error, ApiUnavailable)
    assert (error.rate_limited, error.retry_after_s) == (False, 9.0)
    assert error.reason == "HTTP 503, not in the service's words: '<html><body>502 Bad Gateway</body></html>'"


def test_a_redirect_says_where_to() -> None:
    assert "redirected to /login" in str(error_of(Reading.UNAVAILABLE, facts(302, b"", location="/login")))


def test_a_refused_result_has_a_small_printable_failure_text() -> None:
    text = failure_for_refused_result(
        ApiRefused(422, "VALIDATION_ERROR", facts(422, b'{"code":"V","message":"bad \\u0000 byte"}').message)
    )
    assert text == "the service refused the job's result: HTTP 422 VALIDATION_ERROR: bad byte"
    assert len(failure_for_refused_result(ApiRefused(413, "", "x" * 9999))) <= MAX_ERROR_CHARS


# --- Retry-After -----------------------------------------------------------------------------------------------------

NOON = "Wed, 21 Oct 2026 12:00:00 GMT"


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("3", 3.0),
        (" 3 ", 3.0),
        ("0", 0.0),
        ("1.5", 1.5),
        ("-5", 0.0),
        ("1e9", MAX_RETRY_AFTER_S),
        ("inf", MAX_RETRY_AFTER_S),
        ("9" * 400, MAX_RETRY_AFTER_S),
        ("nan", None),
        ("abc", None),
        ("", None),
        (None, None),
        ("Wed, 21 Oct 2026 12:00:20 GMT", 20.0),
        ("Wed, 21 Oct 2026 12:00:20 -0000", 20.0),
        ("Wed, 21 Oct 2026 11:00:00 GMT", 0.0),
        ("Wed, 21 Oct 2099 07:28:00 GMT", MAX_RETRY_AFTER_S),
        ("Wed, 99 Oct 2099 07:28:00 GMT", None),
    ],
)
def test_retry_after(value: str | None, seconds: float | None) -> None:
    assert retry_after_s(value, date=NOON) == seconds


@pytest.mark.parametrize("date", [None, "yesterday"])
def test_without_a_date_of_its_own_the_wall_clock_is_taken(date: str | None) -> None:
    assert retry_after_s("Wed, 21 Oct 2099 07:28:00 GMT", date=date) == MAX_RETRY_AFTER_S
    assert retry_after_s("Wed, 21 Oct 2015 07:28:00 GMT", date=date) == 0.0


@pytest.mark.parametrize(("said", "seconds"), [(4, 4.0), ("4", None), (None, None), (-1, 0.0)])
def test_the_hint_of_the_body_is_second_choice(said: object, seconds: float | None) -> None:
    body = json.dumps({"code": "RATE_LIMIT_EXCEEDED", "retry_after_secs": said}).encode()
    assert facts(429, body).retry_after_s == seconds
    assert facts(429, body, retry_after="2").retry_after_s == 2.0


# --- words -----------------------------------------------------------------------------------------------------------


def test_messages_are_short_and_on_one_line() -> None:
    message = coded(400, "X", "a\n\x00b " + "c" * 5000).message
    assert message.startswith("a b ccc")
    assert len(message) == MAX_MESSAGE_CHARS


@pytest.mark.parametrize(
    "text", [f"Invalid key {KEY}", "header Bearer abc.def", "token eyJhbGciOi.eyJzdWIi.sig", "my own odd secret"]
)
def test_no_secret_gets_into_a_message(text: str) -> None:
    for answer in (
        facts(400, json.dumps({"code": "X", "message": text}).encode(), secret="my own odd secret"),
        facts(502, f"<p>{text}</p>".encode(), secret="my own odd secret"),
        facts(302, b"", location=f"/login?{text}", secret="my own odd secret"),
    ):
        assert "***" in answer.message
        assert not any(word in answer.message for word in (KEY, "abc.def", "eyJzdWIi", "odd secret"))


def test_a_hardly_secret_secret_does_not_eat_the_text() -> None:
    assert masked("a banana", "a") == "a banana"


@pytest.mark.parametrize("body", [b'{"jobs": [{"payload": "secret"', b'[{"payload": "secret"}]', b' "secret"'])
def test_what_may_be_a_job_is_not_shown(body: bytes) -> None:
    assert excerpt(body) == f"{len(body)} bytes that begin like JSON"


def test_excerpts_are_short_and_printable() -> None:
    assert excerpt(b"\xff\x00 hello\r\n" + b"x" * 10_000).startswith("'\ufffd hello xxx")
    assert len(excerpt(b"x" * 10_000)) < 130
    assert excerpt(None) == "content-encoded"

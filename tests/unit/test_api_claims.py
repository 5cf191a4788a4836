"""Claim answers: what is documented, what is merely odd, and what must not cost the other jobs of the answer."""

from __future__ import annotations

import json
import sys
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spooled_supervisor.api.claims import read_claim
from spooled_supervisor.api.values import Claim
from spooled_supervisor.errors import ApiUnavailable
from spooled_supervisor.job import Job

RECORD: dict[str, Any] = {
    "id": "0191bd70-1111-7000-8000-000000000001",
    "queue_name": "emails",
    "payload": {"to": "a"},
    "retry_count": 1,
    "max_retries": 3,
    "timeout_seconds": 60,
    "lease_expires_at": "2026-01-01T00:00:00Z",
    "lease_id": "0191bd70-2222-7000-8000-000000000002-0191bd70",
}


def read(*records: Any) -> Claim:
    return read_raw(json.dumps({"jobs": list(records)}).encode())


def read_raw(body: bytes) -> Claim:
    return read_claim(body, queue_name="asked", lease_duration_s=30.0, requested_at=1000.0)


def only_job(*records: Any) -> Job:
    claim = read(*records)
    assert not claim.unreadable
    (job,) = claim.jobs
    return job


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in RECORD.items() if key != name}


def test_a_documented_record() -> None:
    assert only_job(RECORD) == Job(
        id=RECORD["id"],
        queue_name="emails",
        lease_id=RECORD["lease_id"],
        payload=b'{"to": "a"}',
        retry_count=1,
        max_retries=3,
        timeout_s=60.0,
        lease_duration_s=30.0,
        requested_at=1000.0,
    )


def test_nothing_to_do() -> None:
    assert read() == Claim()


def test_unknown_fields_are_skipped_and_more_jobs_than_asked_are_all_given() -> None:
    claim = read(*(RECORD | {"id": f"j{n}", "status": "processing", "tags": {"a": [1]}} for n in range(7)))
    assert [job.id for job in claim.jobs] == [f"j{n}" for n in range(7)]


def test_the_first_of_two_equal_ids_is_kept() -> None:
    claim = read(RECORD | {"lease_id": "a"}, RECORD | {"lease_id": "b"}, RECORD | {"id": "other"})
    assert [(job.id, job.lease_id) for job in claim.jobs] == [(RECORD["id"], "a"), ("other", RECORD["lease_id"])]


@pytest.mark.parametrize(
    "payload", ["null", "[]", '"x"', "0", '{"a":  [1, 2.50]}', "9" * 5000, "1e400", '"\\u00e9"', "[" * 500 + "]" * 500]
)
def test_a_payload_stays_the_bytes_it_was(payload: str) -> None:
    body = json.dumps({"jobs": [RECORD | {"payload": "HERE"}]}).replace('"HERE"', payload).encode()
    (job,) = read_raw(body).jobs
    assert job.payload == payload.encode()


def test_a_payload_does_not_keep_the_answer_alive() -> None:
    big = b'{"jobs": [' + json.dumps(RECORD).encode() + b"]" + b" " * 100_000 + b"}"
    before = sys.getrefcount(big)
    claim = read_raw(big)
    assert type(claim.jobs[0].payload) is bytes
    assert sys.getrefcount(big) == before


@pytest.mark.parametrize(
    ("given_id", "text"),
    [
        ('"007"', "007"),
        ("9007199254740993", "9007199254740993"),
        ("-5", "-5"),
        ("9" * 60, "9" * 60),
        ('"\\u00e9/.."', "é/.."),
    ],
)
def test_ids_are_kept_as_given(given_id: str, text: str) -> None:
    body = json.dumps({"jobs": [RECORD | {"id": "HERE", "lease_id": "HERE"}]}).replace('"HERE"', given_id).encode()
    (job,) = read_raw(body).jobs
    assert (job.id, job.lease_id) == (text, text)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"timeout_seconds": None}, {"timeout_s": 300.0}),
        ({"timeout_seconds": 0}, {"timeout_s": 300.0}),
        ({"timeout_seconds": -3}, {"timeout_s": 300.0}),
        ({"timeout_seconds": 0.5}, {"timeout_s": 0.5}),
        ({"timeout_seconds": 10**9}, {"timeout_s": 86400.0}),
        ({"retry_count": 9, "max_retries": 3}, {"retry_count": 9, "is_last_attempt": True}),
        ({"retry_count": None}, {"retry_count": 0}),
        ({"retry_count": 2.0}, {"retry_count": 2}),
        ({"retry_count": -1}, {"retry_count": 0}),
        ({"max_retries": None}, {"max_retries": 3}),
        ({"max_retries": 0}, {"max_retries": 0, "is_last_attempt": True}),
        ({"queue_name": None}, {"queue_name": "asked"}),
        ({"queue_name": ""}, {"queue_name": "asked"}),
        ({"queue_name": "another"}, {"queue_name": "another"}),
        ({"lease_id": None}, {"lease_id": None}),
        ({"lease_id": ""}, {"lease_id": None}),
        ({"lease_id": "l" * 255}, {"lease_id": "l" * 255}),
    ],
)
def test_odd_values_that_have_a_plain_meaning(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    job = only_job(RECORD | fields)
    assert {name: getattr(job, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("missing", "name", "value"),
    [
        ("timeout_seconds", "timeout_s", 300.0),
        ("retry_count", "retry_count", 0),
        ("max_retries", "max_retries", 3),
        ("queue_name", "queue_name", "asked"),
        ("lease_id", "lease_id", None),
        ("payload", "payload", b"null"),
        ("lease_expires_at", "id", RECORD["id"]),
    ],
)
def test_missing_fields(missing: str, name: str, value: object) -> None:
    assert getattr(only_job(without(missing)), name) == value


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"retry_count": "2"}, "retry_count is not a whole number"),
        ({"retry_count": 1.5}, "retry_count is not a whole number"),
        ({"retry_count": True}, "retry_count is not a whole number"),
        ({"max_retries": []}, "max_retries is not a whole number"),
        ({"timeout_seconds": "60"}, "timeout_seconds is not a number"),
        ({"timeout_seconds": True}, "timeout_seconds is not a number"),
        ({"queue_name": 5}, "queue_name is not a text"),
        ({"queue_name": {}, "max_retries": "x"}, "queue_name is not a text; max_retries is not a whole number"),
    ],
)
def test_a_bad_record_is_handed_up_by_name_and_costs_nobody_else(fields: dict[str, Any], problem: str) -> None:
    claim = read(RECORD | {"id": "before"}, RECORD | fields, RECORD | {"id": "after"})
    assert [job.id for job in claim.jobs] == ["before", "after"]
    (bad,) = claim.unreadable
    assert (bad.job.id, bad.job.lease_id) == (RECORD["id"], RECORD["lease_id"])
    assert bad.reason == f"the service's record of this job cannot be used: {problem}"


def test_a_number_out_of_all_ranges_is_a_bad_record() -> None:
    body = json.dumps({"jobs": [RECORD | {"retry_count": "HERE"}, RECORD | {"id": "b"}]})
    for number in ("9" * 5000, "1e400"):
        claim = read_raw(body.replace('"HERE"', number).encode())
        assert [bad.job.id for bad in claim.unreadable] == [RECORD["id"]]
        assert [job.id for job in claim.jobs] == ["b"]


@pytest.mark.parametrize(
    "nameless", [5, None, [], "x", {}, RECORD | {"id": None}, RECORD | {"id": ""}, RECORD | {"id": []}]
)
def test_a_record_without_a_name_is_left_to_its_lease(nameless: Any) -> None:
    claim = read(RECORD, nameless)
    assert [job.id for job in claim.jobs] == [RECORD["id"]]
    assert claim.unreadable == ()
    with pytest.raises(ApiUnavailable, match="lists 1 jobs, none with a usable id"):
        read(nameless)


def test_a_record_whose_lease_cannot_be_told_is_left_to_it() -> None:
    assert [job.id for job in read(RECORD | {"lease_id": {}}, RECORD | {"id": "b"}).jobs] == ["b"]


def test_bad_utf8_costs_its_own_job_only() -> None:
    good, bad = json.dumps(RECORD).encode(), json.dumps(RECORD | {"id": "b", "queue_name": "HERE"}).encode()
    claim = read_raw(b'{"jobs": [' + good + b"," + bad.replace(b"HERE", b"\xff") + b"]}")
    assert [job.id for job in claim.jobs] == [RECORD["id"]]
    assert [bad.job.id for bad in claim.unreadable] == ["b"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b'"\xff"',
        b'{"jobs": null}',
        b'{"jobs": {}}',
        b'{"jobs": 5}',
        b'{"jobs": [',
        b'{"jobs": []} trailing',
        b"<html>sign in</html>",
        b"\x1f\x8b\x08",
        b'{"jobs": [' + b"[" * 100_000,
    ],
)
def test_an_answer_without_sense(body: bytes) -> None:
    with pytest.raises(ApiUnavailable, match="makes no sense"):
        read_raw(body)


def test_a_record_without_a_value_that_json_knows_has_no_id() -> None:
    with pytest.raises(ApiUnavailable, match="lists 1 jobs, none with a usable id"):
        read_raw(b'{"jobs": [{"id": NaN}]}')


@pytest.mark.parametrize(
    "payload",
    [b"[" * 5000 + b"]" * 5000, b'{"a": [' * 2000 + b"]}" * 2000, b'"\\ud800"', b'{"\\"}],[{": "\\ud800 ] } , \\" {"}'],
    ids=["a deep array", "deep objects", "half a surrogate pair", "brackets in strings"],
)
def test_a_payload_that_the_decoder_refuses_costs_nobody_else(payload: bytes) -> None:
    """The child decodes it, or fails the job."""
    odd = json.dumps(RECORD | {"id": "odd", "payload": "HERE"}).encode().replace(b'"HERE"', payload)
    good = json.dumps(RECORD | {"id": "good"}).encode()
    claim = read_raw(b' { "more": [1, {"a": "]}"}], "jobs" : [' + good + b", " + odd + b" ,\n" + good + b"] } ")
    assert [job.id for job in claim.jobs] == ["good", "odd"]
    assert claim.jobs[1].payload == payload
    assert claim.jobs[1].lease_id == RECORD["lease_id"]
    assert not claim.unreadable


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({"timeout_seconds": 10**400}, ("timeout_s", 86400.0)),
        ({"retry_count": 2**63}, ("retry_count", 2**31 - 1)),
        ({"max_retries": 10**30}, ("max_retries", 2**31 - 1)),
    ],
)
def test_a_number_beyond_what_anybody_stores_is_cut(fields: dict[str, Any], found: tuple[str, float]) -> None:
    """What is stored and computed with here has its limits, and would raise."""
    (job,) = read(RECORD | fields).jobs
    assert getattr(job, found[0]) == found[1]


def test_no_payload_gets_into_the_reason() -> None:
    with pytest.raises(ApiUnavailable) as caught:
        read_raw(b'{"jobs": [{"payload": "very private"')
    assert "private" not in str(caught.value)


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
records = st.dictionaries(st.sampled_from(sorted(RECORD)), anything).map(lambda changes: RECORD | changes) | anything


@given(st.lists(records, max_size=4) | anything)
def test_whatever_json_comes_only_our_error_is_raised(jobs: Any) -> None:
    try:
        claim = read_raw(msgspec.json.encode({"jobs": jobs}))
    except ApiUnavailable:
        return
    for job in (*claim.jobs, *(bad.job for bad in claim.unreadable)):
        assert job.id
        assert job.lease_id != ""
        assert 0 < job.timeout_s <= 86400
        assert job.retry_count >= 0
        msgspec.json.decode(job.payload)

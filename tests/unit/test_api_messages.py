"""The bodies that are sent, for both dialects at once, and what good answers are taken for."""

from __future__ import annotations

import json
from typing import Any

import pytest

from spooled_supervisor.api import messages
from spooled_supervisor.api.values import HeartbeatAnswer, Registration, Settled
from spooled_supervisor.errors import ApiUnavailable, ProtocolError
from spooled_supervisor.job import MAX_ERROR_CHARS, Job

WORKER = "w-1"


def job(lease_id: str | None = "l-1", lease_duration_s: float = 30.0) -> Job:
    return Job(
        id="j-1",
        queue_name="q",
        lease_id=lease_id,
        payload=b"null",
        retry_count=0,
        max_retries=3,
        timeout_s=300.0,
        lease_duration_s=lease_duration_s,
        requested_at=0.0,
    )


def register(**fields: Any) -> dict[str, Any]:
    usual: dict[str, Any] = {
        "queue_names": ["emails", "images"],
        "hostname": "host-1",
        "worker_type": "python",
        "version": "1.2.3",
        "max_concurrency": 4,
        "metadata": {"region": "eu"},
    }
    body: dict[str, Any] = json.loads(messages.register_body(WORKER, **(usual | fields)))
    return body


def heartbeat(**fields: Any) -> dict[str, Any]:
    usual: dict[str, Any] = {
        "status": "healthy",
        "current_jobs": 3,
        "cpu_percent": 12.34,
        "memory_percent": 56.78,
        "metadata": None,
    }
    body: dict[str, Any] = json.loads(messages.heartbeat_body(**(usual | fields)))
    return body


# --- what is sent ----------------------------------------------------------------------------------------------------


def test_register_speaks_both_dialects() -> None:
    assert register() == {
        "id": WORKER,
        "worker_id": WORKER,
        "queue_name": "emails",
        "queue_names": ["emails", "images"],
        "max_concurrent_jobs": 4,
        "max_concurrency": 4,
        "hostname": "host-1",
        "worker_type": "python",
        "version": "1.2.3",
        "metadata": {"region": "eu"},
    }


@pytest.mark.parametrize(("places", "sent"), [(-1, 1), (0, 1), (1, 1), (100, 100), (101, 100), (10**30, 100)])
def test_register_keeps_the_number_of_places_in_range(places: int, sent: int) -> None:
    body = register(max_concurrency=places)
    assert (body["max_concurrency"], body["max_concurrent_jobs"]) == (sent, sent)


@pytest.mark.parametrize(
    ("hostname", "sent"),
    [
        ("host.example_1-a.com", "host.example_1-a.com"),
        ("a host/with spaces", "a-host-with-spaces"),
        ("-.host.-", "host"),
        ("höst", "h-st"),
        ("\udcff\x00", "unknown"),
        ("", "unknown"),
        ("...", "unknown"),
        ("h" * 300, "h" * 255),
        ("h" * 254 + ".example", "h" * 254),
    ],
)
def test_register_cleans_the_hostname(hostname: str, sent: str) -> None:
    assert register(hostname=hostname)["hostname"] == sent


def test_register_cuts_words_and_drops_metadata_that_cannot_be_sent() -> None:
    body = register(worker_type="t" * 60, version="v\n" * 60, metadata={"x": "y" * messages.MAX_METADATA_BYTES})
    assert len(body["worker_type"]) == len(body["version"]) == messages.MAX_WORD_CHARS
    assert "metadata" not in body


def test_register_leaves_empty_words_out() -> None:
    assert register(worker_type="", version=" \n").keys() & {"worker_type", "version"} == set()


def nested() -> dict[str, Any]:
    deep: dict[str, Any] = {}
    for _ in range(100_000):
        deep = {"a": deep}
    return deep


@pytest.mark.parametrize("metadata", [{}, None, {"a": object()}, {"a": "\ud800"}, {"a": 2**70, 1: object}])
def test_metadata_that_is_nothing_or_no_json_is_left_out(metadata: Any) -> None:
    assert "metadata" not in heartbeat(metadata=metadata)


def test_bottomless_metadata_is_left_out() -> None:
    assert "metadata" not in heartbeat(metadata=nested())


def test_heartbeat_says_all_that_either_dialect_knows() -> None:
    assert heartbeat(metadata={"host_cpu_percent": 3.5}) == {
        "status": "healthy",
        "current_jobs": 3,
        "cpu_percent": 12.3,
        "memory_percent": 56.8,
        "metadata": {"host_cpu_percent": 3.5},
    }


@pytest.mark.parametrize(
    ("value", "sent"), [(-1.0, 0.0), (0, 0), (99.96, 100.0), (1e9, 100.0), (float("nan"), 0.0), (float("inf"), 0.0)]
)
def test_heartbeat_keeps_percentages_in_range(value: float, sent: float) -> None:
    body = heartbeat(cpu_percent=value, memory_percent=value)
    assert (body["cpu_percent"], body["memory_percent"]) == (sent, sent)


@pytest.mark.parametrize(("value", "sent"), [(-1, 0), (0, 0), (1000, 1000), (1001, 1000)])
def test_heartbeat_keeps_the_number_of_jobs_in_range(value: int, sent: int) -> None:
    assert heartbeat(current_jobs=value)["current_jobs"] == sent


def test_claim_sends_all_four_fields() -> None:
    assert json.loads(messages.claim_body(WORKER, "emails", limit=3, lease_duration_s=30)) == {
        "queue_name": "emails",
        "worker_id": WORKER,
        "limit": 3,
        "lease_duration_secs": 30,
    }


def test_complete_puts_the_result_in_as_it_is() -> None:
    raw = b'{"n": 1.0, "big": 123456789012345678901234567890, "u": "\\u00e9"}'
    assert messages.complete_body(WORKER, job(), raw) == b'{"worker_id":"w-1","lease_id":"l-1","result":' + raw + b"}"


@pytest.mark.parametrize("retryable", [True, False])
def test_fail_says_it_in_every_way(retryable: bool) -> None:
    hints = {} if retryable else {"no_retry": True, "retry": False}
    assert (
        json.loads(messages.fail_body(WORKER, job(), "boom", retryable=retryable))
        == {
            "worker_id": WORKER,
            "lease_id": "l-1",
            "error": "boom",
            "reason": "boom",
        }
        | hints
    )


@pytest.mark.parametrize("text", ["", "  \n", "x" * 5000, "\x00", "\ud800 broken", "\U0001f600" * 3000])
def test_fail_always_has_a_text_that_the_service_takes(text: str) -> None:
    body = json.loads(messages.fail_body(WORKER, job(), text, retryable=True))
    assert 1 <= len(body["error"]) <= MAX_ERROR_CHARS
    assert "\x00" not in body["error"]
    assert body["reason"] == body["error"]


def test_renew_serves_both_routes() -> None:
    assert json.loads(messages.renew_body(WORKER, job())) == {
        "worker_id": WORKER,
        "lease_id": "l-1",
        "lease_duration_secs": 30,
        "extension_seconds": 30,
    }


def test_without_a_lease_id_none_is_sent() -> None:
    bare = job(lease_id=None)
    for body in (
        messages.complete_body(WORKER, bare, b"null"),
        messages.fail_body(WORKER, bare, "x", retryable=True),
        messages.renew_body(WORKER, bare),
    ):
        assert "lease_id" not in json.loads(body)


@pytest.mark.parametrize(("asked", "sent"), [(0.2, 1), (5, 5), (29.5, 30), (30.0, 30), (3600, 3600), (9999, 3600)])
def test_leases_are_whole_seconds_in_range(asked: float, sent: int) -> None:
    assert messages.lease_seconds(asked) == sent


@pytest.mark.parametrize(("message", "sent"), [(None, {}), ("", {"message": ""}), ("a\nb\ud800", {"message": "a b?"})])
def test_progress(message: str | None, sent: dict[str, str]) -> None:
    assert json.loads(messages.progress_body(150.0, message)) == {"progress": 100.0} | sent


def test_a_long_progress_message_is_cut() -> None:
    assert len(json.loads(messages.progress_body(1.0, "x" * 9999))["message"]) == messages.MAX_PROGRESS_CHARS


@pytest.mark.parametrize("raw", [b"null", b" 1 ", b'"\xc3\xa9"', b'{"a":[1,2.5,true]}', b'"\\ud800\\udc00"'])
def test_json_is_json(raw: bytes) -> None:
    messages.check_json(raw)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"1 2",
        b'1},"retry":{',
        b"NaN",
        b'"\xff"',
        b'{"\xed\xa0\x80":1}',
        b'"\\ud800"',
        b'"\x01"',
        b"[1,]",
        b"[" * 100_000 + b"]" * 100_000,
        b"9" * 5000,
    ],
)
def test_anything_else_is_not(raw: bytes) -> None:
    with pytest.raises(ProtocolError, match="no JSON value"):
        messages.check_json(raw)


# --- what is heard ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "registration"),
    [
        (
            {
                "id": "w-1",
                "status": "healthy",
                "registered_at": "2024-01-15T10:00:00Z",
                "heartbeat_interval_seconds": 15,
            },
            Registration("w-1", 15.0),
        ),
        (
            {"id": "w-1", "queue_name": "q", "lease_duration_secs": 30, "heartbeat_interval_secs": 12},
            Registration("w-1", 12.0),
        ),
        ({"id": "x", "heartbeat_interval_secs": 5, "heartbeat_interval_seconds": 9}, Registration("x", 5.0)),
        ({"worker_id": "minted"}, Registration("minted", 10.0)),
        ({"id": 7, "heartbeat_interval_secs": 0, "heartbeat_interval_seconds": 20}, Registration("7", 20.0)),
        ({"id": "x", "heartbeat_interval_secs": "soon"}, Registration("x", 10.0)),
        ({"id": "x", "heartbeat_interval_secs": True}, Registration("x", 10.0)),
        ({"id": "x", "heartbeat_interval_secs": 0.001}, Registration("x", messages.MIN_HEARTBEAT_S)),
        ({"id": "x", "heartbeat_interval_secs": 1e9}, Registration("x", messages.MAX_HEARTBEAT_S)),
    ],
)
def test_registration_in_both_dialects(answer: dict[str, Any], registration: Registration) -> None:
    assert messages.read_registration(json.dumps(answer).encode()) == registration


@pytest.mark.parametrize(
    "body", [b"", b"null", b"[]", b"{}", b'{"id": null}', b'{"id": {}}', b"<html>", b'"\xff"', b"1"]
)
def test_a_registration_without_sense(body: bytes) -> None:
    with pytest.raises(ApiUnavailable):
        messages.read_registration(body)


@pytest.mark.parametrize(
    ("body", "answer"),
    [
        (b"", HeartbeatAnswer(known=True)),
        (b"OK", HeartbeatAnswer(known=True)),
        (b"null", HeartbeatAnswer(known=True)),
        (b"[]", HeartbeatAnswer(known=True)),
        (b"{}", HeartbeatAnswer(known=True)),
        (
            b'{"acknowledged": true, "next_heartbeat_seconds": 10, "commands": []}',
            HeartbeatAnswer(known=True, next_heartbeat_s=10.0),
        ),
        (b'{"acknowledged": false}', HeartbeatAnswer(known=False)),
        (b'{"should_drain": true}', HeartbeatAnswer(known=True, should_drain=True)),
        (b'{"should_drain": "yes"}', HeartbeatAnswer(known=True)),
        (b'{"next_heartbeat_seconds": -1}', HeartbeatAnswer(known=True)),
        (b'{"next_heartbeat_seconds": 1e300}', HeartbeatAnswer(known=True, next_heartbeat_s=60.0)),
        (
            b'{"commands": ["drain", {"command": "stop"}, {"type": "pause"}, {"name": "resume"}]}',
            HeartbeatAnswer(known=True, commands=("drain", "stop", "pause", "resume")),
        ),
        (
            b'{"commands": [1, null, [], {}, {"command": 5}, {"other": "x"}, "", " dr\\nain "]}',
            HeartbeatAnswer(known=True, commands=("dr ain",)),
        ),
        (b'{"commands": "drain"}', HeartbeatAnswer(known=True)),
        (b'{"commands": {"drain": true}}', HeartbeatAnswer(known=True)),
    ],
)
def test_heartbeat_answers(body: bytes, answer: HeartbeatAnswer) -> None:
    assert messages.read_heartbeat(body) == answer


def test_commands_are_bounded() -> None:
    answer = messages.read_heartbeat(json.dumps({"commands": ["x" * 999] * 999}).encode())
    assert len(answer.commands) == messages.MAX_COMMANDS
    assert all(len(word) <= messages.MAX_WORD_CHARS for word in answer.commands)


def test_a_web_page_acknowledges_nothing() -> None:
    with pytest.raises(ApiUnavailable, match="web page"):
        messages.read_heartbeat(b"\n<!DOCTYPE html>")
    messages.read_acknowledged("deregister", b"")


@pytest.mark.parametrize(
    ("body", "settled"),
    [
        (b'{"success": true}', Settled(already=False)),
        (b"{}", Settled(already=False)),
        (b'{"id": "j", "status": "completed"}', Settled(already=False)),
        (b'{"success": true, "will_retry": false}', Settled(already=False, will_retry=False)),
        (b'{"success": true, "will_retry": true}', Settled(already=False, will_retry=True)),
        (b'{"success": true, "will_retry": "maybe"}', Settled(already=False)),
    ],
)
def test_settled(body: bytes, settled: Settled) -> None:
    assert messages.read_settled("fail", body) == settled


@pytest.mark.parametrize(
    "body", [b"", b"null", b"[]", b"true", b"<html>", b'{"success": false}', b'{"success"', b'"\xff"']
)
def test_an_answer_without_sense_settles_nothing(body: bytes) -> None:
    with pytest.raises(ApiUnavailable):
        messages.read_settled("complete", body)

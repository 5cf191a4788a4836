"""Which gRPC status means what: the table, row by row."""

from __future__ import annotations

import grpc
import pytest

from spooled_supervisor.api import grpc_answers
from spooled_supervisor.api.answers import Reading, read
from spooled_supervisor.api.grpc_answers import STATUSES, error_for, facts
from spooled_supervisor.errors import ApiRefused, ApiUnavailable, CredentialsRefused, LeaseLost

MISMATCH = "The lease_id does not match the job's current lease"

CASES: list[tuple[str, str, str, bool, Reading]] = [
    # operation, status, details, replay, what it means
    ("complete", "FAILED_PRECONDITION", "Lease expired", False, Reading.LOST),
    ("complete", "FAILED_PRECONDITION", MISMATCH, True, Reading.LOST),
    ("complete", "FAILED_PRECONDITION", "Job is already completed", True, Reading.ALREADY),
    ("complete", "FAILED_PRECONDITION", "Job is already completed", False, Reading.LOST),
    ("complete", "FAILED_PRECONDITION", "Job is already cancelled", True, Reading.LOST),
    ("complete", "NOT_FOUND", "Resource not found", True, Reading.LOST),
    ("complete", "INVALID_ARGUMENT", "result too large", False, Reading.REFUSED),
    ("complete", "RESOURCE_EXHAUSTED", "Sent message larger than max (5 vs. 4)", False, Reading.REFUSED),
    ("complete", "LEASE_EXPIRED", "over", False, Reading.LOST),
    ("complete", "INTERNAL", "oops", False, Reading.UNAVAILABLE),
    ("complete", "CANCELLED", "", False, Reading.UNAVAILABLE),
    ("complete", "DEADLINE_EXCEEDED", "", False, Reading.UNAVAILABLE),
    ("complete", "UNKNOWN", "", False, Reading.UNAVAILABLE),
    ("fail", "NOT_FOUND", "Resource not found", True, Reading.ALREADY),
    ("fail", "NOT_FOUND", "Resource not found", False, Reading.LOST),
    ("fail", "FAILED_PRECONDITION", "Job is already deadletter", True, Reading.ALREADY),
    ("renew", "FAILED_PRECONDITION", "Lease expired", False, Reading.LOST),
    ("renew", "NOT_FOUND", "Resource not found", False, Reading.LOST),
    ("renew", "UNAVAILABLE", "failed to connect", False, Reading.UNAVAILABLE),
    ("claim", "UNAUTHENTICATED", "Invalid API key", False, Reading.CREDENTIALS),
    ("claim", "UNAUTHENTICATED", "Received http2 header with status: 401", False, Reading.UNAVAILABLE),
    ("claim", "PERMISSION_DENIED", "queue out of scope", False, Reading.REFUSED),
    ("claim", "PERMISSION_DENIED", "Received http2 header with status: 403", False, Reading.UNAVAILABLE),
    ("claim", "UNIMPLEMENTED", "Received http2 header with status: 404", False, Reading.UNAVAILABLE),
    ("claim", "RESOURCE_EXHAUSTED", "slow down", False, Reading.RATE_LIMITED),
    ("claim", "RATE_LIMIT_EXCEEDED", "slow down", False, Reading.RATE_LIMITED),
    ("claim", "INVALID_REQUEST", "empty", False, Reading.REFUSED),
    ("register", "RESOURCE_EXHAUSTED", "workers limit reached (1/1)", False, Reading.REFUSED),
    ("register", "ALREADY_EXISTS", "another organization's", False, Reading.REFUSED),
    ("claim", "SOMETHING_NEW", "", False, Reading.UNAVAILABLE),
]


@pytest.mark.parametrize(("operation", "code", "details", "is_replay", "meaning"), CASES)
def test_a_status_means(operation: str, code: str, details: str, is_replay: bool, meaning: Reading) -> None:
    assert read(operation, facts(code, details), replay=is_replay) is meaning


def test_every_status_of_the_library_has_its_row() -> None:
    assert {status.name for status in grpc.StatusCode} <= STATUSES.keys()


def test_a_rate_limit_carries_its_hint_and_a_quota_has_none() -> None:
    limited = facts("RESOURCE_EXHAUSTED", "daily limit reached", retry_after="7")
    error = error_for(read("claim", limited, replay=False), limited)
    assert isinstance(error, ApiUnavailable)
    assert (error.rate_limited, error.retry_after_s) == (True, 7.0)
    in_band = facts("RATE_LIMIT_EXCEEDED", "Request limit reached, slow down")  # which never has a hint
    assert read("complete", in_band, replay=False) is Reading.RATE_LIMITED
    quota = facts("RESOURCE_EXHAUSTED", "daily limit reached")
    assert isinstance(error_for(read("claim", quota, replay=False), quota), ApiRefused)


def test_errors_speak_of_grpc_and_never_of_the_key() -> None:
    answer = facts("UNAUTHENTICATED", "no such key: sp_test_0123456789 or s3cret-text", secret="s3cret-text")
    error = error_for(Reading.CREDENTIALS, answer)
    assert isinstance(error, CredentialsRefused)
    assert str(error) == "gRPC UNAUTHENTICATED: no such key: *** or ***"
    lost = error_for(Reading.LOST, facts("NOT_FOUND", "Resource not found"), job_id="j")
    assert isinstance(lost, LeaseLost)
    assert str(lost) == "job j: lease lost: gRPC NOT_FOUND: Resource not found"
    assert str(error_for(Reading.UNAVAILABLE, facts("UNAVAILABLE", ""))) == "gRPC UNAVAILABLE"


def test_the_module_of_the_table_does_not_need_grpcio() -> None:
    assert not hasattr(grpc_answers, "grpc")

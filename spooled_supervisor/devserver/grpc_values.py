"""Rows as gRPC messages, refusals as gRPC statuses, and the checks of request fields.

Owns how the store's values look in `spooled.v1`; knows neither calls nor connections. A Struct holds objects only: a
payload or result that is another JSON value goes out empty, as the service does it. So does one that no message can
carry: a number beyond a double's range, or more than MAX_STRUCT_BYTES. Messages are filled where they are, never
copied: a copy is decoded, and decoders refuse what is nested deeply.
"""

from __future__ import annotations

import re
from typing import Any

import grpc
import msgspec
from google.protobuf.struct_pb2 import Struct
from google.protobuf.timestamp_pb2 import Timestamp

from spooled_supervisor.devserver.config import MAX_LEASE_S
from spooled_supervisor.devserver.database import Row
from spooled_supervisor.devserver.errors import ApiError
from spooled_supervisor.devserver.leases import Lease
from spooled_supervisor.devserver.shapes import ORGANIZATION_ID
from spooled_supervisor.devserver.validation import MAX_PAYLOAD_BYTES, QUEUE_NAME, is_in_calendar
from spooled_supervisor.proto import spooled_pb2 as pb
from spooled_supervisor.proto.structs import fill, plain

DEFAULT_LEASE_S = 300
MAX_NAME = 255
MAX_MESSAGE_BYTES = 4 << 20
MAX_STRUCT_BYTES = MAX_MESSAGE_BYTES - (64 << 10)
"""Leaves room for the rest of a job; a number of two bytes in JSON has eleven in a Struct."""

_STATUSES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    409: grpc.StatusCode.FAILED_PRECONDITION,
    413: grpc.StatusCode.INVALID_ARGUMENT,
    422: grpc.StatusCode.INVALID_ARGUMENT,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
}

_IN_BAND = {"LEASE_EXPIRED": "LEASE_EXPIRED", "CONFLICT": "NOT_FOUND", "RATE_LIMIT_EXCEEDED": "RATE_LIMIT_EXCEEDED"}
"""Codes of ProcessJobs that are not names of statuses. It has none for a job that is over already."""


def status_of(error: ApiError) -> grpc.StatusCode:
    """The status of a call that is refused."""
    return _STATUSES.get(error.status, grpc.StatusCode.INTERNAL)


def message_of(error: ApiError) -> str:
    """Clients know a lost lease by the text alone, so the two wordings of it are fixed."""
    is_over = error.code == "LEASE_EXPIRED" and "does not match" not in error.message
    return "Lease expired" if is_over else error.message


def in_band(error: ApiError) -> pb.ErrorResponse:
    """The refusal of one request of ProcessJobs, whose stream goes on."""
    return pb.ErrorResponse(code=_IN_BAND.get(error.code) or status_of(error).name, message=message_of(error))


def refused(message: str) -> ApiError:
    """INVALID_ARGUMENT."""
    return ApiError(400, message)


# --- what is asked ----------------------------------------------------------------------------------------------------


def name(value: str, field: str, limit: int = MAX_NAME) -> str:
    """A text that must be there: proto3's empty text is a missing one."""
    if not value:
        raise refused(f"{field} is required")
    if len(value) > limit:
        raise refused(f"{field} must have at most {limit} characters")
    return value


def queue_name(value: str) -> str:
    return matching(name(value, "queue_name"), "queue_name", QUEUE_NAME)


def matching(value: str, field: str, pattern: re.Pattern[str]) -> str:
    if not pattern.fullmatch(value):
        raise refused(f"{field} contains characters that are not allowed")
    return value


def lease_s(asked: int, least: int) -> int:
    """Zero is the default; what is out of range is pulled into it, where REST refuses."""
    return DEFAULT_LEASE_S if asked <= 0 else min(max(asked, least), MAX_LEASE_S)


def json_of(struct: Struct, field: str) -> bytes:
    text = msgspec.json.encode(plain(struct))
    if len(text) > MAX_PAYLOAD_BYTES:
        raise refused(f"{field} must be at most {MAX_PAYLOAD_BYTES} bytes of JSON")
    return text


def instant(stamp: Timestamp, field: str) -> float | None:
    """Epoch seconds; the zero of both fields is no instant."""
    at = stamp.seconds + stamp.nanos / 1e9
    if not is_in_calendar(at):
        raise refused(f"{field} must be within the years 1 to 9999")
    return at if stamp.seconds or stamp.nanos else None


# --- what is answered -------------------------------------------------------------------------------------------------


def fill_leased(job: pb.Job, lease: Lease, worker_id: str) -> None:
    """Make the empty message the job that is leased; the row is as it was before."""
    row = lease.row
    job.id = row["id"]
    job.organization_id = ORGANIZATION_ID
    job.queue_name = row["queue_name"]
    job.status = pb.JOB_STATUS_PROCESSING
    job.retry_count = row["retry_count"]
    job.max_retries = row["max_retries"]
    job.timeout_seconds = row["timeout_seconds"]
    job.assigned_worker_id = worker_id
    job.lease_id = lease.lease_id
    _fill(job.payload, row["payload"])
    _set(job.lease_expires_at, lease.expires_at)


def fill_job(job: pb.Job, row: Row) -> None:
    """Make the empty message the job as it is now."""
    job.id = row["id"]
    job.organization_id = ORGANIZATION_ID
    job.queue_name = row["queue_name"]
    job.status = getattr(pb, f"JOB_STATUS_{row['status'].upper()}")
    job.retry_count = row["retry_count"]
    job.max_retries = row["max_retries"]
    job.last_error = row["last_error"] or ""
    job.priority = row["priority"]
    job.timeout_seconds = row["timeout_seconds"]
    job.assigned_worker_id = row["worker_id"] or ""
    job.idempotency_key = row["idempotency_key"] or ""
    job.lease_id = row["lease_id"] or ""
    _fill(job.payload, row["payload"])
    if row["result"] is not None:
        _fill(job.result, row["result"])
    for field in ("created_at", "scheduled_at", "started_at", "completed_at", "lease_expires_at"):
        if row[field] is not None:
            _set(getattr(job, field), row[field])


def stamp(at: float) -> Timestamp:
    made = pb.RenewLeaseResponse().new_expires_at
    _set(made, at)
    return made


def _set(stamp: Timestamp, at: float) -> None:
    stamp.FromMicroseconds(int(at * 1e6))


def _fill(struct: Struct, text: bytes) -> None:
    try:
        value: Any = msgspec.json.decode(text)
        fill(struct, value if isinstance(value, dict) else {})
        is_carried = struct.ByteSize() <= MAX_STRUCT_BYTES
    except (OverflowError, RecursionError):
        is_carried = False
    if not is_carried:
        struct.Clear()
        struct.SetInParent()

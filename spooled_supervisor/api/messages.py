"""Bodies that both dialects of the service understand, and what a good answer says. Bytes in, bytes out; no I/O.

The service ignores fields it does not know, so every request carries the names of the published guide and those of the
newer service side by side. A job's payload and a result stay bytes: a payload is copied out of the answer, a result is
put in as it is, which is why `check_json` looks at it first. An answer of another shape than documented is
`ApiUnavailable`, like any other answer without sense. The answer to a claim has a module of its own, `claims`.

    POST /api/v1/workers/register         201 {"id", "heartbeat_interval_secs" or "heartbeat_interval_seconds", ...}
    POST /api/v1/workers/{id}/heartbeat   200 empty, or {"acknowledged", "next_heartbeat_seconds", "commands"}
    POST /api/v1/jobs/claim               200 {"jobs": [{"id", "queue_name", "payload", "retry_count", "max_retries",
                                                         "timeout_seconds", "lease_id", ...}]}
    POST /api/v1/jobs/{id}/complete       200 {"success": true}
    POST /api/v1/jobs/{id}/fail           200 {"success": true, "will_retry"?: bool}
    POST /api/v1/jobs/{id}/heartbeat      200 {"success": true}     (the guide's name: /jobs/{id}/renew-lease)
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Raw

from spooled_supervisor.api.answers import MALFORMED, excerpt, printable
from spooled_supervisor.api.values import HeartbeatAnswer, Registration, Settled
from spooled_supervisor.errors import ApiUnavailable, ProtocolError
from spooled_supervisor.job import Job, clip_error

MAX_METADATA_BYTES = 64 << 10
MAX_WORD_CHARS = 50  # worker_type, version
MAX_HOSTNAME_CHARS = 255
MAX_PROGRESS_CHARS = 500  # ours: the service says no limit
MIN_LEASE_S, MAX_LEASE_S = 1, 3600  # the service wants 5 at least, which the configuration checks; test servers differ
MAX_CLAIM = 100
MAX_CONCURRENCY = 100
MAX_CURRENT_JOBS = 1000
DEFAULT_HEARTBEAT_S = 10.0
MIN_HEARTBEAT_S, MAX_HEARTBEAT_S = 1.0, 60.0  # a worker silent for two minutes is taken for dead
MAX_COMMANDS = 20

_encode = msgspec.json.Encoder().encode


# --- what we say ------------------------------------------------------------------------------------------------------


def check_json(raw: bytes) -> None:
    """Raise ProtocolError unless `raw` is exactly one JSON value in UTF-8 (RFC 8259). Costs a whole decode."""
    try:
        msgspec.json.decode(raw)
    except MALFORMED as error:
        raise ProtocolError(f"a result is no JSON value: {error}") from error


def register_body(
    worker_id: str,
    *,
    queue_names: Sequence[str],
    hostname: str,
    worker_type: str,
    version: str,
    max_concurrency: int,
    metadata: Mapping[str, Any],
) -> bytes:
    """The newer service knows one queue per worker and takes the first; jobs may be claimed from any."""
    places = _clamp(max_concurrency, 1, MAX_CONCURRENCY)
    return _encode(
        {
            "id": worker_id,
            "worker_id": worker_id,
            "queue_name": queue_names[0],
            "queue_names": list(queue_names),
            "max_concurrent_jobs": places,
            "max_concurrency": places,
            "hostname": clean_hostname(hostname),
            **_words(worker_type=worker_type, version=version),
            **_metadata(metadata),
        }
    )


def heartbeat_body(
    *, status: str, current_jobs: int, cpu_percent: float, memory_percent: float, metadata: Mapping[str, Any] | None
) -> bytes:
    """`status`: healthy, degraded, draining or offline; numbers out of the service's range are pulled into it."""
    return _encode(
        {
            "status": status,
            "current_jobs": _clamp(current_jobs, 0, MAX_CURRENT_JOBS),
            "cpu_percent": _percent(cpu_percent),
            "memory_percent": _percent(memory_percent),
            **_metadata(metadata),
        }
    )


def claim_body(worker_id: str, queue_name: str, *, limit: int, lease_duration_s: int) -> bytes:
    """All four fields always: the two dialects disagree about the default lease."""
    return _encode(
        {"queue_name": queue_name, "worker_id": worker_id, "limit": limit, "lease_duration_secs": lease_duration_s}
    )


def complete_body(worker_id: str, job: Job, result: bytes) -> bytes:
    """`result` must have passed `check_json`."""
    return _encode({**_fence(worker_id, job), "result": Raw(result)})


def fail_body(worker_id: str, job: Job, error: str, *, retryable: bool) -> bytes:
    """The newer service has no REST field that stops the retries; the hints are for those that know one."""
    text = clip_error(error)
    hints: dict[str, bool] = {} if retryable else {"no_retry": True, "retry": False}
    return _encode({**_fence(worker_id, job), "error": text, "reason": text, **hints})


def renew_body(worker_id: str, job: Job) -> bytes:
    """The same for both routes: from now on, `lease_duration_s` seconds."""
    lease_s = lease_seconds(job.lease_duration_s)
    return _encode({**_fence(worker_id, job), "lease_duration_secs": lease_s, "extension_seconds": lease_s})


def progress_body(percent: float, message: str | None) -> bytes:
    """A percentage and, if there is one, a line of text."""
    body: dict[str, Any] = {"progress": _percent(percent)}
    if message is not None:
        body["message"] = printable(message.encode("utf-8", "replace").decode(), MAX_PROGRESS_CHARS)
    return _encode(body)


def lease_seconds(duration_s: float) -> int:
    """A lease duration as the service takes it: whole seconds within its limits, rounded up."""
    return _clamp(math.ceil(duration_s), MIN_LEASE_S, MAX_LEASE_S)


def clean_hostname(hostname: str) -> str:
    """Letters, digits, dot, hyphen and underscore; neither dot nor hyphen at the ends; never empty."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", hostname)[:MAX_HOSTNAME_CHARS].strip(".-") or "unknown"


def _fence(worker_id: str, job: Job) -> dict[str, Any]:
    # Without a lease id the field is left out: the newer service answers 422 to null, as it does to its absence.
    return {"worker_id": worker_id} if job.lease_id is None else {"worker_id": worker_id, "lease_id": job.lease_id}


def _words(**words: str) -> dict[str, str]:
    clean = ((name, printable(word, MAX_WORD_CHARS)) for name, word in words.items())
    return {name: word for name, word in clean if word}


def _metadata(metadata: Mapping[str, Any] | None) -> dict[str, Raw]:
    if not metadata:
        return {}
    try:
        encoded = _encode(dict(metadata))
    except (TypeError, ValueError, RecursionError, OverflowError):
        return {}  # it is decoration: a worker without it is better than none
    return {"metadata": Raw(encoded)} if len(encoded) <= MAX_METADATA_BYTES else {}


def _percent(value: float) -> float:
    return round(min(max(value, 0.0), 100.0), 1) if math.isfinite(value) else 0.0


def _clamp(value: int, least: int, most: int) -> int:
    return min(max(value, least), most)


# --- what we hear -----------------------------------------------------------------------------------------------------


def read_registration(body: bytes) -> Registration:
    """The worker id that the service will know us by, which is ours unless it is an old one, and its interval."""
    answer = _object("register", body)
    known_as = answer.get("id") or answer.get("worker_id")
    if not isinstance(known_as, (str, int)):
        raise ApiUnavailable("the answer to register names no worker id")
    interval_s = _interval_s(answer.get("heartbeat_interval_secs"), answer.get("heartbeat_interval_seconds"))
    return Registration(str(known_as), interval_s or DEFAULT_HEARTBEAT_S)


def read_heartbeat(body: bytes) -> HeartbeatAnswer:
    """Lenient, as the newer service answers with an empty body."""
    read_acknowledged("heartbeat", body)
    try:
        answer = _object("heartbeat", body)
    except ApiUnavailable:
        return HeartbeatAnswer(known=True)
    return HeartbeatAnswer(
        known=answer.get("acknowledged") is not False,
        next_heartbeat_s=_interval_s(answer.get("next_heartbeat_seconds"), answer.get("next_heartbeat_secs")),
        commands=_commands(answer.get("commands")),
        should_drain=answer.get("should_drain") is True,
    )


def read_acknowledged(operation: str, body: bytes) -> None:
    """For calls whose answer has no documented content: only a web page is no acknowledgement."""
    if body.lstrip()[:1] == b"<":
        raise ApiUnavailable(f"the answer to {operation} is a web page: {excerpt(body)}")


def read_settled(operation: str, body: bytes) -> Settled:
    """An object that does not deny its success."""
    answer = _object(operation, body)
    if answer.get("success") is False:
        raise ApiUnavailable(f"the answer to {operation} says neither that it was done nor why not")
    will_retry = answer.get("will_retry")
    return Settled(already=False, will_retry=will_retry if isinstance(will_retry, bool) else None)


def _object(operation: str, body: bytes) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(body)
    except MALFORMED:
        raise ApiUnavailable(f"the answer to {operation} is no JSON: {excerpt(body)}") from None
    if not isinstance(value, dict):
        raise ApiUnavailable(f"the answer to {operation} is no JSON object: {excerpt(body)}")
    return value


def _interval_s(*candidates: object) -> float | None:
    for value in candidates:
        if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0:
            return float(min(max(value, MIN_HEARTBEAT_S), MAX_HEARTBEAT_S))
    return None


def _commands(value: object) -> tuple[str, ...]:
    if not isinstance(value, list):
        return ()
    words = (_command(element) for element in value[:MAX_COMMANDS])
    return tuple(printable(word, MAX_WORD_CHARS) for word in words if word)


def _command(element: object) -> str | None:
    # The shape of an element was never written down: a word, or an object that has it under one of these names.
    if isinstance(element, dict):
        element = next((element[key] for key in ("command", "type", "name") if element.get(key)), None)
    return element if isinstance(element, str) else None

"""`SpooledClient`: makes jobs and looks at them, for programs and for handlers; blocking, one request per call.

    client = SpooledClient(api_key="sp_live_...")
    job = client.jobs.create(queue_name="emails", payload={"to": "ann@example.org"}, idempotency_key="welcome-ann")
    client.jobs.get(job.id).status

What an answer means is decided by the same table as for the worker (`api/answers.py`): errors are ApiRefused (also a
job that does not exist), CredentialsRefused, ApiUnavailable. A request is repeated after a failure only where the
service does the thing once all the same: reading, cancelling, making a job with an idempotency key; and after a rate
limit, which refuses before anything is looked at. May be used from any thread, and in forked children.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

import httpx
import msgspec

from spooled_supervisor import __version__, forkserver, options
from spooled_supervisor.api import answers
from spooled_supervisor.api.answers import Reading
from spooled_supervisor.config import Secret
from spooled_supervisor.errors import ApiRefused, ApiUnavailable, ConfigError
from spooled_supervisor.timing import Backoff

USER_AGENT = f"spooled-supervisor-client/{__version__}"
TIMEOUT_S = 30.0
RETRY_FIRST_S = 0.5
RETRY_CAP_S = 30.0
MAX_BULK = 100


@dataclass(frozen=True, slots=True)
class JobCreated:
    """`created` is False if there was a job with this idempotency key already; `id` is that one's then.

    It may be one of the same call, if that had to be repeated.
    """

    id: str
    created: bool


@dataclass(frozen=True, slots=True)
class BulkCreated:
    """One job of a bulk; `index` is its place in the list that was sent."""

    index: int
    id: str
    created: bool


@dataclass(frozen=True, slots=True)
class BulkFailed:
    """One job of a bulk that the service did not take."""

    index: int
    error: str


@dataclass(frozen=True, slots=True)
class BulkResult:
    """What became of a bulk."""

    succeeded: tuple[BulkCreated, ...]
    failed: tuple[BulkFailed, ...]

    @property
    def ids(self) -> list[str]:
        """Of the jobs that there are now, in the order in which they were sent."""
        return [job.id for job in sorted(self.succeeded, key=lambda job: job.index)]


@dataclass(frozen=True, slots=True)
class JobInfo:
    """A job as the service knows it. Times are RFC 3339 text; `record` is the whole answer."""

    id: str
    queue_name: str
    status: str
    payload: Any
    result: Any
    retry_count: int
    max_retries: int
    last_error: str | None
    priority: int
    timeout_seconds: int | None
    tags: Any
    created_at: str | None
    scheduled_at: str | None
    started_at: str | None
    completed_at: str | None
    record: Mapping[str, Any] = field(repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class JobSummary:
    """One line of a list of jobs."""

    id: str
    queue_name: str
    status: str
    priority: int
    retry_count: int
    max_retries: int
    last_error: str | None
    created_at: str | None
    record: Mapping[str, Any] = field(repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class JobStats:
    """How many jobs there are, by status."""

    pending: int = 0
    scheduled: int = 0
    processing: int = 0
    completed: int = 0
    failed: int = 0
    deadletter: int = 0
    cancelled: int = 0
    total: int = 0


class SpooledClient:
    """One account at one service. `client.jobs` has the calls.

    Also a context manager that closes the connections; a closed client opens new ones when it is used again.
    """

    def __init__(
        self,
        api_key: str | None = None,
        base_url: str | None = None,
        *,
        timeout_s: float = TIMEOUT_S,
        retries: int = 3,
        ca_file: str | os.PathLike[str] | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """`api_key` None: SPOOLED_API_KEY. `base_url` None: SPOOLED_API_URL, SPOOLED_BASE_URL, else the cloud.

        `retries`: how often a request that may be repeated is, with growing pauses. Raises ConfigError.
        """
        env = os.environ
        self._key = Secret((env.get("SPOOLED_API_KEY", "") if api_key is None else api_key).strip())
        problems = options.Problems(self._key.reveal())
        if self._key.reveal() or not forkserver.is_fork_server:  # there the key is kept from the app that it imports
            _check_key(self._key.reveal(), problems)
        if base_url is None:
            base_url = env.get("SPOOLED_API_URL") or env.get("SPOOLED_BASE_URL") or options.default_of("api_url")
        self.base_url = str(options.parse(options.URL, options.Setting(base_url, "base_url"), base_url, problems))
        problems.raise_if_any()
        self.ca_file = None if ca_file is None else Path(ca_file)
        self._timeout_s = timeout_s
        self._retries = retries
        self._transport = transport
        self._http: httpx.Client | None = None
        self._pid = os.getpid()
        self.jobs = Jobs(self)

    def __repr__(self) -> str:
        return f"<SpooledClient of {self.base_url}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        http, self._http = self._http, None
        if http is not None and self._pid == os.getpid():
            http.close()

    @property
    def api_key(self) -> Secret:
        """Shows itself only to who asks it to `reveal`."""
        return self._key

    def call(
        self,
        operation: str,
        method: str,
        path: str,
        *,
        body: Any = None,
        query: Any = None,
        is_safe: bool,
        is_done: Callable[[ApiRefused], bool] | None = None,
    ) -> Any:
        """One call: the decoded answer, None where it is empty. `is_safe`: it may be repeated after any failure.

        `is_done`: whether the refusal of a repetition shows that an earlier try, whose answer was lost, did it.
        """
        content = None if body is None else json.dumps(body, allow_nan=False).encode()
        pause = Backoff(RETRY_FIRST_S, RETRY_CAP_S)
        is_lost = False  # an answer: the service may have done it
        while True:
            try:
                return self._send(operation, method, path, content, query)
            except ApiRefused as error:
                if is_lost and is_done is not None and is_done(error):
                    return None
                raise
            except ApiUnavailable as error:
                if pause.failures >= self._retries or not (is_safe or error.rate_limited):
                    raise
                is_lost = is_lost or not error.rate_limited
                time.sleep(max(pause.next_delay(), min(error.retry_after_s or 0.0, RETRY_CAP_S)))

    def _send(self, operation: str, method: str, path: str, content: bytes | None, query: Any) -> Any:
        secret = self._key.reveal()
        try:
            response = self._connection().request(method, path, content=content, params=query)
        except httpx.HTTPError as error:
            reason = f"{type(error).__name__}: {error}".rstrip(": ")
            raise ApiUnavailable(answers.masked(reason, secret)) from error
        header = response.headers.get
        answer = answers.facts(
            response.status_code,
            response.content,
            retry_after=header("retry-after"),
            date=header("date"),
            location=header("location"),
            secret=secret,
        )
        reading = answers.read(operation, answer, replay=False)
        if reading is not Reading.OK:
            raise answers.error_of(reading, answer)
        try:
            return msgspec.json.decode(response.content) if response.content.strip() else None
        except answers.MALFORMED as error:
            said = answers.excerpt(response.content)
            raise ApiUnavailable(f"the answer to {operation} is not JSON: {said}") from error

    def _connection(self) -> httpx.Client:
        if self._pid != os.getpid():  # a fork: what is open belongs to the other one
            self._http, self._pid = None, os.getpid()
        if not self._key.reveal():
            raise ConfigError("api_key: SPOOLED_API_KEY is kept from children; give the client a key of its own there")
        if self._http is None:
            self._http = httpx.Client(
                base_url=self.base_url.removesuffix("/api/v1") + "/api/v1",
                headers={
                    "Authorization": f"Bearer {self._key.reveal()}",
                    "User-Agent": USER_AGENT,
                    "Accept": "application/json",
                    "Content-Type": "application/json",
                },
                timeout=self._timeout_s,
                verify=_trust(self.base_url, self.ca_file),
                transport=self._transport,
            )
        return self._http


class Jobs:
    """The calls about jobs: `SpooledClient.jobs`."""

    def __init__(self, client: SpooledClient) -> None:
        self._client = client

    def create(
        self,
        *,
        queue_name: str,
        payload: Any,
        priority: int | None = None,
        max_retries: int | None = None,
        timeout_seconds: int | None = None,
        scheduled_at: datetime | str | None = None,
        expires_at: datetime | str | None = None,
        idempotency_key: str | None = None,
        tags: Any = None,
        parent_job_id: str | None = None,
        completion_webhook: str | None = None,
    ) -> JobCreated:
        """`POST /api/v1/jobs → 201, or 200` for a key that is known. What is None is left to the queue's settings.

        Without an idempotency key a failure may leave a job behind: nobody can know, so it is not repeated. With one
        it is, and then `created` may be False for a job of this very call, whose first answer was lost.
        """
        body = _without_none(
            queue_name=queue_name,
            priority=priority,
            max_retries=max_retries,
            timeout_seconds=timeout_seconds,
            scheduled_at=_instant("scheduled_at", scheduled_at),
            expires_at=_instant("expires_at", expires_at),
            idempotency_key=idempotency_key,
            tags=tags,
            parent_job_id=parent_job_id,
            completion_webhook=completion_webhook,
        )
        answer = self._client.call(
            "create_job", "POST", "/jobs", body={**body, "payload": payload}, is_safe=bool(idempotency_key)
        )
        return JobCreated(_text(answer, "id"), bool(answer.get("created", True)))

    def bulk(
        self,
        *,
        queue_name: str,
        jobs: Sequence[Mapping[str, Any]],
        default_priority: int | None = None,
        default_max_retries: int | None = None,
        default_timeout_seconds: int | None = None,
    ) -> BulkResult:
        """`POST /api/v1/jobs/bulk → 200`: up to MAX_BULK jobs in one request.

        Each is a mapping with `payload` and perhaps `priority`, `idempotency_key`, `scheduled_at`. One that the
        service does not take costs the others nothing. Repeated after a failure only if every job has a key.
        """
        if not 1 <= len(jobs) <= MAX_BULK:
            raise ValueError(f"jobs: there are {len(jobs)}, 1 to {MAX_BULK} go into one request")
        items = [{**job, "payload": job["payload"]} for job in jobs]
        for item in items:
            if item.get("scheduled_at") is not None:
                item["scheduled_at"] = _instant("scheduled_at", item["scheduled_at"])
        defaults = _without_none(
            default_priority=default_priority,
            default_max_retries=default_max_retries,
            default_timeout_seconds=default_timeout_seconds,
        )
        is_safe = all(item.get("idempotency_key") for item in items)
        body = {"queue_name": queue_name, "jobs": items, **defaults}
        answer = self._client.call("create_jobs", "POST", "/jobs/bulk", body=body, is_safe=is_safe)
        made, refused = _items(answer, "succeeded"), _items(answer, "failed")
        return BulkResult(
            tuple(BulkCreated(int(item["index"]), _text(item, "job_id"), bool(item["created"])) for item in made),
            tuple(BulkFailed(int(item["index"]), str(item["error"])) for item in refused),
        )

    def get(self, job_id: str) -> JobInfo:
        """`GET /api/v1/jobs/{id} → 200`. Raises ApiRefused (404) if there is none."""
        return _job(self._client.call("get_job", "GET", f"/jobs/{_segment(job_id)}", is_safe=True))

    def list(
        self,
        *,
        queue_name: str | None = None,
        status: str | None = None,
        tag: str | None = None,
        limit: int = 50,
        offset: int = 0,
    ) -> list[JobSummary]:
        """`GET /api/v1/jobs → 200`: the newest first, up to 100 of them."""
        query = _without_none(queue_name=queue_name, status=status, tag=tag, limit=limit, offset=offset)
        answer = self._client.call("list_jobs", "GET", "/jobs", query=query, is_safe=True)
        if not isinstance(answer, list):
            raise ApiUnavailable("the answer to list_jobs is no list")
        return [_summary(item) for item in answer]

    def stats(self, queue_name: str | None = None) -> JobStats:
        """`GET /api/v1/jobs/stats → 200`, of one queue or of all."""
        query = _without_none(queue_name=queue_name)
        answer = self._client.call("job_stats", "GET", "/jobs/stats", query=query, is_safe=True)
        return JobStats(**{name: int(answer.get(name) or 0) for name in JobStats.__dataclass_fields__})

    def cancel(self, job_id: str) -> None:
        """`DELETE /api/v1/jobs/{id} → 204`. Raises ApiRefused: 404, or 409 if it runs or is over.

        Where an answer was lost and the repetition finds the job cancelled or gone, that is a success.
        """

        def is_done(refused: ApiRefused) -> bool:  # by the status: the words of a 409 are not fixed
            return refused.status == 404 or (refused.status == 409 and self.get(job_id).status == "cancelled")

        path = f"/jobs/{_segment(job_id)}"
        self._client.call("cancel_job", "DELETE", path, is_safe=True, is_done=is_done)

    def retry(self, job_id: str) -> JobInfo:
        """`POST /api/v1/jobs/{id}/retry → 200`: a dead or failed job is pending again, from its first run."""
        return _job(self._client.call("retry_job", "POST", f"/jobs/{_segment(job_id)}/retry", is_safe=False))


# --- to the service ---------------------------------------------------------------------------------------------------


def _check_key(key: str, problems: options.Problems) -> None:
    if not key:
        problems.add("api_key: is required; give it, or set SPOOLED_API_KEY")
    elif not all("!" <= character <= "~" for character in key):
        problems.add("api_key: what is there cannot be an API key: it holds a blank, or what no header can carry")


def _trust(url: str, ca_file: Path | None) -> Any:
    """Certificates are always verified: against `ca_file`, else against the usual authorities."""
    if ca_file is None or not url.startswith("https"):
        return True
    import ssl

    try:
        return ssl.create_default_context(cafile=str(ca_file))
    except OSError as error:
        raise ConfigError(f"ca_file: {ca_file} cannot be used as PEM certificates: {error}") from error


def _without_none(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _instant(name: str, value: datetime | str | None) -> str | None:
    if isinstance(value, datetime):
        if value.tzinfo is None:
            raise ValueError(f"{name}: {value.isoformat()} has no time zone; say datetime.now(UTC), for example")
        return value.isoformat()
    return value


def _segment(job_id: str) -> str:
    return quote(job_id, safe="") if job_id.strip(".") else job_id.replace(".", "%2E")


# --- from the service -------------------------------------------------------------------------------------------------


def _text(answer: Any, name: str) -> str:
    value = answer.get(name) if isinstance(answer, dict) else None
    if not isinstance(value, str):
        raise ApiUnavailable(f"the answer has no {name}")
    return value


def _items(answer: Any, name: str) -> Iterator[dict[str, Any]]:
    found = answer.get(name) if isinstance(answer, dict) else None
    if not isinstance(found, list):
        raise ApiUnavailable(f"the answer has no {name}")
    yield from found


def _job(answer: Any) -> JobInfo:
    _text(answer, "id")
    names = [name for name in JobInfo.__dataclass_fields__ if name != "record"]
    return JobInfo(**{name: answer.get(name) for name in names}, record=answer)


def _summary(answer: Any) -> JobSummary:
    _text(answer, "id")
    count = answer.get("retry_count", answer.get("attempt", 0))
    names = [name for name in JobSummary.__dataclass_fields__ if name not in ("record", "retry_count")]
    return JobSummary(**{name: answer.get(name) for name in names}, retry_count=count, record=answer)

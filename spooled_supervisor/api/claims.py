"""Reads the answer to a claim: fast when every record is as documented, job by job when one is not.

A bad record must cost only its own job. All jobs of an answer are leased to us, so an answer thrown away strands each
of them until its lease ends, and the bad one would come back in the next. A record with an id is handed up to be failed
by name. One without is left to its lease: there is nothing to call it by. No I/O.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Raw

from spooled_supervisor.api.answers import MALFORMED, excerpt
from spooled_supervisor.api.values import Claim, UnreadableJob
from spooled_supervisor.errors import ApiUnavailable
from spooled_supervisor.job import Job

DEFAULT_TIMEOUT_S, MAX_TIMEOUT_S = 300.0, 86400.0
DEFAULT_MAX_RETRIES = 3
MAX_COUNT = 2**31 - 1
"""What gRPC has for it, and what a database takes."""

T = TypeVar("T")
_Word = Annotated[str, msgspec.Meta(min_length=1)]


class _Record(msgspec.Struct):
    """A job as documented; fields that we do not use are skipped by the decoder."""

    id: _Word
    queue_name: _Word
    payload: Raw
    retry_count: int
    max_retries: int
    timeout_seconds: float | None = None
    lease_id: _Word | None = None


class _Records(msgspec.Struct):
    jobs: list[_Record]


class _RawRecords(msgspec.Struct):
    jobs: list[Raw]


_read_fast = msgspec.json.Decoder(_Records).decode
_read_raw = msgspec.json.Decoder(_RawRecords).decode
_read_fields = msgspec.json.Decoder(dict[str, Raw]).decode


def read_claim(body: bytes, *, queue_name: str, lease_duration_s: float, requested_at: float) -> Claim:
    """The jobs of `{"jobs": [...]}`. `requested_at` (`timing.now`) is when the claim was sent.

    Raises ApiUnavailable if it is no such object at all, or if it lists jobs and not one of them has a usable id.
    """
    reader = _Reader(queue_name, lease_duration_s, requested_at)
    try:
        records = _read_fast(body).jobs
    except MALFORMED:
        return _without_duplicates(reader.one_by_one(body))
    return _without_duplicates([reader.job(record) for record in records])


class _Reader:
    def __init__(self, queue_name: str, lease_duration_s: float, requested_at: float) -> None:
        self._queue_name = queue_name
        self._lease_duration_s = lease_duration_s
        self._requested_at = requested_at

    def job(self, record: _Record) -> Job:
        return Job(
            id=record.id,
            queue_name=record.queue_name,
            lease_id=record.lease_id,
            payload=bytes(record.payload),  # a copy: the raw view would keep the whole answer in memory
            retry_count=min(max(record.retry_count, 0), MAX_COUNT),
            max_retries=min(max(record.max_retries, 0), MAX_COUNT),
            timeout_s=_timeout_s(record.timeout_seconds),
            lease_duration_s=self._lease_duration_s,
            requested_at=self._requested_at,
        )

    def one_by_one(self, body: bytes) -> list[Job | UnreadableJob]:
        try:
            raws = _read_raw(body).jobs
        except MALFORMED as error:
            raws = _scanned_records(body)
            if not raws:
                raise ApiUnavailable(f"the answer to claim makes no sense ({error}): {excerpt(body)}") from None
        found = [one for one in map(self._lenient, raws) if one is not None]
        if raws and not found:
            raise ApiUnavailable(f"the answer to claim lists {len(raws)} jobs, none with a usable id")
        return found

    def _lenient(self, raw: Raw) -> Job | UnreadableJob | None:
        try:
            fields = _Fields(_read_members(raw))
            job_id, lease_id = fields.word("id"), fields.word("lease_id")
        except MALFORMED:
            return None
        if job_id is None:
            return None
        record = _Record(
            id=job_id,
            queue_name=fields.text("queue_name", self._queue_name),
            payload=fields.raw("payload"),
            retry_count=fields.count("retry_count", 0),
            max_retries=fields.count("max_retries", DEFAULT_MAX_RETRIES),
            timeout_seconds=fields.number("timeout_seconds"),
            lease_id=lease_id,
        )
        job = self.job(record)
        if not fields.problems:
            return job
        return UnreadableJob(job, "the service's record of this job cannot be used: " + "; ".join(fields.problems))


# A value that the decoder does not take (nested too deeply, half of a surrogate pair) makes it refuse all around it. So
# what it refuses is split by its brackets and strings, without a look at the values.

_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[\]{},]', re.DOTALL)
_MEMBER = re.compile(rb'("(?:[^"\\]|\\.)*")\s*:\s*', re.DOTALL)


def _items(value: bytes) -> list[bytes]:
    """What an array or an object has at its top level; of any depth, as this does not recurse."""
    items, depth, start = [], 0, 0
    for token in _TOKEN.finditer(value):
        if token[0] in b"[{":
            depth += 1
            if depth == 1:
                start = token.end()
        elif token[0] in b"]}":
            depth -= 1
            if depth == 0:
                items.append(value[start : token.start()])
                break
        elif token[0] == b"," and depth == 1:
            items.append(value[start : token.start()])
            start = token.end()
    return [item.strip() for item in items if item.strip()]


def _members(value: bytes) -> dict[str, Raw]:
    """Of an object, what has a name."""
    pairs = ((member, item) for item in _items(value) if (member := _MEMBER.match(item)) is not None)
    return {msgspec.json.decode(member[1], type=str): Raw(item[member.end() :]) for member, item in pairs}


def _scanned_records(body: bytes) -> list[Raw]:
    try:
        return [Raw(item) for item in _items(bytes(_members(body).get("jobs", b"")))]
    except MALFORMED:
        return []


def _read_members(raw: Raw) -> dict[str, Raw]:
    """Raises one of MALFORMED if it is no object."""
    try:
        return _read_fields(raw)
    except MALFORMED:
        members = _members(bytes(raw))
        if not members:
            raise
        return members


class _Fields:
    """One record's fields: of another type than documented where the meaning is plain, else a problem."""

    def __init__(self, raws: dict[str, Raw]) -> None:
        self._raws = raws
        self.problems: list[str] = []

    def word(self, name: str) -> str | None:
        """An identifier, exactly as given: a number's digits are its text. Raises ValueError if it is neither."""
        raw = bytes(self._raws.get(name, b"null")).strip()
        if re.fullmatch(rb"-?\d+", raw):
            return raw.decode()
        return msgspec.json.decode(raw, type=str | None) or None

    def raw(self, name: str) -> Raw:
        """Any JSON value; nothing at all is null, which some encoders leave out."""
        return self._raws.get(name, Raw(b"null"))

    def text(self, name: str, default: str) -> str:
        value = self._value(name)
        if value is None or isinstance(value, str):
            return value or default
        return self._problem(name, "a text", default)

    def count(self, name: str, default: int) -> int:
        value = self._value(name)
        if value is None:
            return default
        if isinstance(value, (int, float)) and not isinstance(value, bool) and value == int(value):
            return int(value)
        return self._problem(name, "a whole number", default)

    def number(self, name: str) -> float | None:
        value = self._value(name)
        if value is None or (isinstance(value, (int, float)) and not isinstance(value, bool)):
            return value
        return self._problem(name, "a number", None)

    def _value(self, name: str) -> Any:
        try:
            return msgspec.json.decode(self._raws.get(name, b"null"))
        except MALFORMED:
            return ...  # of no type that anybody asks for

    def _problem(self, name: str, wanted: str, default: T) -> T:
        self.problems.append(f"{name} is not {wanted}")
        return default


def _timeout_s(value: float | None) -> float:
    return float(min(value, MAX_TIMEOUT_S)) if value is not None and value > 0 else DEFAULT_TIMEOUT_S


def _without_duplicates(found: list[Job | UnreadableJob] | list[Job]) -> Claim:
    first: dict[str, Job | UnreadableJob] = {}
    for one in found:
        first.setdefault(one.id if isinstance(one, Job) else one.job.id, one)
    return Claim(
        tuple(one for one in first.values() if isinstance(one, Job)),
        tuple(one for one in first.values() if isinstance(one, UnreadableJob)),
    )

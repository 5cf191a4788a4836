"""Reads messages that protobuf refuses: what is in them can still be named. No I/O.

Decoders bound the depth of what they take (100 messages), so one payload that is nested more deeply makes the whole
answer unreadable, and all its jobs are leased to us. A message of no fields skips over everything at any depth, and
keeps it as bytes by field number (https://protobuf.dev/programming-guides/encoding/).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

from spooled_supervisor.proto import spooled_pb2 as pb

JOBS_FIELD = 1
"""Of DequeueResponse (`jobs`) and ProcessResponse (`job`) alike."""
TEXTS = {1: "id", 3: "queue_name", 19: "lease_id"}
NUMBERS = {7: "retry_count", 8: "max_retries", 11: "timeout_seconds"}


@dataclass(frozen=True, slots=True)
class Undecodable:
    """What came instead of a message."""

    raw: bytes

    def jobs(self) -> list[pb.Job | Undecodable]:
        """The jobs, if it is an answer that has some; none if it is nothing of that kind."""
        read = decoder(pb.Job)
        return [read(data) for number, data in _fields(self.raw) if number == JOBS_FIELD and isinstance(data, bytes)]

    def head(self) -> pb.Job:
        """Read as a job: its id, its lease and its numbers, as far as they are there."""
        job = pb.Job()
        for number, data in _fields(self.raw):
            if number in TEXTS and isinstance(data, bytes):
                setattr(job, TEXTS[number], data.decode(errors="replace"))
            elif number in NUMBERS and isinstance(data, int):
                setattr(job, NUMBERS[number], min(data, 2**31 - 1))
        return job


def decoder(kind: type[Any]) -> Callable[[bytes], Any]:
    """Gives the message, or an Undecodable. The library would log what is raised, and make it None."""

    def decode(raw: bytes) -> Any:
        try:
            return kind.FromString(raw)
        except DecodeError:
            return Undecodable(raw)

    return decode


def _fields(raw: bytes) -> list[tuple[int, Any]]:
    try:
        unknown = UnknownFieldSet(Empty.FromString(raw))
        return [(field.field_number, field.data) for field in (unknown[n] for n in range(len(unknown)))]
    except DecodeError:
        return []

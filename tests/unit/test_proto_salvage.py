"""What can be named of messages that protobuf does not decode."""

from __future__ import annotations

import pytest

from spooled_supervisor.proto import spooled_pb2 as pb
from spooled_supervisor.proto.salvage import Undecodable, decoder


def field(number: int, content: bytes) -> bytes:
    """A length-delimited field."""
    size, length = b"", len(content)
    while length > 0x7F:
        size, length = size + bytes([length & 0x7F | 0x80]), length >> 7
    return bytes([number << 3 | 2]) + size + bytes([length]) + content


def nested(levels: int) -> bytes:
    """A Struct of that many objects within each other: fields 1 of it, whose values have a Struct as field 5."""
    struct = b""
    for _ in range(levels):
        struct = field(1, field(1, b"a") + field(2, field(5, struct)))
    return struct


def record(name: str, levels: int) -> bytes:
    """A job whose payload is nested so deeply."""
    job = pb.Job(id=name, queue_name="q", lease_id=f"lease of {name}", retry_count=1, max_retries=3, timeout_seconds=7)
    return job.SerializeToString() + field(5, nested(levels))


def test_a_message_that_decodes_is_decoded() -> None:
    assert decoder(pb.Job)(record("j1", 3)).payload["a"]["a"]["a"] == {}


@pytest.mark.parametrize("kind", [pb.DequeueResponse, pb.ProcessResponse])
def test_one_job_that_is_nested_too_deeply_costs_no_other_one(kind: type[pb.DequeueResponse]) -> None:
    answer = decoder(kind)(field(1, record("j1", 2)) + field(1, record("j2", 50)))
    assert isinstance(answer, Undecodable)
    good, bad = answer.jobs()
    assert isinstance(good, pb.Job)
    assert good.id == "j1"
    assert isinstance(bad, Undecodable)
    assert bad.head() == pb.Job(
        id="j2", queue_name="q", lease_id="lease of j2", retry_count=1, max_retries=3, timeout_seconds=7
    )


@pytest.mark.parametrize("raw", [b"\xff" * 8, b"\x08", b"<html>", bytes(range(256))])
def test_nonsense_has_no_jobs_and_no_name(raw: bytes) -> None:
    answer = decoder(pb.DequeueResponse)(raw)
    assert isinstance(answer, Undecodable)
    assert answer.jobs() == []
    assert answer.head() == pb.Job()

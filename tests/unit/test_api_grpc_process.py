"""What a ProcessJobs stream carries for whom: order, callers that have gone, streams that are about to end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from spooled_supervisor.api.grpc_process import STALLED_S, Asked, ProcessLink
from spooled_supervisor.api.grpc_wire import CallEnd, CallOwner
from spooled_supervisor.errors import ApiRefused, ApiUnavailable, CredentialsRefused
from spooled_supervisor.proto import spooled_pb2 as pb
from tests.support.clock import fake_time


class FakeCall:
    """Sends when it is told to."""

    def __init__(self, owner: CallOwner) -> None:
        self.owner = owner
        self.is_woken = self.is_closed = False

    def wake(self) -> None:
        self.is_woken = True

    def close(self) -> None:
        self.is_closed = True

    def sent(self) -> list[str]:
        """The queues that are asked now."""
        asked = []
        while (message := self.owner.next_message()) is not None:
            asked.append(pb.ProcessRequest.FromString(message).dequeue.queue_name)
        return asked

    def answer(self, *names: str) -> None:
        for name in names:
            self.owner.on_message(pb.ProcessResponse(job=pb.Job(id=name)).SerializeToString())


def linked(test: Callable[[ProcessLink, list[FakeCall]], Coroutine[Any, Any, None]]) -> None:
    calls: list[FakeCall] = []

    def open_call(owner: CallOwner) -> FakeCall:
        calls.append(FakeCall(owner))
        return calls[-1]

    def explain(end: CallEnd) -> Exception:
        kind = {"UNAUTHENTICATED": CredentialsRefused, "PERMISSION_DENIED": ApiRefused}.get(end.code)
        return ApiUnavailable(end.details) if kind is None else kind(0, end.code, end.details)

    asyncio.run(test(ProcessLink(open_call, explain), calls))


def ask(link: ProcessLink, name: str, *, late: list[str] | None = None) -> asyncio.Future[Any]:
    """A dequeue of this queue; the ids of jobs that nobody awaits any more go to `late`."""
    request = pb.ProcessRequest(dequeue=pb.DequeueRequest(queue_name=name))

    def on_late(asked: Asked, response: Any) -> None:
        if late is not None:
            late.append(response.job.id)

    return link.ask("claim", request, 0.0, on_late).answered


def job_of(answered: asyncio.Future[Any]) -> str:
    return str(answered.result().job.id)


def test_answers_belong_to_requests_in_their_order() -> None:
    async def test(link: ProcessLink, calls: list[FakeCall]) -> None:
        asked = [ask(link, name) for name in "abc"]
        (call,) = calls
        assert call.is_woken
        assert call.sent() == ["a", "b", "c"]
        call.answer("1", "2", "3")
        assert [job_of(one) for one in asked] == ["1", "2", "3"]
        assert link.waiting == 0

    linked(test)


def test_a_request_whose_caller_has_gone_is_not_sent_any_more() -> None:
    """Else a job would be leased to nobody: a connection may take as long as it likes to come about."""

    async def test(link: ProcessLink, calls: list[FakeCall]) -> None:
        first, second = ask(link, "a"), ask(link, "b")
        first.cancel()
        assert calls[0].sent() == ["b"]
        calls[0].answer("1")
        assert job_of(second) == "1"

    linked(test)


def test_a_request_that_was_sent_keeps_its_place_when_its_caller_goes() -> None:
    late: list[str] = []

    async def test(link: ProcessLink, calls: list[FakeCall]) -> None:
        first, second = ask(link, "a", late=late), ask(link, "b")
        assert calls[0].sent() == ["a", "b"]
        first.cancel()
        calls[0].answer("1", "2")
        assert job_of(second) == "2"
        assert late == ["1"], "it is leased to us"

    linked(test)


@pytest.mark.parametrize(
    "other", [b"", b"\x4a\x02hi", pb.ProcessResponse(complete=pb.CompleteResponse(success=True)).SerializeToString()]
)
def test_an_answer_of_another_kind_breaks_the_stream(other: bytes) -> None:
    """One that is left out or put in moves all others, and a lost lease would be somebody else's."""

    async def test(link: ProcessLink, calls: list[FakeCall]) -> None:
        asked = [ask(link, name) for name in "abc"]
        assert calls[0].sent() == ["a", "b", "c"]
        calls[0].answer("1")
        calls[0].owner.on_message(other)
        assert calls[0].is_closed
        assert job_of(asked[0]) == "1"
        for one in asked[1:]:
            with pytest.raises(ApiUnavailable, match="the answer to claim is one to something else"):
                one.result()

    linked(test)


def test_an_answer_too_many_breaks_the_stream() -> None:
    """From there on nothing tells which answer is whose."""

    async def test(link: ProcessLink, calls: list[FakeCall]) -> None:
        asked = ask(link, "a")
        assert calls[0].sent() == ["a"]
        calls[0].answer("1", "2")
        assert job_of(asked) == "1"
        assert calls[0].is_closed
        ask(link, "b")
        assert len(calls) == 2

    linked(test)


@pytest.mark.parametrize(
    ("code", "kind"),
    [("UNAVAILABLE", ApiUnavailable), ("PERMISSION_DENIED", ApiUnavailable), ("UNAUTHENTICATED", CredentialsRefused)],
)
def test_the_end_of_a_stream_is_told_to_all_who_wait(code: str, kind: type[Exception]) -> None:
    async def test(link: ProcessLink, calls: list[FakeCall]) -> None:
        sent = ask(link, "a")
        assert calls[0].sent() == ["a"]
        unsent = ask(link, "b")
        calls[0].owner.on_end(CallEnd(code, "over"))
        for answered in (sent, unsent):
            assert type(answered.exception()) is kind
        assert link.waiting == 0
        again = ask(link, "c")
        assert calls[1].sent() == ["c"]
        calls[1].answer("1")
        assert job_of(again) == "1"

    linked(test)


def test_a_stream_that_will_end_is_closed_when_its_last_answer_has_come() -> None:
    async def test(link: ProcessLink, calls: list[FakeCall]) -> None:
        asked = [ask(link, name) for name in "ab"]
        assert calls[0].sent() == ["a", "b"]
        calls[0].owner.on_leaving()
        assert link.is_leaving
        calls[0].answer("1")
        assert not calls[0].is_closed
        calls[0].answer("2")
        assert calls[0].is_closed
        assert [job_of(one) for one in asked] == ["1", "2"]
        assert not link.is_leaving, "the next one is new"

    linked(test)


def test_a_stream_that_will_end_and_carries_nothing_is_closed_at_once() -> None:
    async def test(link: ProcessLink, calls: list[FakeCall]) -> None:
        ask(link, "a")
        calls[0].sent()
        calls[0].answer("1")
        calls[0].owner.on_leaving()
        assert calls[0].is_closed

    linked(test)


def test_a_stream_is_given_up_only_if_it_was_silent_for_the_whole_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = fake_time(monkeypatch)

    async def test(link: ProcessLink, calls: list[FakeCall]) -> None:
        asked_at = clock()
        asked = [ask(link, name) for name in "ab"]
        calls[0].sent()
        clock.advance(STALLED_S - 0.1)
        link.give_up(asked_at)
        assert not calls[0].is_closed, "too early to tell"
        calls[0].answer("1")
        clock.advance(1.0)
        link.give_up(asked_at)
        assert not calls[0].is_closed, "it has answered meanwhile"
        clock.advance(STALLED_S)
        link.give_up(clock() - STALLED_S)
        assert calls[0].is_closed
        with pytest.raises(ApiUnavailable):
            asked[1].result()

    linked(test)


def test_closing_tells_all_who_wait_and_can_be_repeated() -> None:
    async def test(link: ProcessLink, calls: list[FakeCall]) -> None:
        link.close()
        asked = ask(link, "a")
        link.close()
        link.close()
        assert calls[0].is_closed
        with pytest.raises(ApiUnavailable):
            await asked

    linked(test)

"""The calls against a service that misbehaves: which value or exception an answer becomes, and what was sent for it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from typing import Any, TypeAlias, TypeVar

import pytest

from spooled_supervisor import timing
from spooled_supervisor.api.rest import RestApi
from spooled_supervisor.api.values import Claim, HeartbeatAnswer, Registration, Settled
from spooled_supervisor.errors import (
    ApiRefused,
    ApiUnavailable,
    CredentialsRefused,
    LeaseLost,
    ProtocolError,
    SupervisorError,
)
from spooled_supervisor.events import ApiRequestFinished, Events
from spooled_supervisor.job import Job
from tests.support.stub_api import OPERATIONS, Reply, StubApi, stub_api

T = TypeVar("T")
WORKER = "w-1"
LIMIT_S = 10.0  # far more than anything here takes
NO_ROUTE = Reply.error(404, "NOT_FOUND", "No route matches POST /api/v1/jobs/x/y")
NOT_FOUND = Reply.error(404, "NOT_FOUND", "Resource not found")


def run(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    with asyncio.Runner(loop_factory=timing.new_event_loop, debug=True) as runner:
        return runner.run(main())


@pytest.fixture
def stub() -> Iterator[StubApi]:
    with stub_api(api_key="sp_test_key") as stub:
        yield stub


@contextlib.asynccontextmanager
async def service(stub: StubApi, key: str = "sp_test_key", worker_id: str = WORKER) -> AsyncIterator[RestApi]:
    async with RestApi(base_url=stub.url, api_key=lambda: key, worker_id=worker_id, events=Events()) as api:
        yield api


async def register(api: RestApi) -> Registration:
    return await api.register(
        queue_names=["q", "r"],
        hostname="host",
        worker_type="python",
        version="1",
        max_concurrency=4,
        metadata={},
        timeout_s=LIMIT_S,
    )


async def heartbeat(api: RestApi) -> HeartbeatAnswer:
    return await api.heartbeat(
        status="healthy", current_jobs=0, cpu_percent=1.0, memory_percent=2.0, metadata=None, timeout_s=LIMIT_S
    )


async def claim(api: RestApi, limit: int = 10) -> Claim:
    return await api.claim("q", limit=limit, lease_duration_s=30, timeout_s=LIMIT_S)


async def take(api: RestApi, stub: StubApi, **fields: Any) -> Job:
    stub.add_job(**fields)
    (job,) = (await claim(api)).jobs
    return job


async def complete(api: RestApi, job: Job, tries_before: int = 0, result: bytes = b'{"ok":true}') -> Settled:
    return await api.complete(job, result, tries_before=tries_before, deadline=timing.now() + LIMIT_S)


async def fail(api: RestApi, job: Job, tries_before: int = 0, retryable: bool = True) -> Settled:
    return await api.fail(job, "boom", retryable=retryable, tries_before=tries_before, deadline=timing.now() + LIMIT_S)


async def renew(api: RestApi, job: Job) -> float:
    return await api.renew(job, deadline=timing.now() + LIMIT_S)


async def progress(api: RestApi, job: Job) -> bool:
    return await api.progress(job, 50.0, "half", timeout_s=LIMIT_S)


async def raised_by(call: Awaitable[object]) -> SupervisorError | None:
    try:
        await call
    except SupervisorError as error:
        return error
    return None


Call: TypeAlias = Callable[[RestApi, Job], Awaitable[Any]]

CALLS: dict[str, Call] = {
    "register": lambda api, job: register(api),
    "heartbeat": lambda api, job: heartbeat(api),
    "deregister": lambda api, job: api.deregister(timeout_s=LIMIT_S),
    "claim": lambda api, job: claim(api),
    "complete": complete,
    "fail": fail,
    "renew": renew,
    "progress": progress,
}


def test_all_operations_are_tried_here() -> None:
    assert set(CALLS) == set(OPERATIONS.values())


# --- a life without trouble ------------------------------------------------------------------------------------------


def test_a_life_without_trouble(stub: StubApi) -> None:
    async def main() -> None:
        events = Events()
        seen: list[tuple[str, str]] = []
        events.subscribe(lambda event: seen.append((event.operation, event.status)), ApiRequestFinished)
        async with RestApi(base_url=stub.url, api_key=lambda: "sp_test_key", worker_id=WORKER, events=events) as api:
            assert await register(api) == Registration(WORKER, 10.0)
            assert await heartbeat(api) == HeartbeatAnswer(known=True, next_heartbeat_s=10.0)
            before = timing.now()
            first = await take(api, stub, payload={"n": 1})
            second = await take(api, stub, payload={"n": 2})
            assert first.payload == b'{"n": 1}'
            assert before <= first.requested_at <= second.requested_at <= timing.now()
            renewed_at = await renew(api, first)
            assert second.requested_at <= renewed_at <= timing.now()
            assert await complete(api, first) == Settled(already=False)
            assert await fail(api, second) == Settled(already=False, will_retry=True)
            await api.deregister(timeout_s=LIMIT_S)
        assert seen == [
            ("register", "201"),
            ("heartbeat", "200"),
            ("claim", "200"),
            ("claim", "200"),
            ("renew", "200"),
            ("complete", "200"),
            ("fail", "200"),
            ("deregister", "204"),
        ]

    run(main)
    assert stub.completed == {"job-1": b'{"ok":true}'}
    assert stub.failed == {"job-2": "boom"}


def test_paths_are_escaped(stub: StubApi) -> None:
    async def main() -> None:
        async with service(stub, worker_id="a/b c?") as api:
            await heartbeat(api)
            for odd in ("x/../y", "..", ".", "é%"):
                job = Job(odd, "q", "l", b"", 0, 0, 1.0, 30.0, 0.0)
                with pytest.raises((LeaseLost, ApiUnavailable)):
                    await complete(api, job)

    run(main)
    assert [request.path for request in stub.requests] == [
        "/api/v1/workers/a%2Fb%20c%3F/heartbeat",
        "/api/v1/jobs/x%2F..%2Fy/complete",
        "/api/v1/jobs/%2E%2E/complete",
        "/api/v1/jobs/%2E/complete",
        "/api/v1/jobs/%C3%A9%25/complete",
    ]


def test_reports_can_be_made_under_the_id_of_an_earlier_life(stub: StubApi) -> None:
    async def main() -> None:
        async with service(stub) as api:
            first, second = await take(api, stub), await take(api, stub)
            await complete(api.acting_as("earlier"), first)
            await complete(api, second)

    run(main)
    assert [request.json["worker_id"] for request in stub.of("complete")] == ["earlier", WORKER]


def test_an_id_that_the_service_makes_up_is_used_for_the_worker_only(stub: StubApi) -> None:
    stub.on("register", Reply.json({"id": "minted", "heartbeat_interval_seconds": 5}, 201))

    async def main() -> None:
        async with service(stub) as api:
            assert await register(api) == Registration("minted", 5.0)
            await heartbeat(api)
            await complete(api, await take(api, stub))
            await api.deregister(timeout_s=LIMIT_S)

    run(main)
    assert [request.path.split("/")[4] for request in stub.requests] == [
        "register", "minted", "claim", "job-1", "minted"
    ]  # fmt: skip
    assert {request.json["worker_id"] for request in stub.of("claim") + stub.of("complete")} == {WORKER}


# --- each kind of bad answer, for each call --------------------------------------------------------------------------

UNUSABLE = {
    "page": Reply.html(),
    "redirect": Reply(302, b"", (("location", "/login"),)),
    "bad_gateway": Reply.html(502),
    "unavailable": Reply.error(503),
    "time-out": Reply.error(408),
    "encoded": Reply(200, b"\x1f\x8b\x08junk", (("content-encoding", "gzip"),)),
    "login": Reply.html(401),
    "firewall": Reply.html(403),
    "junk": Reply(raw=b"\x00\x01\x02\r\n\r\n"),
    "cut": Reply(reset="in the answer"),
    "large": Reply(200, b" " * (9 << 20) + b"{}"),
}


@pytest.mark.parametrize("operation", sorted(CALLS))
def test_an_unusable_answer_is_unavailable(stub: StubApi, operation: str) -> None:
    async def main() -> None:
        async with service(stub) as api:
            job = await take(api, stub)
            for name, reply in UNUSABLE.items():
                stub.on(operation, reply, times=None)
                error = await raised_by(CALLS[operation](api, job))
                assert isinstance(error, ApiUnavailable), (name, error)
                assert not error.rate_limited
                assert "sp_test_key" not in str(error)
                stub.clear()

    run(main)


EMPTYISH = {"empty": b"", "null": b"null", "list": b"[]", "number": b"7", "bad utf-8": b'"\xff"', "text": b"OK"}


@pytest.mark.parametrize("operation", ["register", "claim", "complete", "fail", "renew"])
def test_a_success_of_the_wrong_shape_is_unavailable(stub: StubApi, operation: str) -> None:
    async def main() -> None:
        async with service(stub) as api:
            job = await take(api, stub)
            for name, body in EMPTYISH.items():
                stub.on(operation, Reply(200, body))
                assert isinstance(await raised_by(CALLS[operation](api, job)), ApiUnavailable), name

    run(main)


def test_calls_without_a_documented_answer_take_any_but_a_page(stub: StubApi) -> None:
    async def main() -> None:
        async with service(stub) as api:
            job = await take(api, stub)
            for body in EMPTYISH.values():
                for operation in ("heartbeat", "deregister", "progress"):
                    stub.on(operation, Reply(200, body))
                assert await heartbeat(api) == HeartbeatAnswer(known=True)
                await api.deregister(timeout_s=LIMIT_S)
                assert await progress(api, job)

    run(main)


REFUSALS: list[tuple[Reply, type[SupervisorError], dict[str, Any]]] = [
    (Reply.error(401), CredentialsRefused, {"status": 401, "code": "UNAUTHORIZED"}),
    (Reply.error(403), ApiRefused, {"status": 403, "code": "ACCESS_DENIED"}),
    (Reply.error(422), ApiRefused, {"status": 422, "code": "VALIDATION_ERROR", "message": "no"}),
    (Reply.error(429, "QUOTA_EXCEEDED", "limit reached"), ApiRefused, {"status": 429, "code": "QUOTA_EXCEEDED"}),
    (Reply.error(429, retry_after="3"), ApiUnavailable, {"rate_limited": True, "retry_after_s": 3.0}),
    (Reply.error(503, retry_after="1e9"), ApiUnavailable, {"rate_limited": False, "retry_after_s": 300.0}),
    (Reply.error(500), ApiUnavailable, {"rate_limited": False, "retry_after_s": None}),
]


@pytest.mark.parametrize("operation", sorted(CALLS))
def test_refusals_of_any_call(stub: StubApi, operation: str) -> None:
    async def main() -> None:
        async with service(stub) as api:
            job = await take(api, stub)
            for reply, expected, fields in REFUSALS:
                stub.on(operation, reply)
                error = await raised_by(CALLS[operation](api, job))
                assert type(error) is expected, (reply, error)
                assert {name: getattr(error, name) for name in fields} == fields

    run(main)


@pytest.mark.parametrize("operation", sorted(set(CALLS) - {"claim"}))
def test_a_stale_connection_costs_no_call_but_a_claim(stub: StubApi, operation: str) -> None:
    async def main() -> None:
        async with service(stub) as api:
            job = await take(api, stub)
            stub.on(operation, Reply(reset="before commit", only_reused=True))
            await CALLS[operation](api, job)

    run(main)
    assert len(stub.of(operation)) == 2


def test_a_claim_on_a_stale_connection_is_not_sent_again(stub: StubApi) -> None:
    async def main() -> None:
        async with service(stub) as api:
            await heartbeat(api)
            stub.on("claim", Reply(reset="after commit"))
            stub.add_job()
            with pytest.raises(ApiUnavailable):
                await claim(api)

    run(main)
    assert len(stub.of("claim")) == 1


# --- register, heartbeat, deregister ----------------------------------------------------------------------------------


def test_a_worker_id_of_another_organization_is_refused(stub: StubApi) -> None:
    stub.on("register", Reply.error(409, "CONFLICT", "worker id belongs to another organization"))

    async def main() -> None:
        async with service(stub) as api:
            with pytest.raises(ApiRefused, match="another organization"):
                await register(api)

    run(main)


@pytest.mark.parametrize("reply", [NOT_FOUND, Reply(404, b""), Reply.json({"acknowledged": False})])
def test_an_unknown_worker_is_told_to_register(stub: StubApi, reply: Reply) -> None:
    stub.on("heartbeat", reply)

    async def main() -> None:
        async with service(stub) as api:
            assert not (await heartbeat(api)).known

    run(main)


def test_a_worker_that_is_forgotten_is_deregistered(stub: StubApi) -> None:
    stub.on("deregister", NOT_FOUND)

    async def main() -> None:
        async with service(stub) as api:
            await api.deregister(timeout_s=LIMIT_S)

    run(main)


def test_a_wrong_key_is_named_as_such(stub: StubApi) -> None:
    async def main() -> None:
        async with service(stub, key="sp_test_other") as api:
            with pytest.raises(CredentialsRefused) as caught:
                await register(api)
            assert (caught.value.status, caught.value.code) == (401, "UNAUTHORIZED")

    run(main)


# --- claim -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("limit", "sent"), [(0, 1), (1, 1), (100, 100), (5000, 100)])
def test_a_claim_asks_within_the_limits(stub: StubApi, limit: int, sent: int) -> None:
    async def main() -> None:
        async with service(stub) as api:
            assert await claim(api, limit) == Claim()

    run(main)
    (request,) = stub.of("claim")
    assert request.json == {"queue_name": "q", "worker_id": WORKER, "limit": sent, "lease_duration_secs": 30}


def test_a_claim_tells_bad_records_from_good_ones(stub: StubApi) -> None:
    stub.add_job("good")
    stub.add_job("bad", retry_count="many")

    async def main() -> None:
        async with service(stub) as api:
            got = await claim(api)
            assert [job.id for job in got.jobs] == ["good"]
            (bad,) = got.unreadable
            assert await fail(api, bad.job) == Settled(already=False, will_retry=True)

    run(main)
    assert "bad" in stub.failed


def test_a_claim_may_be_as_large_as_its_payloads(stub: StubApi) -> None:
    for n in range(2):
        stub.add_job(payload=f"{n}" * (5 << 20))

    async def main() -> None:
        async with service(stub) as api:
            (job,) = (await claim(api, 1)).jobs
            assert len(job.payload) == (5 << 20) + 2
            stub.on("claim", Reply(200, b" " * (8 << 20)))
            with pytest.raises(ApiUnavailable, match="more than"):
                await claim(api, 1)

    run(main)


# --- complete and fail -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "lost", [Reply(reset="after commit"), Reply(close="after commit"), Reply(502, b"", commit=True)]
)
def test_a_complete_whose_answer_was_lost_is_found_to_have_landed(stub: StubApi, lost: Reply) -> None:
    async def main() -> None:
        async with service(stub) as api:
            job = await take(api, stub)
            await api._exchange.aclose()  # else the exchange repeats it by itself
            stub.on("complete", lost)
            with pytest.raises(ApiUnavailable):
                await complete(api, job)
            assert await complete(api, job, tries_before=1) == Settled(already=True)

    run(main)
    assert stub.commits == [("complete", "job-1")]


def test_a_complete_repeated_at_once_by_the_exchange_is_found_to_have_landed(stub: StubApi) -> None:
    async def main() -> None:
        async with service(stub) as api:
            job = await take(api, stub)
            stub.on("complete", Reply(reset="after commit"))
            assert await complete(api, job) == Settled(already=True)

    run(main)
    assert stub.commits == [("complete", "job-1")]


def test_a_fail_whose_answer_was_lost_is_found_to_have_landed(stub: StubApi) -> None:
    async def main() -> None:
        async with service(stub) as api:
            job = await take(api, stub)
            stub.on("fail", Reply(reset="after commit"))
            assert await fail(api, job) == Settled(already=True)

    run(main)
    assert stub.commits == [("fail", "job-1")]


def test_a_first_complete_that_finds_it_completed_was_somebody_elses(stub: StubApi) -> None:
    async def main() -> None:
        async with service(stub) as api:
            job = await take(api, stub)
            await complete(api, job)
            with pytest.raises(LeaseLost, match="job-1"):
                await complete(api, job)

    run(main)


@pytest.mark.parametrize("operation", ["complete", "fail", "renew"])
def test_a_lost_lease_is_lost(stub: StubApi, operation: str) -> None:
    async def main() -> None:
        async with service(stub) as api:
            job = await take(api, stub)
            await renew(api, job)  # the route is known then
            for reply in (Reply.error(409), NOT_FOUND, Reply.error(409, "CONFLICT", "Job is already cancelled")):
                stub.on(operation, reply)
                assert isinstance(await raised_by(CALLS[operation](api, job)), LeaseLost), reply

    run(main)


@pytest.mark.parametrize("operation", ["complete", "fail"])
def test_a_report_that_will_not_be_taken_is_refused(stub: StubApi, operation: str) -> None:
    async def main() -> None:
        async with service(stub) as api:
            job = await take(api, stub)
            for reply in (Reply.error(413), Reply.html(413), Reply.error(400), Reply.error(422)):
                stub.on(operation, reply)
                assert isinstance(await raised_by(CALLS[operation](api, job)), ApiRefused), reply

    run(main)


def test_a_large_result_refused_before_it_is_read_is_refused(stub: StubApi) -> None:
    async def main() -> None:
        async with service(stub) as api:
            job = await take(api, stub)
            stub.on("complete", Reply.html(413))
            with pytest.raises(ApiRefused):
                await complete(api, job, result=json.dumps("x" * (4 << 20)).encode())

    run(main)


def test_a_result_that_is_no_json_is_never_sent(stub: StubApi) -> None:
    async def main() -> None:
        async with service(stub) as api:
            job = await take(api, stub)
            for result in (b"", b"NaN", b'"\xff"', b'1},"x":{"y":2', b"[" * 100_000):
                with pytest.raises(ProtocolError):
                    await complete(api, job, result=result)

    run(main)
    assert stub.of("complete") == []


@pytest.mark.parametrize("retryable", [True, False])
def test_a_failure_says_whether_it_may_be_retried(stub: StubApi, retryable: bool) -> None:
    async def main() -> None:
        async with service(stub) as api:
            await fail(api, await take(api, stub), retryable=retryable)

    run(main)
    (request,) = stub.of("fail")
    assert ("no_retry" in request.json, "retry" in request.json) == (not retryable, not retryable)


def test_without_a_lease_id_nothing_is_made_up(stub: StubApi) -> None:
    async def main() -> None:
        async with service(stub) as api:
            job = await take(api, stub, lease_id=None)
            await complete(api, job)

    run(main)
    assert "lease_id" not in stub.of("complete")[0].json


# --- renew -----------------------------------------------------------------------------------------------------------


def routes_asked(stub: StubApi) -> list[str]:
    return [request.path.rpartition("/")[2] for request in stub.of("renew")]


def test_the_route_of_the_service_is_found_and_remembered() -> None:
    async def main(stub: StubApi) -> None:
        async with service(stub) as api:
            job = await take(api, stub)
            for _ in range(3):
                await renew(api, job)

    with stub_api(renew_routes=("heartbeat",)) as stub:
        run(lambda: main(stub))
        assert routes_asked(stub) == ["heartbeat"] * 3
    with stub_api(renew_routes=("renew-lease",)) as stub:
        run(lambda: main(stub))
        assert routes_asked(stub) == ["heartbeat", "renew-lease", "renew-lease", "renew-lease"]


@pytest.mark.parametrize("gone", [NO_ROUTE, Reply(404, b""), Reply(405, b""), Reply.html(404)])
def test_a_route_that_goes_away_is_replaced(gone: Reply) -> None:
    with stub_api(renew_routes=("heartbeat", "renew-lease")) as stub:

        async def main() -> None:
            async with service(stub) as api:
                job = await take(api, stub)
                await renew(api, job)
                stub.on("renew", gone)
                await renew(api, job)
                await renew(api, job)

        run(main)
        assert routes_asked(stub) == ["heartbeat", "heartbeat", "renew-lease", "renew-lease"]


def test_before_a_route_has_worked_a_404_is_believed_only_from_both(stub: StubApi) -> None:
    async def main() -> None:
        async with service(stub) as api:
            job = await take(api, stub)
            stub.on("renew", NOT_FOUND, NOT_FOUND)
            with pytest.raises(LeaseLost):
                await renew(api, job)
            assert routes_asked(stub) == ["heartbeat", "renew-lease"]

    run(main)


def test_before_a_route_has_worked_a_404_and_trouble_is_trouble(stub: StubApi) -> None:
    async def main() -> None:
        async with service(stub) as api:
            job = await take(api, stub)
            stub.on("renew", NOT_FOUND, Reply.error(500))
            with pytest.raises(ApiUnavailable):
                await renew(api, job)
            await renew(api, job)
            assert routes_asked(stub) == ["heartbeat", "renew-lease", "heartbeat"]

    run(main)


def test_once_a_route_has_worked_a_404_of_the_job_is_final(stub: StubApi) -> None:
    async def main() -> None:
        async with service(stub) as api:
            job = await take(api, stub)
            await renew(api, job)
            stub.on("renew", NOT_FOUND)
            with pytest.raises(LeaseLost):
                await renew(api, job)
            assert routes_asked(stub) == ["heartbeat", "heartbeat"]

    run(main)


def test_a_service_without_any_route_to_renew_is_unavailable_not_lost() -> None:
    with stub_api(renew_routes=()) as stub:

        async def main() -> None:
            async with service(stub) as api:
                with pytest.raises(ApiUnavailable):
                    await renew(api, await take(api, stub))

        run(main)


def test_a_renewal_may_be_answered_without_content(stub: StubApi) -> None:
    stub.on("renew", Reply(204, b""), Reply.json({"success": True, "lease_expires_at": "2026-01-01T00:00:00Z"}))

    async def main() -> None:
        async with service(stub) as api:
            job = await take(api, stub)
            await renew(api, job)
            await renew(api, job)

    run(main)


def test_a_renewal_counts_from_the_request_that_succeeded(stub: StubApi) -> None:
    async def main() -> None:
        async with service(stub) as api:
            job = await take(api, stub)
            stub.on("renew", Reply(delay_s=0.05))
            before = timing.now()
            renewed_at = await renew(api, job)
            assert before <= renewed_at < before + 0.05 <= timing.now()

    run(main)


def test_a_renewal_that_hangs_ends_at_its_deadline(stub: StubApi) -> None:
    stub.on("renew", Reply(hang="after commit"))

    async def main() -> None:
        async with service(stub) as api:
            job = await take(api, stub)
            started = timing.now()
            with pytest.raises(ApiUnavailable, match="no answer in time"):
                await api.renew(job, deadline=started + 0.1)
            assert timing.now() - started < 2.0

    run(main)


# --- progress --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reply", [NO_ROUTE, NOT_FOUND, Reply(404, b""), Reply(405, b"")])
def test_progress_is_given_up_where_it_is_not_known(stub: StubApi, reply: Reply) -> None:
    stub.on("progress", reply)

    async def main() -> None:
        async with service(stub) as api:
            assert not await progress(api, await take(api, stub))

    run(main)


def test_progress_of_a_job_that_is_gone_is_no_reason_to_give_up(stub: StubApi) -> None:
    stub.on("progress", Reply.json({"success": True}), NOT_FOUND, Reply.json({}))

    async def main() -> None:
        async with service(stub) as api:
            job = await take(api, stub)
            assert [await progress(api, job) for _ in range(3)] == [True, True, True]

    run(main)
    assert stub.of("progress")[0].json == {"progress": 50.0, "message": "half"}

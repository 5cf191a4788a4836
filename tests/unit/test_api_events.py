"""The event stream as a hint: what it tells, how it can fail, and that it always comes back."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

import pytest

from spooled_supervisor import timing
from spooled_supervisor.api import events as module
from spooled_supervisor.api import httpx_wire
from spooled_supervisor.api.events import (
    ABSENT_RETRY_S,
    MAX_LINE,
    OPERATION,
    PATH,
    RETRY_CAP_S,
    RETRY_FIRST_S,
    SILENCE_S,
    JobEvents,
)
from spooled_supervisor.api.wire import WireError
from spooled_supervisor.events import ApiRecovered, ApiTroubled, Events
from spooled_supervisor.troubles import Troubles
from tests.support.clock import FakeClock, fake_time, run_in_fake_time
from tests.support.fakes import Recorded

LIMIT_S = 10.0
CREATED = 'data: {"type": "JobCreated", "data": {"queue_name": "emails", "job_id": "j"}}'
CUT = None
SILENT = object()
"""In a script: nothing more is said, and the connection stays."""


class Ear:
    """A listener with notes of what it was told."""

    def __init__(self, url: str = "http://service", ca_file: Path | None = None) -> None:
        events = Events()
        self.recorded = Recorded(events)
        self.troubles = Troubles(events)
        self.jobs: list[str] = []
        self.ups: list[bool] = []
        self.changed = asyncio.Event()
        self.key = "sp_test_one"
        self.listener = JobEvents(
            url,
            lambda: self.key,
            ca_file=ca_file,
            troubles=self.troubles,
            on_job=lambda queue: self._note(self.jobs, queue),
            on_up=lambda up: self._note(self.ups, up),
        )

    def _note(self, notes: list[Any], note: Any) -> None:
        notes.append(note)
        self.changed.set()

    async def until(self, is_true: Callable[[], object]) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not is_true():
                self.changed.clear()
                await self.changed.wait()


# --- by script, in fake time ------------------------------------------------------------------------------------------


class Stream:
    """Stands in for `open_lines`: each connection plays the next script; the last one is repeated."""

    def __init__(self, clock: FakeClock) -> None:
        self._clock = clock
        self.scripts: list[list[Any]] = [[SILENT]]
        self.opened: list[tuple[float, str, Mapping[str, str]]] = []
        self.begun = clock()
        self.open_now = 0

    @contextlib.asynccontextmanager
    async def open_lines(
        self, url: str, headers: Mapping[str, str], *, ca_file: Path | None, max_line: int
    ) -> AsyncIterator[AsyncIterator[str]]:
        self.opened.append((self._clock() - self.begun, url, headers))
        script = self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0]
        first = script[0] if script else ""
        if isinstance(first, Exception):
            raise first
        if first is SILENT:
            await asyncio.Event().wait()
        self.open_now += 1
        try:
            yield self._play(script)
        finally:
            self.open_now -= 1

    async def _play(self, script: list[Any]) -> AsyncIterator[str]:
        for step in script:
            if step is SILENT:
                await asyncio.Event().wait()
            elif isinstance(step, float):
                await asyncio.sleep(step)
            elif isinstance(step, Exception):
                raise step
            else:
                yield step

    @property
    def times(self) -> list[float]:
        return [at for at, _, _ in self.opened]

    @property
    def gaps(self) -> list[float]:
        return [b - a for a, b in zip(self.times, self.times[1:], strict=False)]


Listen = Callable[..., tuple[Ear, Stream]]


@pytest.fixture
def listen(monkeypatch: pytest.MonkeyPatch) -> Listen:
    """Play these scripts to a listener for so many seconds."""

    def run(*scripts: list[Any], seconds: float = 1.0, prepare: Callable[[Ear], object] = id) -> tuple[Ear, Stream]:
        clock = fake_time(monkeypatch, module)
        stream = Stream(clock)
        stream.scripts = list(scripts)
        monkeypatch.setattr(httpx_wire, "open_lines", stream.open_lines)

        async def main() -> Ear:
            ear = Ear()
            prepare(ear)
            task = asyncio.ensure_future(ear.listener.run())
            await asyncio.sleep(seconds)
            assert not task.done(), "it listens for ever"
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            return ear

        ear = run_in_fake_time(clock, main())
        assert stream.open_now == 0, "a connection was left open"
        return ear, stream

    return run


def test_it_asks_for_jobs_that_are_new_or_again_pending_with_the_key(listen: Listen) -> None:
    _, stream = listen([SILENT])
    ((_, url, headers),) = stream.opened
    assert url == "http://service/api/v1" + PATH
    assert headers == {"Authorization": "Bearer sp_test_one", "Accept": "text/event-stream"}


@pytest.mark.parametrize("base", ["http://h", "http://h/", "http://h/api/v1", "http://h/api/v1/"])
def test_the_base_may_name_the_api_already(base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = fake_time(monkeypatch)
    stream = Stream(clock)
    monkeypatch.setattr(httpx_wire, "open_lines", stream.open_lines)

    async def main() -> None:
        task = asyncio.ensure_future(Ear(base).listener.run())
        await asyncio.sleep(0.1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    run_in_fake_time(clock, main())
    assert stream.opened[0][1] == "http://h/api/v1" + PATH


@pytest.mark.parametrize(
    ("line", "jobs"),
    [
        (CREATED, ["emails"]),
        ('data:{"type":"JobCreated","data":{"queue_name":"q"}}', ["q"]),
        ('data: {"type":"JobStatusChange","data":{"queue_name":"q","new_status":"pending"}}', ["q"]),
        ('data: {"type":"JobStatusChange","data":{"queue_name":"q","new_status":"processing"}}', []),
        ('data: {"type":"JobStatusChange","data":{"queue_name":"q"}}', []),
        ('data: {"type":"JobCompleted","data":{"queue_name":"q"}}', []),
        ('data: {"type":"SystemHealth","data":{"database":true}}', []),
        ('data: {"type":"jobcreated","data":{"queue_name":"q"}}', []),
        (": connected", []),
        (": ping", []),
        ("", []),
        ("event: job.created", []),
        ("id: 7", []),
        ("retry: 1000", []),
        ('{"type":"JobCreated","data":{"queue_name":"q"}}', []),
        ('database: {"type":"JobCreated","data":{"queue_name":"q"}}', []),
        ("data:", []),
        ("data: ", []),
        ("data: nonsense", []),
        ('data: {"type":"JobCreated","data":{"queue_name":7}}', []),
        ('data: {"type":"JobCreated","data":[]}', []),
        ('data: ["JobCreated"]', []),
        ("data: null", []),
        ("data: " + "[" * 60_000, []),
        ('data: {"type":"JobCreated","data":{"queue_name":"\\ud800"}}', []),
        ("data: \ufffd\ufffd", []),
    ],
)
def test_only_two_kinds_of_event_mean_a_job_and_nonsense_means_nothing(
    listen: Listen, line: str, jobs: list[str]
) -> None:
    ear, stream = listen([line, CREATED, SILENT])
    assert ear.jobs in ([*jobs, "emails"],)
    assert len(stream.opened) == 1


@pytest.mark.parametrize("line", [": connected", "", "event: x", CREATED, "data: nonsense"])
def test_any_line_shows_that_the_stream_works(listen: Listen, line: str) -> None:
    ear, _ = listen([line, SILENT])
    assert ear.ups[0] is True


def test_a_stream_that_has_said_nothing_yet_is_not_up(listen: Listen) -> None:
    ear, _ = listen([0.5, SILENT], seconds=2.0)
    assert True not in ear.ups


def test_silence_ends_a_connection_and_another_one_is_made(listen: Listen) -> None:
    ear, stream = listen([": connected", 30.0, ": ping", SILENT], [CREATED, SILENT], seconds=30 + SILENCE_S + 5)
    assert len(stream.opened) == 2
    assert 30 + SILENCE_S <= stream.times[1] <= 30 + SILENCE_S + RETRY_FIRST_S
    assert ear.ups[-1] is False or ear.ups[-1] is True
    assert ear.jobs == ["emails"]
    assert [event.reason for event in ear.recorded.of(ApiTroubled)] == ["nothing was heard for 45 s"]


def test_a_connection_that_is_never_answered_ends_like_a_silent_one(listen: Listen) -> None:
    ear, stream = listen([SILENT], [CREATED, SILENT], seconds=SILENCE_S + 5)
    assert len(stream.opened) == 2
    assert ear.jobs == ["emails"]


def test_pings_keep_a_quiet_connection(listen: Listen) -> None:
    _, stream = listen([": connected", *[step for _ in range(100) for step in (15.0, ": ping")], SILENT], seconds=1500)
    assert len(stream.opened) == 1


def test_a_cut_is_followed_by_a_new_connection_soon(listen: Listen) -> None:
    """The service ends every stream after 30 minutes."""
    ear, stream = listen([": connected", 10.0], [CREATED, SILENT], seconds=20.0)
    assert 10.0 < stream.times[1] <= 10.0 + RETRY_FIRST_S
    assert ear.jobs == ["emails"]
    up, down, again = [up for up, before in zip(ear.ups, [None, *ear.ups], strict=False) if up != before][:3]
    assert (up, down, again) == (True, False, True)
    assert ear.recorded.names == ["api_troubled", "api_recovered"]
    assert ear.recorded.of(ApiTroubled)[0].operation == OPERATION
    assert ear.recorded.of(ApiRecovered)[0].failures == 1


@pytest.mark.parametrize(
    "error",
    [
        WireError("ConnectError: All connection attempts failed"),
        WireError("HTTP 500 application/json, no event stream", status=500),
        WireError("HTTP 200 text/html, no event stream", status=200),
        WireError("HTTP 401 application/json, no event stream", status=401),
        TimeoutError(),
    ],
    ids=["no connection", "HTTP 500", "a web page", "HTTP 401", "no answer"],
)
def test_a_stream_that_cannot_be_had_is_tried_slower_and_slower_up_to_a_cap(listen: Listen, error: Exception) -> None:
    ear, stream = listen([error], seconds=1000.0)
    assert RETRY_FIRST_S / 2 <= stream.gaps[0] <= RETRY_FIRST_S + 1e-6
    assert RETRY_CAP_S / 2 <= stream.gaps[-1] <= RETRY_CAP_S + 1e-6
    assert all(gap <= RETRY_CAP_S + 1e-6 for gap in stream.gaps)
    assert len(ear.recorded.of(ApiTroubled)) == 1, "an outage is one line in the log"
    assert True not in ear.ups


@pytest.mark.parametrize("status", [403, 404, 405, 429])
def test_a_service_without_the_stream_or_without_room_for_it_is_asked_seldom(listen: Listen, status: int) -> None:
    error = WireError(f"HTTP {status} application/json, no event stream", status=status)
    _, stream = listen([error], seconds=3 * ABSENT_RETRY_S)
    assert len(stream.opened) <= 4
    assert all(ABSENT_RETRY_S * 0.9 - 1e-6 <= gap <= ABSENT_RETRY_S * 1.1 + 1e-6 for gap in stream.gaps)


def test_a_back_off_is_forgotten_when_it_works_again(listen: Listen) -> None:
    down = WireError("no connection")
    lives = [": connected", 30.0, ": ping", 30.0, ": ping", down]
    _, stream = listen(*[[down]] * 6, lives, [SILENT], seconds=300.0)
    assert stream.gaps[5] > RETRY_FIRST_S
    assert stream.gaps[6] <= 60.0 + RETRY_FIRST_S + 1e-6


def test_a_stream_that_is_cut_after_its_first_line_is_tried_slower_and_slower(listen: Listen) -> None:
    _, stream = listen([": connected", WireError("cut")], seconds=1000.0)
    assert stream.gaps[0] <= RETRY_FIRST_S + 1e-6
    assert stream.gaps[-1] >= RETRY_CAP_S / 2


def test_a_key_that_was_rotated_is_used_for_the_next_connection(listen: Listen) -> None:
    keys = iter(["sp_test_one", "sp_test_two"])

    def prepare(ear: Ear) -> None:
        ear.listener._api_key = lambda: next(keys)

    _, stream = listen([": connected"], [SILENT], seconds=5.0, prepare=prepare)
    assert [headers["Authorization"] for _, _, headers in stream.opened] == ["Bearer sp_test_one", "Bearer sp_test_two"]


def test_a_stream_that_does_not_work_is_never_a_reason_to_be_unhealthy(listen: Listen) -> None:
    """It is never needed: a proxy that does not let it through must not get the daemon restarted."""
    ear, stream = listen([WireError("HTTP 502 text/html, no event stream", status=502)], seconds=1000.0)
    assert len(stream.opened) > 10
    assert ear.troubles.reasons == []


# --- over a real connection -------------------------------------------------------------------------------------------

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
EVENT = b"event: job.created\n" + CREATED.encode() + b"\n\n"


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The service is on this machine."""
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


def heard(
    *answers: bytes,
    until: Callable[[Ear], object],
    monkeypatch: pytest.MonkeyPatch,
    holds: bool = True,
    ca_file: Path | None = None,
    scheme: str = "http",
) -> tuple[Ear, int]:
    """What a listener hears from a service whose connections answer so; and how many connections there were."""
    monkeypatch.setattr(module, "RETRY_FIRST_S", 0.01)
    count = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal count
        answer = answers[min(count, len(answers) - 1)]
        count += 1
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)
            await writer.drain()
            if holds and count >= len(answers):
                await reader.read()
        writer.close()

    async def main() -> Ear:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        ear = Ear(f"{scheme}://127.0.0.1:{server.sockets[0].getsockname()[1]}", ca_file)
        task = asyncio.ensure_future(ear.listener.run())
        waiting = asyncio.ensure_future(ear.until(lambda: until(ear)))
        await asyncio.wait([task, waiting], return_when=asyncio.FIRST_COMPLETED)
        assert not task.done(), task.exception()
        await waiting
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        server.close()
        await asyncio.sleep(0)
        return ear

    with asyncio.Runner(loop_factory=timing.new_event_loop) as runner:
        return runner.run(main()), count


@pytest.mark.parametrize(
    "body",
    [
        EVENT,
        EVENT.replace(b"\n", b"\r\n"),
        b": connected\n\n: ping\n\n" + EVENT,
        b"\xff\xfe\n" + EVENT,
        b"\n\n\n" + EVENT,
        b"x" * (MAX_LINE - 10) + b"\n" + EVENT,
    ],
    ids=["plain", "CR LF", "comments first", "bytes that are no text", "blank lines", "a long line"],
)
def test_an_event_is_heard_while_the_stream_goes_on(monkeypatch: pytest.MonkeyPatch, body: bytes) -> None:
    ear, count = heard(HEAD + body, until=lambda ear: ear.jobs, monkeypatch=monkeypatch)
    assert ear.jobs == ["emails"]
    assert count == 1


def test_a_chunked_stream_is_heard_whatever_its_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    head = HEAD.replace(b"\r\n\r\n", b"\r\nTransfer-Encoding: chunked\r\n\r\n")
    pieces = b"".join(b"%x\r\n%b\r\n" % (len(EVENT[n : n + 7]), EVENT[n : n + 7]) for n in range(0, len(EVENT), 7))
    ear, _ = heard(head + pieces, until=lambda ear: ear.jobs, monkeypatch=monkeypatch)
    assert ear.jobs == ["emails"]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"HTTP/1.1 500 Oops\r\nContent-Length: 2\r\n\r\nno", "HTTP 500 , no event stream"),
        (
            b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 4\r\n\r\nhtml",
            "HTTP 200 text/html, no event",
        ),
        (b"HTTP/1.1 302 Found\r\nLocation: /login\r\nContent-Length: 0\r\n\r\n", "HTTP 302 , no event stream"),
        (b"HTTP/1.1 204 No Content\r\n\r\n", "HTTP 204 , no event stream"),
        (b"SSH-2.0-OpenSSH\r\n\r\n", "RemoteProtocolError"),
        (b"", "RemoteProtocolError"),
        (HEAD, "the stream ended"),
        (HEAD + EVENT, "the stream ended"),
        (HEAD + b"x" * (MAX_LINE + 2), "a line without an end"),
        (HEAD.replace(b"\r\n\r\n", b"\r\nTransfer-Encoding: chunked\r\n\r\n") + b"zz\r\n", "RemoteProtocolError"),
        (HEAD.replace(b"\r\n\r\n", b"\r\nContent-Encoding: gzip\r\n\r\n") + b"no gzip", "DecodingError"),
    ],
)
def test_whatever_comes_instead_of_a_stream_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, answer: bytes, reason: str
) -> None:
    good = HEAD + EVENT.replace(b"emails", b"second")
    ear, count = heard(answer, good, until=lambda ear: "second" in ear.jobs, monkeypatch=monkeypatch)
    assert count == 2
    assert reason in ear.recorded.of(ApiTroubled)[0].reason


def test_nobody_who_listens_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETRY_FIRST_S", 0.01)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))

        async def main() -> None:
            ear = Ear(f"http://127.0.0.1:{taken.getsockname()[1]}")
            task = asyncio.ensure_future(ear.listener.run())
            await ear.until(lambda: len(ear.ups) >= 3)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert set(ear.ups) == {False}

        with asyncio.Runner(loop_factory=timing.new_event_loop) as runner:
            runner.run(main())


@pytest.mark.parametrize("text", [None, "junk"], ids=["missing", "junk"])
def test_a_ca_file_that_was_lost_meanwhile_costs_the_stream_and_not_the_daemon(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str | None
) -> None:
    path = tmp_path / "ca.pem"
    if text is not None:
        path.write_text(text)
    ear, count = heard(b"", until=lambda ear: len(ear.ups) >= 3, monkeypatch=monkeypatch, ca_file=path, scheme="https")
    assert set(ear.ups) == {False}
    assert count == 0
    assert ssl.SSLError.__name__ in ear.recorded.of(ApiTroubled)[0].reason or text is None


@pytest.mark.parametrize(
    "variables",
    [
        {"no_proxy": "fd00::/8"},
        {"no_proxy": "localhost,[::1]"},
        {"all_proxy": "socks5://127.0.0.1:1", "no_proxy": "127.0.0.1"},
        {"https_proxy": "socks://127.0.0.1:1"},
    ],
    ids=lambda variables: " ".join(variables.values()),
)
def test_variables_about_other_proxies_cost_nothing(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    """What httpx makes of them all, for whatever address, would end the daemon."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    ear, _ = heard(HEAD + EVENT, until=lambda ear: ear.jobs, monkeypatch=monkeypatch)
    assert ear.jobs[:1] == ["emails"]


def test_a_proxy_that_cannot_be_used_costs_the_stream_and_not_the_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "socks5://127.0.0.1:1")
    monkeypatch.setenv("no_proxy", "")
    ear, count = heard(b"", until=lambda ear: len(ear.ups) >= 2, monkeypatch=monkeypatch)
    assert (set(ear.ups), count) == ({False}, 0)


def test_it_ends_at_once_when_it_is_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> Coroutine[Any, Any, None] | None:
        gone = asyncio.Event()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(HEAD + EVENT)
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
            gone.set()
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        ear = Ear(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        task = asyncio.ensure_future(ear.listener.run())
        await ear.until(lambda: ear.jobs)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async with asyncio.timeout(LIMIT_S):
            await gone.wait()
        server.close()
        assert ear.ups[-1] is False
        return None

    with asyncio.Runner(loop_factory=timing.new_event_loop) as runner:
        runner.run(main())

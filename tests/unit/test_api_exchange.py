"""One request: its deadline, its one replay, what is unusable, and what a cancelled one leaves behind."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest

from spooled_supervisor import timing
from spooled_supervisor.api import wire
from spooled_supervisor.api.exchange import Exchange, Received
from spooled_supervisor.api.httpx_wire import Transport, proxy_for
from spooled_supervisor.errors import ApiUnavailable, ConfigError
from spooled_supervisor.events import ApiRequestFinished, Events
from tests.support import certificates
from tests.support.stub_api import Reply, StubApi, stub_api

T = TypeVar("T")
KEY = "sp_test_a_key_that_is_secret"
LONG_S = 10.0  # far more than anything here takes
SHORT_S = 0.1  # a deadline that is meant to pass


def run(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """On the loop of production, in debug mode, without a task left behind."""

    async def checked() -> T:
        result = await main()
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return result

    with asyncio.Runner(loop_factory=timing.new_event_loop, debug=True) as runner:
        return runner.run(checked())


@pytest.fixture
def stub() -> Iterator[StubApi]:
    with stub_api() as stub:
        yield stub


class Client:
    """An exchange with its events. `post` sends a heartbeat, which the stub answers with 200 and a small object."""

    def __init__(self, url: str, api_key: Callable[[], str] = lambda: KEY, **options: Any) -> None:
        self.events = Events()
        self.statuses: list[str] = []
        self.events.subscribe(lambda event: self.statuses.append(event.status), ApiRequestFinished)
        options = {"ca_file": None, "user_agent": "test/1", "transport": None} | options
        self.exchange = Exchange(url, api_key, self.events, **options)

    async def post(self, limit_s: float = LONG_S, **options: Any) -> Received:
        return await self.exchange.post("heartbeat", "/workers/w/heartbeat", b"{}", timing.now() + limit_s, **options)


@contextlib.asynccontextmanager
async def client(url: str, **options: Any) -> AsyncIterator[Client]:
    one = Client(url, **options)
    try:
        yield one
    finally:
        await one.exchange.aclose()


async def refusal(one: Client, limit_s: float = LONG_S, **options: Any) -> ApiUnavailable:
    with pytest.raises(ApiUnavailable) as caught:
        await one.post(limit_s, **options)
    return caught.value


# --- what goes out ---------------------------------------------------------------------------------------------------


def test_a_request_says_who_asks_and_what_it_takes(stub: StubApi) -> None:
    async def main() -> None:
        async with client(stub.url) as one:
            received = await one.post()
            assert received.body == b'{"acknowledged": true, "next_heartbeat_seconds": 10, "commands": []}'
            assert not received.replay

    before = timing.now()
    run(main)
    (request,) = stub.requests
    assert request.path == "/api/v1/workers/w/heartbeat"
    assert request.headers == {
        "host": f"127.0.0.1:{stub.port}",
        "user-agent": "test/1",
        "accept": "application/json",
        "accept-encoding": "identity",
        "content-type": "application/json",
        "authorization": f"Bearer {KEY}",
        "content-length": "2",
    }
    assert before <= timing.now()


@pytest.mark.parametrize("suffix", ["", "/", "/api/v1", "/api/v1/"])
def test_the_base_may_name_the_api_already(stub: StubApi, suffix: str) -> None:
    async def main() -> None:
        async with client(stub.url + suffix) as one:
            await one.post()

    run(main)
    assert [request.path for request in stub.requests] == ["/api/v1/workers/w/heartbeat"]


def test_the_path_of_the_base_is_kept(stub: StubApi) -> None:
    async def main() -> None:
        async with client(f"{stub.url}/spooled/") as one:
            await one.post()

    run(main)
    assert [request.path for request in stub.requests] == ["/spooled/api/v1/workers/w/heartbeat"]


def test_the_key_is_asked_for_each_time_and_trimmed(stub: StubApi) -> None:
    keys = iter(["first-key", " second-key\n"])

    async def main() -> None:
        async with client(stub.url, api_key=lambda: next(keys)) as one:
            await one.post()
            await one.post()

    run(main)
    assert [request.headers["authorization"] for request in stub.requests] == ["Bearer first-key", "Bearer second-key"]


@pytest.mark.parametrize("key", ["", "  ", "with space", "line\nbreak", "nul\x00", "schlüssel"])
def test_a_key_that_no_header_can_carry_is_never_sent_nor_shown(stub: StubApi, key: str) -> None:
    async def main() -> None:
        async with client(stub.url, api_key=lambda: key) as one:
            error = await refusal(one)
            assert "API key" in str(error)
            assert not key.strip() or key not in str(error)
            assert one.statuses == []

    run(main)
    assert stub.requests == []


def test_a_key_file_that_is_gone_for_a_moment_is_unavailable(stub: StubApi, tmp_path: Path) -> None:
    async def main() -> None:
        async with client(stub.url, api_key=(tmp_path / "key").read_text) as one:
            assert "cannot be read" in str(await refusal(one))
            (tmp_path / "key").write_text(KEY)
            await one.post()

    run(main)


# --- connections -----------------------------------------------------------------------------------------------------


def test_one_connection_serves_calls_one_after_the_other(stub: StubApi) -> None:
    async def main() -> None:
        async with client(stub.url) as one:
            for _ in range(5):
                await one.post()

    run(main)
    assert [(request.connection, request.number) for request in stub.requests] == [(1, n) for n in range(1, 6)]


def test_nobody_waits_for_a_connection(stub: StubApi) -> None:
    stub.on("heartbeat", Reply(hang="before commit"), times=20)

    async def main() -> None:
        async with client(stub.url) as one:
            hanging = [asyncio.create_task(one.post()) for _ in range(20)]
            await asyncio.to_thread(stub.wait_for, "heartbeat", 20)
            assert (await one.post()).answer.status == 200
            for task in hanging:
                task.cancel()
            await asyncio.gather(*hanging, return_exceptions=True)

    run(main)


@pytest.mark.parametrize(
    "cut", [Reply(reset="before commit"), Reply(close="before commit"), Reply(reset="after commit")]
)
def test_a_stale_connection_is_replaced_once_and_said_to_be(stub: StubApi, cut: Reply) -> None:
    async def main() -> None:
        async with client(stub.url) as one:
            assert not (await one.post()).replay
            stub.on("heartbeat", cut)
            started = timing.now()
            again = await one.post()
            assert again.replay
            assert again.started_at >= started
            assert one.statuses == ["200", "error", "200"]

    run(main)
    assert [(request.connection, request.number) for request in stub.requests] == [(1, 1), (1, 2), (2, 1)]


def test_a_connection_closed_while_idle_costs_nothing(stub: StubApi) -> None:
    async def main() -> None:
        async with client(stub.url) as one:
            await one.post()
            await asyncio.to_thread(stub.drop_idle)
            assert not (await one.post()).replay
            assert one.statuses == ["200", "200"]

    run(main)


def test_what_may_not_be_replayed_is_not(stub: StubApi) -> None:
    async def main() -> None:
        async with client(stub.url) as one:
            await one.post(may_replay=False)
            stub.on("heartbeat", Reply(reset="before commit"))
            await refusal(one, may_replay=False)
            assert one.statuses == ["200", "error"]

    run(main)
    assert len(stub.requests) == 2


def test_a_fresh_connection_that_fails_is_not_tried_again(stub: StubApi) -> None:
    stub.on("heartbeat", Reply(reset="before commit"), Reply(close="before commit"))

    async def main() -> None:
        async with client(stub.url) as one:
            assert "lost" in str(await refusal(one))
            assert "closed the connection" in str(await refusal(one))
            assert one.statuses == ["error", "error"]

    run(main)
    assert len(stub.requests) == 2


def test_a_second_stale_connection_is_a_failure(stub: StubApi) -> None:
    async def main() -> None:
        async with client(stub.url) as one:
            await one.post()
            stub.on("heartbeat", Reply(reset="before commit"), times=2)
            await refusal(one)
            assert (await one.post()).answer.status == 200

    run(main)


def test_an_answer_that_breaks_off_is_not_replayed(stub: StubApi) -> None:
    async def main() -> None:
        async with client(stub.url) as one:
            await one.post()
            # The head is whole and half of the body is missing: the service has answered.
            stub.on("heartbeat", Reply(raw=b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{"))
            await refusal(one)
            assert one.statuses == ["200", "error"]

    run(main)
    assert len(stub.requests) == 2


def test_a_refused_connection_is_unavailable_and_later_it_works(stub: StubApi) -> None:
    async def main() -> None:
        async with client(stub.url) as one:
            await one.post()
            await asyncio.to_thread(stub.down)
            assert "no connection" in str(await refusal(one))
            await asyncio.to_thread(stub.up)
            assert (await one.post()).answer.status == 200
            assert one.statuses == ["200", "error", "200"]

    run(main)


def test_a_name_that_does_not_resolve_is_unavailable() -> None:
    async def main() -> None:
        async with client("http://nowhere.invalid:1") as one:
            await refusal(one)
            assert one.statuses == ["error"]

    run(main)


# --- the deadline ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "slow",
    [
        Reply(hang="before commit"),
        Reply(hang="after commit"),
        Reply(delay_s=LONG_S),
        Reply(trickle_s=0.02),  # every byte comes in good time
    ],
)
def test_no_slowness_outlives_the_deadline(stub: StubApi, slow: Reply) -> None:
    stub.on("heartbeat", slow)

    async def main() -> None:
        async with client(stub.url) as one:
            started = timing.now()
            assert "no answer in time" in str(await refusal(one, SHORT_S))
            assert SHORT_S <= timing.now() - started < SHORT_S + 2.0
            assert one.statuses == ["timeout"]
            assert (await one.post()).answer.status == 200  # on another connection

    run(main)
    assert [request.connection for request in stub.requests] == [1, 2]


def test_connecting_ends_at_the_deadline() -> None:
    async def main() -> None:
        with contextlib.ExitStack() as sockets:
            listener = sockets.enter_context(socket.socket())
            listener.bind(("127.0.0.1", 0))
            listener.listen(0)
            for _ in range(3):  # a full backlog answers nobody (listen(2))
                waiting = sockets.enter_context(socket.socket())
                waiting.setblocking(False)
                waiting.connect_ex(listener.getsockname())
            async with client(f"http://127.0.0.1:{listener.getsockname()[1]}") as one:
                await refusal(one, SHORT_S)
                assert one.statuses == ["timeout"]

    run(main)


@pytest.mark.parametrize("limit_s", [0.0, -5.0])
def test_without_time_nothing_is_sent(stub: StubApi, limit_s: float) -> None:
    async def main() -> None:
        async with client(stub.url) as one:
            assert "no time was left" in str(await refusal(one, limit_s))
            assert one.statuses == []

    run(main)
    assert stub.requests == []


# --- cancelling ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slow", [Reply(hang="before commit"), Reply(trickle_s=0.5)])
def test_a_cancelled_call_closes_its_connection_and_is_not_counted(stub: StubApi, slow: Reply) -> None:
    async def main() -> None:
        async with client(stub.url) as one:
            await one.post()
            stub.on("heartbeat", slow)
            task = asyncio.create_task(one.post())
            await asyncio.to_thread(stub.wait_for, "heartbeat", 2)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert (await one.post()).answer.status == 200
            assert one.statuses == ["200", "200"]

    run(main)
    assert [request.connection for request in stub.requests] == [1, 1, 2]


def test_calls_cancelled_at_any_moment_leave_the_client_usable(stub: StubApi) -> None:
    """Cancels after 0, 1, 2 ... turns of the loop, through connecting, sending, reading and closing."""

    async def main() -> None:
        async with client(stub.url) as one:
            finished = 0
            for turns in range(120):
                task = asyncio.create_task(one.post())
                for _ in range(turns):
                    await asyncio.sleep(0)
                task.cancel()
                (outcome,) = await asyncio.gather(task, return_exceptions=True)
                assert isinstance(outcome, (Received, asyncio.CancelledError)), outcome
                finished += isinstance(outcome, Received)
            assert (await one.post()).answer.status == 200
            assert finished

    run(main)
    gc.collect()  # a socket that was lost says so


def test_giving_the_connection_back_is_not_torn_by_a_cancellation() -> None:
    class SlowToClose(httpx.AsyncByteStream):
        def __init__(self) -> None:
            self.closing = asyncio.Event()
            self.closed = asyncio.Event()

        async def __aiter__(self) -> AsyncIterator[bytes]:
            yield b"{}"

        async def aclose(self) -> None:
            self.closing.set()
            await asyncio.sleep(0)
            self.closed.set()

    async def main() -> None:
        stream = SlowToClose()
        transport = httpx.MockTransport(lambda request: httpx.Response(200, stream=stream))
        async with client("http://api.example", transport=transport) as one:
            task = asyncio.create_task(one.post())
            await stream.closing.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await asyncio.wait_for(stream.closed.wait(), LONG_S)

    run(main)


# --- what is unusable ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "raw",
    [
        b"hello\r\n",
        b"\x15\x03\x01\x00\x02\x02P",
        b"HTTP/1.1 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"x-filler: " + b"y" * 200_000 + b"\r\n\r\n",
        b"",
    ],
)
def test_what_is_no_http_is_unavailable(stub: StubApi, raw: bytes) -> None:
    stub.on("heartbeat", Reply(raw=raw))

    async def main() -> None:
        async with client(stub.url) as one:
            await refusal(one)
            assert one.statuses == ["error"]
            assert (await one.post()).answer.status == 200

    run(main)


@pytest.mark.parametrize(
    "raw",
    [
        b"HTTP/1.0 200 OK\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
        b"HTTP/1.1 103 Early Hints\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}",
    ],
)
def test_other_ways_of_http_are_fine(stub: StubApi, raw: bytes) -> None:
    stub.on("heartbeat", Reply(raw=raw))

    async def main() -> None:
        async with client(stub.url) as one:
            assert (await one.post()).body == b"{}"

    run(main)


def test_an_answer_that_is_too_large_is_not_read_to_its_end(stub: StubApi) -> None:
    stub.on("heartbeat", Reply(body=b" " * 5000))

    async def main() -> None:
        async with client(stub.url) as one:
            assert "more than 4999 bytes" in str(await refusal(one, most_bytes=4999))
            assert one.statuses == ["200"]
            stub.on("heartbeat", Reply(body=b" " * 5000))
            assert len((await one.post(most_bytes=5000)).body or b"") == 5000

    run(main)


@pytest.mark.parametrize(("encoding", "readable"), [("identity", True), ("gzip", False), ("br", False)])
def test_an_encoded_answer_has_no_body_for_us(stub: StubApi, encoding: str, readable: bool) -> None:
    stub.on("heartbeat", Reply(body=b"{}", headers=(("Content-Encoding", encoding),)))

    async def main() -> None:
        async with client(stub.url) as one:
            assert (await one.post()).body == (b"{}" if readable else None)

    run(main)


def test_redirects_are_not_followed(stub: StubApi) -> None:
    stub.on("heartbeat", Reply(302, b"", (("Location", "/login"),)))

    async def main() -> None:
        async with client(stub.url) as one:
            assert (await one.post()).answer.message == "redirected to /login"

    run(main)
    assert len(stub.requests) == 1


def test_headers_of_a_refusal_are_read(stub: StubApi) -> None:
    dates = (("date", "Wed, 21 Oct 2026 12:00:00 GMT"), ("retry-after", "Wed, 21 Oct 2026 12:00:07 GMT"))
    stub.on("heartbeat", Reply(503, b"", dates))

    async def main() -> None:
        async with client(stub.url) as one:
            assert (await one.post()).answer.retry_after_s == 7.0

    run(main)


def test_a_page_that_repeats_the_key_is_not_repeated(stub: StubApi) -> None:
    odd = "no-key-like-prefix-at-all"
    stub.on("heartbeat", Reply(200, f"<pre>authorization: Bearer {odd}; key={odd}</pre>".encode()))

    async def main() -> None:
        async with client(stub.url, api_key=lambda: odd) as one:
            assert odd.encode() not in ((await one.post()).body or b"")

    run(main)


# --- where to --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url", ["", "api.spooled.cloud", "ftp://a", "http://", "http://a:b", "http://u:p@a", "http://a/?q=1", "http://a/#f"]
)
def test_an_address_that_cannot_be_used_names_the_option(url: str) -> None:
    with pytest.raises(ConfigError, match="--api-url"):
        Client(url)


def test_a_ca_file_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "junk.pem").write_text("junk")
    for path in (tmp_path / "missing.pem", tmp_path / "junk.pem"):
        with pytest.raises(ConfigError, match=path.name):
            Client("https://localhost", ca_file=path)


def test_a_transport_can_be_given_and_is_closed_in_the_end() -> None:
    class Canned(httpx.AsyncBaseTransport):
        closed = False

        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            return httpx.Response(200, stream=httpx.ByteStream(b"{}"))

        async def aclose(self) -> None:
            self.closed = True

    transport = Canned()

    async def main() -> None:
        given: Transport = transport
        async with client("https://example.org", transport=given) as one:
            assert (await one.post()).body == b"{}"

    run(main)
    assert transport.closed


PROXY_VARIABLES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in PROXY_VARIABLES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    return monkeypatch


@pytest.mark.parametrize(
    ("variables", "url", "proxy"),
    [
        ({}, "https://api.example", None),
        ({"https_proxy": "http://p:3128"}, "https://api.example", "http://p:3128"),
        ({"HTTPS_PROXY": "p:3128"}, "https://api.example", "http://p:3128"),
        ({"http_proxy": "http://p:3128"}, "https://api.example", None),
        ({"http_proxy": "http://p:3128"}, "http://api.example", "http://p:3128"),
        ({"all_proxy": "http://p:3128"}, "https://api.example", "http://p:3128"),
        ({"https_proxy": "http://p:1", "no_proxy": "api.example"}, "https://api.example:8443", None),
        ({"https_proxy": "http://p:1", "no_proxy": ".example, other"}, "https://api.example", None),
        ({"https_proxy": "http://p:1", "no_proxy": "*"}, "https://api.example", None),
        ({"https_proxy": "http://p:1", "no_proxy": "other"}, "https://api.example", "http://p:1"),
        ({"https_proxy": ""}, "https://api.example", None),
    ],
)
def test_the_proxy_of_the_environment(
    environment: pytest.MonkeyPatch, variables: dict[str, str], url: str, proxy: str | None
) -> None:
    for name, value in variables.items():
        environment.setenv(name, value)
    assert proxy_for(url) == proxy


def test_requests_go_through_the_proxy(stub: StubApi, environment: pytest.MonkeyPatch) -> None:
    environment.setenv("http_proxy", stub.url)

    async def main() -> None:
        async with client("http://api.example:8080") as one:
            assert (await one.post()).answer.status == 404  # the stub knows no path that begins with a host

    run(main)
    (request,) = stub.requests
    assert request.path == "http://api.example:8080/api/v1/workers/w/heartbeat"
    assert request.headers["host"] == "api.example:8080"


def test_a_proxy_that_cannot_be_used_is_a_matter_of_configuration(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("https_proxy", "gopher://p:70")
    with pytest.raises(ConfigError, match="gopher"):
        Client("https://api.example")


# --- TLS -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A self-signed certificate for 127.0.0.1, and its key."""
    return certificates.certificate(tmp_path_factory.mktemp("tls"), "IP:127.0.0.1")


@pytest.fixture
def tls_stub(certificate: tuple[Path, Path]) -> Iterator[StubApi]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    with stub_api(tls=context) as stub:
        yield stub


def test_a_certificate_of_ones_own_is_accepted_by_its_file(tls_stub: StubApi, certificate: tuple[Path, Path]) -> None:
    async def main() -> None:
        async with client(tls_stub.url, ca_file=certificate[0]) as one:
            assert (await one.post()).answer.status == 200
            tls_stub.on("heartbeat", Reply(reset="before commit"))
            assert (await one.post()).replay

    run(main)


def test_an_unknown_certificate_is_never_accepted(tls_stub: StubApi) -> None:
    async def main() -> None:
        async with client(tls_stub.url) as one:
            assert "certificate verify failed" in str(await refusal(one))
            assert one.statuses == ["error"]

    run(main)
    assert tls_stub.requests == []


def test_a_certificate_for_another_name_is_never_accepted(tls_stub: StubApi, certificate: tuple[Path, Path]) -> None:
    async def main() -> None:
        async with client(f"https://localhost:{tls_stub.port}", ca_file=certificate[0]) as one:
            assert "certificate verify failed" in str(await refusal(one))

    run(main)
    assert tls_stub.requests == []


def test_a_handshake_that_hangs_ends_at_the_deadline_and_leaves_no_socket(stub: StubApi) -> None:
    """The stub speaks plain HTTP and waits for the end of what it takes for a header."""

    async def main() -> None:
        async with client(f"https://127.0.0.1:{stub.port}") as one:
            await refusal(one, SHORT_S)
            assert one.statuses == ["timeout"]

    run(main)
    gc.collect()  # a socket that was lost says so


def test_idle_connections_are_kept_longer_than_heartbeats_are_apart() -> None:
    assert 10.0 < wire.KEEPALIVE_S < 60.0

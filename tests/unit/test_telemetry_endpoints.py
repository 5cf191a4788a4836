"""The listener on a real loopback socket: what each path answers, and clients that are slow, rude or many."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import errno
import hashlib
import json
import os
import socket
import urllib.request
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from html.parser import HTMLParser
from typing import Any

import pytest

from spooled_supervisor import timing
from spooled_supervisor.errors import EX_CONFIG, ConfigError
from spooled_supervisor.events import Events
from spooled_supervisor.telemetry import endpoints as endpoints_module
from spooled_supervisor.telemetry import logs
from spooled_supervisor.telemetry.endpoints import MAX_CONNECTIONS, Endpoints, health_status
from spooled_supervisor.telemetry.exchange import Request, Response
from spooled_supervisor.telemetry.metrics import Metrics
from spooled_supervisor.telemetry.page import PAGE
from spooled_supervisor.telemetry.snapshot import (
    CHILD_STATES,
    ChildSnapshot,
    FailureSnapshot,
    LeaseSnapshot,
    QueueSnapshot,
    Snapshot,
)

CHILD = ChildSnapshot(
    slot=0,
    pid=4711,
    generation=1,
    state="busy",
    queue="emails",
    job_id="job-1",
    elapsed_s=1.5,
    deadline_in_s=None,
    percent=50.0,
    message="half \udcff",
    jobs_done=3,
    uptime_s=20.0,
    pss_bytes=1000,
    uss_bytes=None,
    cpu_s=1.0,
)
RUNNING = Snapshot(
    phase="running",
    worker_id="w-1",
    uptime_s=12.34567,
    started_at=1.7e9,
    registered=True,
    quiet=False,
    reasons=(),
    unhealthy=(),
    queues=(QueueSnapshot("emails", 1.0, None, 2, 1), QueueSnapshot("reports", 2.0, 1, 1, 0)),
    children=(CHILD,),
    slots_backed_off=0,
    leases_held=4,
    unsettled=0,
    outbox_depth=0,
    outbox_age_s=0.0,
    outbox_on_disk=True,
    heartbeat_age_s=1.0,
    procs=4,
    generation=1,
)


class Site:
    """A listener with a snapshot that a test may replace, and a client."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        self.now = RUNNING
        events = Events()
        self.errors, writer = os.pipe()
        os.set_blocking(self.errors, False)
        self.log = logs.setup("info", "json", events=events, stream_fd=writer)
        os.close(writer)
        self.endpoints = Endpoints(
            host, port, snapshot=self.snapshot, metrics=Metrics(events, self.snapshot), log=self.log
        )

    def snapshot(self) -> Snapshot:
        return self.now

    def logged(self) -> list[dict[str, Any]]:
        try:
            return [json.loads(line) for line in os.read(self.errors, 1 << 16).splitlines()]
        except BlockingIOError:
            return []

    def close(self) -> None:
        self.log.close()
        os.close(self.errors)

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.endpoints.port)

    async def raw(self, request: bytes) -> bytes:
        reader, writer = await self.connect()
        writer.write(request)
        answer = await reader.read()
        writer.close()
        await writer.wait_closed()
        return answer

    async def ask(self, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
        lines = "".join(f"{name}: {value}\r\n" for name, value in {"Host": "localhost", **headers}.items())
        head, _, body = (await self.raw(f"{method} {path} HTTP/1.1\r\n{lines}\r\n".encode())).partition(b"\r\n\r\n")
        status, *rest = head.decode().split("\r\n")
        return int(status.split()[1]), dict(line.split(": ", 1) for line in rest), body

    async def document(self, path: str) -> tuple[int, Any]:
        status, _, body = await self.ask(path)
        return status, json.loads(body)


@asynccontextmanager
async def a_site() -> AsyncIterator[Site]:
    site = Site()
    try:
        async with site.endpoints:
            site.logged()
            yield site
    finally:
        site.close()


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=timing.new_event_loop) as runner:
        runner.run(coroutine)
        assert len(asyncio.all_tasks(runner.get_loop())) == 0


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise TimeoutError


@pytest.fixture(autouse=True)
def _no_descriptor_is_left() -> Iterator[None]:
    before = os.listdir("/proc/self/fd")
    yield
    assert os.listdir("/proc/self/fd") == before


def test_metrics_are_served_in_the_format_that_was_asked_for() -> None:
    async def main() -> None:
        async with a_site() as site:
            status, headers, body = await site.ask("/metrics")
            assert (status, headers["Content-Type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
            assert b"worker_jobs_in_progress" in body
            status, headers, body = await site.ask("/metrics", Accept="application/openmetrics-text; version=1.0.0")
            assert headers["Content-Type"].startswith("application/openmetrics-text; version=1.0.0")
            assert body.endswith(b"# EOF\n")

    run(main())


def test_health_has_the_guides_shape_and_what_is_behind_it() -> None:
    async def main() -> None:
        async with a_site() as site:
            assert await site.document("/health") == (
                200,
                {
                    "status": "healthy",
                    "worker_id": "w-1",
                    "current_jobs": 3,
                    "uptime_seconds": 12.346,
                    "state": "running",
                    "queues": [
                        {"name": "emails", "in_progress": 2, "waiting": 1},
                        {"name": "reports", "in_progress": 1, "waiting": 0},
                    ],
                    "children": {**dict.fromkeys(CHILD_STATES, 0), "busy": 1},
                    "reasons": [],
                },
            )

    run(main())


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({}, "healthy"),
        ({"quiet": True, "reasons": ("quiet",)}, "healthy"),
        ({"registered": False, "worker_id": None}, "healthy"),
        ({"unhealthy": ("every slot is in back-off",)}, "unhealthy"),
        ({"phase": "booting"}, "starting"),
        ({"phase": "booting", "unhealthy": ("starting: no child has been ready yet",)}, "starting"),
        ({"phase": "booting", "unhealthy": ("starting: no child has been ready yet", "HTTP 401")}, "unhealthy"),
        ({"phase": "draining"}, "draining"),
        ({"phase": "stopping", "unhealthy": ("x",)}, "draining"),
    ],
)
def test_health_is_200_exactly_when_healthy_and_liveness_always(changes: dict[str, Any], status: str) -> None:
    async def main() -> None:
        async with a_site() as site:
            site.now = dataclasses.replace(RUNNING, **changes)
            assert health_status(site.now) == status
            code, document = await site.document("/health")
            assert (code, document["status"]) == (200 if status == "healthy" else 503, status)
            assert document["reasons"] == list(site.now.unhealthy)
            assert (await site.document("/livez"))[0] == 200

    run(main())


def test_readiness_gives_its_reasons() -> None:
    async def main() -> None:
        async with a_site() as site:
            assert await site.document("/readyz") == (200, {"ready": True, "reasons": []})
            site.now = dataclasses.replace(RUNNING, reasons=("quiet", "no usable child"))
            assert await site.document("/readyz") == (503, {"ready": False, "reasons": ["quiet", "no usable child"]})

    run(main())


def test_the_status_is_the_whole_snapshot_whatever_a_child_wrote_into_it() -> None:
    async def main() -> None:
        async with a_site() as site:
            status, document = await site.document("/status.json")
            assert status == 200
            assert set(document) == {field.name for field in dataclasses.fields(Snapshot)}
            assert document["children"][0]["message"] == "half \\udcff"

    run(main())


def test_what_the_status_grew_later_has_a_value_where_nobody_gave_one() -> None:
    """Who makes a snapshot need not know the page's fields, and who reads one finds them all."""

    async def main() -> None:
        async with a_site() as site:
            _, document = await site.document("/status.json")
            queue = document["queues"][0]
            assert (queue["done"], queue["failed"], queue["rate_per_min"], queue["breaker"]) == (0, 0, 0.0, "closed")
            assert (document["failures"], document["throughput"], document["leases"]) == ([], [], [])
            site.now = dataclasses.replace(
                RUNNING,
                throughput=((1.7e9, 3, 1),),
                failures=(FailureSnapshot("j", "q", "crashed", "x \udcff", "out", 1.7e9, 0, True, None),),
                leases=(LeaseSnapshot("j", "q", "held", 25.0, 10.0),),
            )
            _, document = await site.document("/status.json")
            assert document["throughput"] == [[1.7e9, 3, 1]]
            assert document["failures"][0]["error"] == "x \\udcff"
            assert document["leases"][0]["ends_in_s"] == 25.0

    run(main())


class Links(HTMLParser):
    """What a page would load, run or style."""

    def __init__(self) -> None:
        super().__init__()
        self.urls: list[str] = []
        self.attributes: list[str] = []
        self.contents: dict[str, list[str]] = {"script": [], "style": []}
        self._inside: str | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._inside = tag if tag in self.contents else None
        self.attributes += [name for name, _ in attrs]
        self.urls += [value or "" for name, value in attrs if name in ("src", "href", "action", "data", "srcset")]

    def handle_data(self, data: str) -> None:
        if self._inside is not None:
            self.contents[self._inside].append(data)

    def handle_endtag(self, tag: str) -> None:
        self._inside = None


def test_the_page_is_one_file_that_may_run_and_load_nothing_but_itself() -> None:
    async def main() -> None:
        async with a_site() as site:
            status, headers, body = await site.ask("/")
            assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
            links = Links()
            links.feed(body.decode())
            own = {"metrics", "health", "readyz", "status.json", "data:,"}
            assert {url for url in links.urls if not url.startswith("#")} <= own
            assert not [name for name in links.attributes if name.startswith("on") or name == "style"]
            policy = dict(part.split(" ", 1) for part in headers["Content-Security-Policy"].split("; "))
            assert policy["default-src"] == "'none'"
            for tag in ("script", "style"):
                (content,) = links.contents[tag]
                digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
                assert policy[f"{tag}-src"] == f"'sha256-{digest}'"
            assert "unsafe" not in headers["Content-Security-Policy"]

    run(main())


def test_the_pages_script_never_makes_markup_of_text() -> None:
    script = PAGE.read_text().partition("<script>")[2]
    for sink in ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval(", "Function("):
        assert sink not in script


def test_the_page_is_the_same_whatever_happens_and_needs_no_snapshot() -> None:
    async def main() -> None:
        async with a_site() as site:
            first = await site.ask("/")
            site.now = None  # type: ignore[assignment]
            assert (await site.ask("/"))[2] == first[2]
            assert (await site.ask("/", "HEAD"))[1]["Content-Length"] == str(len(first[2]))

    run(main())


@pytest.mark.parametrize("path", ["/page.html", "/metrics/", "/nothing", "/../etc/passwd", "/Health", "/%6detrics"])
def test_other_paths_are_not_found_and_the_answer_lists_those_that_are(path: str) -> None:
    async def main() -> None:
        async with a_site() as site:
            status, document = await site.document(path)
            assert status == 404
            assert "/metrics" in document["pages"]

    run(main())


def test_a_query_does_not_change_the_page() -> None:
    async def main() -> None:
        async with a_site() as site:
            assert (await site.ask("/livez?x=1"))[0] == 200

    run(main())


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "TRACE", "BREW"])
def test_only_reading_is_allowed(method: str) -> None:
    async def main() -> None:
        async with a_site() as site:
            status, headers, _ = await site.ask("/health", method)
            assert (status, headers["Allow"]) == (405, "GET, HEAD")

    run(main())


def test_a_refused_upload_still_gets_to_read_why() -> None:
    async def main() -> None:
        async with a_site() as site:
            body = b"x" * 100_000
            head = b"POST /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)
            assert (await site.raw(head + body)).startswith(b"HTTP/1.1 405 ")

    run(main())


@pytest.mark.parametrize("path", ["/metrics", "/health", "/nothing"])
def test_head_has_the_length_and_no_body(path: str) -> None:
    async def main() -> None:
        async with a_site() as site:
            status, headers, body = await site.ask(path, "HEAD")
            wanted, _, full = await site.ask(path)
            assert (status, body) == (wanted, b"")
            assert abs(int(headers["Content-Length"]) - len(full)) < 200  # process figures differ from one to the next

    run(main())


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LOCALHOST:9464", 200),
        ("127.0.0.1:9464", 200),
        ("[::1]:9464", 200),
        ("192.0.2.7", 200),
        ("evil.example", 403),
        ("evil.example:9464", 403),
        ("localhost.evil.example", 403),
        ("", 403),
    ],
)
def test_on_loopback_a_name_that_a_web_page_could_own_is_refused(host: str, status: int) -> None:
    async def main() -> None:
        async with a_site() as site:
            assert (await site.ask("/health", Host=host))[0] == status

    run(main())


def test_a_name_in_the_request_line_counts_as_the_host() -> None:
    async def main() -> None:
        async with a_site() as site:
            assert (await site.ask("http://evil.example/health"))[0] == 403
            assert (await site.ask("http://localhost/health", Host="evil.example"))[0] == 200

    run(main())


def test_where_everybody_may_connect_any_host_is_served() -> None:
    async def main() -> None:
        site = Site("0.0.0.0")
        async with site.endpoints:
            assert (await site.ask("/health", Host="worker-7.internal"))[0] == 200
        site.close()

    run(main())


@pytest.mark.parametrize("request_", [b"\r\n", b"nonsense\r\n\r\n", b"GET /" + b"a" * 20_000, b"\x16\x03\x01\r\n\r\n"])
def test_rubbish_is_answered_or_left_and_the_next_request_works(request_: bytes) -> None:
    async def main() -> None:
        async with a_site() as site:
            reader, writer = await site.connect()
            writer.write(request_)
            writer.write_eof()
            answer = await reader.read()
            assert answer == b"" or answer.startswith(b"HTTP/1.1 4")
            writer.close()
            await writer.wait_closed()
            assert (await site.ask("/livez"))[0] == 200
            assert site.logged() == []

    run(main())


def test_a_request_in_single_bytes_is_understood() -> None:
    async def main() -> None:
        async with a_site() as site:
            reader, writer = await site.connect()
            for byte in b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n":
                writer.write(bytes([byte]))
                await writer.drain()
                await asyncio.sleep(0)
            assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
            writer.close()
            await writer.wait_closed()

    run(main())


def test_empty_lines_before_a_request_are_allowed_and_never_kept() -> None:
    async def main() -> None:
        async with a_site() as site:
            reader, writer = await site.connect()
            await until(lambda: len(site.endpoints._connections) == 1)
            (connection,) = site.endpoints._connections
            for _ in range(20):
                writer.write(b"\r\n" * 50_000)
                await writer.drain()
            writer.write(b"GET /livez HTTP/1.1\r\n")
            await until(lambda: connection._received.endswith(b"HTTP/1.1\r\n"))
            assert connection._received == b"GET /livez HTTP/1.1\r\n"
            writer.write(b"Host: localhost\r\n\r\n")
            assert b"200 OK" in await reader.read()
            writer.close()
            await writer.wait_closed()

    run(main())


def test_a_client_that_does_not_finish_its_request_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints_module, "READ_TIMEOUT_S", 0.05)

    async def main() -> None:
        async with a_site() as site:
            reader, writer = await site.connect()
            writer.write(b"GET /livez HTTP/1.1\r\n")
            assert await reader.read() == b""
            writer.close()

    run(main())


def test_a_client_that_does_not_take_its_answer_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints_module, "WRITE_TIMEOUT_S", 0.05)

    async def main() -> None:
        async with a_site() as site:
            site.endpoints.routes["/huge"] = lambda request: Response(200, b"x" * 50_000_000)
            client = socket.create_connection(("127.0.0.1", site.endpoints.port))
            client.setblocking(False)
            client.sendall(b"GET /huge HTTP/1.1\r\nHost: localhost\r\n\r\n")
            await until(lambda: len(site.endpoints._connections) == 1)
            await until(lambda: not site.endpoints._connections)
            client.close()

    run(main())


def test_more_connections_than_allowed_cost_the_oldest_its_place() -> None:
    async def main() -> None:
        async with a_site() as site:
            held = [await site.connect() for _ in range(MAX_CONNECTIONS)]
            assert (await site.ask("/livez"))[0] == 200
            assert await held[0][0].read() == b""
            held[1][1].write(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert (await held[1][0].read()).startswith(b"HTTP/1.1 200 ")
            for _, writer in held:
                writer.close()

    run(main())


def test_leaving_closes_open_connections_and_the_port() -> None:
    async def main() -> None:
        async with a_site() as site:
            reader, writer = await site.connect()
            await until(lambda: len(site.endpoints._connections) == 1)
            port = site.endpoints.port
        assert await reader.read() == b""
        writer.close()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", port)

    run(main())


def test_the_port_can_be_bound_again_at_once_after_connections_were_served() -> None:
    async def main() -> None:
        async with a_site() as site:
            port = site.endpoints.port
            await site.ask("/livez")
        again = Site(port=port)
        async with again.endpoints:
            assert (await again.ask("/livez"))[0] == 200
        again.close()

    run(main())


def test_a_port_in_use_is_the_operators_business_and_named() -> None:
    async def main() -> None:
        async with a_site() as site:
            second = Site(port=site.endpoints.port)
            with pytest.raises(ConfigError) as caught:
                async with second.endpoints:
                    pass
            assert caught.value.exit_code == EX_CONFIG
            (problem,) = caught.value.problems
            assert f"127.0.0.1:{site.endpoints.port}: {os.strerror(errno.EADDRINUSE)}" in problem
            assert "--http-listen" in problem
            second.close()

    run(main())


@pytest.mark.parametrize(
    ("host", "port", "words"),
    [
        ("192.0.2.1", 0, os.strerror(errno.EADDRNOTAVAIL)),
        ("2001:db8::1", 9464, "[2001:db8::1]:9464: "),
        ("no-such-host.invalid", 9464, "no-such-host.invalid:9464: "),
        ("127.0.0.1", 70_000, "127.0.0.1:70000: "),
        ("x" * 70 + ".example", 9464, ".example:9464: "),
    ],
)
def test_an_address_that_cannot_be_bound_is_named_with_the_reason(host: str, port: int, words: str) -> None:
    async def main() -> None:
        site = Site(host, port)
        with pytest.raises(ConfigError, match="--http-listen: cannot listen on ") as caught:
            async with site.endpoints:
                pass
        assert words in str(caught.value)
        site.close()

    run(main())


def test_the_address_that_is_listened_on_is_logged_once() -> None:
    async def main() -> None:
        site = Site("[::1]" if socket.has_ipv6 else "127.0.0.1")
        async with site.endpoints:
            (line,) = site.logged()
            assert line["event"] == "endpoints_listening"
            assert line["port"] == site.endpoints.port != 0
        site.close()

    run(main())


def test_a_program_that_is_started_does_not_inherit_the_listener() -> None:
    async def main() -> None:
        async with a_site() as site:
            server = site.endpoints._server
            assert server is not None
            assert [os.get_inheritable(s.fileno()) for s in server.sockets] == [False]

    run(main())


def test_a_page_that_fails_is_a_500_told_of_once_until_it_works_again() -> None:
    async def main() -> None:
        async with a_site() as site:
            is_broken = True

            def page(request: Request) -> Response:
                if is_broken:
                    raise ZeroDivisionError("in a page")
                return Response(200, b"fine", "text/plain")

            site.endpoints.routes["/page"] = page
            for _ in range(3):
                assert (await site.ask("/page"))[0] == 500
            assert [(line["event"], line["error"]) for line in site.logged()] == [
                ("endpoint_failed", "ZeroDivisionError: in a page")
            ]
            is_broken = False
            assert (await site.ask("/page"))[2] == b"fine"
            is_broken = True
            assert (await site.ask("/page"))[0] == 500
            assert len(site.logged()) == 1

    run(main())


def test_requests_are_not_logged() -> None:
    async def main() -> None:
        async with a_site() as site:
            for path in ("/metrics", "/health", "/nothing"):
                await site.ask(path)
            assert site.logged() == []

    run(main())


def test_an_ordinary_client_reads_it_all() -> None:
    async def main() -> None:
        async with a_site() as site:
            url = f"http://localhost:{site.endpoints.port}/metrics"

            def fetch() -> bytes:
                with urllib.request.urlopen(url) as answer:
                    return bytes(answer.read())

            assert b"worker_jobs_processed_total" in await asyncio.to_thread(fetch)

    run(main())


def test_tens_of_clients_at_once_are_all_served() -> None:
    async def main() -> None:
        async with a_site() as site:
            answers = await asyncio.gather(*(site.ask("/health") for _ in range(MAX_CONNECTIONS - 4)))
            assert {status for status, _, _ in answers} == {200}

    run(main())


def test_entering_and_leaving_again_and_again_leaves_nothing() -> None:
    async def main() -> None:
        site = Site()
        for _ in range(20):
            site.endpoints.port = 0
            async with site.endpoints:
                assert (await site.ask("/livez"))[0] == 200
        site.close()

    run(main())

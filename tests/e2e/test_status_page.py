"""The status page in a real browser: in front of a real daemon, and of snapshots that a daemon would rarely have.

Needs Playwright for Python and the system's Chromium; without them all of it is skipped, with the reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import re
import shutil
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from spooled_supervisor import timing
from spooled_supervisor.events import Events
from spooled_supervisor.telemetry import logs
from spooled_supervisor.telemetry.endpoints import Endpoints
from spooled_supervisor.telemetry.metrics import Metrics
from spooled_supervisor.telemetry.snapshot import (
    ChildSnapshot,
    FailureSnapshot,
    LeaseSnapshot,
    QueueSnapshot,
    Snapshot,
)
from tests.support.daemon import Daemon, daemon
from tests.support.devserver import DevServer, dev_server

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, ViewportSize

playwright = pytest.importorskip("playwright.sync_api", reason="no browser tests: Playwright for Python is missing")
expect = playwright.expect
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
if CHROMIUM is None:
    pytest.skip("no browser tests: there is no chromium (apt-get install chromium)", allow_module_level=True)

PATIENCE_MS = 15_000
DESKTOP: ViewportSize = {"width": 1280, "height": 900}
PHONE: ViewportSize = {"width": 390, "height": 844}

APP = """
import os, time
from pathlib import Path
from spooled_supervisor import App

app = App()

@app.handler("quick")
def quick(ctx):
    return None

@app.handler("shown")
def shown(ctx):
    while not Path(ctx.payload["until"]).exists():
        ctx.signal.raise_if_aborted()
        ctx.progress(ctx.payload["percent"], ctx.payload["message"])
        time.sleep(0.05)

@app.handler("failing")
def failing(ctx):
    raise ValueError(ctx.payload["text"])

@app.handler("crashing")
def crashing(ctx):
    print(ctx.payload["text"], flush=True)
    os._exit(3)
"""
MARKUP = "<script>window.broken=1</script><img src=x onerror='window.broken=1'><b onclick=x>&amp;</b>"
REORDERED = "abc\u202egnp.exe\u2066"


# --- the browser ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    flags = "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    flags += " --disable-component-update --disable-sync --disable-dev-shm-usage"
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, headless=True, args=flags.split())
        yield browser
        browser.close()


class Visit:
    """One open page, and all that the browser complained about."""

    def __init__(self, browser: Browser, url: str, viewport: ViewportSize = DESKTOP, **options: Any) -> None:
        self.context = browser.new_context(viewport=viewport, **options)
        self.page: Page = self.context.new_page()
        self.page.set_default_timeout(PATIENCE_MS)
        expect.set_options(timeout=PATIENCE_MS)
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.complaints.append(f"page error: {error}"))
        self.page.on("dialog", lambda dialog: self.complaints.append(f"dialog: {dialog.message}"))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(url)
        expect(self.page.locator("#main")).to_be_visible()

    def wait_for_refreshes(self, count: int = 1) -> None:
        """So many answers more, and their rendering."""
        for _ in range(count):
            with self.page.expect_response("**/status.json"):
                pass
        self.page.evaluate("() => new Promise((done) => setTimeout(done, 50))")


@contextlib.contextmanager
def visit(browser: Browser, url: str, viewport: ViewportSize = DESKTOP, **options: Any) -> Iterator[Visit]:
    """Leaving it asks what is asked of every visit: no complaints, and nothing was fetched from elsewhere."""
    it = Visit(browser, url, viewport, **options)
    try:
        yield it
        assert it.complaints == []
        assert it.page.evaluate("window.broken") is None
        assert {request for request in it.requests if not request.startswith("data:")} <= {url, f"{url}status.json"}
    finally:
        it.context.close()


# --- in front of a daemon ---------------------------------------------------------------------------------------------


@pytest.fixture
def server() -> Iterator[DevServer]:
    with dev_server(retry_base_s=60) as server:
        yield server


@pytest.fixture
def app_dir(tmp_path: Path) -> Path:
    (tmp_path / "shown_app.py").write_text(APP)
    return tmp_path


@contextlib.contextmanager
def worker(server: DevServer, app_dir: Path, *options: str, **more: Any) -> Iterator[Daemon]:
    with daemon(
        "shown_app", url=server.url, api_key=server.api_key, cwd=app_dir, options=options, **more
    ) as supervisor:
        supervisor.wait_until_running()
        yield supervisor


def url_of(supervisor: Daemon) -> str:
    return f"http://127.0.0.1:{supervisor.http_port}/"


def show_job(server: DevServer, until: Path, message: str = "page 4 of 9", percent: float = 42.0) -> str:
    payload = {"until": str(until), "message": message, "percent": percent}
    return server.client.create("shown", payload, timeout_seconds=600)


def test_what_runs_what_has_run_and_what_has_failed_is_shown(
    browser: Browser, server: DevServer, app_dir: Path
) -> None:
    until = app_dir / "until"
    with worker(server, app_dir) as supervisor, visit(browser, url_of(supervisor)) as it:
        page = it.page
        expect(page.locator("#state")).to_have_text("running")
        expect(page.locator("#children tbody tr")).to_have_count(2)
        job_id = show_job(server, until)
        row = page.locator("#children tbody tr", has_text=job_id)
        expect(row).to_contain_text("busy")
        expect(row).to_contain_text("page 4 of 9")
        expect(row).to_contain_text("42 %")
        expect(row).to_contain_text(re.compile(r"in 9 min \d+ s"))  # its deadline
        assert row.locator("progress").evaluate("(bar) => bar.value") == 42
        expect(page.locator("#leases tbody tr")).to_contain_text(job_id)
        assert "1/2 busy" in page.title()

        until.touch()
        expect(page.locator("#queues tbody tr", has_text="shown").locator("td").nth(4)).to_have_text("1")
        expect(page.locator("#leases-text")).to_have_text("None is held.")
        assert page.locator("#bars-done").get_attribute("d")

        failed = server.client.create("failing", {"text": "no such page"}, max_retries=0)
        crashed = server.client.create("crashing", {"text": "the last words"}, max_retries=3)
        expect(page.locator("#failures li")).to_have_count(2)
        first = page.locator("#failures li", has_text="ValueError: no such page")
        expect(first).to_contain_text("final")
        first.locator("summary").click()
        expect(first).to_contain_text(failed)
        second = page.locator("#failures li", has_text="crashed")
        expect(second).to_contain_text("will be retried")
        second.locator("summary").click()
        expect(second.get_by_role("region", name="Last output")).to_have_text("the last words")
        expect(second).to_contain_text(crashed)


def test_what_a_job_writes_stays_text(browser: Browser, server: DevServer, app_dir: Path) -> None:
    until = app_dir / "until"
    hostile = f"{MARKUP}{REORDERED}\x1b[31m"
    with worker(server, app_dir) as supervisor, visit(browser, url_of(supervisor), PHONE) as it:
        page = it.page
        show_job(server, until, hostile)
        show_job(server, until, "x" * 10_000)
        server.client.create("failing", {"text": hostile + "y" * 10_000}, max_retries=0)
        until_both = page.locator(".message", has_text="window.broken=1")
        expect(until_both).to_contain_text("<script>window.broken=1</script><img src=x onerror='window.broken=1'>")
        expect(until_both).to_contain_text("abc\\u202egnp.exe\\u2066\\u001b[31m")
        expect(page.locator(".message", has_text="xxxxx")).to_have_count(1)
        until.touch()
        failure = page.locator("#failures li")
        expect(failure).to_contain_text("&amp;")
        failure.locator("summary").click()
        expect(failure.locator("pre")).to_contain_text("abc\\u202egnp.exe\\u2066\\u001b[31myyy")
        assert page.locator("main img, main script, main b[onclick]").count() == 0
        assert_fits(page)


def test_it_says_why_nothing_is_claimed(browser: Browser, server: DevServer, app_dir: Path) -> None:
    with worker(server, app_dir) as supervisor, visit(browser, url_of(supervisor)) as it:
        expect(it.page.locator("#reasons")).to_be_hidden()
        supervisor.signal(signal.SIGTSTP)
        expect(it.page.locator("#state")).to_have_text("quiet")
        expect(it.page.locator("#reasons")).to_contain_text("quiet: SIGTSTP")
        supervisor.signal(signal.SIGCONT)
        expect(it.page.locator("#state")).to_have_text("running")
        expect(it.page.locator("#reasons")).to_be_hidden()


def test_it_survives_the_daemons_restart(browser: Browser, server: DevServer, app_dir: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    listen = ("--http-listen", f"127.0.0.1:{port}")
    with contextlib.ExitStack() as stack:
        with worker(server, app_dir, *listen) as first:
            it = stack.enter_context(visit(browser, f"http://127.0.0.1:{port}/"))
            page = it.page
            expect(page.locator("#about")).to_contain_text(f"pid {first.pid}")
        expect(page.locator("#state")).to_have_text("not reachable")
        expect(page.locator("#lost")).to_contain_text("Not reachable since ")
        page.locator("footer").scroll_into_view_if_needed()
        expect(page.locator("#lost")).to_be_in_viewport()
        assert page.title().startswith("not reachable")
        expect(page.locator("#children tbody tr")).to_have_count(2)  # the last that was known stays to be read
        with worker(server, app_dir, *listen) as second:
            expect(page.locator("#about")).to_contain_text(f"pid {second.pid}")
            expect(page.locator("#lost")).to_be_hidden()
            expect(page.locator("#state")).to_have_text("running")
            assert page.title().startswith("running")
            it.complaints = [text for text in it.complaints if "ERR_CONNECTION" not in text]  # the browser's own
            stack.close()


# --- in front of a snapshot -------------------------------------------------------------------------------------------


def a_child(slot: int, state: str = "busy", **changes: Any) -> ChildSnapshot:
    child = ChildSnapshot(
        slot=slot,
        pid=41000 + slot,
        generation=2,
        state=state,
        queue="thumbnails" if state == "busy" else None,
        job_id=f"4da4f9fc-1a69-4b8a-a656-27ac7a97{slot:04x}" if state == "busy" else None,
        elapsed_s=12.0 if state == "busy" else None,
        deadline_in_s=48.0 if state == "busy" else None,
        percent=30.0 if state == "busy" else None,
        message="page 3 of 10" if state == "busy" else None,
        jobs_done=1234,
        uptime_s=500.0,
        pss_bytes=123 << 20,
        uss_bytes=80 << 20,
        cpu_s=33.0,
    )
    return dataclasses.replace(child, **changes)


def a_failure(n: int, **changes: Any) -> FailureSnapshot:
    failed = FailureSnapshot(
        f"job-{n}", "thumbnails", "crashed", f"E{n}: text", "words\n" * 50, time.time() - 90 + n, 1, n % 2 > 0, 4.0
    )
    return dataclasses.replace(failed, **changes)


EMPTY = Snapshot(
    phase="booting",
    worker_id=None,
    uptime_s=0.3,
    started_at=1.7e9,
    registered=False,
    quiet=False,
    reasons=("starting: the app is being imported",),
    unhealthy=("starting: the app is being imported",),
    queues=(),
    children=(),
    slots_backed_off=0,
    leases_held=0,
    unsettled=0,
    outbox_depth=0,
    outbox_age_s=0.0,
    outbox_on_disk=True,
    heartbeat_age_s=None,
    procs=4,
    generation=1,
)
BUSY = dataclasses.replace(
    EMPTY,
    phase="running",
    worker_id="w-7f3a2c19",
    registered=True,
    reasons=(),
    unhealthy=(),
    queues=(
        QueueSnapshot("thumbnails", 3.0, None, 2, 1, 48211, 12, 412.0),
        QueueSnapshot("invoices", 1.0, 2, 1, 0, 310, 44, 2.4, "half_open"),
        QueueSnapshot("embeddings", 0.5, 1, 0, 0, 0, 9, 0.0, "open"),
    ),
    children=(a_child(0), a_child(1, percent=None, message=None), a_child(2, "idle"), a_child(3, "aborting")),
    leases_held=2,
    heartbeat_age_s=3.0,
    failures=(a_failure(2), a_failure(1, kind="failed", output="")),
    throughput=tuple((1.7e9 + 5 * n, n % 17, int(n % 9 == 0)) for n in range(120)),
    leases=(
        LeaseSnapshot("job-1", "thumbnails", "held", 25.0, 10.0),
        LeaseSnapshot("job-2", "q", "settling", 2.0, 0.0),
    ),
    pid=4127,
    version="1.0.0",
    hostname="worker-07",
    api_url="https://api.example",
    cpus=4.0,
    load_average=(1.0, 2.0, 3.0),
    cpu_percent=70.0,
    memory_percent=20.0,
)
MANY = dataclasses.replace(BUSY, children=tuple(a_child(n) for n in range(64)), procs=64)
LONG = dataclasses.replace(
    BUSY,
    worker_id="w" * 300,
    hostname="h" * 300,
    api_url="https://" + "a" * 300,
    reasons=("r" * 500,),
    queues=tuple(dataclasses.replace(queue, name=queue.name + "q" * 300) for queue in BUSY.queues),
    children=(
        a_child(0, queue="q" * 300, job_id="j" * 300, message="m" * 10_000),
        a_child(1, message="\u0645\u0631\u062d\u0628\u0627 50% " + REORDERED),
    ),
    failures=(a_failure(1, queue="q" * 300, job_id="j" * 300, error="e" * 2048, output="o" * 4096, kind="k" * 99),),
    leases=(LeaseSnapshot("j" * 300, "q" * 300, "held", 2.0, 0.0),),
)


class Stage(threading.Thread):
    """The listener in a thread, with a snapshot that a test replaces."""

    def __init__(self) -> None:
        super().__init__(name="stage")
        self.now: Snapshot = BUSY
        self._is_up = threading.Event()
        self.start()
        assert self._is_up.wait(10)

    def run(self) -> None:
        with asyncio.Runner(loop_factory=timing.new_event_loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        events = Events()
        null = os.open(os.devnull, os.O_WRONLY)
        log = logs.setup("error", "json", events=events, stream_fd=null)
        os.close(null)
        metrics = Metrics(events, lambda: self.now)
        async with Endpoints("127.0.0.1", 0, snapshot=lambda: self.now, metrics=metrics, log=log) as endpoints:
            self.url = f"http://127.0.0.1:{endpoints.port}/"
            self._is_up.set()
            await self._end.wait()
        log.close()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self.join(10)


@pytest.fixture(scope="module")
def shared_stage() -> Iterator[Stage]:
    stage = Stage()
    yield stage
    stage.close()


@pytest.fixture
def stage(shared_stage: Stage) -> Stage:
    shared_stage.now = BUSY
    return shared_stage


def assert_fits(page: Page) -> None:
    """Nothing sticks out to the side."""
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


@pytest.mark.parametrize("viewport", [DESKTOP, PHONE], ids=["desktop", "phone"])
@pytest.mark.parametrize("now", [EMPTY, BUSY, MANY, LONG], ids=["empty", "busy", "many", "long"])
def test_it_fits_whatever_there_is_to_show(
    browser: Browser, stage: Stage, now: Snapshot, viewport: ViewportSize
) -> None:
    stage.now = now
    with visit(browser, stage.url, viewport) as it:
        expect(it.page.locator("#children tbody tr")).to_have_count(len(now.children))
        for summary in it.page.locator("summary").all():
            summary.click()
        assert_fits(it.page)


def test_a_daemon_that_has_nothing_yet_says_so(browser: Browser, stage: Stage) -> None:
    stage.now = EMPTY
    with visit(browser, stage.url) as it:
        expect(it.page.locator("#state")).to_have_text("starting")
        expect(it.page.locator("#reasons")).to_contain_text("the app is being imported")
        expect(it.page.locator("#unhealthy")).to_be_hidden()
        for text in ("No child yet.", "No queue yet.", "None is held."):
            expect(it.page.locator("main")).to_contain_text(text)


def test_a_refresh_touches_only_what_has_changed(browser: Browser, stage: Stage) -> None:
    with visit(browser, stage.url) as it:
        page = it.page
        page.locator("#failures summary").first.click()
        page.locator("#failures summary").first.focus()
        page.evaluate(
            """() => {
                for (const node of document.querySelectorAll("main *")) node.seenBefore = true;
                getSelection().selectAllChildren(document.querySelector("#children td.job .id"));
            }"""
        )
        selected = page.evaluate("String(getSelection())")
        older = BUSY.children[0]
        stage.now = dataclasses.replace(
            BUSY,
            children=(dataclasses.replace(older, percent=80.0, message="page 8 of 10"), *BUSY.children[1:]),
            failures=(a_failure(3), *BUSY.failures),
            leases=(*BUSY.leases[1:], dataclasses.replace(BUSY.leases[0], ends_in_s=30.0)),
        )
        expect(page.locator(".message").first).to_have_text("page 8 of 10")
        it.wait_for_refreshes(2)
        new = page.evaluate(
            "[...document.querySelectorAll('main *')].filter((n) => !n.seenBefore && !n.closest('#failures li')).length"
        )
        assert new == 0
        assert page.evaluate("[...document.querySelectorAll('#failures li')].map((n) => Boolean(n.seenBefore))") == [
            False,
            True,
            True,
        ]
        assert page.locator("#failures details[open]").count() == 1
        assert (
            page.evaluate("document.activeElement.closest('li').seenBefore && document.activeElement.tagName")
            == "SUMMARY"
        )
        assert page.evaluate("String(getSelection())") == selected == BUSY.children[0].job_id


def test_it_works_with_the_keyboard(browser: Browser, stage: Stage) -> None:
    with visit(browser, stage.url) as it:
        page, keyboard = it.page, it.page.keyboard
        keyboard.press("Tab")
        assert page.evaluate("document.activeElement.id") == "pause"
        assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
        keyboard.press("Enter")
        expect(page.locator("#pause")).to_have_text("Resume")
        expect(page.locator("#refreshed")).to_contain_text("paused at ")
        asked = len(it.requests)
        stage.now = dataclasses.replace(BUSY, phase="draining")
        page.wait_for_timeout(2500)
        assert len(it.requests) == asked
        expect(page.locator("#state")).to_have_text("running")
        keyboard.press("Space")
        expect(page.locator("#state")).to_have_text("draining")
        expect(page.locator("#pause")).to_have_text("Pause")

        for _ in range(20):
            keyboard.press("Tab")
            if page.evaluate("document.activeElement.tagName") == "SUMMARY":
                break
        assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
        keyboard.press("Enter")
        expect(page.locator("#failures details[open]")).to_have_count(1)
        keyboard.press("Tab")
        assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "Error"
        keyboard.press("Tab")
        assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "Last output"


def test_the_tables_are_tables_for_who_does_not_see_them(browser: Browser, stage: Stage) -> None:
    for viewport in (DESKTOP, PHONE):
        with visit(browser, stage.url, viewport) as it:
            page = it.page
            for name, rows in (("Children", 4), ("Queues", 3), ("Leases due", 2)):
                table = page.get_by_role("table", name=name)
                expect(table.get_by_role("row")).to_have_count(rows + 1)
            expect(page.get_by_role("progressbar", name="Progress")).to_have_count(1)
            expect(page.get_by_role("img", name="Last 10 minutes")).to_be_visible()
            expect(page.get_by_role("status")).to_have_text("running")
            expect(page.get_by_role("heading", level=1)).to_contain_text("spooled-supervisor")


def test_a_breaker_and_a_broken_outbox_are_seen(browser: Browser, stage: Stage) -> None:
    stage.now = dataclasses.replace(
        BUSY,
        unhealthy=("queue embeddings: held back",),
        outbox_on_disk=False,
        outbox_problem="disk full",
        outbox_depth=7,
    )
    with visit(browser, stage.url) as it:
        page = it.page
        expect(page.locator("#state")).to_have_text("not healthy")
        expect(page.locator("#unhealthy")).to_contain_text("queue embeddings: held back")
        expect(page.locator("#queues tbody tr").nth(1)).to_contain_text("half open")
        expect(page.locator("#outbox")).to_contain_text("disk full")
        assert "d92d3a" in (page.locator("#icon").get_attribute("href") or "")


def test_another_version_asks_for_a_reload(browser: Browser, stage: Stage) -> None:
    with visit(browser, stage.url) as it:
        stage.now = dataclasses.replace(BUSY, version="1.1.0")
        expect(it.page.locator("#newer")).to_contain_text("The supervisor is now version 1.1.0")
        it.page.get_by_role("button", name="Reload").click()
        expect(it.page.locator("#about")).to_contain_text("1.1.0")
        expect(it.page.locator("#newer")).to_be_hidden()


_CONTRAST = """() => {
    const parse = (colour) => colour.match(/[\\d.]+/g).map(Number);
    const light = ([r, g, b]) => [r, g, b].map((v) => (v /= 255) <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
        .reduce((sum, v, n) => sum + v * [.2126, .7152, .0722][n], 0);
    const ground = (node) => {
        for (; node; node = node.parentElement) {
            const colour = parse(getComputedStyle(node).backgroundColor);
            if (colour.length < 4 || colour[3] > 0) return colour;
        }
        return [255, 255, 255];
    };
    const poor = [];
    for (const node of document.querySelectorAll("body *:not(script, noscript, noscript *, progress)")) {
        const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.data.trim());
        if (!own || !node.checkVisibility()) continue;
        const [a, b] = [light(parse(getComputedStyle(node).color)), light(ground(node))].sort((x, y) => y - x);
        const contrast = (a + .05) / (b + .05);
        if (contrast < 4.5) poor.push(`${node.tagName}.${node.className} ${node.textContent.slice(0, 20)} ${contrast}`);
    }
    return poor;
}"""
"""Texts with less contrast than WCAG 2.2, 1.4.3 asks for."""


@pytest.mark.parametrize("viewport", [DESKTOP, PHONE], ids=["desktop", "phone"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark_are_readable(
    browser: Browser, stage: Stage, scheme: str, viewport: ViewportSize, tmp_path: Path
) -> None:
    stage.now = dataclasses.replace(BUSY, unhealthy=("one",), reasons=("two",), registered=False)
    with visit(browser, stage.url, viewport, color_scheme=scheme) as it:
        page = it.page
        page.locator("summary").first.click()
        brightness = sum(page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)"))
        assert brightness > 600 if scheme == "light" else brightness < 150
        assert page.evaluate(_CONTRAST) == []
        page.evaluate("scrollTo(0, 0)")
        (tmp_path / "page.png").write_bytes(page.screenshot(full_page=True))  # for people: pytest keeps it for a while


def test_who_wants_no_motion_gets_none(browser: Browser, stage: Stage) -> None:
    motion = "getComputedStyle(document.querySelector('main')).transitionDuration"
    with visit(browser, stage.url, reduced_motion="reduce") as it:
        assert it.page.evaluate(motion) == "0s"
    with visit(browser, stage.url, reduced_motion="no-preference") as it:
        assert it.page.evaluate(motion) != "0s"


def test_without_javascript_it_says_where_the_facts_are(browser: Browser, stage: Stage) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(stage.url)
    expect(page.locator("noscript p")).to_contain_text("This page needs JavaScript.")
    expect(page.locator("noscript p")).to_be_visible()
    context.close()


def test_what_is_injected_into_the_page_still_does_not_run(browser: Browser, stage: Stage) -> None:
    """The policy holds even where the script would have a mistake."""
    it = Visit(browser, stage.url)
    it.page.evaluate(
        """() => {
            const script = document.createElement("script");
            try { script.text = "window.broken = 1"; } catch { window.refused = true; }
            document.body.append(script);
            try { document.body.insertAdjacentHTML("beforeend", "<img src=x onerror='window.broken=1'>"); }
            catch { window.refused = true; }
        }"""
    )
    it.page.wait_for_timeout(300)
    assert it.page.evaluate("[window.broken ?? null, window.refused]") == [None, True]
    it.context.close()

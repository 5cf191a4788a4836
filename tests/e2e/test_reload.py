"""Reloading the app while it serves: when the new code runs, what goes on meanwhile, and what a broken app costs."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from spooled_supervisor.control import ask
from tests.e2e.conftest import Site
from tests.support.daemon import Daemon, environment, run_line, state_of, wait_until

APP = """
import os, time
from pathlib import Path
from spooled_supervisor import App
from tests.support.apps.ledger import Run, note

HERE = Path(__file__).parent
app = App()

def handle(ctx):
    run = Run(ctx)
    gate = (ctx.payload or {{}}).get("gate")
    while gate and not os.path.exists(gate):
        run.tick()
        time.sleep(0.005)
    run.end()
    return {version!r}

for name in {queues!r}:
    app.handler(os.environ["QUEUE_PREFIX"] + name)(handle)
{more}
"""
WAITS = """
note("importing")
while not (HERE / "go").exists():
    time.sleep(0.005)
"""
SLOW_START = """
@app.on_child_start
def start():
    time.sleep(0.2)
"""
FAILING_START = """
@app.on_child_start
def start():
    raise RuntimeError("the database is down")
"""


class Shop:
    """An app that is rewritten while a daemon runs it."""

    def __init__(self, site: Site, folder: Path) -> None:
        self.site = site
        self.folder = folder
        self.write("one")

    def write(self, version: str, *, queues: tuple[str, ...] = ("q",), more: str = "") -> None:
        """The new code; jobs return its version."""
        (self.folder / "shop.py").write_text(APP.format(version=version, queues=queues, more=more))

    def worker(self, *, queues: tuple[str, ...] = (), **more: Any) -> AbstractContextManager[Daemon]:
        """Without queues it serves those that the app has."""
        env = {"PYTHONDONTWRITEBYTECODE": "1", **more.pop("env", {})}
        return self.site.worker(app="shop", queues=queues, cwd=self.folder, env=env, **more)

    def version(self, queue: str = "q") -> Any:
        """Of the code that runs a job now."""
        return self.site.end(self.site.client.create(self.site.prefix + queue, {}))["result"]

    def held(self, worker: Daemon, count: int = 1) -> tuple[list[str], Path]:
        """Jobs that run until the file is there."""
        gate = self.folder / "gate"
        jobs = [self.site.client.create(self.site.prefix + "q", {"gate": str(gate)}) for _ in range(count)]
        for job_id in jobs:
            worker.ledger.wait_for("start", job=job_id)
        return jobs, gate


@pytest.fixture
def shop(site: Site, tmp_path: Path) -> Shop:
    folder = tmp_path / "shop"
    folder.mkdir()
    return Shop(site, folder)


def tell(worker: Daemon, command: str, **fields: Any) -> dict[str, Any]:
    return ask(worker.state_dir / "control.sock", {"command": command, **fields}, timeout_s=30.0)


def generations(worker: Daemon) -> list[int]:
    """Of the children that are there, by slot."""
    children = worker.status()["children"]
    return [child["generation"] for child in sorted(children, key=lambda child: child["slot"])]


def wait_for_generation(worker: Daemon, generation: int, procs: int = 2) -> None:
    wait_until(lambda: generations(worker) == [generation] * procs, f"{procs} children of generation {generation}")


def fewest_ready(worker: Daemon, after: int) -> int:
    """How many children there were at the worst moment, those that leave not counted as soon as they are gone."""
    count = fewest = len(worker.events("child_ready")) - len(worker.events("child_exited"))
    for event in reversed(worker.events(after=after)):
        if event["event"] == "child_ready":
            count -= 1
        elif event["event"] == "child_exited":
            count += 1
        fewest = min(fewest, count)
    return fewest


# --- new code ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["ctl", "HUP"])
def test_reload_while_idle_runs_the_new_code_and_never_has_fewer_children(shop: Shop, by: str) -> None:
    with shop.worker() as worker:
        worker.wait_until_running()
        assert shop.version() == "one"
        before = worker.children()
        old_server = worker.fork_server
        shop.write("two")
        mark = worker.mark()
        if by == "ctl":
            answer = tell(worker, "reload")
            assert answer == {
                "ok": True,
                "text": "generation 2 is loaded; 2 children are replaced, busy ones after their job",
            }
        else:
            worker.signal(signal.SIGHUP)
        assert worker.wait_for_event("reloaded", after=mark)["generation"] == 2
        wait_for_generation(worker, 2)
        assert shop.version() == "two"
        assert not set(before) & set(worker.children())
        assert fewest_ready(worker, mark) >= 2
        assert {event["reason"] for event in worker.events("child_exited", after=mark)} == {"reload"}
        wait_until(lambda: state_of(old_server) == "", "the old fork server is gone")
        assert not worker.events("orphans_killed")
        assert not worker.events("child_killed")
        assert worker.metrics()['spooled_supervisor_reloads_total{result="ok"}'] == 1


def test_reload_while_jobs_run_lets_them_finish_with_the_old_code(shop: Shop) -> None:
    with shop.worker() as worker:
        worker.wait_until_running()
        jobs, gate = shop.held(worker, 2)
        pids = worker.children()
        shop.write("two")
        tell(worker, "reload")
        assert worker.children() == pids, "busy children stay"
        gate.touch()
        assert [shop.site.end(job_id)["result"] for job_id in jobs] == ["one", "one"]
        wait_for_generation(worker, 2)
        assert shop.version() == "two"
        assert not worker.events("child_killed")


def test_an_idle_child_is_replaced_while_its_neighbour_is_busy(shop: Shop) -> None:
    with shop.worker() as worker:
        worker.wait_until_running()
        (job_id,), gate = shop.held(worker)
        shop.write("two")
        tell(worker, "reload")
        wait_until(lambda: sorted(generations(worker)) == [1, 2], "one of each generation")
        assert shop.version() == "two"
        gate.touch()
        assert shop.site.end(job_id)["result"] == "one"
        wait_for_generation(worker, 2)


def test_reload_under_a_stream_of_jobs_loses_none_and_comes_to_an_end(shop: Shop) -> None:
    with shop.worker(options=["--prefetch", "2"]) as worker:
        worker.wait_until_running()
        jobs = shop.site.client.bulk(shop.site.prefix + "q", [{} for _ in range(300)])
        worker.ledger.wait_for("end", 20)
        shop.write("two", more=SLOW_START)
        mark = worker.mark()
        tell(worker, "reload")
        wait_for_generation(worker, 2)
        results = [shop.site.end(job_id)["result"] for job_id in jobs]
        assert set(results) <= {"one", "two"}
        assert all(worker.ledger.runs(job_id) == 1 for job_id in jobs)
        assert fewest_ready(worker, mark) >= 2


def test_reload_again_and_again_leaves_nothing_behind(shop: Shop) -> None:
    with shop.worker() as worker:
        worker.wait_until_running()
        tell(worker, "reload")
        wait_for_generation(worker, 2)
        fds = worker.fd_count()
        for n in range(3, 7):
            shop.write(f"version {n}")
            assert tell(worker, "reload")["ok"]
        wait_for_generation(worker, 6)
        assert shop.version() == "version 6"
        wait_until(lambda: worker.fd_count() <= fds + 2, "no descriptors are lost")
        wait_until(lambda: len(worker.leftovers()) == 3, "a fork server and two children")


def test_a_child_that_the_old_fork_server_gives_birth_to_after_a_reload_is_replaced_too(shop: Shop) -> None:
    with shop.worker() as worker:
        worker.wait_until_running()
        old_server = worker.fork_server
        os.kill(old_server, signal.SIGSTOP)
        try:
            assert tell(worker, "recycle", slot=0)["ok"]  # a fork is asked for, and not answered
            shop.write("two")
            assert tell(worker, "reload")["ok"]
        finally:
            os.kill(old_server, signal.SIGCONT)
        wait_for_generation(worker, 2)
        wait_until(lambda: state_of(old_server) == "", "the old fork server is gone")
        assert shop.version() == "two"
        assert not worker.events("orphans_killed")
        assert not worker.events("child_failed_to_boot")


def test_a_child_that_dies_during_a_reload_is_replaced_by_a_new_one(shop: Shop) -> None:
    with shop.worker() as worker:
        worker.wait_until_running()
        (job_id,), gate = shop.held(worker)
        busy = worker.ledger.entries("start", job=job_id)[0]["pid"]
        shop.write("two")
        tell(worker, "reload")
        os.kill(busy, signal.SIGKILL)
        wait_for_generation(worker, 2)
        gate.touch()
        assert shop.site.client.wait_for(job_id, "completed")["result"] == "two"


# --- queues -----------------------------------------------------------------------------------------------------------


def test_queues_that_the_new_code_adds_are_served_and_those_it_drops_are_not(shop: Shop) -> None:
    shop.write("one", queues=("q", "old"))
    with shop.worker() as worker:
        worker.wait_until_running()
        assert shop.version("old") == "one"
        shop.write("two", queues=("q", "new"))
        tell(worker, "reload")
        wait_for_generation(worker, 2)
        assert shop.version("new") == "two"
        dropped = shop.site.client.create(shop.site.prefix + "old", {})
        for _ in range(3):
            assert shop.version("q") == "two"
        assert shop.site.client.job(dropped)["status"] == "pending"
        names = {queue["name"] for queue in worker.status()["queues"]}
        assert names == {shop.site.prefix + "q", shop.site.prefix + "new"}
        assert f'worker_jobs_in_progress{{queue="{shop.site.prefix}new"}}' in worker.metrics()


def test_a_running_job_of_a_queue_that_is_dropped_is_counted_until_it_is_over(shop: Shop) -> None:
    shop.write("one", queues=("q",))
    with shop.worker() as worker:
        worker.wait_until_running()
        (job_id,), gate = shop.held(worker)
        shop.write("two", queues=("new",))
        tell(worker, "reload")
        in_progress = f'worker_jobs_in_progress{{queue="{shop.site.prefix}q"}}'
        assert worker.health()[1]["current_jobs"] == 1
        assert worker.metrics()[in_progress] == 1
        gate.touch()
        assert shop.site.end(job_id)["result"] == "one"
        wait_until(lambda: in_progress not in worker.metrics(), "it is shown no longer")
        assert worker.health()[1]["current_jobs"] == 0


def test_queues_that_were_named_by_option_stay(shop: Shop) -> None:
    with shop.worker(queues=("q",)) as worker:
        worker.wait_until_running()
        shop.write("two", queues=("q", "new"))
        tell(worker, "reload")
        wait_for_generation(worker, 2)
        other = shop.site.client.create(shop.site.prefix + "new", {})
        for _ in range(3):
            assert shop.version("q") == "two"
        assert shop.site.client.job(other)["status"] == "pending"


# --- a broken app -----------------------------------------------------------------------------------------------------


class Manager:
    """The receiving end of sd_notify(3)."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "notify"
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(str(self.path))
        self.socket.setblocking(False)
        self.lines: list[str] = []

    def fill(self) -> None:
        """Have no room for another message until somebody asks for them."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender, contextlib.suppress(BlockingIOError):
            sender.setblocking(False)
            while True:
                sender.sendto(b"X=1", str(self.path))

    def has(self, *lines: str) -> bool:
        """Whether these came, in this order."""
        try:
            while True:
                self.lines += self.socket.recv(65536).decode().splitlines()
        except BlockingIOError:
            pass
        rest = iter(self.lines)
        return all(any(wanted in line for line in rest) for wanted in lines)


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    made = Manager(tmp_path)
    yield made
    made.socket.close()


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("def broken(:", "SyntaxError"),
        ("import no_such_module_anywhere", "ModuleNotFoundError"),
        ("raise RuntimeError('no configuration')", "no configuration"),
        ("import os; os._exit(3)", "exited with status 3"),
        ("app = 7", "app"),
    ],
    ids=["syntax", "import", "raises", "exits", "no app"],
)
def test_reload_of_a_broken_app_exits_1_says_so_and_the_old_one_goes_on(
    shop: Shop, manager: Manager, code: str, why: str
) -> None:
    with shop.worker(env={"NOTIFY_SOCKET": str(manager.path)}) as worker:
        worker.traceback_is_fine = True  # the app's own
        worker.wait_until_running()
        pids = worker.children()
        good = (shop.folder / "shop.py").read_text()
        (shop.folder / "shop.py").write_text(code)
        line = [sys.executable, "-m", "spooled_supervisor", "ctl", "reload", "--state-dir", str(worker.state_dir)]
        done = run_line(line, env=environment(None), cwd=shop.folder, state_dir=shop.folder)
        assert done.code == 1
        assert "the app cannot be loaded, generation 1 goes on serving:" in done.output
        assert why in done.output
        assert why in worker.wait_for_event("reload_failed")["error"]
        assert worker.metrics()['spooled_supervisor_reloads_total{result="failed"}'] == 1
        said = ("READY=1", "RELOADING=1", "READY=1", "reload failed, generation 1 goes on")
        wait_until(lambda: manager.has(*said), "systemd is told")
        assert worker.children() == pids
        assert shop.version() == "one"
        assert worker.readyz()[0] == 200
        (shop.folder / "shop.py").write_text(good.replace("'one'", "'mended'"))
        assert tell(worker, "reload")["ok"]
        wait_until(
            lambda: manager.has(*said, "READY=1") and "reload failed" not in manager.lines[-1], "it is well again"
        )
        wait_until(lambda: shop.version() == "mended", "the new code runs")


def test_reload_of_an_app_that_takes_too_long_is_given_up(shop: Shop) -> None:
    with shop.worker(options=["--boot-timeout", "1"]) as worker:
        worker.wait_until_running()
        shop.write("two", more=WAITS)
        answer = tell(worker, "reload")
        assert not answer["ok"]
        assert "importing it took longer than --boot-timeout 1 s" in answer["text"]
        assert shop.version() == "one"
        wait_until(lambda: len(worker.leftovers()) == 3, "the one that hung is killed")


def test_a_new_app_whose_children_do_not_start_keeps_the_old_ones_serving(shop: Shop) -> None:
    with shop.worker() as worker:
        worker.wait_until_running()
        pids = worker.children()
        shop.write("two", more=FAILING_START)
        mark = worker.mark()
        assert tell(worker, "reload")["ok"], "it can be imported"
        failed = worker.wait_for_event("child_failed_to_boot", count=3, after=mark)
        assert "the database is down" in failed["cause"]
        for _ in range(3):
            assert shop.version() == "one"
        assert worker.readyz()[0] == 200
        assert set(pids) <= set(worker.children())
        assert not worker.events("child_exited", after=mark, pid=lambda pid: pid in pids)
        shop.write("three")
        assert tell(worker, "reload")["ok"]
        wait_for_generation(worker, 3)
        assert shop.version() == "three"


# --- two things at once -----------------------------------------------------------------------------------------------


def test_reload_while_reloading_is_refused_and_the_first_goes_on(shop: Shop) -> None:
    with shop.worker() as worker:
        worker.wait_until_running()
        shop.write("two", more=WAITS)
        worker.signal(signal.SIGHUP)
        worker.ledger.wait_for("importing")
        assert tell(worker, "reload") == {"ok": False, "text": "a reload is under way already"}
        worker.signal(signal.SIGHUP)
        refused = worker.wait_for_event("command_refused")
        assert refused["reason"] == "a reload is under way already"
        assert shop.version() == "one", "jobs are run meanwhile"
        (shop.folder / "go").touch()
        worker.wait_for_event("reloaded")
        wait_for_generation(worker, 2)
        assert shop.version() == "two"


def test_a_manager_that_is_busy_for_a_while_is_told_what_it_waits_for(shop: Shop, manager: Manager) -> None:
    manager.fill()
    with shop.worker(env={"NOTIFY_SOCKET": str(manager.path)}) as worker:
        worker.wait_until_running()
        wait_until(lambda: manager.has("READY=1"), "systemd is told")
        _, gate = shop.held(worker)
        manager.fill()
        worker.signal(signal.SIGTERM)
        worker.wait_for_event("phase_changed", phase="draining")
        wait_until(lambda: manager.has("READY=1", "STOPPING=1"), "systemd is told")
        gate.touch()
        assert worker.wait() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGQUIT])
def test_stop_during_a_reload_stops_at_once(shop: Shop, manager: Manager, number: signal.Signals) -> None:
    with shop.worker(env={"NOTIFY_SOCKET": str(manager.path)}) as worker:
        worker.wait_until_running()
        shop.write("two", more=WAITS)
        worker.signal(signal.SIGHUP)
        worker.ledger.wait_for("importing")
        began = time.monotonic()
        worker.signal(number)
        assert worker.wait() == 0
        assert time.monotonic() - began < 5.0
        assert manager.has("STOPPING=1")
        assert not manager.has("STOPPING=1", "READY=1")


def test_a_reload_that_ends_during_a_drain_starts_nobody(shop: Shop, manager: Manager) -> None:
    with shop.worker(env={"NOTIFY_SOCKET": str(manager.path)}) as worker:
        worker.wait_until_running()
        (job_id,), gate = shop.held(worker)
        shop.write("two", more=WAITS)
        worker.signal(signal.SIGHUP)
        worker.ledger.wait_for("importing")
        worker.signal(signal.SIGTERM)
        worker.wait_for_event("phase_changed", phase="draining")
        mark = worker.mark()
        (shop.folder / "go").touch()
        worker.wait_for_event("command_refused", after=mark)
        gate.touch()
        assert worker.wait() == 0
        assert shop.site.client.job(job_id)["result"] == "one"
        assert not worker.events("child_started", after=mark)
        assert not manager.has("STOPPING=1", "READY=1")

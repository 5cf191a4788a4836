"""What a job does to its child must not be met by the next job there: code that other people write, run as it comes.

One child; a job is a few lines of Python that set `result`, or define `main` as a coroutine for the async queue.
"""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.conftest import Site
from tests.support.daemon import Daemon, wait_until

APP = """
import contextvars, decimal, faulthandler, logging, multiprocessing, os, resource, subprocess, sys, threading, time
import asyncio
from concurrent.futures import ProcessPoolExecutor
from spooled_supervisor import App

app = App()
var = contextvars.ContextVar("var", default="untouched")

def tell(n):
    logging.getLogger("copy").warning("from a copy")
    return n

def run(ctx):
    scope = {{**globals(), "ctx": ctx, "result": None}}
    exec(ctx.payload["code"], scope)
    return [os.getpid(), scope["result"]]

async def run_async(ctx):
    scope = {{**globals(), "ctx": ctx}}
    exec(ctx.payload["code"], scope)
    return [os.getpid(), await scope["main"]()]

app.handler("{prefix}q")(run)
app.handler("{prefix}a", on_abort="raise")(run_async)
{more}
"""


class Child:
    """The only child of a daemon, and jobs for it."""

    def __init__(self, site: Site, worker: Daemon) -> None:
        self._site = site
        self.worker = worker

    def run(self, code: str, *, queue: str = "q", timeout_s: int = 10) -> dict[str, Any]:
        payload = {"code": textwrap.dedent(code)}
        job = self._site.client.create(self._site.prefix + queue, payload, max_retries=0, timeout_seconds=timeout_s)
        return self._site.end(job)

    def result(self, code: str, *, queue: str = "q") -> Any:
        job = self.run(code, queue=queue)
        assert job["status"] == "completed", job["last_error"]
        self.pid, value = job["result"]
        return value


@pytest.fixture
def child(site: Site, tmp_path: Path) -> Iterator[Child]:
    with worker_of(site, tmp_path) as worker:
        yield Child(site, worker)


def worker_of(site: Site, folder: Path, *, more: str = "") -> Any:
    (folder / "odd.py").write_text(APP.format(prefix=site.prefix, more=more))
    options = ["--abort-grace", "0.5"]
    return site.worker(app="odd", queues=("q", "a"), procs=1, cwd=folder, options=options)


def cpu_s_of(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


# --- copies of the child ----------------------------------------------------------------------------------------------


def test_a_process_that_a_handler_forks_may_log(child: Child) -> None:
    code = """
        process = multiprocessing.get_context("fork").Process(target=tell, args=(1,))
        process.start(); process.join()
        with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
            result = [process.exitcode, list(pool.map(tell, [1, 2]))]
    """
    assert child.result(code) == [0, [1, 2]]
    wait_until(lambda: child.worker.log.count("warn: from a copy") == 3, "what they log is in the job's output")


def test_every_job_may_use_a_fork_server_of_multiprocessing(child: Child) -> None:
    code = """
        process = multiprocessing.get_context("forkserver").Process(target=time.sleep, args=(0,))
        process.start(); process.join()
        result = process.exitcode
    """
    assert [child.result(code), child.result(code)] == [0, 0]


# --- descriptors ------------------------------------------------------------------------------------------------------


def test_a_handler_that_closes_all_from_three_on_costs_nothing(child: Child) -> None:
    assert child.result("ctx.signal.wait(0.01); os.closerange(3, 256); result = 'fine'") == "fine"
    before = child.pid
    idle_cpu_s = cpu_s_of(child.pid)
    time.sleep(0.5)  # it has nothing to do, so it must do nothing
    assert cpu_s_of(child.pid) - idle_cpu_s < 0.1
    assert child.result("result = 2") == 2
    assert child.pid == before


def test_a_loop_that_has_lost_its_descriptors_gets_no_other_job(child: Child) -> None:
    quick = "async def main(): await asyncio.sleep(0.01); return 1"
    assert child.result(quick, queue="a") == 1
    child.result("os.closerange(3, 256)")
    for _ in range(3):
        assert child.result(quick, queue="a") == 1


# --- threads ----------------------------------------------------------------------------------------------------------


def test_a_thread_of_an_async_job_does_not_work_on_beside_the_next_one(child: Child, tmp_path: Path) -> None:
    lines = tmp_path / "lines"
    code = f"""
        def work():
            for _ in range(600):
                with open({str(lines)!r}, "a") as file: file.write("x")
                time.sleep(0.01)
        async def main(): await asyncio.to_thread(work)
    """
    job = child.run(code, queue="a", timeout_s=1)
    assert job["status"] == "deadletter"
    assert child.worker.wait_for_event("child_exited")["reason"] == "thread"
    written = lines.stat().st_size
    child.result("result = 1")
    assert lines.stat().st_size == written


def test_threads_of_async_jobs_that_are_over_keep_their_child(child: Child) -> None:
    code = "async def main(): return await asyncio.to_thread(lambda: 2)"
    pids = set()
    for _ in range(3):
        assert child.result(code, queue="a") == 2
        pids.add(child.pid)
    assert len(pids) == 1


# --- what lasts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "look", "unchanged"),
    [
        ("var.set('mine')", "result = var.get()", "untouched"),
        ("decimal.getcontext().prec = 3", "result = decimal.getcontext().prec", 28),
        ("os.environ['TZ'] = 'Asia/Tokyo'; time.tzset()", "result = time.tzname[0] == 'JST'", False),
        ("faulthandler.dump_traceback_later(0.2, exit=True)", "time.sleep(0.5); result = 'lives'", "lives"),
        ("os.set_blocking(1, False)", "print('x' * 300_000); result = os.get_blocking(1)", True),
    ],
)
def test_the_next_job_of_the_child_finds_it_as_it_was(child: Child, change: str, look: str, unchanged: object) -> None:
    child.result(change)
    before = child.pid
    assert child.result(look) == unchanged
    assert child.pid == before


def test_an_async_job_leaves_no_context_to_the_next(child: Child) -> None:
    assert child.result("async def main(): var.set('mine')", queue="a") is None
    assert child.result("async def main(): return var.get()", queue="a") == "untouched"
    assert child.result("result = var.get()") == "untouched"


def test_a_leftover_is_found_where_the_job_has_left_no_descriptor_to_look_with(child: Child) -> None:
    code = """
        result = subprocess.Popen(["sleep", "60"]).pid
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    """
    pid = child.result(code)
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), "it is killed")


def test_variables_of_start_hooks_are_there_in_every_job(site: Site, tmp_path: Path) -> None:
    more = """
@app.on_child_start
def start(): var.set("sync")
other = contextvars.ContextVar("other")
@app.on_child_start
async def start_too(): other.set("async")
"""
    with worker_of(site, tmp_path, more=more) as worker:
        child = Child(site, worker)
        for _ in range(2):
            assert child.result("result = [var.get(), other.get()]") == ["sync", "async"]
            assert child.result("async def main(): return [var.get(), other.get()]", queue="a") == ["sync", "async"]


@pytest.mark.parametrize("more", ["", "app.on_child_start(lambda: None)"])
def test_the_directory_that_the_daemon_runs_in_may_be_removed(site: Site, tmp_path: Path, more: str) -> None:
    release = tmp_path / "release"
    release.mkdir()
    (tmp_path / "odd.py").write_text(APP.format(prefix=site.prefix, more=more))
    env = {"PYTHONPATH": str(tmp_path)}
    with site.worker(app="odd", queues=("q", "a"), procs=1, cwd=release, env=env) as worker:
        child = Child(site, worker)
        child.result("result = 1")
        before = child.pid
        release.rmdir()
        assert child.result("result = 1") == 1
        assert child.result("result = 1") == 1
        assert child.pid == before
        child.run("os._exit(1)")
        assert child.result("result = 2") == 2, "a new child starts there, too"


def test_an_async_preload_hook_is_refused(site: Site, tmp_path: Path) -> None:
    more = "async def load(): pass\napp.on_preload(load)\n"
    with worker_of(site, tmp_path, more=more) as worker:
        worker.exit_may_be = 78
        assert worker.wait() == 78
        assert "an on_preload hook cannot be async" in worker.log

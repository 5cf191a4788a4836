"""The helpers for tests of handlers, used as a user's tests would use them."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from spooled_supervisor import AbortSignal, App, JobContext, NonRetryableError
from spooled_supervisor.testing import (
    HandlerRun,
    LogLine,
    ProgressReport,
    embedded_server,
    run_handler,
    run_in_child,
    supervisor,
)
from spooled_supervisor.testing.programs import ProgramFailed, RunningSupervisor
from spooled_supervisor.worker import WorkerError
from tests.e2e.conftest import Site
from tests.support.daemon import REPOSITORY, environment
from tests.support.program import program

EXAMPLES = Path(__file__).resolve().parents[1] / "support/examples"

app = App()
opened: list[str] = []


@app.on_child_start
async def connect() -> None:
    opened.append("connection")


@app.on_child_stop
def disconnect() -> None:
    opened.clear()


@app.handler("work")
def work(ctx: JobContext) -> Any:
    ctx.progress(25, "begun")
    ctx.log("warn", "careful", pages=ctx.payload["n"])
    sys.stdout.write("printed\n")
    logging.getLogger("mine").info("by the standard library")
    return {"doubled": ctx.payload["n"] * 2, "opened": list(opened), "pid": os.getpid(), "tries": ctx.retry_count}


@app.handler("async")
async def work_async(ctx: JobContext) -> Any:
    await asyncio.sleep(0)
    return (ctx.payload, ctx.timeout_s, ctx.max_retries)


@app.handler("abortable", on_abort="raise")
def abortable(ctx: JobContext) -> None:
    time.sleep(30)


def raises(ctx: JobContext) -> None:
    raise NonRetryableError("never again")


def misbehaves(ctx: JobContext) -> Any:
    match ctx.payload:
        case "crash":
            sys.stdout.write("last words\n")
            os.kill(os.getpid(), signal.SIGSEGV)
        case "exit":
            os._exit(3)
        case "not json":
            return {1, 2}
        case "hang":
            sleeper = subprocess.Popen(["sleep", "64"], start_new_session=True)
            ctx.log("info", "started", pid=sleeper.pid)
            time.sleep(30)
        case "obeys":
            return [ctx.signal.wait(30), ctx.signal.reason]
    return None


# --- in this process --------------------------------------------------------------------------------------------------


def test_a_handler_runs_here_with_all_that_it_says() -> None:
    run = run_handler(app, {"n": 21}, queue_name="work", retry_count=2)
    assert run.outcome == "succeeded"
    assert run.result == {"doubled": 42, "opened": ["connection"], "pid": os.getpid(), "tries": 2}
    assert run.progress == (ProgressReport(25.0, "begun"),)
    assert run.logs == (LogLine("warn", "careful", {"pages": 21}, "log"),)
    assert opened == [], "the stop hook has run"


def test_an_async_handler_runs_and_its_result_goes_through_json() -> None:
    run = run_handler(app, ("a", "b"), queue_name="async", timeout_s=7, max_retries=1)
    assert run == HandlerRun("succeeded", [["a", "b"], 7, 1])


def test_a_closure_runs_here() -> None:
    assert run_handler(lambda ctx: ctx.queue_name, None).result == "test"
    assert run_handler(lambda ctx: ctx.queue_name, None, queue_name="mails").result == "mails"


def test_a_failure_is_described_as_in_a_child() -> None:
    run = run_handler(raises, None)
    assert (run.outcome, run.retryable, run.result) == ("failed", False, None)
    assert run.error is not None
    assert run.error.startswith("spooled_supervisor.errors.NonRetryableError: never again\n  at ")
    assert "in raises" in run.error


def test_a_result_that_is_no_json_fails() -> None:
    run = run_handler(misbehaves, "not json")
    assert run.outcome == "failed"
    assert run.error == "the result is not JSON: result is of type set"


def test_only_what_is_declared_as_async_is_awaited_as_in_a_child() -> None:
    async def real(ctx: JobContext) -> int:
        return 1

    run = run_handler(lambda ctx: real(ctx), None)
    assert (run.outcome, run.error) == ("failed", "the result is not JSON: result is of type coroutine")

    class Callable:
        async def __call__(self, ctx: JobContext) -> int:
            return 2

    assert run_handler(Callable(), None).result == 2


def test_an_abort_of_the_tests_own_reaches_the_handler() -> None:
    told = AbortSignal()
    told.abort("shutdown")
    assert run_handler(misbehaves, "obeys", signal=told).result == [True, "shutdown"]

    def obedient(ctx: JobContext) -> None:
        ctx.signal.raise_if_aborted()

    told = AbortSignal()
    threading.Timer(0.01, told.abort, ["operator"]).start()
    told.wait(5)
    run = run_handler(obedient, None, signal=told)
    assert (run.outcome, run.error) == ("aborted", "aborted: operator")
    told = AbortSignal()
    told.abort("shutdown")
    run = run_handler(obedient, None, signal=told)
    assert (run.outcome, run.error) == ("aborted", "aborted by worker shutdown")


def test_ctrl_c_is_not_swallowed() -> None:
    def interrupted(ctx: JobContext) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_handler(interrupted, None)


def test_where_an_event_loop_runs_what_is_async_is_refused_and_not_blamed() -> None:
    hooked, lazy = App(), App()
    for each in (hooked, lazy):
        each.handler("q")(lambda ctx: 1)
    hooked.on_child_stop(connect)
    lazy.on_child_start(lambda: connect())

    async def main() -> None:
        with pytest.raises(WorkerError, match=r"await asyncio.to_thread\(run_handler, ...\)"):
            run_handler(app, None, queue_name="async")
        for other in (hooked, lazy):
            with pytest.raises(WorkerError, match="here runs an event loop"):
                run_handler(other, None)
        assert run_handler(lambda ctx: ctx.payload, 3).result == 3
        run = await asyncio.to_thread(run_handler, app, None, queue_name="async")
        assert run.outcome == "succeeded"

    asyncio.run(main())
    assert opened == []


@pytest.mark.parametrize("queue", [None, "nothing"])
def test_which_handler_is_meant_must_be_said(queue: str | None) -> None:
    with pytest.raises(ValueError, match="the app has handlers for work, async, abortable"):
        run_handler(app, None, queue_name=queue)


# --- in a child -------------------------------------------------------------------------------------------------------


def test_a_handler_runs_in_a_child_of_its_own() -> None:
    run = run_in_child(app, {"n": 21}, queue_name="work", retry_count=1)
    assert run.outcome == "succeeded", run
    assert run.result["pid"] != os.getpid()
    assert (run.result["doubled"], run.result["opened"], run.result["tries"]) == (42, ["connection"], 1)
    assert run.progress == (ProgressReport(25.0, "begun"),)
    assert {(line.level, line.message, line.source) for line in run.logs} == {
        ("warn", "careful", "log"),
        ("info", "printed", "output"),
        ("info", "by the standard library", "logging"),
    }
    assert next(line for line in run.logs if line.source == "log").meta == {"pages": 21}


@pytest.mark.parametrize(
    ("payload", "outcome", "words"),
    [
        ("crash", "crashed", ["the child was killed by SIGSEGV", "last words"]),
        ("exit", "crashed", ["exited with status 3 without an outcome"]),
        ("not json", "failed", ["the result is not JSON"]),
        ("hang", "timed_out", ["longer than its limit of 0.5 s", "in misbehaves"]),
    ],
)
def test_whatever_it_does_happens_to_the_child(payload: str, outcome: str, words: list[str]) -> None:
    started_at = time.monotonic()
    run = run_in_child(misbehaves, payload, timeout_s=0.5, abort_grace_s=0.1)
    assert run.outcome == outcome, run
    assert all(word in (run.error or "") for word in words), run.error
    assert time.monotonic() - started_at < 15
    for line in run.logs:
        if line.message == "started":
            assert b"sleep" not in _command_line(str(line.meta["pid"])), "what it had started is killed, too"
    assert (payload == "hang") == any(line.message == "started" for line in run.logs)


def test_a_child_of_a_program_whose_output_goes_to_a_file_prints_into_its_log(tmp_path: Path) -> None:
    """Of such a program the copy has streams that could seek, and then are pipes."""
    program = tmp_path / "program.py"
    program.write_text(
        "from spooled_supervisor.testing import run_in_child\n"
        "def handle(ctx):\n"
        "    print('from the child: \\u00e9')\n"
        "print('before')\n"
        "run = run_in_child(handle, {})\n"
        "assert run.outcome == 'succeeded', run\n"
        "assert [line.message for line in run.logs] == ['from the child: \\u00e9'], run\n"
        "print('after')\n"
    )
    output = tmp_path / "output"
    with output.open("w") as file:
        done = subprocess.run(
            [sys.executable, program], stdin=subprocess.DEVNULL, stdout=file, stderr=file, timeout=60, check=False
        )
    assert (done.returncode, output.read_text()) == (0, "before\nafter\n")


@pytest.mark.parametrize("instead", ["io.StringIO()", "Tee(sys.stdout)", "None"])
def test_what_a_handler_prints_is_not_lost_where_the_program_has_replaced_its_streams(site: Site, instead: str) -> None:
    with program(
        f"""
        import io
        from spooled_supervisor.testing import run_in_child
        class Tee:
            def __init__(self, stream): self.stream = stream
            def write(self, text): self.stream.write(text)
            def flush(self): self.stream.flush()
        def handle(ctx):
            print("printed: \u00e9", file=sys.stdout)
            sys.stderr.write("complained\\n")
        sys.stdout, sys.stderr = {instead}, {instead}
        mine = sys.stdout, sys.stderr
        run = run_in_child(handle, None)
        assert mine == (sys.stdout, sys.stderr)
        sys.stdout = sys.__stdout__
        say(sorted(line.message for line in run.logs))
        """,
        url=site.server.url,
        api_key=site.server.api_key,
    ) as running:
        assert running.wait() == (0, ["['complained', 'printed: \u00e9']"])


def _command_line(pid: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def test_one_that_obeys_the_limit_has_still_run_out_of_time() -> None:
    run = run_in_child(misbehaves, "obeys", timeout_s=0.3, abort_grace_s=5)
    assert run.outcome in ("succeeded", "timed_out")


def test_an_abort_is_raised_where_the_handler_wants_it() -> None:
    run = run_in_child(app, None, queue_name="abortable", timeout_s=0.3, abort_grace_s=5)
    assert run.outcome in ("aborted", "timed_out")


def test_a_failure_in_a_child_keeps_its_meaning() -> None:
    run = run_in_child(raises, None)
    assert (run.outcome, run.retryable) == ("failed", False)


def test_no_child_is_made_where_an_event_loop_runs() -> None:
    async def main() -> None:
        with pytest.raises(WorkerError, match=r"await asyncio.to_thread\(run_in_child, ...\)"):
            run_in_child(work, {"n": 1})
        assert (await asyncio.to_thread(run_in_child, work, {"n": 1})).outcome == "succeeded"

    asyncio.run(main())


def test_a_process_with_threads_is_not_forked() -> None:
    leave = threading.Event()
    thread = threading.Thread(target=leave.wait)
    thread.start()
    try:
        with pytest.raises(WorkerError, match="it is defined inside a function"):
            run_in_child(lambda ctx: 1, None)
        assert run_in_child(work, {"n": 1}).outcome == "succeeded"
    finally:
        leave.set()
        thread.join()


def test_a_process_with_threads_finds_an_app_that_another_module_wires_up(site: Site, tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text("begun = []\ndef work(ctx): return len(begun)\n")
    (tmp_path / "wiring.py").write_text("""if True:
        import plain
        from spooled_supervisor import App
        app = App()
        app.handler("q")(plain.work)
        app.on_child_start(lambda: plain.begun.append(1))
    """)
    with program(
        """
        import plain, wiring
        from spooled_supervisor.testing import run_in_child
        from wiring import app as again
        leave = threading.Event()
        thread = threading.Thread(target=leave.wait)
        thread.start()
        say(run_in_child(wiring.app, None).result)
        hooked, bare = App(), App()
        for app in (hooked, bare): app.handler("q")(plain.work)
        hooked.on_child_stop(plain.begun.clear)
        say(run_in_child(bare, None).result)
        try: run_in_child(hooked, None)
        except Exception as error: say(type(error).__name__, error)
        leave.set(); thread.join()
        """,
        url=site.server.url,
        api_key=site.server.api_key,
        path=[tmp_path],
    ) as running:
        code, lines = running.wait()
    assert (code, lines[:2]) == (0, ["1", "0"])
    assert lines[2].startswith("WorkerError the app cannot be run in a child: this process has threads")
    assert "it is no variable of a module" in lines[2]


def test_a_process_with_one_thread_is_forked_and_anything_can_be_a_handler(site: Site) -> None:
    with program(
        """
        from spooled_supervisor.testing import run_in_child
        factor = 3
        say(run_in_child(lambda ctx: factor * ctx.payload, 5).result)
        say(run_in_child(lambda ctx: os._exit(4), None).error)
        def boot(): raise OSError("no model")
        app = App()
        app.handler("q")(lambda ctx: 1)
        app.on_child_start(boot)
        say(run_in_child(app, None).error.splitlines()[0])
        say(children_of_ours(), os.listdir("/proc/self/task") == [str(os.getpid())])
        """,
        url=site.server.url,
        api_key=site.server.api_key,
    ) as running:
        code, lines = running.wait()
    assert (code, lines) == (
        0,
        [
            "15",
            "the child exited with status 4 without an outcome",
            "the child did not get ready: on_child_start failed: OSError: no model",
            "[] True",
        ],
    )


def signals(ctx: JobContext) -> None:
    os.kill(ctx.payload["pid"], ctx.payload["signal"])
    time.sleep(30)


@pytest.mark.parametrize("number", [signal.SIGALRM, signal.SIGINT])
def test_what_a_signal_handler_raises_ends_the_child_too(site: Site, number: signal.Signals) -> None:
    with program(
        f"""
        from spooled_supervisor.testing import run_in_child
        from tests.e2e.test_testing_helpers import signals
        class TimeIsUp(Exception): pass
        def limit(*_): raise TimeIsUp
        signal.signal({number:d}, limit)
        def look():
            return children_of_ours(), sorted(os.listdir("/proc/self/fd")), signal.getsignal({number:d}) is limit
        before = look()
        def interrupted():
            try: say(run_in_child(signals, {{"pid": os.getpid(), "signal": {number:d}}}))
            except TimeIsUp: say(look() == before)
        interrupted()
        leave = threading.Event()
        thread = threading.Thread(target=leave.wait)
        thread.start()  # from here on an interpreter is started, and nothing is forked
        interrupted()
        leave.set(); thread.join()
        say(run_in_child(lambda ctx: ctx.payload, 5).result)
        """,
        url=site.server.url,
        api_key=site.server.api_key,
    ) as running:
        assert running.wait() == (0, ["True", "True", "5"])


# --- programs and fixtures --------------------------------------------------------------------------------------------


def test_a_server_and_a_supervisor_of_a_test(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTPS_PROXY", "all_proxy"):  # both are on this machine
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with embedded_server(retry_base="50ms") as server:
        with supervisor(f"{__name__}:app", server, queue=["work"], procs=1) as running:
            job = server.client.jobs.create(queue_name="work", payload={"n": 2})
            done = server.wait_for_job(job.id)
            assert done.result["doubled"] == 4
            assert running.events("job_completed")[0]["job_id"] == job.id
            assert [entry for entry in running.events() if server.api_key in str(entry)] == []
            pid = running.pid
            assert running.stop() == 0
            assert running.stop() == 0
        assert not Path(f"/proc/{pid}").exists()
        waits = server.client.jobs.create(queue_name="nobody", payload=1)
        with pytest.raises(TimeoutError, match="is pending, not completed, after"):
            server.wait_for_job(waits.id, "completed", timeout_s=0.1)
        with pytest.raises(ProgramFailed, match="no_such_app"), supervisor("no_such_app", server):
            pass


def test_the_supervisor_sees_no_settings_of_ours(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SPOOLED_QUEUES", "nothing of the app's")
    monkeypatch.setenv("STATE_DIRECTORY", "/nowhere")
    with embedded_server() as server, supervisor(f"{__name__}:app", server, queue=["work"]) as running:
        assert isinstance(running, RunningSupervisor)


@pytest.mark.parametrize("level", ["warning", "error"])
def test_a_supervisor_that_says_little_is_ready_too(level: str) -> None:
    with embedded_server() as server, supervisor(f"{__name__}:app", server, queue=["work"], log_level=level) as running:
        assert running.events("supervisor_started") == []
        job = server.client.jobs.create(queue_name="work", payload={"n": 2})
        assert server.wait_for_job(job.id).result["doubled"] == 4


@pytest.mark.parametrize("name", ["api_url", "state_dir", "http_listen", "log_format"])
def test_an_option_that_is_fixed_is_refused_and_not_overridden(name: str) -> None:
    with (
        embedded_server() as server,
        pytest.raises(ValueError, match=f"which sets it by itself: {name}"),
        supervisor(f"{__name__}:app", server, **{name: "off"}),
    ):
        pass


def test_the_example_of_the_readme(tmp_path: Path) -> None:
    shutil.copy(EXAMPLES / "tasks.py", tmp_path)
    shutil.copy(EXAMPLES / "tests_of_tasks.py", tmp_path / "test_tasks.py")
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["spooled_supervisor.testing.pytest_plugin"]\n')
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:timeout"],
        cwd=tmp_path,
        env={**environment(None), "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 passed" in done.stdout

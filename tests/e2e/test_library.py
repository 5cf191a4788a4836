"""The library face, used as a program uses it: each test is a small program of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.e2e.conftest import Site
from tests.support.daemon import wait_until
from tests.support.program import Program, program

pytestmark = pytest.mark.alone

EXAMPLES = Path(__file__).resolve().parents[1] / "support/examples"


class Programs:
    """Starts programs at a server."""

    def __init__(self, site: Site) -> None:
        self.site = site

    def start(self, source: str | Path, *path: str | Path, wrap: Sequence[str] = ()) -> AbstractContextManager[Program]:
        server = self.site.server
        return program(source, url=server.url, api_key=server.api_key, prefix=self.site.prefix, path=path, wrap=wrap)

    def run(self, source: str | Path, *path: str | Path, wrap: Sequence[str] = ()) -> list[str]:
        """To its end, which must be a good one; what it has printed."""
        with self.start(source, *path, wrap=wrap) as running:
            code, lines = running.wait()
        assert code == 0, "\n".join(lines)
        return lines


@pytest.fixture
def programs(site: Site) -> Programs:
    return Programs(site)


# --- handlers ---------------------------------------------------------------------------------------------------------


def test_a_closure_a_lambda_and_a_decorated_function_are_handlers(programs: Programs) -> None:
    lines = programs.run("""
        def scaled(factor):
            def handler(ctx):
                return factor * ctx.payload
            return handler
        closure, lamb, decorated, named = (worker(name) for name in ("closure", "lambda", "decorated", "named"))
        assert closure.process(scaled(7))
        lamb.process(lambda ctx: -ctx.payload)
        @decorated.process
        def handler(ctx):
            return [ctx.payload, ctx.queue_name]
        @named.process(on_abort="raise")
        async def asynchronous(ctx):
            return os.getpid()
        workers = [closure, lamb, decorated, named]
        left = set(workers)
        for w in workers:
            def done(e, w=w):
                say(e.queue_name.rpartition("-")[2], e.result)
                left.discard(w)
                if not left:
                    for other in workers: other.stop()
            w.on("job:completed", done)
            create(w, 6)
        run_workers(*workers)
        say(os.getpid(), {w.state for w in workers})
    """)
    said = dict(line.split(" ", 1) for line in lines)
    assert said["closure"] == "42"
    assert said["lambda"] == "-6"
    assert said["decorated"].startswith("[6, ")
    pid = lines[-1].split()[0]
    assert said["named"] != pid
    assert said[pid] == "{'stopped'}"


def test_events_come_in_order_and_carry_the_names_of_the_guide(programs: Programs) -> None:
    lines = programs.run("""
        w = worker("q")
        @w.process
        def handler(ctx):
            ctx.progress(40, "nearly")
            if ctx.payload == "bad": raise ValueError("no")
            return {"n": 1}
        names = ("started stopped error job:claimed job:started job:progress job:completed job:failed job:lease_lost "
                 "child:started child:exited").split()
        for name in names:
            w.on(name, lambda e, name=name: say(name, type(e).__name__))
        w.on("job:completed", lambda e: say("  ", e.job_id == good, e.queue_name == w.queue_name, e.result))
        w.on("job:failed", lambda e: say("  ", e.job_id == bad, e.error.splitlines()[0], e.will_retry, e.kind))
        w.on("job:completed", lambda e: say("  ", client.jobs.get(good).status))
        w.on("job:progress", lambda e: say("  ", e.percent, e.message))
        w.on("started", lambda e: say("  ", e.worker_id == w.worker_id, w.state))
        w.on("stopped", lambda e: say("  ", e.reason, e.unsettled))
        seen = []
        def done(e):
            seen.append(e)
            if len(seen) == 2: w.stop()
        w.on("job:completed", done); w.on("job:failed", done)
        say(w.state, w.worker_id, w.active_job_count)
        good, bad = create(w, "good"), create(w, "bad", max_retries=0)
        w.start()
        say(w.state, w.active_job_count)
    """)
    assert lines[0] == "idle None 0"
    assert lines[-1] == "stopped 0"
    text = "\n".join(lines)
    for words in (
        "started WorkerStarted\n   True running",
        "job:progress JobProgress\n   40.0 nearly",
        "job:completed JobCompleted\n   True True {'n': 1}\n   completed",
        "job:failed JobFailed\n   True ValueError: no False failed",
        "stopped WorkerStopped\n   stop was called 0",
    ):
        assert words in text
    order = [line.split()[0] for line in lines if line.startswith("job:")]
    assert order[:3] == ["job:claimed", "job:started", "job:progress"]
    assert "job:lease_lost" not in text
    assert "error " not in text


def test_what_a_callback_raises_is_logged_and_changes_nothing(programs: Programs) -> None:
    lines = programs.run("""
        import logging
        logging.basicConfig(level=logging.WARNING, stream=sys.stdout)
        w = worker("q")
        w.process(lambda ctx: 1)
        def bad(e): raise RuntimeError("mine")
        def leaves(e): sys.exit(3)
        w.on("job:claimed", bad); w.on("job:completed", leaves)
        w.on("job:completed", lambda e: w.stop())
        create(w, None)
        w.start()
        say(w.state)
    """)
    text = "\n".join(lines)
    assert "RuntimeError: mine" in text
    assert "SystemExit: 3" in text
    assert lines[-1] == "stopped"


def test_after_off_and_unsubscribe_nobody_is_called(programs: Programs) -> None:
    lines = programs.run("""
        w = worker("q")
        w.process(lambda ctx: 1)
        def one(e): say("one")
        def two(e): say("two")
        w.on("job:completed", one)
        unsubscribe = w.on("job:completed", two)
        def done(e):
            say("done")
            w.off("job:completed", one); unsubscribe(); unsubscribe()
            if e.job_id == second: w.stop()
            else: globals().__setitem__("second", create(w, 2))
        w.on("job:completed", done)
        second = None
        create(w, 1)
        w.start()
    """)
    assert lines == ["one", "two", "done", "done"]


def test_output_and_logs_of_handlers_reach_the_programs_log(programs: Programs) -> None:
    lines = programs.run("""
        import logging
        logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(name)s|%(levelname)s|%(message)s")
        w = worker("q")
        @w.process
        def handler(ctx):
            print("printed")
            ctx.log("warn", "logged", pages=3)
        w.on("job:completed", lambda e: w.stop())
        create(w, None)
        w.start()
    """)
    records = [line.split("|", 2) for line in lines if not line.startswith("httpx|")]
    assert {record[0] for record in records} == {"spooled_supervisor"}
    assert any(level == "INFO" and "message=printed" in text for _, level, text in records)
    assert any(level == "WARNING" and "message=logged" in text and "pages" in text for _, level, text in records)
    assert not any("sp_test" in text for _, _, text in records)


@pytest.mark.parametrize("how", ["forked", "by name"])
@pytest.mark.parametrize("closed", ["<&-", ">&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_a_program_with_closed_standard_streams_runs_a_worker(
    programs: Programs, tmp_path: Path, closed: str, how: str
) -> None:
    (tmp_path / "handlers.py").write_text("""if True:
        import os
        def streams(ctx):
            os.write(1, b"by number\\n")
            return [os.path.basename(os.readlink(f"/proc/self/fd/{fd}")).partition(":")[0] for fd in range(3)]
    """)
    said = tmp_path / "said"
    programs.run(
        f"""
        from handlers import streams
        class Log(logging.Handler):
            def emit(self, record): words.append(record.getMessage())
        words = []
        logging.getLogger("spooled_supervisor").addHandler(Log())
        logging.getLogger("spooled_supervisor").setLevel(logging.INFO)
        leave = threading.Event()
        thread = threading.Thread(target=leave.wait)
        if {how == "by name"}: thread.start()
        w = worker("q", boot_timeout=5)
        w.process(streams)
        w.on("job:completed", lambda e: (words.append(str(e.result)), w.stop()))
        create(w, None)
        client.close()  # its connection may be one of the three, too
        try: w.start()
        finally:
            leave.set()
            pathlib.Path({str(said)!r}).write_text("|".join(words))
        """,
        tmp_path,
        wrap=["sh", "-c", f'exec "$@" {closed}', "sh"],
    )
    words = said.read_text()
    assert "['null', 'pipe', 'pipe']" in words
    assert "by number" in words


# --- starting and stopping --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_a_worker_of_the_main_thread_and_the_programs_handlers_come_back(
    programs: Programs, number: signal.Signals
) -> None:
    with programs.start("""
        def own(*_): say("own handler")
        signal.signal(signal.SIGTERM, own); signal.signal(signal.SIGINT, own)
        w = worker("q", shutdown_timeout=5)
        @w.process
        def handler(ctx):
            say = ctx.progress(1)
            ctx.signal.wait(30)
            return ctx.signal.reason
        w.on("job:progress", lambda e: say("runs", w.active_job_count))
        w.on("job:completed", lambda e: say("completed", e.result))
        w.on("stopped", lambda e: say("stopped", e.reason))
        create(w, None)
        w.start()
        say(signal.getsignal(signal.SIGTERM) is own, signal.getsignal(signal.SIGINT) is own)
        os.kill(os.getpid(), signal.SIGTERM)
    """) as running:
        assert running.wait_for_line("runs") == "runs 1"
        running.process.send_signal(number)
        assert running.wait() == (0, ["completed shutdown", f"stopped {number.name}", "True True", "own handler"])


def test_a_second_signal_kills_and_settles(programs: Programs) -> None:
    with programs.start("""
        w = worker("q")
        @w.process
        def handler(ctx):
            ctx.progress(1)
            time.sleep(60)
        w.on("job:progress", lambda e: say("runs"))
        w.on("job:failed", lambda e: say("failed", e.kind, e.error))
        create(w, None)
        w.start()
        say(w.state)
    """) as running:
        running.wait_for_line("runs")
        running.process.send_signal(signal.SIGINT)
        time.sleep(0.2)
        running.process.send_signal(signal.SIGINT)
        assert running.wait() == (0, ["failed released Worker shutdown", "stopped"])


def test_a_worker_in_another_thread_leaves_signals_alone(programs: Programs, tmp_path: Path) -> None:
    (tmp_path / "handlers.py").write_text("def answer(ctx): return 42\n")
    lines = programs.run(
        """
        from handlers import answer
        before = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)]
        w = worker("q")
        w.process(answer)
        w.on("job:completed", lambda e: say(e.result))
        w.on("job:completed", lambda e: say(before == [signal.getsignal(n) for n in (15, 2, 17)]))
        thread = threading.Thread(target=w.start)
        thread.start()
        job = create(w, None)
        while client.jobs.get(job).status != "completed": time.sleep(0.01)
        say(w.state)
        w.stop()
        say(w.join(20), w.state)
        thread.join()
        """,
        tmp_path,
    )
    assert sorted(lines) == sorted(["42", "True", "running", "True stopped"])


def test_auto_start_forks_first_and_works_in_a_thread(programs: Programs) -> None:
    lines = programs.run("""
        secret = 6
        w = worker("q", auto_start=True)
        say(w.state)
        w.process(lambda ctx: secret * 7)
        job = create(w, None)
        while client.jobs.get(job).status != "completed": time.sleep(0.01)
        say(client.jobs.get(job).result, w.state, threading.active_count() > 1)
        w.stop(); w.stop()
        say(w.join(20), w.state)
        w.stop()
        again = worker("again", auto_start=True)  # the program has one thread, and can be forked
        again.on("job:completed", lambda e: (say(e.result), again.stop()))
        create(again, None)
        again.process(lambda ctx: "again")
        again.join()
    """)
    assert lines == ["idle", "42 running True", "True stopped", "again"]


def test_a_worker_goes_on_when_the_main_thread_has_ended_and_a_stop_drains_it(programs: Programs) -> None:
    with programs.start("""
        w = worker("q", auto_start=True, shutdown_timeout=5)
        signal.signal(signal.SIGTERM, lambda *_: w.stop())
        w.on("error", lambda e: say("error", e.error))
        w.on("job:completed", lambda e: say("completed", len(e.result)))
        w.on("stopped", lambda e: say("stopped", e.reason, e.unsettled))
        runs = threading.Event()
        w.on("job:progress", lambda e: runs.set())
        @w.process
        def handler(ctx):
            ctx.progress(1)
            ctx.signal.wait(30)
            return "x" * (128 << 10)  # so much that a helper thread of the loop writes it to the disk
        create(w, None)
        runs.wait()
        threading._register_atexit(say, "main has ended")
    """) as running:
        running.wait_for_line("main has ended")
        running.process.send_signal(signal.SIGTERM)
        assert running.wait() == (0, [f"completed {128 << 10}", "stopped stop was called 0"])


@pytest.mark.parametrize("how", ["auto_start", "a thread", "an executor"])
def test_a_worker_in_a_thread_works_though_the_main_thread_ends_at_once(
    programs: Programs, tmp_path: Path, how: str
) -> None:
    (tmp_path / "handlers.py").write_text("def answer(ctx): return 42\n")
    lines = programs.run(
        f"""
        import concurrent.futures
        from handlers import answer
        w = worker("q", auto_start={how == "auto_start"})
        w.on("error", lambda e: say("error", e.error))
        w.on("job:completed", lambda e: (say(e.result), w.stop()))
        w.on("stopped", lambda e: say("stopped", e.unsettled))
        create(w, None)
        w.process(answer)
        if {how == "a thread"}: threading.Thread(target=w.start).start()
        if {how == "an executor"}: concurrent.futures.ThreadPoolExecutor().submit(w.start)
        while w.state == "idle": time.sleep(0.001)
        """,
        tmp_path,
    )
    assert lines == ["42", "stopped 0"]


def test_a_fork_of_a_program_with_a_worker_does_not_wait_for_it_at_its_end(programs: Programs) -> None:
    lines = programs.run("""
        w = worker("q", auto_start=True)
        started = threading.Event()
        w.on("started", lambda e: started.set())
        w.process(lambda ctx: 1)
        started.wait()
        pid = os.fork()
        if pid == 0:
            threading._shutdown()  # as multiprocessing does
            os._exit(7)
        say(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        w.stop()
    """)
    assert lines == ["7"]


def test_what_fails_before_the_loop_turns_is_told_and_a_later_start_works(programs: Programs) -> None:
    lines = programs.run("""
        from spooled_supervisor import timing
        class Log(logging.Handler):
            def emit(self, record): say("log", record.getMessage().partition("has failed")[2])
        logging.getLogger("spooled_supervisor").addHandler(Log(logging.ERROR))
        make = timing.new_event_loop
        def full(): raise OSError(24, "Too many open files")
        timing.new_event_loop = full
        w = worker("q", auto_start=True)
        w.on("error", lambda e: say("error", e.error))
        w.process(lambda ctx: 1)
        say(w.join(20), w.state, w.error, children_of_ours())
        try: w.start()
        except OSError as error: say("raised", error)
        timing.new_event_loop = make
        w.on("started", lambda e: w.stop())
        w.start()
        say(w.state)
    """)
    told = ["log : [Errno 24] Too many open files", "error [Errno 24] Too many open files"]
    ended = "True error [Errno 24] Too many open files []"
    assert lines == [*told, ended, *told, "raised [Errno 24] Too many open files", "stopped"]


def test_stop_before_start_makes_start_return_at_once_and_only_once(programs: Programs) -> None:
    lines = programs.run("""
        w = worker("q")
        w.process(lambda ctx: 1)
        w.stop(); w.stop()
        w.start()
        say(w.state, children_of_ours())
        w.on("job:completed", lambda e: w.stop())
        for _ in range(2):
            create(w, None)
            w.start()
            say(w.state, children_of_ours())
        w.on("started", lambda e: w.stop())
        w.start()
        say(w.state)
    """)
    assert lines == ["stopped []", "stopped []", "stopped []", "stopped"]


def test_stop_from_another_thread_while_it_boots(programs: Programs) -> None:
    lines = programs.run("""
        for delay in (0, 0.001, 0.01, 0.03, 0.1):
            w = worker("q", auto_start=True)
            w.process(lambda ctx: 1)
            time.sleep(delay)
            w.stop()
            say(w.join(20), w.state)
        say(children_of_ours())
    """)
    assert lines == ["True stopped"] * 5 + ["[]"]


def test_many_starts_and_stops_at_any_moment_leave_nothing_and_lose_no_job(programs: Programs) -> None:
    lines = programs.run("""
        import random
        states = set()
        for n in range(6):
            w = worker("q", concurrency=2, max_jobs_per_child=1, auto_start=True)
            for _ in range(3): create(w, n)
            w.process(lambda ctx: time.sleep(0.01))
            def stopper(delay):
                time.sleep(delay); w.stop(); w.stop()
            threads = [threading.Thread(target=stopper, args=(random.random() * 0.4,)) for _ in range(3)]
            for thread in threads: thread.start()
            for thread in threads: thread.join()
            assert w.join(20)
            states.add(w.state)
        say(states, children_of_ours())
        w = worker("q")
        w.process(lambda ctx: None)
        def look(e):
            if client.jobs.stats(w.queue_name).completed == 18: w.stop()
        w.on("started", look); w.on("job:completed", look)
        w.start()
        say(client.jobs.stats(w.queue_name).total, children_of_ours())
    """)
    assert lines == ["{'stopped'} []", "18 []"]


def test_several_workers_share_the_signals(programs: Programs) -> None:
    with programs.start("""
        one, two = worker("one"), worker("two")
        for w in (one, two):
            w.process(lambda ctx: os.getpid())
            w.on("started", lambda e: say("started"))
            w.on("stopped", lambda e: say("stopped", e.reason))
        run_workers(one, two)
        say(one.state, two.state, one.worker_id != two.worker_id)
    """) as running:
        for _ in range(2):
            running.wait_for_line("started")
        assert len(running.titled("fork server standing by")) == 2
        running.process.send_signal(signal.SIGTERM)
        assert running.wait() == (0, ["stopped SIGTERM", "stopped SIGTERM", "stopped stopped True"])


def test_when_one_of_several_fails_the_others_stop_in_peace(programs: Programs) -> None:
    lines = programs.run("""
        good = worker("good")
        bad = SpooledWorker(SpooledClient("sp_test_a_key_that_is_wrong"), "bad", concurrency=1)
        for w in (good, bad):
            w.process(lambda ctx: 1)
            w.on("error", lambda e: say("error", type(e.error).__name__))
            w.on("stopped", lambda e: say("stopped", e.reason))
        try: run_workers(good, bad)
        except Exception as error: say(type(error).__name__, error.exit_code)
        say(good.state, bad.state, type(bad.error).__name__)
    """)
    assert lines == [
        "error CredentialsRefused",
        "stopped another worker of the program has failed",
        "CredentialsRefused 77",
        "stopped error CredentialsRefused",
    ]


def test_what_a_signal_handler_of_the_program_raises_ends_the_workers_and_their_jobs(
    programs: Programs, tmp_path: Path
) -> None:
    with programs.start(f"""
        class TimeIsUp(Exception): pass
        def limit(*_): raise TimeIsUp("now")
        signal.signal(signal.SIGALRM, limit)
        one, two = worker("one"), worker("two")
        @one.process
        def handler(ctx):
            pathlib.Path({str(tmp_path / "runs")!r}).touch()
            time.sleep(60)
        two.process(lambda ctx: 1)
        for w in (one, two):
            w.on("error", lambda e: say("error", repr(e.error)))
            w.on("stopped", lambda e: say("stopped", e.reason))
        create(one, None)
        try: run_workers(one, two)
        except TimeIsUp as error: say("raised", error)
        for w in (one, two): say(w.state, repr(w.error), w.join(0), w.active_job_count)
        say("left", children_of_ours())
        two.on("started", lambda e: two.stop())
        two.start()
    """) as running:
        wait_until((tmp_path / "runs").exists, "a running job")
        running.process.send_signal(signal.SIGALRM)
        code, lines = running.wait()
    assert code == 0
    assert lines == [
        *["error TimeIsUp('now')"] * 2,
        "raised now",
        *["error TimeIsUp('now') True 0"] * 2,
        "left []",
        "stopped stop was called",
    ]


def test_what_a_signal_handler_raises_ends_a_busy_worker_wherever_the_loop_is(programs: Programs) -> None:
    lines = programs.run("""
        class TimeIsUp(Exception): pass
        def limit(*_): raise TimeIsUp("now")
        signal.signal(signal.SIGALRM, limit)
        def after_a_while(seconds):
            signal.setitimer(signal.ITIMER_REAL, seconds, 0.001)  # and again, while it unwinds
        waits = [lambda: os.kill(os.getpid(), signal.SIGALRM)]
        waits += [lambda n=n: after_a_while(0.001 + 0.0071 * n) for n in range(8)]
        for wait in waits:
            w = worker("q", prefetch=10)
            w.process(lambda ctx: 1)
            client.jobs.bulk(queue_name=w.queue_name, jobs=[{"payload": n} for n in range(100)])
            began = []
            w.on("job:completed", lambda e: began or (began.append(e), wait()))
            w.on("error", lambda e: signal.setitimer(signal.ITIMER_REAL, 0))
            w.on("job:completed", lambda e: w.stop() if client.jobs.stats(w.queue_name).pending == 0 else None)
            try: w.start()
            except BaseException as error: raised = error
            else: raised = None
            say(repr(raised), w.state, w.error is raised, children_of_ours(), signal.getsignal(signal.SIGALRM) is limit)
    """)
    assert lines == ["TimeIsUp('now') error True [] True"] * 9


# --- programs with threads --------------------------------------------------------------------------------------------


def test_a_program_with_threads_is_told_both_ways_out(programs: Programs) -> None:
    lines = programs.run("""
        leave = threading.Event()
        thread = threading.Thread(target=leave.wait)
        thread.start()
        w = worker("q")
        w.process(lambda ctx: 1)
        try: w.start()
        except Exception as error: say(error)
        say(w.state, children_of_ours())
        leave.set(); thread.join()
        w.on("job:completed", lambda e: w.stop())
        create(w, 1)
        w.start()
        say(w.state)
    """)
    text = lines[0]
    assert "it has 2 threads" in text
    assert "main file" in text
    assert "Either start the worker before anything else starts threads" in text
    assert "or put the handler at the top level of a module that can be imported" in text
    assert lines[1:] == ["error []", "stopped"]


def test_a_running_event_loop_is_no_place_to_block(programs: Programs, tmp_path: Path) -> None:
    (tmp_path / "handlers.py").write_text("def double(ctx): return 2 * ctx.payload\n")
    lines = programs.run(
        """
        import asyncio
        from handlers import double
        async def main():
            w = worker("q")
            w.process(double)
            try: w.start()
            except Exception as error: say(error)
            w.on("job:completed", lambda e: (say(e.result), w.stop()))
            create(w, 4)
            await asyncio.to_thread(w.start)
            background = worker("background", auto_start=True)
            background.on("job:completed", lambda e: (say(e.result), background.stop()))
            background.process(double)
            create(background, 5)
            await asyncio.to_thread(background.join)
            w = worker("q2")
            w.process(lambda ctx: 1)
            try: w.start()
            except Exception as error: say("it runs an event loop" in str(error))
        asyncio.run(main())
        """,
        tmp_path,
    )
    assert "await asyncio.to_thread(worker.start)" in lines[0]
    assert lines[1:] in (["8", "10", "True"], ["8", "10", "False"])


def test_a_module_that_starts_its_worker_when_imported_is_not_started_again_by_its_fork_server(
    programs: Programs, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(
        "import os\nfrom spooled_supervisor import SpooledClient, SpooledWorker\n"
        "w = SpooledWorker(SpooledClient('sp_test_0123456789' if 'SPOOLED_API_KEY' not in os.environ else None),"
        " os.environ['QUEUE_PREFIX'] + 'q', concurrency=1, auto_start=True)\n"
        "w.on('job:completed', lambda e: (print(e.result, flush=True), w.stop()))\n"
        "@w.process\ndef handler(ctx): return 'imported'\n"
    )
    lines = programs.run(
        """
        leave = threading.Event()
        thread = threading.Thread(target=leave.wait)
        thread.start()
        import mine
        create(mine.w, 1)
        say(mine.w.join(20))
        leave.set()
        """,
        tmp_path,
    )
    assert lines == ["imported", "True"]


# --- deaths -----------------------------------------------------------------------------------------------------------


def test_a_dead_fork_server_is_replaced_by_the_one_that_stands_by_and_a_second_death_ends_the_worker(
    programs: Programs,
) -> None:
    with programs.start("""
        w = worker("q", max_jobs_per_child=1)
        names = []
        @w.process
        def handler(ctx):
            names.append(ctx.payload)
            return names
        w.on("job:completed", lambda e: say("done", e.result))
        w.on("error", lambda e: say("error", type(e.error).__name__, w.state))
        w.on("started", lambda e: say("started"))
        try: w.start()
        except Exception as error: say(error)
        say(w.state, children_of_ours())
    """) as running:
        site = programs.site
        running.wait_for_line("started")
        queue = site.prefix + "q"
        (standby,) = running.titled("fork server standing by")
        (first,) = [pid for pid in running.titled("fork server") if pid != standby]
        assert site.end(site.client.create(queue, "a"))["result"] == ["a"]
        os.kill(first, signal.SIGKILL)
        for name in "bc":
            assert site.end(site.client.create(queue, name))["result"] == [name]
        assert running.titled("standing by") == []
        os.kill(standby, signal.SIGKILL)
        code, lines = running.wait()
        assert code == 0
        ends = [line for line in lines if not line.startswith("done")]
        assert "stood by for it too" in ends[-2]
        assert ends[0] == "error NoCopyLeft error"
        assert ends[-1] == "error []"


def test_children_of_the_program_are_left_alone(programs: Programs) -> None:
    lines = programs.run("""
        lives = subprocess.Popen(["sleep", "60"], start_new_session=True)
        dead = subprocess.Popen([sys.executable, "-c", "raise SystemExit(7)"])
        w = worker("q", job_timeout=0.5, abort_grace=0.1)
        during = []
        @w.process
        def handler(ctx):
            subprocess.Popen(["sleep", "61"], start_new_session=True)
            subprocess.Popen(["setsid", "sleep", "62"])
            if ctx.payload == "hang": time.sleep(60)
            if ctx.payload == "crash": os._exit(9)
        def done(e):
            during.append(subprocess.Popen([sys.executable, "-c", "raise SystemExit(8)"]))
            if len(during) == 3: w.stop()
        w.on("job:completed", done); w.on("job:failed", done)
        for what in ("hang", "crash", "plain"): create(w, what, max_retries=0)
        w.start()
        say(dead.wait(), [p.wait() for p in during], lives.poll())
        say(children_of_ours() == [str(lives.pid)])
        lives.kill()
        say(lives.wait())
    """)
    assert lines == ["7 [8, 8, 8] None", "True", "-9"]


def test_statuses_that_the_program_takes_away_are_unknown_and_nothing_more(programs: Programs) -> None:
    lines = programs.run("""
        def greedy(*_):
            try:
                while os.waitpid(-1, os.WNOHANG)[0]: pass
            except ChildProcessError: pass
        signal.signal(signal.SIGCHLD, greedy)
        w = worker("q")
        w.process(lambda ctx: os._exit(3) if ctx.payload == "crash" else "fine")
        seen = []
        def done(e):
            seen.append(e)
            if len(seen) == 2: w.stop()
        w.on("job:completed", done)
        w.on("job:failed", done)
        w.on("job:failed", lambda e: say(e.kind))
        w.on("job:completed", lambda e: say(e.result))
        create(w, "crash", max_retries=0); create(w, "fine")
        w.start()
        say(w.state, signal.getsignal(signal.SIGCHLD) is greedy)
    """)
    assert sorted(lines) == ["crashed", "fine", "stopped True"]


def test_what_was_changed_in_the_program_is_put_back(programs: Programs) -> None:
    lines = programs.run("""
        from spooled_supervisor import kernel
        import setproctitle
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        r, s = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(s)
        def masks():
            status = pathlib.Path("/proc/self/status").read_text()
            lines = [line.split() for line in status.splitlines() if line.startswith(("SigBlk", "SigIgn", "SigCgt"))]
            # 32 and 33 are glibc's own (nptl(7)): it catches them from the first thread on
            return [(name, int(mask, 16) & ~(0b11 << 31)) for name, mask in lines]
        def look():
            return {
                "subreaper": kernel.is_child_subreaper(), "masks": masks(), "title": setproctitle.getproctitle(),
                "environ": dict(os.environ), "cwd": os.getcwd(),
            }
        before = look()
        def inside(e):
            say(kernel.is_child_subreaper(), os.stat("/proc/self/mem").st_uid == os.getuid())
            os.close(os.open("/proc/self/environ", os.O_RDONLY))
            say(subprocess.run(["cat", f"/proc/{os.getpid()}/environ"], stdout=subprocess.DEVNULL).returncode)
        w = worker("q")
        w.process(lambda ctx: [os.environ.get("SPOOLED_API_KEY"), sorted(os.environ) != []])
        w.on("started", inside)
        w.on("job:completed", lambda e: (say(e.result), w.stop()))
        create(w, 1)
        client.close()
        fds = set(os.listdir("/proc/self/fd"))
        w.start()
        client.close()
        after = look()
        say({what: (before[what], after[what]) for what in before if before[what] != after[what]})
        say(set(os.listdir("/proc/self/fd")) - fds, signal.set_wakeup_fd(-1) == s)
    """)
    assert lines == ["True True", "0", "[None, True]", "{}", "set() True"]


def test_when_the_program_is_killed_everything_goes_with_it(programs: Programs) -> None:
    with programs.start("""
        w = worker("q", concurrency=2)
        @w.process
        def handler(ctx):
            subprocess.Popen(["sleep", "63"], start_new_session=True)
            ctx.progress(1)
            time.sleep(60)
        w.on("job:progress", lambda e: say("runs"))
        create(w, None)
        w.start()
    """) as running:
        running.wait_for_line("runs")
        assert len(running.family()) >= 4
        running.process.kill()
    assert running.family() == []


def test_a_handler_may_use_the_client_of_the_program(programs: Programs) -> None:
    lines = programs.run("""
        first, second = worker("first"), worker("second")
        first.process(lambda ctx: create(second, ctx.payload + 1))
        second.process(lambda ctx: ctx.payload)
        second.on("job:completed", lambda e: (say(e.result), first.stop(), second.stop()))
        create(first, 1)
        run_workers(first, second)
    """)
    assert lines == ["2"]


def test_a_state_directory_keeps_the_worker_id_and_takes_one_worker_only(programs: Programs, tmp_path: Path) -> None:
    lines = programs.run(f"""
        ids = []
        for _ in range(2):
            w = worker("q", state_dir={str(tmp_path / "state")!r})
            w.process(lambda ctx: 1)
            w.on("started", lambda e: w.stop())
            w.start()
            ids.append(w.worker_id)
        say(ids[0] == ids[1])
        pair = [worker("q", state_dir={str(tmp_path / "state")!r}, worker_id=f"w{{n}}") for n in range(2)]
        for w in pair: w.process(lambda ctx: 1)
        try: run_workers(*pair)
        except Exception as error: say(error)
        say([w.state for w in pair], children_of_ours())
    """)
    assert lines[0] == "True"
    assert any("is in use by the supervisor with pid" in line for line in lines[1:-1])
    assert lines[-1] == "['stopped', 'error'] []"


# --- the examples of the README ---------------------------------------------------------------------------------------


def test_the_first_example(programs: Programs) -> None:
    with programs.start(EXAMPLES / "library_first.py") as running:
        client = programs.site.client
        deadline = time.monotonic() + 20
        while client.stats("reports")["completed"] == 0:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        running.process.send_signal(signal.SIGINT)
        assert running.wait() == (0, [])


def test_the_example_of_events(programs: Programs) -> None:
    lines = programs.run(EXAMPLES / "library_events.py")
    assert [line.split()[0] for line in lines[:3]] == ["started"] * 3
    assert lines[-2:] == ["stopped: stop was called", "[1, 4, 9] stopped"]


def test_the_example_of_several_workers(programs: Programs) -> None:
    with programs.start(EXAMPLES / "library_several.py") as running:
        client = programs.site.client
        jobs = [client.create("mails", "ann"), client.create("pictures", "bob")]
        assert [client.wait_for(job, "completed", timeout_s=20)["result"] for job in jobs] == ["to ann", "of bob"]
        running.process.send_signal(signal.SIGTERM)
        assert running.wait() == (0, [])


def test_the_example_inside_asyncio(programs: Programs, tmp_path: Path) -> None:
    (tmp_path / "handlers.py").write_text("def double(ctx): return 2 * ctx.payload\n")
    assert programs.run(EXAMPLES / "library_threads.py", tmp_path) == ["result 42"]


def test_the_example_in_the_background(programs: Programs) -> None:
    lines = programs.run(EXAMPLES / "library_background.py")
    with contextlib.suppress(ValueError):
        assert lines[0].startswith("the program goes on; the worker is")
    assert lines[-1] == "result 42"

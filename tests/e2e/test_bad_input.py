"""Bad input and what it gets: an exit code, a message that names what to do, within seconds, and nothing left running.

Or, where the input comes from a server: a daemon that lives on, says what is wrong, does not hammer, and recovers.
"""

from __future__ import annotations

import os
import socket
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import STUB_KEY, Site, stub_worker
from tests.support.daemon import (
    APPS,
    Finished,
    command_line,
    daemon,
    environment,
    is_alive,
    processes_of,
    run_line,
    run_to_end,
    wait_until,
)
from tests.support.stub_api import Reply, StubApi
from tests.support.transports import REST_ONLY

KEY = "sp_test_0123456789"
GOOD_APP = """
from spooled_supervisor import App
app = App()
@app.handler("q")
def handle(ctx):
    return "ok"
"""


def write_app(folder: Path, text: str, name: str = "myjobs") -> Path:
    (folder / f"{name}.py").write_text(textwrap.dedent(text))
    return folder


def assert_complains(done: Finished, code: int, *words: str, within_s: float = 5.0) -> None:
    assert done.code == code, done.output
    for word in words:
        assert word in done.output, done.output
    assert done.seconds < within_s


# --- apps ----------------------------------------------------------------------------------------------------------

BROKEN_APPS: dict[str, tuple[str, Sequence[str]]] = {
    "raises": (
        "import json\ndef load():\n    raise RuntimeError('no database')\nload()",
        ["in load", "RuntimeError: no database"],
    ),
    "imports-what-is-not-there": ("import not_there_at_all", ["No module named 'not_there_at_all'"]),
    "syntax": ("def broken(:\n    pass", ["SyntaxError", "def broken(:"]),
    "exits-0": ("import sys\nsys.exit(0)", ["SystemExit"]),
    "exits-with-text": ("import sys\nsys.exit('not like this')", ["not like this"]),
    "keyboard-interrupt": ("raise KeyboardInterrupt", ["KeyboardInterrupt"]),
    "own-base-exception": ("class Own(BaseException): pass\nraise Own('mine')", ["Own: mine"]),
    "recursion": ("def f():\n    f()\nf()", ["RecursionError"]),
    "odd-text": ("class E(Exception):\n    def __str__(self): raise ValueError\nraise E", ["E:"]),
    "parses-arguments": (
        "import argparse\nargparse.ArgumentParser().parse_args(['--never'])",
        ["unrecognized arguments: --never"],
    ),
    "hard-exit": ("import os\nprint('last words', flush=True)\nos._exit(0)", ["exited with status 0", "last words"]),
    "kills-itself": ("import os\nos.kill(os.getpid(), 11)", ["SIGSEGV"]),
    "no-app": ("x = 1", ["has no attribute 'app'"]),
    "app-is-a-number": ("app = 7", ["is a int", "App or a callable"]),
    "app-is-a-callable": ("def app(ctx): pass", ["exactly one --queue"]),
    "no-handlers": ("from spooled_supervisor import App\napp = App()", ["has no handlers"]),
    "bad-queue-name": (
        "from spooled_supervisor import App\napp = App()\n@app.handler('.x')\ndef h(ctx): pass",
        [".x", "letters"],
    ),
    "two-handlers": (GOOD_APP + "@app.handler('q')\ndef other(ctx): pass", ["has a handler already"]),
    "preload-hook-raises": (
        GOOD_APP + "@app.on_preload\ndef hook(): raise OSError('no model')",
        ["no model", "in hook"],
    ),
    "huge-text": ("raise RuntimeError('x' * 10_000_000)", ["cannot be imported"]),
    "surrogate": ("raise RuntimeError('a\\ud800b')", ["RuntimeError"]),
    "floods": ("for n in range(20000): print('flood', n)\nraise RuntimeError('after the flood')", ["after the flood"]),
    "closes-everything": ("import os\nos.closerange(0, 4096)\nraise RuntimeError('nobody hears me')", []),
    "starts-a-program": (
        "import subprocess\nsubprocess.Popen(['sleep', '100'], start_new_session=True)\nraise OSError('after that')",
        ["after that"],
    ),
    "forks": (
        "import os\nif os.fork() == 0:\n    raise OSError('in the fork')\nos.wait()\nraise OSError('in the parent')",
        ["in the parent"],
    ),
}


@pytest.mark.parametrize("name", BROKEN_APPS)
def test_app_that_cannot_be_imported_exits_78_with_its_own_last_lines(tmp_path: Path, name: str) -> None:
    text, words = BROKEN_APPS[name]
    done = run_to_end("myjobs", cwd=write_app(tmp_path, text))
    assert_complains(done, 78, "myjobs", *words)
    assert "spooled_supervisor/" not in done.output, "our own frames say nothing to the author of the app"


@pytest.mark.parametrize("name", ["raises", "syntax", "exits-0", "no-app", "bad-queue-name", "starts-a-program"])
def test_check_says_the_same_and_exits_78(tmp_path: Path, name: str) -> None:
    text, words = BROKEN_APPS[name]
    done = check(write_app(tmp_path, text))
    assert_complains(done, 78, "myjobs", *words)


def check(cwd: Path, options: Sequence[str] = (), env: dict[str, str] | None = None) -> Finished:
    line = [sys.executable, "-m", "spooled_supervisor", "check", "--app", "myjobs", "--api-url", "http://127.0.0.1:9"]
    line += ["--state-dir", str(cwd / "state"), *options]
    return run_line(line, env=environment(KEY) | (env or {}), cwd=cwd, state_dir=cwd / "state")


@pytest.mark.parametrize("command", ["run", "check"])
def test_children_that_the_limit_of_open_files_does_not_let_in_are_told_before_anything_starts(
    tmp_path: Path, command: str
) -> None:
    write_app(tmp_path, GOOD_APP)
    line = [sys.executable, "-m", "spooled_supervisor", command, "--app", "myjobs", "--api-url", "http://127.0.0.1:9"]
    line += ["--state-dir", str(tmp_path / "state"), "--http-listen", "off", "--procs", "118"]
    done = run_line(
        ["/usr/bin/env", "prlimit", "--nofile=64", *line],
        env=environment(KEY),
        cwd=tmp_path,
        state_dir=tmp_path / "state",
    )
    assert_complains(done, 78, "procs: 118 children do not fit into the limit of 64 open files", "LimitNOFILE=")
    assert "fork_server_started" not in done.output


def test_check_of_a_good_app_exits_0_and_starts_nothing(tmp_path: Path) -> None:
    done = check(write_app(tmp_path, GOOD_APP))
    assert_complains(done, 0, "ok: myjobs")
    assert not (tmp_path / "state").exists()


def test_check_reports_configuration_and_app_together(tmp_path: Path) -> None:
    done = check(write_app(tmp_path, "raise RuntimeError('no database')"), ["--procs", "0", "--lease-duration", "1"])
    assert_complains(done, 64, "--procs", "--lease-duration", "no database")


def test_module_that_is_not_there_exits_78(tmp_path: Path) -> None:
    assert_complains(run_to_end("not_there", cwd=tmp_path), 78, "No module named 'not_there'")


def test_queue_without_a_handler_exits_78(tmp_path: Path) -> None:
    done = run_to_end("myjobs", cwd=write_app(tmp_path, GOOD_APP), options=["--queue", "other"])
    assert_complains(done, 78, "'other'", "it has: q")


def test_import_that_hangs_exits_78_after_the_boot_timeout(tmp_path: Path) -> None:
    write_app(tmp_path, "import time, subprocess\nsubprocess.Popen(['sleep', '100'])\ntime.sleep(100)")
    done = run_to_end("myjobs", cwd=tmp_path, options=["--boot-timeout", "1"])
    assert_complains(done, 78, "--boot-timeout 1 s")


def test_app_beside_modules_named_like_ours_is_imported(tmp_path: Path, stub: StubApi) -> None:
    """The current directory is the app's: a `queue.py` there must not break our own imports."""
    for name in ("queue", "socket", "json", "signal", "frames", "child"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('a module of the app was taken for another')")
    write_app(tmp_path, GOOD_APP)
    safe = {"PYTHONSAFEPATH": "1"}  # as with the console script; `python -m` would put the directory first for us, too
    with stub_worker(stub, app="myjobs", cwd=tmp_path, procs=1, env=safe) as worker:
        stub.add_job()
        wait_until(lambda: stub.completed, "the job")
        assert worker.stop() == 0


def test_plain_callable_serves_the_one_queue_it_is_given(tmp_path: Path, stub: StubApi) -> None:
    write_app(tmp_path, "def double(ctx):\n    return {'n': 2 * ctx.payload['n']}")
    with stub_worker(stub, app="myjobs:double", queues=["numbers"], cwd=tmp_path, procs=1):
        stub.add_job(queue_name="numbers", payload={"n": 21})
        wait_until(lambda: stub.completed, "the job")
        assert stub.completed == {"job-1": b'{"n":42}'}


def test_threads_at_import_are_a_warning_with_their_names(stub: StubApi) -> None:
    with stub_worker(stub, app="threaded", procs=1) as worker:
        warned = worker.wait_for_event("fork_server_threaded")
        assert warned["threads"] == ["the app's poller"]
        assert warned["level"] == "warn"
        stub.add_job()
        wait_until(lambda: stub.completed, "the job")


def test_threads_at_import_with_strict_preload_exit_78(tmp_path: Path) -> None:
    done = run_to_end("threaded", options=["--queue", "q", "--strict-preload"])
    assert_complains(done, 78, "threads", "the app's poller")


# --- the key -------------------------------------------------------------------------------------------------------


def test_missing_key_exits_78_and_says_where_it_belongs() -> None:
    assert_complains(run_to_end("modes", api_key=None), 78, "SPOOLED_API_KEY", "--api-key-file")


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"", "blank"),
        (b" \n\n", "blank"),
        (b"two words\n", "blank"),
        (b"\xff\xfe\x00key", "API key"),
        (b"k" * 10_000, "characters"),
    ],
)
def test_key_file_without_a_key_exits_78_and_shows_none_of_it(tmp_path: Path, content: bytes, word: str) -> None:
    file = tmp_path / "key"
    file.write_bytes(content)
    done = run_to_end("modes", api_key=None, options=["--api-key-file", str(file)])
    assert_complains(done, 78, "--api-key-file", word)
    assert "two words" not in done.output


def test_key_file_that_is_not_there_exits_64(tmp_path: Path) -> None:
    done = run_to_end("modes", api_key=None, options=["--api-key-file", str(tmp_path / "gone")])
    assert_complains(done, 64, str(tmp_path / "gone"), "No such file")


def test_key_on_the_command_line_is_refused_and_not_repeated() -> None:
    done = run_to_end("modes", api_key=None, options=["--api-key", "sp_live_very_secret"])
    assert_complains(done, 64, "--api-key", "SPOOLED_API_KEY")
    assert "very_secret" not in done.output


def test_refused_key_exits_77(stub: StubApi) -> None:
    done = run_to_end("modes", url=stub.url, api_key="sp_test_wrong_but_well_formed")
    assert_complains(done, 77, "401")
    assert "wrong_but_well_formed" not in done.output
    assert len(stub.requests) < 20


@pytest.mark.parametrize("command", ["status", "ctl quiet", "ctl", "export", "export config", "demo"])
@pytest.mark.parametrize("key", ["--api-key sp_live_very_secret", "--api-key=very_secret", "--api-key very_secret"])
def test_key_on_any_command_line_is_refused_and_not_repeated(tmp_path: Path, command: str, key: str) -> None:
    line = [sys.executable, "-m", "spooled_supervisor", *command.split(), *key.split()]
    done = run_line(line, env=environment(KEY), state_dir=tmp_path, cwd=tmp_path)
    assert_complains(done, 64, "--api-key: no such flag", "SPOOLED_API_KEY")
    assert "very_secret" not in done.output


def test_a_word_that_looks_like_a_key_is_not_repeated(tmp_path: Path) -> None:
    line = [sys.executable, "-m", "spooled_supervisor", "status", "sp_live_very_secret"]
    done = run_line(line, env=environment(KEY), state_dir=tmp_path, cwd=tmp_path)
    assert_complains(done, 64, "unrecognized arguments: sp_live_***")


def test_check_online_exits_77_of_a_refused_key_and_69_where_no_service_answers(stub: StubApi, tmp_path: Path) -> None:
    write_app(tmp_path, GOOD_APP)
    online = ["--online", "--api-url", stub.url]
    good, wrong = {"SPOOLED_API_KEY": STUB_KEY}, {"SPOOLED_API_KEY": "sp_test_wrong_but_well_formed"}
    assert_complains(check(tmp_path, online, good), 0, "ok: myjobs")
    assert_complains(check(tmp_path, online, wrong), 77, f"{stub.url}: HTTP 401")
    assert_complains(check(tmp_path, ["--online", "--api-url", "http://127.0.0.1:9"], good), 69, "127.0.0.1:9: ")


def test_check_online_of_a_broken_app_and_a_refused_key_tells_both_and_exits_78(stub: StubApi, tmp_path: Path) -> None:
    write_app(tmp_path, "raise RuntimeError('no database')")
    done = check(tmp_path, ["--online", "--api-url", stub.url], {"SPOOLED_API_KEY": "sp_test_wrong_but_well_formed"})
    assert_complains(done, 78, "no database", "HTTP 401")


def test_refused_key_of_the_embedded_server_exits_77(site: Site) -> None:
    done = run_to_end("modes", url=site.server.url, api_key="sp_test_wrong_but_well_formed")
    assert_complains(done, 77, "401")


@REST_ONLY
def test_401_of_a_login_page_is_no_refusal(stub: StubApi) -> None:
    """A proxy's 401 says nothing about our key: it may be gone in a minute."""
    for operation in ("register", "claim"):
        stub.on(operation, Reply.html(401), times=None)
    with stub_worker(stub) as worker:
        worker.wait_for_event("api_troubled")
        worker.wait_until_running()
        stub.clear()
        job_id = stub.add_job(payload={"mode": "ok"})
        wait_until(lambda: job_id in stub.completed, "the job")


def test_403_concerns_that_queue_only(stub: StubApi) -> None:
    def forbid(body: Any) -> bool:
        return bool(body["queue_name"] == "q")

    stub.on("claim", Reply.error(403), times=1)
    with stub_worker(stub, queues=["q", "q2"]) as worker:
        worker.wait_for_event("api_troubled")
        for queue in ("q", "q2"):
            stub.add_job(queue_name=queue, payload={"mode": "ok"})
        wait_until(lambda: stub.completed, "the job of the queue that is allowed")
        assert len(stub.completed) == 1
        assert worker.is_running


# --- options -------------------------------------------------------------------------------------------------------


def test_malformed_options_exit_64_and_are_all_named() -> None:
    options = [
        *("--procs", "many", "--lease-duration", "2", "--heartbeat-fraction", "1.5", "--poll-interval", "-1"),
        *("--queue", ".hidden", "--prefetch", "x", "--max-child-memory", "lots", "--log-format", "xml", "--nonsense"),
        *("--http-listen", "nowhere", "--worker-id", "a b", "--api-url", "ftp://x", "--transport", "pigeon"),
    ]
    done = run_to_end("modes", options=options)
    flags = [word for word in options if word.startswith("--")]
    assert_complains(done, 64, *flags, "'many'", "'.hidden'", "grpc-process")


def test_unknown_command_exits_64(tmp_path: Path) -> None:
    line = [sys.executable, "-m", "spooled_supervisor", "fly"]
    assert_complains(
        run_line(line, env=environment(KEY), state_dir=tmp_path), 64, "'fly'", "run, check, demo, dev-server"
    )


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_help_and_version_exit_0(tmp_path: Path, option: str) -> None:
    line = [sys.executable, "-m", "spooled_supervisor", option]
    done = run_line(line, env=environment(None), state_dir=tmp_path)
    assert done.code == 0
    assert done.output


def test_missing_app_exits_64_or_78_and_is_named(tmp_path: Path) -> None:
    line = [sys.executable, "-m", "spooled_supervisor"]
    done = run_line(line, env=environment(KEY), state_dir=tmp_path)
    assert done.code in (64, 78)
    assert "--app" in done.output


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("procs = ", ["is not TOML"]),
        ("procs = 'many'\nnonsense = 1\n[queues.'-x']\nweight = 0", ["procs", "nonsense", "-x", "weight"]),
        ("api_key = 'sp_live_very_secret'", ["does not belong in this file"]),
        ("\xff", ["UTF-8"]),
    ],
)
def test_bad_configuration_file_exits_78_with_all_its_problems(tmp_path: Path, text: str, words: Sequence[str]) -> None:
    file = tmp_path / "conf.toml"
    file.write_bytes(text.encode("latin-1"))
    line = [sys.executable, "-m", "spooled_supervisor", "--app", "modes", "--config", str(file)]
    done = run_line(line, env=environment(KEY), state_dir=tmp_path)
    assert_complains(done, 78, str(file), *words)
    assert "very_secret" not in done.output


# --- the machine ---------------------------------------------------------------------------------------------------


def test_port_in_use_exits_78_before_anything_is_claimed(stub: StubApi) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run_to_end("modes", url=stub.url, api_key=STUB_KEY, options=["--http-listen", f"127.0.0.1:{port}"])
        assert_complains(done, 78, f"127.0.0.1:{port}", "in use", "--http-listen")
        assert not stub.requests


def test_address_that_is_not_ours_exits_78() -> None:
    assert_complains(run_to_end("modes", options=["--http-listen", "192.0.2.1:9464"]), 78, "192.0.2.1:9464")


def test_state_directory_that_is_a_file_exits_78(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = run_to_end("modes", state_dir=tmp_path / "file")
    assert_complains(done, 78, str(tmp_path / "file"), "--state-dir")


def test_state_directory_that_cannot_be_written_exits_78() -> None:
    """/proc takes no directories of anybody, root included."""
    done = run_to_end("modes", state_dir=Path("/proc/self/spooled"))
    assert_complains(done, 78, "/proc/self/spooled", "--state-dir")


def test_locked_state_directory_exits_78_and_names_the_pid(stub: StubApi, tmp_path: Path) -> None:
    with stub_worker(stub, state_dir=tmp_path / "state") as first:
        first.wait_until_running()
        line = command_line("modes", url=stub.url, procs=1, state_dir=tmp_path / "state")
        done = run_line(line, env=environment(STUB_KEY), state_dir=tmp_path / "no such marker")
        assert_complains(done, 78, str(first.pid), "--state-dir")
        assert first.health()[0] == 200, "the first one is not disturbed"
        assert len(processes_of(tmp_path / "state")) == 3, "neither are its children"


def test_check_beside_a_running_daemon_disturbs_nobody(stub: StubApi, tmp_path: Path) -> None:
    write_app(tmp_path, GOOD_APP)
    with stub_worker(stub, app="myjobs", cwd=tmp_path, state_dir=tmp_path / "state") as worker:
        children = sorted(worker.wait_until_running().children())
        assert check_in_use(tmp_path).code == 0
        assert sorted(worker.children()) == children
        assert all(map(is_alive, children))


def check_in_use(cwd: Path) -> Finished:
    line = [sys.executable, "-m", "spooled_supervisor", "check", "--app", "myjobs", "--state-dir", str(cwd / "state")]
    return run_line(line, env=environment(KEY), cwd=cwd, state_dir=cwd / "another")


# --- the server ----------------------------------------------------------------------------------------------------

# Most of this is HTTP that no client of gRPC ever sees; what can go wrong there is in test_grpc_client.py.

SENSELESS: dict[str, Reply] = {
    "html": Reply.html(),
    "html-502": Reply.html(502),
    "empty": Reply(200, b""),
    "null": Reply(200, b"null"),
    "array": Reply(200, b"[1]"),
    "bad-utf-8": Reply(200, b'{"jobs": "\xff"}'),
    "not-json": Reply(200, b"{jobs: []"),
    "redirect": Reply(302, b"", (("location", "/login"),)),
    "no-content": Reply(204, b""),
    "too-much": Reply(200, b"[" + b" " * (9 << 20) + b"]"),
    "garbage": Reply(raw=b"\x00\x01\x02 no HTTP at all\r\n\r\n"),
    "half": Reply(raw=b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n{"),
    "nothing": Reply(close="before commit"),
    "reset": Reply(reset="before commit"),
    "bad-gzip": Reply(200, b"not gzip", (("content-encoding", "gzip"),)),
    "deep": Reply(200, b"[" * 100_000),
    "huge-number": Reply(200, b'{"jobs": ' + b"9" * 5000 + b"}"),
    "header-of-100-kb": Reply(200, b"{}", (("x-long", "y" * 100_000),)),
    "500": Reply.error(500),
    "429-with-nonsense": Reply.error(429, retry_after="abc"),
}


@REST_ONLY
@pytest.mark.parametrize("name", SENSELESS)
def test_senseless_claim_answers_end_nothing_and_are_not_hammered(stub: StubApi, name: str) -> None:
    stub.on("claim", SENSELESS[name], times=2)
    with stub_worker(stub, procs=1) as worker:
        stub.wait_for("claim", 2)
        job_id = stub.add_job(payload={"mode": "ok"})
        wait_until(lambda: job_id in stub.completed, "the job, after the server has come to its senses")
        first, second, third = [request.at for request in stub.wait_for("claim", 3)[:3]]
        assert second - first >= 0.09, "every path through the loop waits"
        assert third - second >= 0.09
        assert worker.health()[0] == 200


@REST_ONLY
@pytest.mark.parametrize(
    "name", ["html", "empty", "null", "array", "garbage", "redirect", "bad-utf-8", "nothing", "500"]
)
def test_senseless_answers_to_everything_end_nothing(stub: StubApi, name: str) -> None:
    for operation in ("register", "heartbeat", "claim", "deregister"):
        stub.on(operation, SENSELESS[name], times=None)
    with stub_worker(stub, procs=1) as worker:
        worker.wait_until_running()
        began, requests = time.monotonic(), len(stub.requests)
        stub.wait_for("claim", 3)
        elapsed = time.monotonic() - began
        assert len(stub.requests) - requests <= 6 + 12 * elapsed
        if name != "null":
            wait_until(lambda: worker.health()[0] == 503, "a reason to be unhealthy")
        assert worker.get("/livez")[0] == 200
        stub.clear()
        job_id = stub.add_job(payload={"mode": "ok"})
        wait_until(lambda: job_id in stub.completed, "the job, after the server has come to its senses")


@REST_ONLY
@pytest.mark.parametrize("name", ["html", "empty", "garbage", "nothing", "html-502", "500", "redirect", "bad-gzip"])
def test_senseless_answers_to_complete_lose_no_result_and_make_no_failure(stub: StubApi, name: str) -> None:
    stub.on("complete", SENSELESS[name], times=2)
    with stub_worker(stub, procs=1):
        job_id = stub.add_job(payload={"mode": "ok", "n": 5})
        wait_until(lambda: job_id in stub.completed, "the result")
        assert not stub.of("fail")


@pytest.mark.parametrize("status", [400, 413, 422])
def test_result_that_the_service_refuses_for_good_becomes_one_small_failure(stub: StubApi, status: int) -> None:
    stub.on("complete", Reply.error(status, message="not this body"), times=None)
    with stub_worker(stub, procs=1):
        job_id = stub.add_job(payload={"mode": "result", "what": "large"})
        wait_until(lambda: job_id in stub.failed, "the failure")
        assert "refused the job's result" in stub.failed[job_id]
        assert str(status) in stub.failed[job_id]
        assert len(stub.of("complete")) <= 3
        assert len(stub.of("fail")) == 1
        assert len(stub.of("fail")[0].body) < 4096


def test_failure_that_is_refused_is_sent_once_more_as_plain_text(stub: StubApi) -> None:
    stub.on("fail", Reply.error(422))
    with stub_worker(stub, procs=1):
        job_id = stub.add_job(payload={"mode": "raise", "text": "odd \u0001 text"})
        wait_until(lambda: job_id in stub.failed, "the failure")
        assert stub.failed[job_id].isprintable()
        assert "ValueError" in stub.failed[job_id]


@REST_ONLY  # a number is a number in gRPC
def test_job_whose_record_is_unreadable_is_failed_by_name_and_others_run(stub: StubApi) -> None:
    with stub_worker(stub, procs=2) as worker:
        worker.wait_until_running()
        bad = stub.add_job(payload={"mode": "ok"}, timeout_seconds="soon")
        good = stub.add_job(payload={"mode": "ok"})
        wait_until(lambda: good in stub.completed, "the good job")
        wait_until(lambda: bad in stub.failed or bad in stub.completed, "an end of the bad one")


@REST_ONLY  # a stream and ProcessJobs give one at a time
def test_more_jobs_than_asked_for_are_given_back(stub: StubApi) -> None:
    def record(n: int) -> dict[str, Any]:
        return {
            "id": f"extra-{n}",
            "queue_name": "q",
            "payload": {"mode": "ok"},
            "retry_count": 0,
            "max_retries": 3,
            "timeout_seconds": 300,
            "lease_id": f"l{n}",
        }

    for n in range(5):
        stub.leases[f"extra-{n}"] = f"l{n}"
    stub.on("claim", Reply.json({"jobs": [record(n) for n in range(5)]}))
    with stub_worker(stub, procs=1):
        wait_until(lambda: len(stub.completed) + len(stub.failed) == 5, "an end of all five")
        assert len(stub.completed) == 1
        assert all("more jobs than were asked for" in text for text in stub.failed.values())


def test_name_that_cannot_be_resolved_keeps_trying(tmp_path: Path) -> None:
    with daemon("modes", url="http://does-not-exist.invalid", api_key=KEY, procs=1) as worker:
        worker.wait_until_running()
        worker.wait_for_event("api_troubled", operation="register")
        assert worker.readyz()[0] == 503
        assert worker.get("/livez")[0] == 200
        began = time.monotonic()
        assert worker.stop() == 0
        assert time.monotonic() - began < 6.0


def test_apps_folder_is_where_these_tests_think() -> None:
    assert (APPS / "modes.py").exists()
    assert os.access(APPS, os.R_OK)

"""The README is true: its examples run, its tables say what the code says, its links lead somewhere.

A block of code carries a comment that no reader sees: `<!-- test: NAME -->` where a test here runs it, or
`<!-- not run: WHY -->`. If NAME is a file of `tests/support/examples`, the block is that file, and other tests run it.
A table that repeats something of the code carries `<!-- table: NAME -->`.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
from prometheus_client.metrics_core import Metric

from spooled_supervisor import (
    SpooledWorker,
    __version__,
    config,
    devserver,
    errors,
    exporting,
    observer,
    operating,
    options,
    supervisor,
    workerevents,
)
from spooled_supervisor.devserver.config import DEFAULT_API_KEY
from spooled_supervisor.events import Events
from spooled_supervisor.telemetry.endpoints import Endpoints
from spooled_supervisor.telemetry.logs import EventLog
from spooled_supervisor.telemetry.metrics import Metrics
from tests.bench import growth, scenarios
from tests.bench import readme as bench_readme
from tests.support.daemon import PATIENCE_S, Daemon, daemon, environment, wait_until
from tests.support.devserver import DevServer, Producer, dev_server

REPOSITORY = Path(__file__).resolve().parents[1]
README = (REPOSITORY / "README.md").read_text()
SHIPPED = REPOSITORY / "systemd"
UNIT = (SHIPPED / "spooled-supervisor.service").read_text()
EXAMPLES = REPOSITORY / "tests/support/examples"
BASH = "/bin/bash"
ADDRESS = "http://127.0.0.1:8080"
GRPC_ADDRESS = "127.0.0.1:50051"
PRIMES_BELOW_100000 = 9592

_BLOCK = re.compile(r"(?:^<!-- (test|not run): (.+?) -->\n)?^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
_TABLE = re.compile(r"^<!-- table: (.+?) -->\n((?:^\|.*\n)+)", re.MULTILINE)
_DYING_WITH_PARENT = "import ctypes,os,sys; ctypes.CDLL(None).prctl(1, 9); os.execv(sys.argv[1], sys.argv[1:])"


@dataclass(frozen=True)
class Block:
    mark: str  # test, "not run", or nothing
    name: str
    language: str
    text: str


BLOCKS = [Block(mark or "", name or "", language, text) for mark, name, language, text in _BLOCK.findall(README)]
RUN_HERE = {
    "conftest.py",
    "ctl",
    "curl",
    "export",
    "first app",
    "first daemon",
    "first job",
    "first server",
    "grpc daemon",
    "grpc server",
    "jobs.py",
    "kubernetes",
    "sdk",
    "toml",
}
RUN_ELSEWHERE = {
    "library_events.py": "e2e/test_library.py",
    "library_first.py": "e2e/test_library.py",
    "library_several.py": "e2e/test_library.py",
    "library_threads.py": "e2e/test_library.py",
    "tasks.py": "e2e/test_testing_helpers.py",
    "tests_of_tasks.py": "e2e/test_testing_helpers.py",
}
"""Examples that are files, and the tests that run them."""


def code(name: str) -> str:
    """The blocks with this name, joined as a reader would join them."""
    found = [block.text for block in BLOCKS if (block.mark, block.name) == ("test", name)]
    assert found, f"no block is marked <!-- test: {name} -->"
    return "\n\n".join(found)


def table(name: str) -> list[list[str]]:
    """The rows of a marked table, without its head, cell by cell as they are written."""
    found = dict(_TABLE.findall(README))
    assert name in found, f"no table is marked <!-- table: {name} -->"
    rows = [line.strip()[1:-1].split("|") for line in found[name].splitlines()]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def quoted(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


# --- figures ----------------------------------------------------------------------------------------------------------


def test_the_benchmarks_table_has_all_figures_that_are_bounded_and_no_other() -> None:
    """By hand nobody changes it: `make bench BENCH_ARGS=--readme` writes it."""
    begin, end = README.index(bench_readme.BEGIN), README.index(bench_readme.END)
    assert begin < README.index("<!-- table: benchmark -->") < README.index("<!-- table: growth -->") < end
    bounds = {
        figure.title: f"{figure.bound} {figure.unit}".strip()
        for scenario in scenarios.ALL
        if scenario not in growth.SCENARIOS
        for figure in scenario.figures
        if figure.bound is not None
    }
    rows = table("benchmark")
    assert {title: bound for title, _, _, bound, _ in rows} == bounds
    assert {met for *_, met in rows} <= {"yes", "NO"}
    assert len(table("growth")) == 2 * len(growth.CURVES)


# --- what is there ----------------------------------------------------------------------------------------------------


def test_every_block_in_a_language_is_run_or_says_why_not() -> None:
    unmarked = [block.text for block in BLOCKS if block.language and not block.mark]
    assert unmarked == []
    assert {block.name for block in BLOCKS if block.mark == "test"} == RUN_HERE | RUN_ELSEWHERE.keys()


@pytest.mark.parametrize("name", RUN_ELSEWHERE)
def test_an_example_that_is_a_file_is_what_the_other_tests_run(name: str) -> None:
    assert code(name) == (EXAMPLES / name).read_text()
    assert f'"{name}"' in (REPOSITORY / "tests" / RUN_ELSEWHERE[name]).read_text()


def test_every_link_leads_somewhere() -> None:
    prose = _BLOCK.sub("", README)
    headings = re.findall(r"^#+ (.+)$", prose, re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
    targets = re.findall(r"\]\(([^)]+)\)", prose)
    assert [t for t in targets if t.startswith("#") and t[1:] not in anchors] == []
    paths = [t for t in targets if not t.startswith(("#", "https://"))]
    assert [path for path in paths if not (REPOSITORY / path).exists()] == []


def test_every_flag_and_variable_that_is_named_exists() -> None:
    parser = argparse.ArgumentParser()
    devserver.add_arguments(parser)
    ours = {option.flag for option in options.OPTIONS.values()}
    servers = {flag for action in parser._actions for flag in action.option_strings}
    commands = {"--online", "--watch", "--json", "--exec-start"}
    of_others = {"--version", "--now", "--no-deps", "--no-cache-dir", "--only", "--repeat", "--scope", "--user"}
    of_others |= {"--long", "--readme"}  # the benchmark's
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", README))
    assert named - ours - servers - commands - of_others == set()
    variables = {name for option in options.OPTIONS.values() for name in option.env}
    assert set(re.findall(r"\bSPOOLED_\w+", README)) - variables == {"SPOOLED_API_KEY", "SPOOLED_DEV_API_KEY"}


def test_every_extra_that_is_named_exists() -> None:
    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(re.findall(r"spooled-supervisor\[([\w-]+)\]", README)) == set(extras)


def test_the_changelog_knows_this_version() -> None:
    assert f"## [{__version__}]" in (REPOSITORY / "CHANGELOG.md").read_text()


# --- tables -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", options.GROUPS)
def test_options_are_those_of_the_code(group: str) -> None:
    assert [row[:4] for row in table(group)] == [_option_row(option) for option in options.GROUPS[group]]


def _option_row(option: options.Option) -> list[str]:
    default = "this package's" if option.default == __version__ else option.default or option.otherwise
    key = f"`{option.key}`" if option.is_in_file else ""
    env = ", ".join(f"`{name}`" for name in option.env)
    return [f"`{option.flag}`", env, key, default.replace("<", "&lt;").replace(">", "&gt;")]


def test_metrics_are_those_on_the_page() -> None:
    metrics = Metrics(Events(), lambda: observer.boot_snapshot(observer.Standing("w"), 2))
    on_page = {_metric_row(family) for family in metrics.collect()}
    assert {(quoted(row[0])[0], row[1], *quoted(row[2])) for row in table("metrics")} == on_page


def _metric_row(family: Metric) -> tuple[str, ...]:
    suffix = {"counter": "_total", "info": "_info"}.get(family.type, "")
    labels = tuple(getattr(family, "_labelnames", ()))
    if family.type == "info":
        labels = tuple(name for name in family.samples[0].labels)
    return (family.name + suffix, family.type, *labels)


def test_endpoints_are_those_that_answer() -> None:
    nothing = cast(Any, None)
    endpoints = Endpoints("127.0.0.1", 0, snapshot=nothing, metrics=nothing, log=cast(EventLog, nothing))
    assert {quoted(row[0])[0] for row in table("endpoints")} == set(endpoints.routes)


def test_exit_codes_are_those_of_the_code() -> None:
    codes = {getattr(errors, name) for name in vars(errors) if name.startswith("EX_")}
    assert {int(row[0]) for row in table("exit codes")} == codes


def test_commands_of_ctl_are_those_of_the_code() -> None:
    (commands,) = [action for action in operating._ctl_parser()._actions if isinstance(action.choices, dict)]
    assert {quoted(row[0])[0].split()[0] for row in table("ctl")} == set(commands.choices or ())


def test_signals_are_those_that_are_caught() -> None:
    caught = {*supervisor.STOP_SIGNALS, *supervisor.COMMAND_SIGNALS, *supervisor.UNUSED_SIGNALS}
    names = {number.name.removeprefix("SIG") for number in caught} | {"TSTP", "CONT"}
    assert {name for row in table("signals") for name in quoted(row[0])} == names


def test_transports_are_those_of_the_option() -> None:
    words = [quoted(row[0])[0] for row in table("transports")]
    assert " or ".join([", ".join(words[:-1]), words[-1]]) == options.TRANSPORT.rule


def test_arguments_of_the_worker_are_those_of_the_code() -> None:
    parameters = inspect.signature(SpooledWorker).parameters.values()
    arguments = [(p.name, repr(p.default)) for p in parameters if p.kind is p.KEYWORD_ONLY]
    assert [(quoted(row[0])[0], row[1]) for row in table("worker")] == arguments


def test_events_of_the_worker_are_those_of_the_code() -> None:
    assert [quoted(row[0])[0] for row in table("worker events")] == list(workerevents.NAMES)


def test_the_instants_of_a_lease_are_those_of_the_defaults() -> None:
    claims = config.ClaimConfig()
    grace_s = config.PoolConfig(procs=1).abort_grace_s
    lease_s = claims.lease_duration_s
    instants = [
        lease_s * claims.heartbeat_fraction,
        config.abort_after_s(lease_s, grace_s),
        config.kill_after_s(lease_s),
        lease_s,
    ]
    assert [row[0] for row in table("lease")] == [f"{instant:g} s" for instant in instants]


def test_what_the_troubleshooting_quotes_is_said_somewhere() -> None:
    sources = [path.read_text() for path in (REPOSITORY / "spooled_supervisor").rglob("*.py")]
    events = Path(sys.modules[Events.__module__].__file__ or "").read_text()
    said = "\n".join(sources) + "\n".join(_snake(name) for name in re.findall(r"^class (\w+)\(", events, re.MULTILINE))
    said = re.sub(r'"\s*\n\s*f?"', "", said)  # texts that go on on the next line
    unsaid = [text for row in table("troubleshooting")[:-1] for text in quoted(row[0]) if text not in said]
    assert [text for text in unsaid if not re.fullmatch(r"HTTP 401|killed by SIGKILL|exited with status 0", text)] == []


def _snake(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


# --- deployment -------------------------------------------------------------------------------------------------------


def test_paths_of_the_installation_are_those_of_the_unit() -> None:
    (block,) = [block.text for block in BLOCKS if "systemctl enable" in block.text]
    for path in ("/opt/spooled-supervisor/venv", "/etc/spooled/supervisor.toml", "/etc/spooled/api-key"):
        assert path in block
        assert path in UNIT
    assert "`TimeoutStopSec=` (90 s)" in README
    assert "TimeoutStopSec=90s" in UNIT


def test_the_pod_has_more_time_than_the_daemon_takes() -> None:
    manifest = code("kubernetes")
    (grace_s,) = map(int, re.findall(r"terminationGracePeriodSeconds: (\d+)", manifest))
    in_peace_s = supervisor.FLUSH_LIMIT_S + supervisor.LEAVE_LIMIT_S
    after_s = max(in_peace_s, supervisor.STOP_LIMIT_S) + supervisor.DEREGISTER_TIMEOUT_S
    assert grace_s > options.default_of("shutdown_timeout") + after_s
    assert after_s <= 10  # as the text says
    paths = {quoted(row[0])[0] for row in table("endpoints")}
    assert set(re.findall(r"httpGet: {path: ([^,]+),", manifest)) <= paths


def test_the_configuration_is_understood(tmp_path: Path) -> None:
    file = tmp_path / "supervisor.toml"
    file.write_text(code("toml"))
    environ = {"SPOOLED_API_KEY": "sp_test_0123456789", "SPOOLED_APP": "a", "HOME": str(tmp_path)}
    loaded = config.load(["--config", str(file)], environ)
    assert loaded.queues == (config.QueueConfig("thumbnails", 3.0, 2, 120.0),)


# --- examples ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server() -> Iterator[DevServer]:
    with dev_server(honour_no_retry=True, retry_base_s=0.01) as server:
        yield server


@pytest.fixture
def client(server: DevServer) -> Iterator[Producer]:
    with Producer(server.url, server.api_key) as client:
        yield client


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(tmp_path)


class Shell:
    """A user's terminals: one directory, and `spooled-supervisor` on the path."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        program = folder / "bin" / "spooled-supervisor"
        program.parent.mkdir()
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m spooled_supervisor "$@"\n')
        program.chmod(0o755)
        self.env = environment(None) | {
            "PATH": f"{program.parent}:{os.environ['PATH']}",
            "HOME": str(folder),
            "SPOOLED_HTTP_LISTEN": "off",
            "NO_PROXY": "*",
            "no_proxy": "*",
        }

    def run(self, script: str) -> str:
        """What it prints; it must end with 0."""
        done = subprocess.run(
            [BASH, "-euo", "pipefail", "-c", script],
            cwd=self.folder,
            env=self.env,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert done.returncode == 0, f"{script}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    @contextlib.contextmanager
    def running(self, script: str, wait_for: str) -> Iterator[str]:
        """Run a script whose last line goes on until it is stopped; gives the line of output that was waited for."""
        *before, last = [line for line in script.splitlines() if line and not line.startswith("#")]
        process = subprocess.Popen(
            [sys.executable, "-ISc", _DYING_WITH_PARENT, BASH, "-euc", "\n".join([*before, f"exec {last}"])],
            cwd=self.folder,
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        assert process.stdout is not None
        said: list[str] = []
        try:
            for line in process.stdout:
                said.append(line)
                if wait_for in line:
                    yield line
                    break
            process.send_signal(signal.SIGTERM)
            rest, _ = process.communicate(timeout=PATIENCE_S)
            assert wait_for in said[-1], "".join(said) + rest
            assert process.returncode == 0, "".join(said) + rest
        finally:
            process.kill()
            process.communicate()


needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")


@needs_curl
def test_the_first_app_runs_as_told(shell: Shell) -> None:
    (shell.folder / "myjobs.py").write_text(code("first app"))
    with shell.running(code("first server").replace("dev-server", "dev-server --port 0", 1), "ready on") as ready:
        address = re.findall(r"http://[\d.:]+", ready)[0]
        assert ready.replace(address, ADDRESS) in code("first server")
        with shell.running(code("first daemon").replace(ADDRESS, address), "supervisor_started"):
            shell.run(code("first job").replace(ADDRESS, address))
            with Producer(address, DEFAULT_API_KEY) as client:
                (job,) = client.call("GET", "/jobs?queue_name=primes")
                done = client.wait_for(job["id"], "completed")
    assert done["result"] == {"limit": 100000, "primes": PRIMES_BELOW_100000}


@needs_curl
@pytest.mark.parametrize("transport", ["grpc-stream", "grpc-process"])
def test_the_first_app_runs_over_grpc_as_told(shell: Shell, transport: str) -> None:
    (shell.folder / "myjobs.py").write_text(code("first app"))
    server = code("grpc server").replace("--grpc-port 50051", "--port 0 --grpc-port 0", 1)
    with shell.running(server, "ready on") as ready:
        address, grpc_address = re.findall(r"http://[\d.:]+", ready)[0], ready.rpartition(" ")[2].strip()
        assert ready.replace(address, ADDRESS).replace(grpc_address, GRPC_ADDRESS) in code("grpc server")
        daemon = code("grpc daemon").replace(ADDRESS, address).replace(GRPC_ADDRESS, grpc_address)
        with shell.running(daemon.replace("grpc-stream", transport), "supervisor_started"):
            shell.run(code("first job").replace(ADDRESS, address))
            with Producer(address, DEFAULT_API_KEY) as client:
                (job,) = client.call("GET", "/jobs?queue_name=primes")
                assert client.wait_for(job["id"], "completed")["result"]["primes"] == PRIMES_BELOW_100000


def test_a_daemon_is_looked_at_and_steered_as_told(shell: Shell) -> None:
    (shell.folder / "jobs.py").write_text(code("jobs.py"))
    with dev_server() as server:
        # Which app is said, as there may be other daemons in the usual places of the machine; the reader has one.
        shell.env |= {"SPOOLED_APP": "jobs", "SPOOLED_API_URL": server.url, "SPOOLED_API_KEY": server.api_key}
        with shell.running("spooled-supervisor --procs 2", "supervisor_started"):
            job_id = server.client.create("hashes", {"prefix": "never"})
            server.client.wait_for(job_id, "processing")
            for line in code("ctl").splitlines():
                command, _, answer = line.replace("5f0c…", job_id).partition(" # ")
                said = " ".join(shell.run(command).split())
                assert _is_such_an_answer(said, answer.strip()), f"{line}\n{said}"
        assert server.client.job(job_id)["last_error"].startswith("stopped by an operator")


def _is_such_an_answer(said: str, told: str) -> bool:
    """Dots stand for anything, and numbers for numbers."""
    pattern = ".*".join(re.sub(r"\d+", r"\\d+", re.escape(part)) for part in told.split("..."))
    return re.fullmatch(pattern, said) is not None


def test_files_are_exported_as_told(shell: Shell) -> None:
    shell.run(code("export"))
    assert (shell.folder / "spooled-supervisor.yml").read_text() == (SHIPPED / "alert-rules.yml").read_text()
    assert (shell.folder / "spooled-supervisor.json").read_text() == (SHIPPED / "grafana-dashboard.json").read_text()
    assert set(re.findall(r"spooled-supervisor export ([a-z][a-z-]+)", README)) == set(exporting.FILES)


@needs_curl
def test_the_examples_with_curl_are_answered(shell: Shell, server: DevServer) -> None:
    calls = [line for line in code("curl").splitlines() if line.startswith("api ")]
    script = code("curl").replace(ADDRESS, server.url).replace("curl -sS", "curl -sS --fail-with-body -w '\\n'")
    answers = [json.loads(line) for line in shell.run(script).splitlines() if line]
    assert len(answers) == len(calls) == 9
    assert answers[1]["success_count"] == 2
    assert [job["priority"] for job in answers[2]] == [0, 0, 5]
    assert (answers[3]["pending"], answers[4]["paused"], answers[5]["resumed"]) == (3, True, True)


def test_the_sdk_makes_jobs(shell: Shell, server: DevServer) -> None:
    (shell.folder / "produce.py").write_text(code("sdk").replace(ADDRESS, server.url))
    assert shell.run(f'"{sys.executable}" produce.py') == "pending\n"


@pytest.fixture(scope="module")
def worker(server: DevServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon with the handlers of the text."""
    folder = tmp_path_factory.mktemp("jobs")
    (folder / "jobs.py").write_text(code("jobs.py"))
    with daemon("jobs", url=server.url, api_key=server.api_key, cwd=folder) as worker:
        yield worker.wait_until_running()


@pytest.mark.parametrize(
    ("queue", "payload", "result"),
    [
        ("pages", {"pages": 3}, {"pages": 3}),
        ("invoices", {"customer": "Ada"}, "invoice for Ada"),
        ("hashes", {"prefix": "00"}, 286),
        ("lengths", {"texts": ["one", "three"]}, [3, 5]),
        ("sums", {"first": 4}, 6),
    ],
)
def test_handlers_return_what_they_should(
    worker: Daemon, client: Producer, queue: str, payload: Any, result: Any
) -> None:
    job_id = client.create(queue, payload)
    assert client.wait_for(job_id, "completed", "deadletter", timeout_s=PATIENCE_S)["result"] == result


def test_a_handler_that_asks_not_to_be_retried_is_heard_by_the_embedded_server(
    worker: Daemon, client: Producer
) -> None:
    job = client.wait_for(client.create("invoices", {}), "deadletter", timeout_s=PATIENCE_S)
    assert (job["retry_count"], "there is no customer" in job["last_error"]) == (0, True)


def test_a_handler_is_interrupted_and_cleans_up(worker: Daemon, client: Producer) -> None:
    job_id = client.create("hashes", {"prefix": "never"}, timeout_seconds=1, max_retries=0)
    job = client.wait_for(job_id, "deadletter", timeout_s=PATIENCE_S)
    assert job["last_error"].startswith("timed out: the job ran longer than its limit of 1 s")
    worker.wait_for_event("job_logged", message=lambda text: text.startswith("looked at"))
    worker.wait_for_event("child_exited", reason="aborted")


def test_what_handlers_say_is_in_the_log(worker: Daemon, client: Producer) -> None:
    job_id = client.create("pages", {"pages": 2})
    worker.wait_for_event("job_progressed", job_id=job_id, percent=100.0, message="page 2 of 2")
    worker.wait_for_event("job_logged", job_id=job_id, message="rendered", meta='{"pages": 2}')


def test_what_handlers_count_is_among_the_metrics(worker: Daemon, client: Producer) -> None:
    job_id = client.create("texts", {"text": "one two three", "language": "en"})
    assert client.wait_for(job_id, "completed", timeout_s=PATIENCE_S)["result"] == 3
    worker.wait_for_event("job_completed", job_id=job_id)
    (name,) = re.findall(r"# (words_counted_total\S+)", code("jobs.py"))
    wait_until(lambda: worker.metrics().get(name) == 3, f"{name} is 3")


def test_the_fixtures_are_brought_by_that_line() -> None:
    names: dict[str, Any] = {}
    exec(code("conftest.py"), names)
    assert names["pytest_plugins"] == ["spooled_supervisor.testing.pytest_plugin"]
    assert code("conftest.py").strip() in (REPOSITORY / "tests" / RUN_ELSEWHERE["tasks.py"]).read_text()

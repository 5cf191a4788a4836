"""A child that attacks its report pipe costs itself and its job, and nothing else.

Every attack runs beside a job of another child, which must not notice. Afterwards both slots work, the supervisor has
not grown, its loop has never stood still, and its log holds no traceback.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import pytest

from tests.chaos.stage import start_daemon
from tests.support.daemon import Daemon, daemon
from tests.support.devserver import DevServer, Producer, dev_server

APPS = Path(__file__).parents[1] / "chaos" / "apps"
PROCS = 2
MAX_GROWTH_BYTES = 24 << 20
MAX_STANDSTILL_S = 1.0

COSTS_THE_CHILD = (
    "garbage",
    "garbage_and_return",
    "empty_frames",
    "half_frame_and_exit",
    "two_gigabytes_announced",
    "two_gigabytes_sent",
    "a_frame_at_its_limit",
    "deep_nesting",
    "closed_pipes",
    "closed_and_on",
    "other_run",
    "earlier_run",
    "second_hello",
    "hello_of_another",
    "started_twice",
    "huge_run",
    "negative_run",
    "unknown_tag",
    "long_text",
    "neither_nor",
    "both",
    "flood_from_threads",
)
"""The job is failed as crashed, once."""
ENDS_BY_ITS_LIMIT = ("half_frame",)
"""Nothing is wrong with what came so far."""
IS_TAKEN_AT_ITS_WORD = (
    "answered_twice",
    "answered_twice_at_once",
    "endless_cpu",
    "negative_cpu",
)
"""A child may say what its own job's result is."""
IS_NO_RESULT = ("no_json", "not_a_number")
DOES_NO_HARM = ("odd_progress", "odd_words", "flood_of_logs", "flood_of_progress")


@dataclass
class Pulse:
    """Asks the supervisor for a sign of life all the time: the longest silence is how long its loop stood still."""

    worker: Daemon
    longest_s: float = 0.0
    error: BaseException | None = None
    _stop: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Pulse:
        self._port = self.worker.http_port
        self._thread = threading.Thread(target=self._ask)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()
        assert self.error is None, repr(self.error)

    def _ask(self) -> None:
        try:
            while not self._stop.wait(0.05):
                asked_at = time.monotonic()
                assert self.worker.get("/livez")[0] == 200
                self.longest_s = max(self.longest_s, time.monotonic() - asked_at)
        except BaseException as error:
            self.error = error


@pytest.fixture(scope="module")
def server() -> Iterator[DevServer]:
    with dev_server(retry_base_s=0.01) as running:
        yield running


@pytest.fixture(scope="module")
def worker(server: DevServer) -> Iterator[Daemon]:
    options = ["--poll-interval", "0.05", "--abort-grace", "0.5", "--log-level", "info"]
    with daemon("hostile", url=server.url, api_key=server.api_key, procs=PROCS, options=options, cwd=APPS) as running:
        started = running.wait_for_event("supervisor_started")
        assert started["procs"] == PROCS
        yield running


@pytest.fixture
def client(server: DevServer) -> Iterator[Producer]:
    """With connections of its own: those of a whole module would be opened anew in the middle of some test."""
    with Producer(server.url, server.api_key) as made:
        yield made


def rss(worker: Daemon) -> int:
    pages = int(Path(f"/proc/{worker.pid}/statm").read_text().split()[1])
    return pages * 4096


def attack(client: Producer, worker: Daemon, name: str) -> tuple[str, str]:
    """Status and error of the hostile job. Everybody else is well, during and after it."""
    before = rss(worker)
    bystander = client.create("plain", {"n": 1, "seconds": 0.5}, max_retries=0)
    worker.ledger.wait_for("start", job=bystander)
    with Pulse(worker) as pulse:
        hostile = client.create("hostile", {"attack": name}, max_retries=0, timeout_seconds=6)
        worker.ledger.wait_for("start", job=hostile)
        # They wait for a child to be free: the hostile one must not get any of them.
        after = [client.create("plain", {"n": n, "seconds": 0.02}, max_retries=0) for n in range(4 * PROCS)]
        job = client.wait_for(hostile, "completed", "deadletter", timeout_s=20.0)
        # Both slots are back: these two run at the same time.
        pair = [client.create("plain", {"n": n, "seconds": 0.3}, max_retries=0) for n in range(PROCS)]
        for job_id in (bystander, *after, *pair):
            done = client.wait_for(job_id, "completed", "deadletter", timeout_s=20.0)
            assert done["status"] == "completed", done["last_error"]
            assert worker.ledger.runs(job_id) == 1, "a job of somebody else was run twice"
    assert pulse.longest_s < MAX_STANDSTILL_S
    assert rss(worker) - before < MAX_GROWTH_BYTES
    assert len({worker.ledger.entries(job=job_id)[0]["run"] for job_id in pair}) == PROCS
    worker.assert_no_traceback()
    facts = [event["event_type"] for event in client.history(hostile)]
    assert facts == ["created", "claimed", job["status"] if job["status"] == "completed" else "failed"]
    client.wait_for(
        client.create("hostile", {"attack": "nothing"}), "completed"
    )  # else the queue is left alone a while
    return job["status"], job["last_error"] or ""


@pytest.mark.parametrize("name", COSTS_THE_CHILD)
def test_an_attack_costs_the_child_and_its_job(client: Producer, worker: Daemon, name: str) -> None:
    status, error = attack(client, worker, name)
    assert status == "deadletter"
    assert "without an outcome" in error


@pytest.mark.parametrize("name", ENDS_BY_ITS_LIMIT)
def test_a_frame_that_never_ends_costs_what_a_stuck_job_costs(client: Producer, worker: Daemon, name: str) -> None:
    status, error = attack(client, worker, name)
    assert (status, "limit of 6 s" in error) == ("deadletter", True)


@pytest.mark.parametrize("name", IS_TAKEN_AT_ITS_WORD)
def test_the_first_answer_counts_and_nothing_after_it(client: Producer, worker: Daemon, name: str) -> None:
    status, error = attack(client, worker, name)
    assert (status, error) == ("completed", "")


@pytest.mark.parametrize("name", IS_NO_RESULT)
def test_a_result_that_is_no_json_never_becomes_part_of_a_request(client: Producer, worker: Daemon, name: str) -> None:
    status, error = attack(client, worker, name)
    assert (status, "JSON" in error) == ("deadletter", True)


@pytest.mark.parametrize("name", DOES_NO_HARM)
def test_odd_words_and_too_many_of_them_do_no_harm(client: Producer, worker: Daemon, name: str) -> None:
    status, error = attack(client, worker, name)
    assert (status, error) == ("completed", "")
    assert not worker.events("made up")


def test_a_child_that_answers_and_goes_on_keeps_a_job_only_until_it_counts_as_not_started(tmp_path: Path) -> None:
    """A made-up answer looks like a true one. The next job waits in its pipe, and then goes to another child."""
    patch = "import spooled_supervisor.pool as pool; pool.START_LIMIT_S = 1.0"
    with (
        dev_server() as server,
        start_daemon(
            "hostile",
            url=server.url,
            api_key=server.api_key,
            state_dir=tmp_path / "state",
            ledger=tmp_path / "ledger",
            procs=1,
            patch=patch,
        ) as worker,
    ):
        hostile = server.client.create("hostile", {"attack": "answered_and_stayed"}, max_retries=0)
        server.client.wait_for(hostile, "completed")
        next_one = server.client.create("plain", {"n": 1}, max_retries=0)
        server.client.wait_for(next_one, "completed")
        assert worker.ledger.runs(next_one) == 1
        worker.wait_for_event("child_killed", reason="unresponsive")
        assert worker.stop() == 0

"""What one handler leaves behind never meets the next one: it is put back, or another child takes the next job.

One daemon with one slot: after each littering job a second one looks around, and must see what the first ever saw.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.daemon import Daemon, daemon, is_alive, wait_until
from tests.support.devserver import DevServer, Producer, dev_server
from tests.support.transports import options_of

APPS = Path(__file__).parents[1] / "chaos" / "apps"
PUT_BACK = (
    "nothing",
    "cwd",
    "cwd_removed",
    "umask",
    "environ_cleared",
    "environ_added",
    "timer_real",
    "timer_virtual",
    "timer_prof",
    "alarm",
    "signals_ignored",
    "signals_default",
    "real_time_ignored",
    "real_time_default",
    "real_time_raising",
    "signals_blocked",
    "soft_limits",
    "memory_limit",
    "streams_none",
    "streams_replaced",
    "streams_reconfigured",
    "streams_dup2",
    "stdin_from_file",
    "descriptors_closed",
    "logging_disabled",
    "gc_disabled",
    "recursion_limit",
    "socket_timeout",
    "affinity",
    "few_descriptors",
    "thread_that_ends",
    "zombies",
    "living_child",
    "living_session",
    "double_fork",
    "many_children",
)
REPLACED = ("hard_limit", "many_descriptors", "thread", "daemon_thread", "streams_closed")
EITHER = ("environ_replaced", "raw_thread", "nice", "tracing", "faulthandler_gone")
"""Put back where that can be done, else the child is replaced."""


@dataclass
class Slot:
    """A daemon with one slot, and what a job sees there at first."""

    client: Producer
    worker: Daemon
    clean: dict[str, Any]
    numbers: Iterator[int]

    def look(self, seconds: float = 0.0) -> dict[str, Any]:
        n = next(self.numbers)
        job_id = self.client.create("look", {"n": n, "seconds": seconds}, max_retries=0)
        job = self.client.wait_for(job_id, "completed", "deadletter")
        assert job["status"] == "completed", job["last_error"]
        wanted = {f"looking around {n}", f"and by stderr {n}", f"on the raw descriptor {n}", f"by logging {n}"}
        wait_until(lambda: self.said(job_id) == wanted, f"the log has {wanted}")
        return dict(job["result"])

    def said(self, job_id: str) -> set[str]:
        """What stands in the log for this job."""
        return {event["message"] for event in self.worker.events("job_logged", job_id=job_id)}

    def litter(self, what: str) -> int:
        job_id = self.client.create("litter", {"what": what}, max_retries=0)
        job = self.client.wait_for(job_id, "completed", "deadletter")
        assert job["status"] == "completed", job["last_error"]
        return int(job["result"])

    def assert_clean(self, seen: dict[str, Any]) -> None:
        assert {key: value for key, value in seen.items() if key != "pid"} == {
            key: value for key, value in self.clean.items() if key != "pid"
        }


@pytest.fixture(scope="module")
def server() -> Iterator[DevServer]:
    with dev_server(grpc_port=0, stream_poll_s=0.05) as running:
        yield running


@pytest.fixture(scope="module")
def only_slot(server: DevServer, transport: str) -> Iterator[Slot]:
    options = ["--poll-interval", "0.05", "--abort-grace", "1", *options_of(transport, server.grpc_address)]
    with daemon("litter", url=server.url, api_key=server.api_key, procs=1, options=options, cwd=APPS) as worker:
        found = Slot(server.client, worker, {}, itertools.count())
        found.clean = found.look()
        yield found


@pytest.fixture
def slot(server: DevServer, only_slot: Slot) -> Iterator[Slot]:
    """With connections of its own: those of a whole module would be opened anew in the middle of some test."""
    with Producer(server.url, server.api_key) as client:
        yield replace(only_slot, client=client)


@pytest.mark.parametrize("what", PUT_BACK)
def test_what_can_be_put_back_is_and_the_child_lives_on(slot: Slot, what: str) -> None:
    pid = slot.litter(what)
    seen = slot.look(seconds=0.4 if what.startswith("timer") else 1.1 if what == "alarm" else 0.0)
    slot.assert_clean(seen)
    assert seen["pid"] == pid


@pytest.mark.parametrize("what", REPLACED)
def test_what_cannot_be_put_back_costs_the_child_and_not_the_next_job(slot: Slot, what: str) -> None:
    pid = slot.litter(what)
    seen = slot.look()
    slot.assert_clean(seen)
    assert seen["pid"] != pid
    wait_until(lambda: not is_alive(pid), "the unfit child is gone")
    exited = slot.worker.wait_for_event("child_exited", pid=pid)
    assert exited["reason"] not in ("crash", "boot")


@pytest.mark.parametrize("what", EITHER)
def test_the_next_job_sees_nothing_of_it_either_way(slot: Slot, what: str) -> None:
    slot.litter(what)
    slot.assert_clean(slot.look())


@pytest.mark.parametrize("what", ["real_time_ignored", "real_time_default", "signals_blocked", "real_time_raising"])
def test_the_next_job_can_still_be_stopped_and_its_stack_is_told(slot: Slot, what: str) -> None:
    slot.litter(what)
    job_id = slot.client.create("stuck", None, max_retries=0, timeout_seconds=1)
    job = slot.client.wait_for(job_id, "deadletter")
    assert "limit" in job["last_error"], job["last_error"]
    assert "litter.py" in job["last_error"], "the stack at the moment of the abort"
    assert not slot.worker.events("child_killed", job_id=job_id), "it was asked, and stopped by itself"


@pytest.mark.parametrize("what", ["living_child", "living_session", "double_fork"])
def test_processes_left_behind_are_named_and_killed(slot: Slot, what: str) -> None:
    mark = slot.worker.mark()
    slot.litter(what)
    found = slot.worker.wait_for_event("leftovers_found", after=mark)
    assert found["names"] == ["sleep"]
    wait_until(lambda: not sleeps(slot.worker), "no process is left")


def test_with_leftovers_keep_they_are_named_and_live_on() -> None:
    options = ["--leftovers", "keep", "--poll-interval", "0.05"]
    with (
        dev_server() as server,
        daemon("litter", url=server.url, api_key=server.api_key, procs=1, options=options, cwd=APPS) as worker,
    ):
        worker.wait_until_running()
        job_id = server.client.create("litter", {"what": "living_session"}, max_retries=0)
        job = server.client.wait_for(job_id, "completed")
        found = worker.wait_for_event("leftovers_found", job_id=job_id)
        assert found["names"] == ["sleep"]
        look = server.client.create("look", {"n": 1}, max_retries=0)
        seen = server.client.wait_for(look, "completed")["result"]
        assert seen["pid"] == job["result"]
        (child,) = seen["children"]
        assert is_alive(int(child))
    # They are not the next life's: the end of the daemon is the end of them (`daemon` looks).


HOOKED = """
import os, signal
from spooled_supervisor import App

app = App()
kept = lambda *_: None

@app.on_child_start
def hook():
    for number in (signal.SIGUSR1, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, kept)

@app.handler("litter")
def litter(ctx):
    for number in (signal.SIGALRM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    return {"pid": os.getpid()}

@app.handler("look")
def look(ctx):
    hooked = [signal.getsignal(number) is kept for number in (signal.SIGUSR1, signal.SIGHUP, signal.SIGCHLD)]
    return {"pid": os.getpid(), "hooked": hooked, "alarm": signal.getsignal(signal.SIGALRM) == signal.SIG_DFL}
"""


def test_signal_handlers_of_a_start_hook_are_put_back_with_the_others(tmp_path: Path) -> None:
    (tmp_path / "hooked.py").write_text(HOOKED)
    options = ["--poll-interval", "0.05"]
    with (
        dev_server() as server,
        daemon("hooked", url=server.url, api_key=server.api_key, procs=1, options=options, cwd=tmp_path),
    ):
        for _ in range(2):
            results = []
            for queue in ("litter", "look"):
                job_id = server.client.create(queue, {}, max_retries=0)
                results.append(server.client.wait_for(job_id, "completed")["result"])
            assert results[1] == {"pid": results[0]["pid"], "hooked": [True, True, True], "alarm": True}


def sleeps(worker: Daemon) -> list[int]:
    return [pid for pid in worker.leftovers() if Path(f"/proc/{pid}/comm").read_text().strip() == "sleep"]

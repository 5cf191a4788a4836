"""The outbox: what is on disk when, what a next life reads from it, and that no bad disk stands in the way of a job."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
import stat
import threading
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from spooled_supervisor import outbox as module
from spooled_supervisor import timing
from spooled_supervisor.job import Crashed, Failed, Outcome, Released, Succeeded, TimedOut
from spooled_supervisor.outbox import BIG_BYTES, FILE_NAME, FORGET_BATCH, Leftover, Outbox
from tests.support.clock import FakeClock, fake_time, run_in_fake_time
from tests.support.fakes import make_job

T = TypeVar("T")
URL = "http://api"
FRAME_BYTES = 4096 + 24  # sqlite.org/fileformat2.html, 4.1


def run(main: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=timing.new_event_loop) as runner:
        return runner.run(main)


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Outbox]:
    with open_box(tmp_path) as made:
        yield made


def open_box(directory: Path, **options: Any) -> Outbox:
    return Outbox(directory, api_url=URL, worker_id="w", **options)


def next_life(directory: Path) -> list[Leftover]:
    """What a supervisor that starts now would find; the one before need not have closed anything."""
    with open_box(directory) as box:
        assert box.problem is None
        return box.leftovers()


def the_outcome(directory: Path) -> Succeeded | Failed | None:
    (leftover,) = next_life(directory)
    return leftover.outcome


async def decide(box: Outbox, outcome: Outcome, id: str = "job-1") -> None:
    job = make_job(id)
    box.decide(job, outcome, started_at=job.requested_at)
    await box.keep(job)


# --- what a next life finds -----------------------------------------------------------------------------------------


def test_a_held_lease_is_found_without_an_outcome_and_with_all_that_a_report_needs(box: Outbox, tmp_path: Path) -> None:
    box.hold([make_job("a", retry_count=2, max_retries=7), make_job("b", lease_id=None)])
    a, b = sorted(next_life(tmp_path), key=lambda found: found.job.id)
    assert (a.job.id, a.job.lease_id, a.job.queue_name, a.outcome) == ("a", "lease-1", "emails", None)
    assert (a.job.retry_count, a.job.max_retries, a.worker_id, a.api_url) == (2, 7, "w", URL)
    assert b.job.lease_id is None


@pytest.mark.parametrize(
    ("outcome", "kept"),
    [
        (Succeeded(b'{"ok":true}'), Succeeded(b'{"ok":true}')),
        (Succeeded(b"null"), Succeeded(b"null")),
        (Failed("ValueError: no"), Failed("ValueError: no")),
        (Failed("never again", retryable=False), Failed("never again", retryable=False)),
        (Released("not started"), Failed("not started")),
    ],
    ids=repr,
)
def test_an_outcome_is_found_as_it_was_decided(box: Outbox, tmp_path: Path, outcome: Outcome, kept: Outcome) -> None:
    run(decide(box, outcome))
    assert the_outcome(tmp_path) == kept


@pytest.mark.parametrize("outcome", [TimedOut(3.0), Crashed("killed by SIGSEGV", "tail")], ids=repr)
def test_an_outcome_of_our_own_is_found_as_its_text(box: Outbox, tmp_path: Path, outcome: Outcome) -> None:
    run(decide(box, outcome))
    found = the_outcome(tmp_path)
    assert isinstance(found, Failed)
    assert found.retryable
    assert "3 s" in found.error or "SIGSEGV" in found.error


def test_a_small_outcome_is_on_disk_before_anybody_else_has_had_a_turn(box: Outbox, tmp_path: Path) -> None:
    with pytest.raises(StopIteration):
        decide(box, Succeeded(b"1")).send(None)  # no loop runs: it has not waited for anything
    assert the_outcome(tmp_path) == Succeeded(b"1")


def test_what_was_decided_until_now_is_on_disk_with_one_commit(box: Outbox, tmp_path: Path) -> None:
    jobs = [make_job(id) for id in "abc"]
    box.hold(jobs)
    for job in jobs:
        box.decide(job, Succeeded(b"1"), started_at=job.requested_at)
    with pytest.raises(StopIteration):
        box.keep(jobs[0]).send(None)
    found = next_life(tmp_path)
    statements: list[str] = []
    assert box._db is not None
    box._db.set_trace_callback(statements.append)
    run(box.keep(jobs[1]))  # there is nothing left to write
    assert [leftover.outcome for leftover in found] == 3 * [Succeeded(b"1")]
    assert statements == []


def test_a_lease_that_was_renewed_after_its_outcome_was_decided_counts_from_the_renewal(
    box: Outbox, tmp_path: Path
) -> None:
    job = make_job()
    box.decide(job, Succeeded(b"1"), started_at=job.requested_at)
    box.renewed(job, job.requested_at + 10.0)
    run(box.keep(job))
    (leftover,) = next_life(tmp_path)
    assert leftover.job.requested_at == job.requested_at + 10.0
    assert leftover.outcome == Succeeded(b"1")


def test_what_is_forgotten_before_it_was_kept_leaves_nothing(tmp_path: Path) -> None:
    async def main(box: Outbox) -> None:
        for id, size in (("a", 1), ("b", 2 * BIG_BYTES)):
            job = make_job(id)
            box.hold([job])
            box.decide(job, Succeeded(b"1" * size), started_at=job.requested_at)
            box.forget(job)
            await box.keep(job)

    with Outbox(tmp_path, api_url=URL, worker_id="w") as box:
        run(main(box))
    assert next_life(tmp_path) == []


def test_a_big_outcome_is_on_disk_when_keep_returns(box: Outbox, tmp_path: Path) -> None:
    big = b'"' + b"x" * (2 * BIG_BYTES) + b'"'
    run(decide(box, Succeeded(big)))
    assert the_outcome(tmp_path) == Succeeded(big)


def test_what_another_worker_id_has_left_keeps_that_id_until_it_is_reported(box: Outbox, tmp_path: Path) -> None:
    """The service takes it in that name only, and we may end before it has."""
    job = make_job()
    for worker_id, found in ((None, "w"), ("w-before", "w-before")):
        box.decide(job, Succeeded(b"1"), started_at=job.requested_at, worker_id=worker_id)
        run(box.keep(job))
        assert [leftover.worker_id for leftover in next_life(tmp_path)] == [found]


def test_a_forgotten_job_is_gone_after_a_moment_and_at_the_latest_when_the_box_is_closed(tmp_path: Path) -> None:
    async def main(box: Outbox) -> None:
        box.hold([make_job("a"), make_job("b")])
        box.forget(make_job("a"))
        assert len(next_life(tmp_path)) == 2  # deletes are batched
        await asyncio.sleep(0)

    with open_box(tmp_path) as box:
        run(main(box))
    assert [found.job.id for found in next_life(tmp_path)] == ["b"]


def test_many_forgotten_jobs_go_at_once(box: Outbox, tmp_path: Path) -> None:
    async def main() -> None:
        jobs = [make_job(str(n)) for n in range(FORGET_BATCH)]
        box.hold(jobs)
        for job in jobs:
            box.forget(job)

    run(main())
    assert next_life(tmp_path) == []


def test_two_leases_of_one_job_are_two_rows(box: Outbox, tmp_path: Path) -> None:
    async def main() -> None:
        box.hold([make_job("a", "lease-1"), make_job("a", "lease-2")])
        box.decide(make_job("a", "lease-2"), Succeeded(b"2"), started_at=0.0)
        await box.keep(make_job("a", "lease-2"))

    run(main())
    assert {found.job.lease_id: found.outcome for found in next_life(tmp_path)} == {
        "lease-1": None,
        "lease-2": Succeeded(b"2"),
    }


def test_a_lease_ends_after_its_last_renewal_for_the_next_life_too(box: Outbox, tmp_path: Path) -> None:
    job = make_job(requested_at=timing.now(), lease_duration_s=30.0)
    box.hold([job])
    box.renewed(job, job.requested_at + 10.0)
    (found,) = next_life(tmp_path)
    assert found.end == pytest.approx(job.requested_at + 40.0)


def test_after_a_reboot_the_wall_clock_tells_how_old_a_lease_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "boot_id", lambda: "an earlier boot")
    with open_box(tmp_path) as box:
        box.hold([make_job(requested_at=timing.now() - 20.0, lease_duration_s=30.0)])
        box.child_born(4711, 1)
    monkeypatch.setattr(module, "boot_id", lambda: "this boot")
    with open_box(tmp_path) as box:
        (found,) = box.leftovers()
        assert found.end - timing.now() == pytest.approx(10.0, abs=1.0)
        assert box.survivors() == []  # whoever has this number now is somebody else


def test_living_children_are_found_and_the_dead_are_not(box: Outbox, tmp_path: Path) -> None:
    box.child_born(1, 100)
    box.child_born(2, 200)
    box.child_gone(1)
    with open_box(tmp_path) as later:
        assert later.survivors() == [(2, 200)]
        later.forget_survivors()
        assert later.survivors() == []


def test_results_are_nobody_elses_to_read(box: Outbox, tmp_path: Path) -> None:
    run(decide(box, Succeeded(b"1")))
    for file in tmp_path.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) & 0o077 == 0, file


# --- limits ---------------------------------------------------------------------------------------------------------


def test_too_many_outcomes_make_it_full_until_the_service_has_taken_one(
    box: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_OUTCOMES", 2)

    async def main() -> None:
        await decide(box, Succeeded(b"1"), "a")
        assert not box.is_full
        await decide(box, Succeeded(b"1"), "b")
        assert box.is_full
        assert box.depth == 2
        box.forget(make_job("a"))
        assert not box.is_full
        assert box.depth == 1

    run(main())


def test_too_many_bytes_make_it_full(box: Outbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_BYTES", 100)

    async def main() -> None:
        await decide(box, Succeeded(b"1" * 60), "a")
        await decide(box, Failed("x" * 60), "b")
        assert box.is_full
        box.forget(make_job("a"))
        box.forget(make_job("a"))  # twice is once
        assert not box.is_full

    run(main())


def test_the_age_is_that_of_the_oldest_outcome(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = fake_time(monkeypatch, module)

    async def main(box: Outbox) -> None:
        assert box.age_s(clock()) == 0.0
        await decide(box, Succeeded(b"1"), "a")
        clock.advance(3.0)
        await decide(box, Succeeded(b"1"), "b")
        clock.advance(2.0)
        assert box.age_s(clock()) == 5.0

    with open_box(tmp_path) as box:
        run(main(box))


# --- bad files ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content", [b"no database at all" * 100, b"SQLite format 3\0" + b"\xff" * 4096], ids=["text", "header"]
)
def test_a_file_that_is_no_database_is_put_aside_and_told(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FILE_NAME).write_bytes(content)
    (tmp_path / f"{FILE_NAME}-wal").write_bytes(b"nor this")
    with open_box(tmp_path) as box:
        assert box.problem is None
        assert box.replaced is not None
        assert f"{FILE_NAME}.broken" in box.replaced
        box.hold([make_job()])
    assert (tmp_path / f"{FILE_NAME}.broken").read_bytes() == content
    assert len(next_life(tmp_path)) == 1


def test_a_database_that_breaks_while_it_is_open_is_put_aside_when_it_is_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first page is whole, so opening it says nothing."""
    clock = fake_time(monkeypatch, module)
    with open_box(tmp_path) as box:
        box.hold([make_job(str(n)) for n in range(200)])
    data = bytearray((tmp_path / FILE_NAME).read_bytes())
    data[4096:] = b"\xff" * (len(data) - 4096)
    (tmp_path / FILE_NAME).write_bytes(data)

    async def main() -> None:
        with open_box(tmp_path) as box:
            assert box.leftovers() == []
            assert box.problem is not None
            clock.advance(module.REOPEN_INTERVAL_S)
            box.tick(clock())
            assert box.problem is None
            assert box.replaced is not None
            box.hold([make_job()])
            assert box.problem is None

    run(main())
    assert len(next_life(tmp_path)) == 1


def test_an_empty_file_is_a_new_one(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).touch()
    with open_box(tmp_path) as box:
        assert (box.problem, box.replaced) == (None, None)


def test_a_directory_that_is_not_there_means_memory_only(tmp_path: Path) -> None:
    with open_box(tmp_path / "nowhere") as box:
        assert box.problem is not None
        assert "nowhere" in box.problem
        run(decide(box, Succeeded(b"1")))
        assert box.depth == 1


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Every statement that writes fails while it says True, in connections that are made meanwhile, too."""
    is_full = [False]

    class Connection(sqlite3.Connection):
        def execute(self, sql: str, *args: Any) -> Any:
            if is_full[0] and sql.lstrip().upper().startswith(("INSERT", "UPDATE", "DELETE", "BEGIN")):
                raise sqlite3.OperationalError("database or disk is full")
            return super().execute(sql, *args)

        def executescript(self, sql: str) -> Any:
            if is_full[0]:
                raise sqlite3.OperationalError("database or disk is full")
            return super().executescript(sql)

    connect = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda *args, **kwargs: connect(*args, factory=Connection, **kwargs))
    return is_full


@pytest.mark.parametrize("size", [10, 2 * BIG_BYTES], ids=["small", "big"])
def test_a_full_disk_means_memory_only_until_there_is_room_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full_disk: list[bool], size: int
) -> None:
    clock = fake_time(monkeypatch, module)
    reopened: list[float] = []

    async def main(box: Outbox) -> None:
        full_disk[0] = True
        await decide(box, Succeeded(b"1" * size), "a")
        assert box.problem is not None
        assert "full" in box.problem
        assert box.depth == 1  # it is still on its way to the service
        clock.advance(module.REOPEN_INTERVAL_S / 2)
        box.tick(clock())
        assert not reopened
        clock.advance(module.REOPEN_INTERVAL_S)
        box.tick(clock())  # still full
        assert box.problem is not None
        full_disk[0] = False
        clock.advance(module.REOPEN_INTERVAL_S)
        box.tick(clock())
        assert box.problem is None
        assert len(reopened) == 1

    with open_box(tmp_path, on_reopened=lambda missed: reopened.append(clock())) as box:
        box.leftovers()
        run(main(box))


def test_what_could_not_be_read_at_the_start_is_told_when_the_file_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full_disk: list[bool]
) -> None:
    clock = fake_time(monkeypatch, module)
    with open_box(tmp_path) as before:
        before.hold([make_job("unfinished")])
        run(decide(before, Succeeded(b"1"), "done"))
    told: list[list[tuple[str, Outcome | None]]] = []

    def on_reopened(missed: list[Leftover]) -> None:
        told.append(sorted(((found.job.id, found.outcome) for found in missed), key=repr))

    full_disk[0] = True
    with open_box(tmp_path, on_reopened=on_reopened) as box:
        assert box.leftovers() == []
        run(decide(box, Succeeded(b"2"), "new"))
        for is_full in (False, True, False):
            full_disk[0] = is_full
            clock.advance(module.REOPEN_INTERVAL_S)
            box.tick(clock())
            if is_full:
                box.hold([make_job("another")])  # it is lost again
    assert told == [[("done", Succeeded(b"1")), ("unfinished", None)], []]


def test_a_full_disk_is_named_even_where_sqlite_has_ended_the_transaction_itself(
    box: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it does when a statement, and not the commit, finds no room."""

    class Connection:
        in_transaction = False

        def execute(self, sql: str) -> None:
            if sql == "ROLLBACK":
                raise sqlite3.OperationalError("cannot rollback - no transaction is active")

        def executemany(self, sql: str, rows: object) -> None:
            raise sqlite3.OperationalError("database or disk is full")

        def close(self) -> None:
            pass

    assert box._db is not None
    box._db.close()
    monkeypatch.setattr(box, "_db", Connection())
    box.hold([make_job("a"), make_job("b")])
    assert box.problem is not None
    assert "database or disk is full" in box.problem


def test_many_big_outcomes_at_once_are_all_kept_while_small_things_are_written(tmp_path: Path) -> None:
    """SQLite gives a lock to who asks most: whoever got none in time took the file for broken."""
    jobs = [make_job(f"job-{n}") for n in range(100)]

    async def main(box: Outbox) -> None:
        box.hold(jobs)
        for job in jobs:
            box.decide(job, Succeeded(b"1" * 10 * BIG_BYTES), started_at=job.requested_at)
        keeping = [asyncio.ensure_future(box.keep(job)) for job in jobs]
        while not all(task.done() for task in keeping):
            box.child_born(1, 1)
            await asyncio.sleep(0)
        assert box.problem is None

    with open_box(tmp_path) as box:
        run(main(box))
        assert [type(found.outcome) for found in next_life(tmp_path)] == [Succeeded] * len(jobs)


def test_a_big_outcome_does_not_wait_for_the_loops_own_threads(box: Outbox, tmp_path: Path) -> None:
    """They look up names, all of them for as long as a name server is out of reach."""
    answered = threading.Event()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        lookups = [loop.run_in_executor(None, answered.wait) for _ in range(100)]
        try:
            await asyncio.wait_for(decide(box, Succeeded(b"1" * 2 * BIG_BYTES)), 10.0)
        finally:
            answered.set()
            await asyncio.gather(*lookups)

    run(main())
    assert the_outcome(tmp_path) == Succeeded(b"1" * 2 * BIG_BYTES)


@pytest.mark.parametrize("size", [1, 2 * BIG_BYTES], ids=["small", "big"])
def test_what_nobody_came_to_keep_is_written_when_the_box_is_closed(tmp_path: Path, size: int) -> None:
    job = make_job()
    with open_box(tmp_path) as box:
        box.hold([job])
        box.decide(job, Succeeded(b"1" * size), started_at=job.requested_at)
    assert the_outcome(tmp_path) == Succeeded(b"1" * size)


def test_a_job_that_comes_again_without_a_lease_id_is_not_deleted_with_its_last_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = fake_time(monkeypatch, module)
    job = make_job(lease_id=None)

    async def main(box: Outbox) -> None:
        for result in (b"1", b"22"):
            box.hold([job])
            box.decide(job, Succeeded(result), started_at=job.requested_at)
            await box.keep(job)
            if result == b"1":
                box.forget(job)
        await asyncio.sleep(2 * module.FORGET_DELAY_S)
        assert the_outcome(tmp_path) == Succeeded(b"22")
        box.decide(job, Succeeded(b"333"), started_at=job.requested_at)
        box.forget(job)
        assert box._bytes == 0

    with open_box(tmp_path) as box:
        run_in_fake_time(clock, main(box))


@pytest.mark.parametrize("size", [1, 2 * BIG_BYTES], ids=["small", "big"])
def test_a_renewal_counts_for_an_outcome_that_is_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full_disk: list[bool], size: int
) -> None:
    clock = fake_time(monkeypatch, module)
    job = make_job(requested_at=clock())

    async def main(box: Outbox) -> None:
        box.hold([job])
        full_disk[0] = True
        box.decide(job, Succeeded(b"1" * size), started_at=job.requested_at)
        await box.keep(job)
        box.renewed(job, clock.advance(7.0))
        full_disk[0] = False
        clock.advance(module.REOPEN_INTERVAL_S)
        box.tick(clock())

    with open_box(tmp_path) as box:
        run(main(box))
        (found,) = next_life(tmp_path)
    assert found.job.requested_at == job.requested_at + 7.0


def test_a_directory_that_vanishes_is_a_problem_and_no_exception(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A big outcome and a checkpoint open the file anew, in a thread."""
    clock = fake_time(monkeypatch, module)
    directory = tmp_path / "state"
    directory.mkdir()

    async def main(box: Outbox) -> None:
        shutil.rmtree(directory)
        clock.advance(module.CHECKPOINT_INTERVAL_S)
        box.tick(clock())
        await asyncio.sleep(0)
        await decide(box, Succeeded(b"1" * 2 * BIG_BYTES))
        assert box.problem is not None

    with open_box(directory) as box:
        run(main(box))


def test_the_log_does_not_grow_with_the_jobs_where_they_end_without_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job writes two frames, so that 4000 would be 8600 of them."""
    long_log, unwatched_jobs = 500, 500
    monkeypatch.setattr(module, "CHECKPOINT_ROWS", 100)
    monkeypatch.setattr(module, "LONG_LOG_FRAMES", long_log)
    log = tmp_path / f"{FILE_NAME}-wal"

    async def main(box: Outbox) -> None:
        for n in range(4000):
            job = make_job(f"job-{n}")
            box.hold([job])
            box.decide(job, Succeeded(b"1"), started_at=job.requested_at)
            await box.keep(job)
            box.forget(job)
            box.tick(timing.now())
            await asyncio.sleep(0)
            if n % unwatched_jobs == unwatched_jobs - 1 and box._checkpoint is not None:
                await box._checkpoint  # the machine may have had no time for its thread
        assert box.problem is None
        # Two checkpoints may pass before one has seen a log that is too long.
        assert log.stat().st_size / FRAME_BYTES < long_log + 2 * unwatched_jobs * 2.2

    with open_box(tmp_path) as box:
        run(main(box))


def test_what_the_service_took_while_there_was_no_disk_is_not_reported_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full_disk: list[bool]
) -> None:
    clock = fake_time(monkeypatch, module)

    async def main(box: Outbox) -> None:
        box.hold([make_job("a"), make_job("b")])
        full_disk[0] = True
        await decide(box, Succeeded(b"1"), "a")
        box.forget(make_job("a"))
        box.forget(make_job("b"))
        await asyncio.sleep(module.FORGET_DELAY_S)
        full_disk[0] = False
        clock.advance(module.REOPEN_INTERVAL_S)
        box.tick(clock())
        assert next_life(tmp_path) == []

    with open_box(tmp_path) as box:
        run_in_fake_time(clock, main(box))


def test_an_outcome_that_was_decided_while_there_was_no_disk_is_kept_once_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full_disk: list[bool]
) -> None:
    clock = fake_time(monkeypatch, module)

    async def main(box: Outbox) -> None:
        box.hold([make_job("a")])
        full_disk[0] = True
        await decide(box, Succeeded(b"1"), "a")
        full_disk[0] = False
        clock.advance(module.REOPEN_INTERVAL_S)
        box.tick(clock())
        assert the_outcome(tmp_path) == Succeeded(b"1")

    with open_box(tmp_path) as box:
        run(main(box))


# --- upkeep ---------------------------------------------------------------------------------------------------------


def test_the_log_is_moved_into_the_database_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = fake_time(monkeypatch, module)

    log = tmp_path / f"{FILE_NAME}-wal"

    async def main(box: Outbox) -> None:
        clock.advance(module.CHECKPOINT_INTERVAL_S)
        box.tick(clock())
        assert box._checkpoint is not None
        await box._checkpoint

    with open_box(tmp_path) as box:
        box.hold([make_job(str(n)) for n in range(1000)])
        grown = log.stat().st_size
        assert grown > 50_000
        run(main(box))
        box.hold([make_job(str(n)) for n in range(1000)])
        assert log.stat().st_size == grown  # written from its beginning again


def test_evidence_against_poison_jobs_is_kept_for_so_many_and_so_long(
    box: Outbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = FakeClock(1000.0)
    monkeypatch.setattr(module, "wall", at)
    for n in range(5):
        box.poisoned(f"job-{n}", 1, "killed by SIGSEGV", keep=3, oldest_wall=0.0)
        at.advance(1.0)
    box.poisoned("job-2", 2, "killed by SIGABRT", keep=3, oldest_wall=0.0)
    with open_box(tmp_path) as later:
        assert [row[:3] for row in later.poison(0.0)] == [
            ("job-3", 1, "killed by SIGSEGV"),
            ("job-4", 1, "killed by SIGSEGV"),
            ("job-2", 2, "killed by SIGABRT"),
        ]
        assert [row[0] for row in later.poison(1004.5)] == ["job-2"]
        later.cured("job-2")
        assert later.poison(1004.5) == []

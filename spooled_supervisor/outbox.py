"""What must outlive the process: which leases are ours, outcomes that the service has not got yet, children that live.

SQLite in the state directory. A lease is written when it is claimed, its outcome before it is reported, and the row
goes after the service has answered; so after a crash or a `kill -9` the next start knows what to report and what to
fail. WAL mode with synchronous=NORMAL (sqlite.org/wal.html): that survives the death of every process; a power cut may
lose the last seconds, whose jobs then run again. Commits are made on the loop's thread (17 us for one outcome, 9 for
each of five); checkpoints, and outcomes above BIG_BYTES, in a thread with a connection of its own. What is decided at
one moment goes with one commit, and deletes are batched: a report that is sent twice is answered "already completed".

It never stands in the way of a job: a full disk or a broken file turns it into memory only, which it tells (`problem`)
and tries to end. Instants are `timing.now` with the boot they belong to; across a boot the wall clock must do.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from spooled_supervisor.job import Failed, Job, Outcome, Succeeded, error_text
from spooled_supervisor.processes import boot_id
from spooled_supervisor.timing import now, wall

FILE_NAME = "state.db"
BIG_BYTES = 64 * 1024
MAX_OUTCOMES = 1000
MAX_BYTES = 64 << 20
"""At either limit nothing more is claimed: the service gives us jobs faster than it takes their outcomes."""
FORGET_BATCH = 64
FORGET_DELAY_S = 1.0
CHECKPOINT_INTERVAL_S = 30.0
CHECKPOINT_ROWS = 5000
"""Written since the last checkpoint: some 8 MB of log."""
LONG_LOG_FRAMES = 8192
"""Of 4 kB each. A log that is longer is begun anew even if somebody has to wait for that."""
PASSES = 5
FEW_FRAMES = 100
REOPEN_INTERVAL_S = 10.0

SCHEMA = """
CREATE TABLE IF NOT EXISTS leases (
    job_id TEXT NOT NULL, lease_id TEXT NOT NULL, queue_name TEXT NOT NULL,
    api_url TEXT NOT NULL, worker_id TEXT NOT NULL,
    retry_count INTEGER NOT NULL, max_retries INTEGER NOT NULL,
    timeout_s REAL NOT NULL, duration_s REAL NOT NULL,
    boot_id TEXT NOT NULL, started_at REAL NOT NULL, started_wall REAL NOT NULL,
    result BLOB, error TEXT, retryable INTEGER NOT NULL,
    PRIMARY KEY (job_id, lease_id)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS children (
    pid INTEGER PRIMARY KEY, start_time INTEGER NOT NULL, boot_id TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS poison (
    job_id TEXT PRIMARY KEY, deaths INTEGER NOT NULL, evidence TEXT NOT NULL, last_wall REAL NOT NULL
) WITHOUT ROWID;
"""
_PUT = f"INSERT OR REPLACE INTO leases VALUES ({', '.join('?' * 15)})"
_RENEW = "UPDATE leases SET boot_id = ?, started_at = ?, started_wall = ? WHERE job_id = ? AND lease_id = ?"
START = slice(9, 12)
"""Where these three are in a row."""
_FORGET = "DELETE FROM leases WHERE job_id = ? AND lease_id = ?"

Row = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Leftover:
    """A lease of an earlier life. `outcome` None: its job was waiting or running when that life ended."""

    job: Job
    worker_id: str
    api_url: str
    outcome: Succeeded | Failed | None

    @property
    def end(self) -> float:
        """When its lease ends, on `timing.now`."""
        return self.job.requested_at + self.job.lease_duration_s


class Outbox:
    """One per supervisor, as a context manager; for the loop's thread only. Nothing of it raises for a bad disk."""

    def __init__(
        self,
        directory: Path,
        *,
        api_url: str,
        worker_id: str,
        on_reopened: Callable[[list[Leftover]], None] = lambda missed: None,
    ) -> None:
        """`on_reopened` is told what an earlier life has left, if that could not be read at the start."""
        self._path = directory / FILE_NAME
        self._api_url = api_url
        self._worker_id = worker_id
        self._on_reopened = on_reopened
        self._boot_id = boot_id()
        self._db: sqlite3.Connection | None = None
        self._on_their_way: dict[tuple[str, str], tuple[float, int, Row]] = {}  # decided: since when, bytes, all of it
        self._bytes = 0
        self._unwritten: dict[tuple[str, str], Row] = {}  # of those, what the file has not got yet ...
        self._unwritten_big: dict[tuple[str, str], Row] = {}  # ... apart, as each of these is written in a thread
        self._forgotten: list[tuple[str, str]] = []
        self._forget_timer: asyncio.TimerHandle | None = None
        self._reopen_at = 0.0
        self._checkpoint_at = now() + CHECKPOINT_INTERVAL_S
        self._checkpoint: asyncio.Future[None] | None = None
        # Not the loop's own threads: those may all wait for a name server, and a report waits for this one. It is one,
        # and there is a turn to write: SQLite's own lock is got by who asks most, and the others would give up.
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="outbox")
        self._turn = threading.Lock()
        self._has_been_read = False
        self._rows_written = 0
        self._is_broken = False  # the file is no sound database: it is put aside before it is opened again
        self.problem: str | None = None  # why nothing is kept on disk at the moment

    def __enter__(self) -> Outbox:
        self._open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._writer.shutdown()
        self._unwritten.update(self._unwritten_big)
        self._write_decided()
        self._flush_forgotten()
        if self._db is not None:
            with contextlib.suppress(sqlite3.Error):  # what is in the log is read from there by the next start
                self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            self._db.close()
            self._db = None

    # --- of this life ------------------------------------------------------------------------------------------------

    def hold(self, jobs: Sequence[Job]) -> None:
        """These leases are ours now; one commit for a whole claim."""
        if any(job.lease_id is None and _key(job) in self._forgotten for job in jobs):
            self._flush_forgotten()  # the same job again, so soon: a delete that comes later would mean this one
        self._write(_PUT, [self._row(job, None, None, True) for job in jobs])

    def renewed(self, job: Job, started_at: float) -> None:
        """The lease counts from this instant now."""
        key = _key(job)
        start = (self._boot_id, started_at, wall() - (now() - started_at))
        if (sent := self._on_their_way.get(key)) is not None:
            since, size, row = sent
            row = row[: START.start] + start + row[START.stop :]
            self._on_their_way[key] = (since, size, row)
            for unwritten in (self._unwritten, self._unwritten_big):
                if key in unwritten:
                    unwritten[key] = row
        self._write(_RENEW, [(*start, *key)])

    def decide(self, job: Job, outcome: Outcome, *, started_at: float, worker_id: str | None = None) -> None:
        """The outcome is known. It must not be reported before `keep` has returned.

        `worker_id`: who holds the lease, if it is an earlier life under another id; only that one can report it.
        """
        result = outcome.result if isinstance(outcome, Succeeded) else None
        error = None if isinstance(outcome, Succeeded) else error_text(outcome)
        retryable = not isinstance(outcome, Failed) or outcome.retryable
        size = len(result or b"") + len(error or "")
        row = self._row(job, result, error, retryable, started_at=started_at, worker_id=worker_id)
        if (replaced := self._on_their_way.get(_key(job))) is not None:
            self._bytes -= replaced[1]
        self._on_their_way[_key(job)] = (now(), size, row)
        self._bytes += size
        (self._unwritten if size <= BIG_BYTES else self._unwritten_big)[_key(job)] = row

    async def keep(self, job: Job) -> None:
        """When this returns what was decided of the job is on disk, or `problem` says why not.

        All that is small and was decided until now is written before the first suspension, in one commit: two outcomes
        take three quarters of the time of two commits, five half of it. Not cancel-safe: a big one may be written
        afterwards.
        """
        self._write_decided()
        row = self._unwritten_big.pop(_key(job), None)
        if row is None or self._db is None:  # what is on its way is written when there is a file again
            return
        loop = asyncio.get_running_loop()
        failed = await loop.run_in_executor(self._writer, _write_elsewhere, self._path, row, self._turn)
        if failed is not None:
            self._degrade(failed)
        elif (sent := self._on_their_way.get(_key(job))) is not None and sent[2] is not row:  # renewed meanwhile
            self._write(_RENEW, [(*sent[2][START], *_key(job))])

    def forget(self, job: Job) -> None:
        """The service has the outcome, or the lease is over; the row goes a little later, with others."""
        key = _key(job)
        self._unwritten.pop(key, None)
        self._unwritten_big.pop(key, None)
        if (sent := self._on_their_way.pop(key, None)) is not None:
            self._bytes -= sent[1]
        self._forgotten.append(key)
        if len(self._forgotten) >= FORGET_BATCH:
            self._flush_forgotten()
        elif self._forget_timer is None:
            self._forget_timer = asyncio.get_running_loop().call_later(FORGET_DELAY_S, self._flush_forgotten)

    def child_born(self, pid: int, start_time: int) -> None:
        """This process is a child of ours."""
        self._write("INSERT OR REPLACE INTO children VALUES (?, ?, ?)", [(pid, start_time, self._boot_id)])

    def child_gone(self, pid: int) -> None:
        """It is reaped."""
        self._write("DELETE FROM children WHERE pid = ?", [(pid,)])

    def poisoned(self, job_id: str, deaths: int, evidence: str, keep: int, oldest_wall: float) -> None:
        """A job has killed its child so many times; `keep` rows that are younger than `oldest_wall` stay."""
        self._write("INSERT OR REPLACE INTO poison VALUES (?, ?, ?, ?)", [(job_id, deaths, evidence, wall())])
        self._write(
            "DELETE FROM poison WHERE last_wall < ? OR job_id IN "
            "(SELECT job_id FROM poison ORDER BY last_wall DESC LIMIT -1 OFFSET ?)",
            [(oldest_wall, keep)],
        )

    def cured(self, job_id: str) -> None:
        """It ended without killing its child."""
        self._write("DELETE FROM poison WHERE job_id = ?", [(job_id,)])

    @property
    def depth(self) -> int:
        """Outcomes that the service has not got yet."""
        return len(self._on_their_way)

    def age_s(self, at: float) -> float:
        """How long the oldest of them has been waiting."""
        return at - min((since for since, _, _ in self._on_their_way.values()), default=at)

    @property
    def is_full(self) -> bool:
        """Whether nothing more should be claimed."""
        return len(self._on_their_way) >= MAX_OUTCOMES or self._bytes >= MAX_BYTES

    def tick(self, at: float) -> None:
        """Now and then: checkpoint in a thread, or try to get the file back."""
        if self._db is None:
            if at >= self._reopen_at:
                self._open()
                if self._db is not None:
                    missed = [] if self._has_been_read else self.leftovers()
                    self._flush_forgotten()
                    self._write(_PUT, [row for _, _, row in self._on_their_way.values()])
                    self._on_reopened(missed)
        elif at >= self._checkpoint_at or self._rows_written > CHECKPOINT_ROWS:
            self._checkpoint_at = at + CHECKPOINT_INTERVAL_S
            self._rows_written = 0
            if self._checkpoint is None or self._checkpoint.done():
                loop = asyncio.get_running_loop()
                self._checkpoint = loop.run_in_executor(None, _checkpoint, self._path)

    # --- of earlier lives --------------------------------------------------------------------------------------------

    def leftovers(self) -> list[Leftover]:
        """What earlier lives have left, of any address; ask before anything is claimed."""
        rows = self._read("SELECT * FROM leases ORDER BY started_wall")
        self._has_been_read = self._db is not None
        return [self._leftover(row) for row in rows]

    def survivors(self) -> list[tuple[int, int]]:
        """Pid and start time (proc_pid_stat(5)) of children of an earlier life, of this boot."""
        rows = self._read("SELECT pid, start_time FROM children WHERE boot_id = ?", self._boot_id)
        return [(pid, start_time) for pid, start_time in rows]

    def forget_survivors(self) -> None:
        """They are dead."""
        self._write("DELETE FROM children", [()])

    def poison(self, oldest_wall: float) -> list[tuple[str, int, str, float]]:
        """Job id, deaths, evidence and when: the oldest first."""
        return [
            (job_id, deaths, evidence, at)
            for job_id, deaths, evidence, at in self._read(
                "SELECT * FROM poison WHERE last_wall >= ? ORDER BY last_wall", oldest_wall
            )
        ]

    # --- rows --------------------------------------------------------------------------------------------------------

    def _row(
        self,
        job: Job,
        result: bytes | None,
        error: str | None,
        retryable: bool,
        *,
        started_at: float | None = None,
        worker_id: str | None = None,
    ) -> Row:
        started_at = job.requested_at if started_at is None else started_at
        return (
            *_key(job),
            job.queue_name,
            self._api_url,
            self._worker_id if worker_id is None else worker_id,
            job.retry_count,
            job.max_retries,
            job.timeout_s,
            job.lease_duration_s,
            self._boot_id,
            started_at,
            wall() - (now() - started_at),
            result,
            error,
            retryable,
        )

    def _leftover(self, row: Row) -> Leftover:
        (job_id, lease_id, queue_name, api_url, worker_id, retry_count, max_retries, timeout_s, duration_s) = row[:9]
        (boot, started_at, started_wall, result, error, retryable) = row[9:]
        if boot != self._boot_id:
            started_at = now() - max(0.0, wall() - started_wall)  # the clock may have been set back
        outcome: Succeeded | Failed | None = None
        if result is not None:
            outcome = Succeeded(result)
        elif error is not None:
            outcome = Failed(error, retryable=bool(retryable))
        job = Job(
            id=job_id,
            queue_name=queue_name,
            lease_id=lease_id or None,
            payload=b"null",
            retry_count=retry_count,
            max_retries=max_retries,
            timeout_s=timeout_s,
            lease_duration_s=duration_s,
            requested_at=started_at,
        )
        return Leftover(job, worker_id, api_url, outcome)

    # --- the file ----------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        try:
            self._db = self._connect_or_replace()
            self.problem = None
        except (sqlite3.Error, OSError) as error:
            self._degrade(error)

    def _connect_or_replace(self) -> sqlite3.Connection:
        """Open the file; one that is no database any more is put aside, as it must not stop the work."""
        try:
            if self._is_broken:  # its first page may be whole, and then opening it says nothing
                raise sqlite3.DatabaseError(self.problem)
            return _connect(self._path, SCHEMA)
        except sqlite3.DatabaseError as error:
            if not _means_broken(error):
                raise
            for suffix in ("", "-wal", "-shm"):
                with contextlib.suppress(FileNotFoundError):
                    os.replace(f"{self._path}{suffix}", f"{self._path}.broken{suffix}")
            self._is_broken = False
            self.replaced = f"{self._path} was no database ({error}); it was renamed to {self._path.name}.broken"
            return _connect(self._path, SCHEMA)

    replaced: str | None = None
    """Set when a broken file was put aside; who tells it sets it back."""

    def _degrade(self, error: sqlite3.Error | OSError) -> None:
        if self._db is not None:
            self._db.close()
            self._db = None
        self._is_broken = self._is_broken or _means_broken(error)
        self.problem = f"{self._path}: {error}"
        self._reopen_at = now() + REOPEN_INTERVAL_S

    def _write(self, sql: str, rows: Sequence[Row]) -> None:
        if self._db is None or not rows:
            return
        self._rows_written += len(rows)
        try:
            with self._turn:
                if len(rows) == 1:
                    self._db.execute(sql, rows[0])  # a transaction by itself
                else:
                    with _transaction(self._db):
                        self._db.executemany(sql, rows)
        except sqlite3.Error as error:
            self._degrade(error)

    def _write_decided(self) -> None:
        rows, self._unwritten = [*self._unwritten.values()], {}
        self._write(_PUT, rows)

    def _read(self, sql: str, *values: object) -> Iterable[Row]:
        if self._db is None:
            return []
        try:
            return self._db.execute(sql, values).fetchall()
        except sqlite3.Error as error:
            self._degrade(error)
            return []

    def _flush_forgotten(self) -> None:
        if self._forget_timer is not None:
            self._forget_timer.cancel()
            self._forget_timer = None
        self._write(_FORGET, self._forgotten)
        if self._db is not None or len(self._forgotten) > MAX_OUTCOMES:
            self._forgotten = []  # else they are still in the file, and go when it is opened again


def _key(job: Job) -> tuple[str, str]:
    return (job.id, job.lease_id or "")


def _connect(path: Path, schema: str = "") -> sqlite3.Connection:
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))  # results are nobody else's to read
    # isolation_level None: no transactions behind our back; one statement is one commit.
    db = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None, cached_statements=32)
    try:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")
        db.execute("PRAGMA wal_autocheckpoint = 0")
        db.executescript(schema)
    except BaseException:
        db.close()
        raise
    return db


BUSY_TIMEOUT_S = 0.5
"""For the moment in which the other connection of ours, in a thread, commits a big outcome."""


@contextlib.contextmanager
def _transaction(db: sqlite3.Connection) -> Iterator[None]:
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        if db.in_transaction:  # a full disk has ended it already
            db.execute("ROLLBACK")
        raise
    db.execute("COMMIT")


def _means_broken(error: sqlite3.Error | OSError) -> bool:
    """Whether the file is at fault; OperationalError is a disk that is full, a lock, a file that cannot be opened."""
    return type(error) is sqlite3.DatabaseError


def _write_elsewhere(path: Path, row: Row, turn: threading.Lock) -> sqlite3.Error | OSError | None:
    """In a thread: keep a big outcome; what went wrong, if anything did."""
    try:
        with contextlib.closing(_connect(path)) as db, turn:
            db.execute(_PUT, row)
    except (sqlite3.Error, OSError) as error:
        return error
    return None


def _checkpoint(path: Path) -> None:
    """In a thread: move the log into the database. What fails is tried again later.

    PASSIVE: it waits for nobody and nobody waits for it, however slow the disk; the log is written from its beginning
    again once all of it has been moved (sqlite.org/wal.html, 2.2). Where jobs end without pause there is no such
    moment, and the log would grow by 7 kB with each of them. So a long one is moved in several passes, each of which
    has only to move what was written during the last, and then comes a RESTART: writers wait for the few frames that
    are left.
    """
    with contextlib.suppress(sqlite3.Error, OSError), contextlib.closing(_connect(path)) as db:
        for _ in range(PASSES):
            _, frames, moved = db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
            if frames - moved < FEW_FRAMES:
                break
        if frames > LONG_LOG_FRAMES:
            db.execute("PRAGMA wal_checkpoint(RESTART)")

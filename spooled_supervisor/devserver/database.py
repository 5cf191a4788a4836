"""The SQLite file: its tables, its one connection, its transactions.

Owns the schema and how the file is opened; does not know what a job may do. One writer: the event loop's thread, which
awaits nothing between BEGIN and COMMIT, so a transaction is never seen half done and never waits for another. The file
is locked for as long as it is open; a second server on it is refused. Instants are epoch seconds (REAL).

Without a path it is a temporary database of SQLite's own: a file without a name in TMPDIR or /var/tmp, written only as
the page cache fills up, and gone with the process however that ends. So most commits write nothing; in a file that is
kept, each is two writes for every page that it changes.

Invariants of `jobs`: `ready` is 1 for exactly the rows that a claim may take as far as time and parent are concerned;
`due_at` is set for exactly the rows that only time keeps from that; lease columns are set while `processing` (and stay
on `completed` rows, which is how a repeated complete is recognised).
Sources: sqlite.org/wal.html (exclusive locking mode needs no shared memory), sqlite.org/partialindex.html,
sqlite.org/inmemorydb.html (temporary databases).
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from spooled_supervisor.errors import ConfigError

Row: TypeAlias = sqlite3.Row
Values: TypeAlias = Sequence[Any] | Mapping[str, Any]
"""A sequence for `?`, a mapping for `:name`. Not `?1`: the first releases of Python 3.12 warn (CPython #117995)."""

DatabaseFault = sqlite3.Error
"""What any statement may raise; answered as 500 DATABASE_ERROR."""

TEMPORARY = ""
"""The name by which SQLite makes a temporary database."""

SCHEMA_VERSION = 1

_SCHEMA = """
CREATE TABLE jobs (
    seq INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    queue_name TEXT NOT NULL,
    status TEXT NOT NULL,
    ready INTEGER NOT NULL,
    due_at REAL,
    priority INTEGER NOT NULL,
    job_type TEXT NOT NULL,
    retry_count INTEGER NOT NULL DEFAULT 0,
    max_retries INTEGER NOT NULL,
    timeout_seconds INTEGER NOT NULL,
    last_error TEXT,
    created_at REAL NOT NULL,
    updated_at REAL NOT NULL,
    scheduled_at REAL,
    started_at REAL,
    completed_at REAL,
    expires_at REAL,
    tags BLOB,
    idempotency_key TEXT UNIQUE,
    parent_job_id TEXT,
    dependencies_met INTEGER NOT NULL,
    completion_webhook TEXT,
    worker_id TEXT,
    lease_id TEXT,
    lease_expires_at REAL,
    progress REAL,
    progress_message TEXT
) STRICT;
CREATE INDEX jobs_to_claim ON jobs (queue_name, priority DESC, created_at, seq) WHERE ready = 1;
CREATE INDEX jobs_to_come ON jobs (due_at) WHERE due_at IS NOT NULL;
CREATE INDEX jobs_waiting_for_parents ON jobs (parent_job_id) WHERE dependencies_met = 0;
CREATE INDEX jobs_by_lease_end ON jobs (lease_expires_at) WHERE status = 'processing';
CREATE INDEX jobs_by_expiry ON jobs (expires_at) WHERE expires_at IS NOT NULL;
CREATE INDEX jobs_by_status ON jobs (queue_name, status);

-- Apart from jobs, so that a change of status does not rewrite a large payload.
CREATE TABLE payloads (
    seq INTEGER PRIMARY KEY REFERENCES jobs ON DELETE CASCADE,
    payload BLOB NOT NULL
) STRICT;
CREATE TABLE results (
    seq INTEGER PRIMARY KEY REFERENCES jobs ON DELETE CASCADE,
    result BLOB NOT NULL
) STRICT;

CREATE TABLE history (
    id INTEGER PRIMARY KEY,
    seq INTEGER NOT NULL REFERENCES jobs ON DELETE CASCADE,
    event_type TEXT NOT NULL,
    worker_id TEXT,
    details BLOB,
    created_at REAL NOT NULL
) STRICT;
CREATE INDEX history_by_job ON history (seq);

CREATE TABLE queues (
    queue_name TEXT PRIMARY KEY,
    id TEXT NOT NULL,
    max_retries INTEGER NOT NULL,
    default_timeout INTEGER NOT NULL,
    rate_limit INTEGER,
    enabled INTEGER NOT NULL,
    settings BLOB NOT NULL,
    paused_at REAL,
    created_at REAL NOT NULL,
    updated_at REAL NOT NULL
) STRICT;

CREATE TABLE workers (
    id TEXT PRIMARY KEY,
    queue_name TEXT NOT NULL,
    queue_names BLOB NOT NULL,
    hostname TEXT NOT NULL,
    worker_type TEXT,
    version TEXT,
    max_concurrency INTEGER NOT NULL,
    current_jobs INTEGER NOT NULL DEFAULT 0,
    status TEXT NOT NULL,
    metadata BLOB,
    registered_at REAL NOT NULL,
    last_heartbeat REAL NOT NULL,
    updated_at REAL NOT NULL,
    jobs_processed INTEGER NOT NULL DEFAULT 0,
    jobs_failed INTEGER NOT NULL DEFAULT 0
) STRICT;

CREATE TABLE revoked_tokens (
    token_id TEXT PRIMARY KEY,
    expires_at REAL NOT NULL
) STRICT;
"""


class Database:
    """The open file, a temporary one if `path` is None.

    `on_commit` is called after every transaction. Raises ConfigError when the file cannot be used: unwritable, in use,
    no database, or from another version.
    """

    def __init__(self, path: str | None, *, on_commit: Callable[[], None] = lambda: None) -> None:
        self._on_commit = on_commit
        name = TEMPORARY if path is None else path
        try:
            # The app may be built in one thread and served in another; it is used by one at a time all the same.
            self._connection = sqlite3.connect(name, isolation_level=None, timeout=0.0, check_same_thread=False)
            self._connection.row_factory = sqlite3.Row
            self._prepare(name)
        except sqlite3.Error as error:
            self._abandon()
            raise ConfigError(f"--db {name}: {error}") from error
        except ConfigError:
            self._abandon()
            raise

    def execute(self, sql: str, values: Values = ()) -> sqlite3.Cursor:
        return self._connection.execute(sql, values)

    def execute_each(self, sql: str, rows: Iterable[Values]) -> None:
        self._connection.executemany(sql, rows)

    def first(self, sql: str, values: Values = ()) -> Row | None:
        row: Row | None = self._connection.execute(sql, values).fetchone()
        return row

    def all(self, sql: str, values: Values = ()) -> list[Row]:
        return self._connection.execute(sql, values).fetchall()

    def value(self, sql: str, values: Values = ()) -> Any:
        """The first column of the first row; None without a row."""
        row = self._connection.execute(sql, values).fetchone()
        return None if row is None else row[0]

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """All or nothing. The body must not await."""
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._connection.execute("COMMIT")
            self._on_commit()
        except BaseException:
            if self._connection.in_transaction:  # a COMMIT that failed may have rolled back itself
                self._connection.execute("ROLLBACK")
            raise

    def is_usable(self) -> bool:
        try:
            return bool(self.value("SELECT 1"))
        except sqlite3.Error:
            return False

    def close(self) -> None:
        """A second call does nothing."""
        self._connection.close()

    def _prepare(self, name: str) -> None:
        # Before the first access, or WAL would set up shared memory that nobody shares.
        self.execute("PRAGMA locking_mode = EXCLUSIVE")
        self.execute(f"PRAGMA journal_mode = {'MEMORY' if name == TEMPORARY else 'WAL'}")
        self.execute("PRAGMA synchronous = NORMAL")
        self.execute("PRAGMA foreign_keys = ON")
        self.execute("PRAGMA temp_store = MEMORY")
        version = self.value("PRAGMA user_version")
        if version == 0 and not self.value("SELECT count(*) FROM sqlite_master"):
            self._connection.executescript(f"BEGIN IMMEDIATE;{_SCHEMA}PRAGMA user_version = {SCHEMA_VERSION};COMMIT;")
        elif version != SCHEMA_VERSION:
            raise ConfigError(f"--db {name}: not a database of this version of the dev-server")
        with self.transaction():  # takes the lock, and shows now rather than later that the file can be written
            self.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")

    def _abandon(self) -> None:
        with contextlib.suppress(AttributeError):  # connect itself may have failed
            self._connection.close()

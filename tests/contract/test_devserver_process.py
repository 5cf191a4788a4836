"""The server as a process: how it starts, how it refuses to, how it ends, what it keeps."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.requests import Request
from starlette.types import Message

from spooled_supervisor.devserver import ServerConfig, validation
from spooled_supervisor.devserver.config import is_loopback
from spooled_supervisor.devserver.errors import ApiError
from spooled_supervisor.devserver.jobs import NewJob
from spooled_supervisor.errors import ConfigError
from tests.support.devserver import REPOSITORY, DevServer, command, dev_server, local_server

STOP_LIMIT_S = 2.0


def refused(*line: str, **environment: str) -> tuple[int, str]:
    """Run a command that must end by itself: its exit status and what it said on stderr."""
    done = subprocess.run(
        line, capture_output=True, text=True, cwd=REPOSITORY, timeout=20, env={**os.environ, **environment}, check=False
    )
    assert done.stdout == ""
    return done.returncode, done.stderr


# Starting


def test_the_ready_line_names_an_address_that_answers() -> None:
    with dev_server() as server:
        assert server.url.startswith("http://127.0.0.1:")
        assert server.client.call("GET", "/jobs") == []


def test_a_body_without_a_length_is_measured_as_it_comes() -> None:
    def chunks() -> Iterator[bytes]:
        for _ in range(3):
            yield b" " * (1 << 20)

    with dev_server() as server:
        headers = {"Content-Type": "application/json"}
        assert server.client.http.post("/jobs", content=chunks(), headers=headers).status_code == 413
        body = b'{"queue_name": "q", "payload": 1}'
        assert server.client.http.post("/jobs", content=iter([body]), headers=headers).status_code == 201


def test_a_body_that_stalls_is_not_awaited_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    async def stalling() -> Message:
        await asyncio.sleep(10)
        raise AssertionError("still awaited")

    headers = [(b"content-type", b"application/json"), (b"content-length", b"100")]
    request = Request({"type": "http", "method": "POST", "path": "/", "headers": headers}, stalling)
    monkeypatch.setattr(validation, "BODY_LIMIT_S", 0.05)
    with pytest.raises(ApiError) as refusal:
        asyncio.run(validation.read_fields(request))
    assert (refusal.value.status, refusal.value.code) == (408, "REQUEST_TIMEOUT")


def test_the_key_comes_from_the_flag_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPOOLED_DEV_API_KEY", "sp_test_from_environment")
    with dev_server() as server:
        assert server.api_key == "sp_test_from_environment"
        server.client.call("GET", "/jobs")
    with dev_server(api_key="sp_test_from_flag") as server:
        assert server.api_key == "sp_test_from_flag"


def test_a_port_in_use_is_one_clear_line_and_exit_78() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        status, message = refused(*command(port=port))
    assert status == 78
    assert message == f"spooled dev-server: cannot listen on 127.0.0.1 port {port}: Address already in use\n"


def test_a_database_that_cannot_be_written_is_one_clear_line_and_exit_78(tmp_path: Path) -> None:
    path = tmp_path / "no" / "such" / "directory" / "jobs.db"
    status, message = refused(*command(port=0, db=path))
    assert status == 78
    assert message == f"spooled dev-server: --db {path}: unable to open database file\n"


def test_a_file_that_is_no_database_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("not a database, but somebody's notes " * 100)
    status, message = refused(*command(port=0, db=path))
    assert (status, message) == (78, f"spooled dev-server: --db {path}: file is not a database\n")
    assert path.read_text().startswith("not a database")


def test_a_database_of_something_else_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "other.db"
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE theirs (x)")
    connection.close()
    with pytest.raises(ConfigError, match="not a database of this version"), local_server(db=str(path)):
        pass


def test_two_servers_cannot_share_a_database(tmp_path: Path) -> None:
    path = tmp_path / "jobs.db"
    with dev_server(db=path):
        status, message = refused(*command(port=0, db=path))
    assert (status, message) == (78, f"spooled dev-server: --db {path}: database is locked\n")


def test_an_address_that_others_can_reach_must_be_allowed() -> None:
    status, message = refused(*command(host="0.0.0.0"))
    assert status == 78
    assert "--allow-remote" in message
    assert ServerConfig(host="0.0.0.0", allow_remote=True).host == "0.0.0.0"


@pytest.mark.parametrize("missing", ["starlette", "uvicorn"])
def test_without_its_libraries_the_message_names_the_extra(missing: str) -> None:
    program = (
        f"import sys; sys.modules[{missing!r}] = None\n"
        "sys.argv[1:] = ['--port', '0']\n"
        "from spooled_supervisor.devserver.__main__ import main\n"
        "sys.exit(main())"
    )
    status, message = refused(sys.executable, "-c", program)
    assert status == 78
    assert message == f"spooled dev-server: {missing} is not installed; install spooled-supervisor[dev-server]\n"


def test_a_flag_that_makes_no_sense_is_a_usage_error() -> None:
    assert refused(*command(retry_base_s="soon"))[0] == 64


def test_importing_the_package_imports_no_server() -> None:
    program = (
        "import sys, spooled_supervisor.devserver\n"
        "sys.exit(any(name in sys.modules for name in ('starlette', 'uvicorn', 'sqlite3', 'asyncio')))"
    )
    assert refused(sys.executable, "-c", program) == (0, "")


def test_bad_settings_are_told_all_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        ServerConfig(host="example.com", port=70000, api_key="eyJ short", worker_offline_s=0, retry_base_s=-1)
    text = str(caught.value)
    for flag in ("--host", "--port", "--api-key", "--worker-offline", "--retry-base"):
        assert flag in text


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("h", False)],
)
def test_loopback_is_recognised(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


# Ending


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_signal_ends_it_cleanly_and_quickly_although_streams_are_open(number: signal.Signals) -> None:
    with dev_server() as server, server.client.http.stream("GET", "/events") as response:
        lines = response.iter_lines()
        assert next(lines) == ": connected"
        began = time.monotonic()
        server.process.send_signal(number)
        assert server.process.wait(10) == 0
        assert time.monotonic() - began < STOP_LIMIT_S
        assert not [line for line in lines if line and not line.startswith(":")]
        assert server.log_text() == ""


def connected(server: DevServer, head: str) -> socket.socket:
    """A connection that has sent this much of a request, and reads little of the answer."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", server.port))
    connection.sendall(f"{head}\r\nHost: local\r\nAuthorization: Bearer {server.api_key}\r\n".encode())
    return connection


def test_a_stop_while_a_body_stalls_is_a_clean_end() -> None:
    with dev_server() as server, connected(server, "POST /api/v1/jobs HTTP/1.1") as connection:
        connection.sendall(b"Content-Type: application/json\r\nContent-Length: 100\r\nExpect: 100-continue\r\n\r\n{")
        assert connection.recv(100).startswith(b"HTTP/1.1 100 ")  # the server reads the body now
        server.stop()


def test_a_stop_while_a_listener_does_not_read_is_a_clean_end() -> None:
    with dev_server() as server, connected(server, "GET /api/v1/events?events=job.completed HTTP/1.1") as connection:
        connection.sendall(b"\r\n")
        assert connection.recv(10).startswith(b"HTTP/1.1 2")
        for _ in range(12):
            server.client.create("q")
            (job,) = server.client.call("POST", "/jobs/claim", {"queue_name": "q", "worker_id": "w"})["jobs"]
            server.client.call("POST", f"/jobs/{job['id']}/complete", {"result": "x" * 900_000})
        server.stop()


def test_the_temporary_database_is_on_disk_and_leaves_nothing_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with dev_server() as server:
        job_id, *_ = [server.client.create("q", {"text": "x" * 500_000}) for _ in range(8)]  # more than memory keeps
        opened = {os.readlink(path) for path in Path(f"/proc/{server.process.pid}/fd").iterdir()}
        assert any(name.startswith(str(tmp_path)) for name in opened)
        assert server.client.job(job_id)["payload"] == {"text": "x" * 500_000}
        server.kill()
    assert not list(tmp_path.iterdir())


def test_what_a_refusal_has_begun_is_undone_in_a_temporary_database_too() -> None:
    with local_server() as server:
        jobs = [NewJob("q", b"{}"), NewJob("q", b"{}", parent_job_id="none")]
        with pytest.raises(ApiError, match="parent_job_id"):
            server.services.jobs.create_all(jobs, server.clock())
        assert server.ok("GET", "/jobs/stats")["total"] == 0


# Keeping


def test_jobs_and_leases_outlive_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "jobs.db"
    with dev_server(db=path) as server:
        waiting, running = server.client.bulk("q", [{"n": 1}, {"n": 2}], default_priority=1)[::-1]
        (job,) = server.client.call("POST", "/jobs/claim", {"queue_name": "q", "worker_id": "w"})["jobs"]
        assert job["id"] == running
        token = server.client.call("POST", "/auth/login", {"api_key": server.api_key})["access_token"]
    with dev_server(db=path) as server:
        assert server.client.job(waiting)["payload"] == {"n": 2}
        ack = {"worker_id": "w", "lease_id": job["lease_id"], "result": 5}
        server.client.call("POST", f"/jobs/{running}/complete", ack)
        assert server.client.job(running)["result"] == 5
        headers = {"Authorization": f"Bearer {token}"}
        assert server.client.http.get("/jobs", headers=headers).status_code == 200


def test_what_was_answered_outlives_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "jobs.db"
    with dev_server(db=path) as server:
        job_id = server.client.create("q", "precious")
        server.kill()
    with dev_server(db=path) as server:
        assert server.client.job(job_id)["payload"] == "precious"

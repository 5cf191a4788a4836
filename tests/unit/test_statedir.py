"""One supervisor per state directory, and a worker id that outlives it."""

from __future__ import annotations

import os
import re
import signal
import stat
from pathlib import Path

import pytest

from spooled_supervisor.errors import EX_CONFIG, ConfigError
from spooled_supervisor.statedir import MAX_WORKER_ID, StateDir


def test_it_is_made_for_this_user_alone_and_holds_our_pid(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b"
    with StateDir(path) as state:
        assert state.path == path
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
        assert stat.S_IMODE((path / "lock").stat().st_mode) == 0o600
        assert (path / "lock").read_text() == f"{os.getpid()}\n"
    assert (path / "lock").read_text() == ""


def test_a_second_supervisor_is_refused_and_told_the_pid_and_the_way_out(tmp_path: Path) -> None:
    with StateDir(tmp_path), pytest.raises(ConfigError) as caught, StateDir(tmp_path):
        pass
    assert caught.value.exit_code == EX_CONFIG
    assert f"in use by the supervisor with pid {os.getpid()};" in str(caught.value)
    assert "--state-dir" in str(caught.value)
    with StateDir(tmp_path):
        pass


def test_a_lock_without_a_pid_in_it_still_refuses(tmp_path: Path) -> None:
    with StateDir(tmp_path):
        (tmp_path / "lock").write_text("")
        with pytest.raises(ConfigError, match="pid another process"), StateDir(tmp_path):
            pass


def test_what_a_dead_supervisor_has_left_in_the_lock_does_not_matter(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text("4711 and a long text\n")
    with StateDir(tmp_path):
        assert (tmp_path / "lock").read_text() == f"{os.getpid()}\n"


def test_a_program_that_is_started_does_not_inherit_the_lock(tmp_path: Path) -> None:
    with StateDir(tmp_path) as state:
        assert not os.get_inheritable(state._lock_fd)


def test_a_fork_of_the_program_does_not_keep_the_lock(tmp_path: Path) -> None:
    with StateDir(tmp_path):
        pid = os.fork()
        if pid == 0:
            signal.pause()
            os._exit(0)
    try:
        with StateDir(tmp_path):
            pass
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_a_path_that_cannot_be_a_directory_is_a_configuration_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match=r"must be a directory that this user may write \(give --state-dir\)"):
            StateDir(path).__enter__()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_that_may_not_be_written_is_a_configuration_error(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="Permission denied"):
        StateDir(tmp_path).__enter__()


# --- the worker id ----------------------------------------------------------------------------------------------------


def test_the_worker_id_is_made_once(tmp_path: Path) -> None:
    with StateDir(tmp_path) as state:
        made = state.worker_id("host-1")
        assert re.fullmatch(r"host-1-[0-9a-f]{16}", made)
        assert state.worker_id("host-2") == made
    with StateDir(tmp_path) as state:
        assert state.worker_id("host-1") == made


def test_two_directories_on_one_host_are_two_workers(tmp_path: Path) -> None:
    assert StateDir(tmp_path).worker_id("host") != StateDir(_made(tmp_path / "b")).worker_id("host")


def _made(path: Path) -> Path:
    path.mkdir()
    return path


@pytest.mark.parametrize("hostname", ["", "h\u00f6st name/..", "x" * 300, "a.b-c_d"])
def test_any_host_name_makes_an_id_that_the_service_takes(tmp_path: Path, hostname: str) -> None:
    assert re.fullmatch(rf"[A-Za-z0-9_.-]{{1,{MAX_WORKER_ID}}}", StateDir(tmp_path).worker_id(hostname))


@pytest.mark.parametrize("kept", ["", "\n", "a b", "x" * (MAX_WORKER_ID + 1), "a/b"])
def test_an_id_that_cannot_be_used_is_replaced(tmp_path: Path, kept: str) -> None:
    (tmp_path / "worker-id").write_text(kept)
    made = StateDir(tmp_path).worker_id("host")
    assert made.startswith("host-")
    assert (tmp_path / "worker-id").read_text() == made + "\n"


def test_an_id_that_somebody_wrote_by_hand_is_kept(tmp_path: Path) -> None:
    (tmp_path / "worker-id").write_text("  my-worker.7\n")
    assert StateDir(tmp_path).worker_id("host") == "my-worker.7"


def test_an_id_that_cannot_be_read_or_kept_is_a_configuration_error(tmp_path: Path) -> None:
    (tmp_path / "worker-id").mkdir()
    with pytest.raises(ConfigError, match="the worker id cannot be kept there"):
        StateDir(tmp_path).worker_id("host")
    other = _made(tmp_path / "other")
    (other / "worker-id").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="the worker id cannot be kept there"):
        StateDir(other).worker_id("host")


def test_no_draft_is_left_behind(tmp_path: Path) -> None:
    StateDir(tmp_path).worker_id("host")
    assert [path.name for path in tmp_path.iterdir()] == ["worker-id"]

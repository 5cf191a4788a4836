"""The API key follows its file, and never gets worse than the last one that was good."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from spooled_supervisor import keys
from spooled_supervisor.config import KEY_LIMIT_BYTES, ApiConfig, Secret
from spooled_supervisor.keys import LOOK_AGAIN_S, ApiKey
from tests.support.clock import FakeClock, fake_time

NO_KEYS = [b"newkey\n# since May\n", b"new key\n", b"new\x1bkey\n", b"k" * (KEY_LIMIT_BYTES + 1)]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    return fake_time(monkeypatch, keys)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    path.write_text("first\n")
    return path


def a_key(file: Path | None) -> ApiKey:
    return ApiKey(ApiConfig("http://localhost", Secret("first"), key_file=file))


def later(key: ApiKey, clock: FakeClock) -> str:
    """The key, after the file is looked at again."""
    clock.advance(LOOK_AGAIN_S)
    return key()


def test_a_key_without_a_file_never_changes(clock: FakeClock) -> None:
    key = a_key(None)
    assert key() == "first"
    assert later(key, clock) == "first"


def test_a_rotated_key_is_read_again_after_a_while(clock: FakeClock, file: Path) -> None:
    key = a_key(file)
    assert key() == "first"
    file.write_text("second-longer\n")
    clock.advance(LOOK_AGAIN_S - 0.1)
    assert key() == "first"
    clock.advance(0.1)
    assert key() == "second-longer"


def test_a_key_that_was_rotated_while_the_app_was_imported_is_the_first_to_be_used(
    clock: FakeClock, file: Path
) -> None:
    file.write_text("second\n")  # "first" was read from it long ago
    assert a_key(file)() == "second"


def test_a_file_that_is_replaced_by_one_of_the_same_size_is_read_again(clock: FakeClock, file: Path) -> None:
    key = a_key(file)
    other = file.with_name("new")
    other.write_text("other\n")
    os.utime(other, ns=(file.stat().st_atime_ns, file.stat().st_mtime_ns))
    other.replace(file)
    assert later(key, clock) == "other"


@pytest.mark.parametrize("content", [b"", b"  \n", b"\xff\xfe\n", "schl\u00fcssel\n".encode(), *NO_KEYS])
def test_a_file_that_holds_no_key_leaves_the_last_one_in_place(clock: FakeClock, file: Path, content: bytes) -> None:
    key = a_key(file)
    file.write_bytes(content)
    assert later(key, clock) == "first"
    file.write_text("third\n")
    assert later(key, clock) == "third"


def test_a_new_key_is_told_of_before_it_is_given_out_and_only_once(clock: FakeClock, file: Path) -> None:
    told: list[str] = []
    key = ApiKey(ApiConfig("http://localhost", Secret("first"), key_file=file), told.append)
    for content in ("first\n", "second\n", "second", "no key\n", "third\n"):
        file.write_text(content)
        later(key, clock)
    assert told == ["second", "third"]


def test_a_file_that_is_gone_leaves_the_last_key_in_place_until_it_is_back(clock: FakeClock, file: Path) -> None:
    key = a_key(file)
    file.unlink()
    assert later(key, clock) == "first"
    file.write_text("second\n")
    assert later(key, clock) == "second"


def test_a_directory_in_its_place_changes_nothing(clock: FakeClock, file: Path) -> None:
    key = a_key(file)
    file.unlink()
    file.mkdir()
    assert later(key, clock) == "first"


def test_the_file_is_not_looked_at_for_every_request(clock: FakeClock, file: Path) -> None:
    key = a_key(file)
    assert later(key, clock) == "first"
    file.write_text("second\n")
    clock.advance(LOOK_AGAIN_S / 2)
    assert [key(), key()] == ["first", "first"]


def test_a_file_that_cannot_be_read_yet_is_looked_at_again(
    file: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Moved into place first and given to us afterwards: its content, its time and its size do not change by that."""
    key = a_key(file)
    file.write_text("the-second\n")
    with monkeypatch.context() as patched:
        patched.setattr(keys, "read_key", _denied)
        assert later(key, clock) == "first"
    assert later(key, clock) == "the-second"


def _denied(*_: object) -> str:
    raise PermissionError

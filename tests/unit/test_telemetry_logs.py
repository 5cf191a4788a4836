"""The log as a whole: which events become lines, what happens when they cannot, and other people's loggers."""

from __future__ import annotations

import gc
import json
import logging
import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from spooled_supervisor import events as happened
from spooled_supervisor.errors import EX_CONFIG, ConfigError
from spooled_supervisor.events import Event, Events
from spooled_supervisor.telemetry import logs

VALUES = {"int": 1, "float": 0.123456789, "str": "text", "bool": True, "tuple[str, ...]": ("a", "b")}
CLASSES = sorted((c for c in vars(happened).values() if isinstance(c, type) and issubclass(c, Event)), key=str)
CLASSES.remove(Event)


def any_of(kind: type[Event], /, **fields: object) -> Event:
    """An event of this class; fields that are not given have some value of their type."""
    types = {name: kind.__annotations__[name].split(" | ")[0] for name in kind.__struct_fields__}
    made: Any = {name: VALUES.get(type_) for name, type_ in types.items()}
    return kind(**{**made, **fields})


class Reader:
    """The other end of standard error."""

    def __init__(self) -> None:
        self.fd, self.writer = os.pipe()
        os.set_blocking(self.fd, False)

    def text(self) -> str:
        received = b""
        while True:
            try:
                part = os.read(self.fd, 1 << 16)
            except BlockingIOError:
                return received.decode()
            if not part:
                return received.decode()
            received += part

    def documents(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.text().splitlines()]

    def names(self) -> list[str]:
        return [document["event"] for document in self.documents()]


@pytest.fixture
def reader() -> Iterator[Reader]:
    end = Reader()
    yield end
    os.close(end.fd)
    os.close(end.writer)


@pytest.fixture
def events() -> Events:
    return Events()


@pytest.fixture
def log(reader: Reader, events: Events) -> Iterator[logs.EventLog]:
    made = logs.setup("info", "json", events=events, stream_fd=reader.writer, secrets=["sp_live_key"])
    yield made
    made.close()


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("form", logs.FORMATS)
def test_every_event_makes_a_line_exactly_from_its_level_on(kind: type[Event], form: str, reader: Reader) -> None:
    for level in ("debug", "info", "warn", "error"):
        bus = Events()
        log = logs.setup(level, form, events=bus, stream_fd=reader.writer)
        bus.emit(any_of(kind))
        log.close()
        is_logged = kind.level >= logs.LEVELS[level]
        assert reader.text().count(kind.name) == int(is_logged)


@pytest.mark.usefixtures("log")
def test_a_line_has_all_fields_of_its_event(reader: Reader, events: Events) -> None:
    events.emit(any_of(happened.ChildExited, pid=4711, signal="SIGKILL", exit_code=None, uptime_s=12.4000000001))
    (document,) = reader.documents()
    assert set(document) == {"ts", "level", "event"} | set(happened.ChildExited.__struct_fields__)
    assert document["event"] == "child_exited"
    assert document["pid"] == 4711
    assert document["exit_code"] is None
    assert document["uptime_s"] == 12.4


@pytest.mark.parametrize(
    ("severity", "level"), [("debug", None), ("info", "info"), ("warn", "warn"), ("error", "error")]
)
@pytest.mark.usefixtures("log")
def test_a_line_of_a_handler_has_the_level_it_asked_for(
    severity: str, level: str | None, reader: Reader, events: Events
) -> None:
    events.emit(any_of(happened.JobLogged, severity=severity, message="hello"))
    assert [document["level"] for document in reader.documents()] == ([level] if level else [])


@pytest.mark.usefixtures("log")
def test_a_severity_nobody_knows_counts_as_info(reader: Reader, events: Events) -> None:
    events.emit(any_of(happened.JobLogged, severity="loud"))
    assert reader.documents()[0]["level"] == "info"


@pytest.mark.usefixtures("log")
def test_secrets_do_not_reach_the_stream(reader: Reader, events: Events) -> None:
    events.emit(any_of(happened.JobLogged, severity="info", message="found sp_live_key in the payload"))
    logging.getLogger("anybody").warning("Authorization: Bearer %s", "sp_live_key")
    written = reader.text()
    assert "sp_live_key" not in written
    assert written.count("***") == 2


def test_a_secret_that_is_found_later_does_not_reach_the_stream_either(
    log: logs.EventLog, reader: Reader, events: Events
) -> None:
    log.keep_secret("sp_live_rotated")
    events.emit(any_of(happened.JobLogged, severity="info", message="sp_live_key, then sp_live_rotated"))
    assert "***, then ***" in reader.text()


def test_lines_that_were_dropped_are_counted_and_told_of_first(
    log: logs.EventLog, reader: Reader, events: Events
) -> None:
    event = any_of(happened.JobCompleted)
    while not log.dropped:
        events.emit(event)
    for _ in range(9):
        events.emit(event)
    assert log.dropped == 10
    reader.text()
    log.write(logging.INFO, "works_again")
    documents = [document for document in reader.documents() if document["event"] != "job_completed"]
    assert [(d["event"], d.get("count")) for d in documents] == [("log_lines_dropped", 10), ("works_again", None)]
    events.emit(event)
    assert reader.names() == ["job_completed"]
    assert log.dropped == 10


def test_a_reader_that_went_away_stops_nothing(events: Events) -> None:
    reader, writer = os.pipe()
    log = logs.setup("info", "text", events=events, stream_fd=writer)
    os.close(reader)
    for _ in range(3):
        events.emit(any_of(happened.JobCompleted))
    assert log.dropped == 3
    log.close()
    os.close(writer)


def test_a_standard_error_that_was_never_open_stops_nothing(events: Events) -> None:
    log = logs.setup("info", "text", events=events, stream_fd=99_999)
    events.emit(any_of(happened.JobCompleted))
    logging.getLogger("anybody").error("hello")
    assert log.dropped == 2
    log.close()


@pytest.mark.parametrize(
    ("kind", "number"), [("ChildReady", 7), ("JobCompleted", 6), ("LoopLagged", 4), ("ForkFailed", 3)]
)
@pytest.mark.parametrize("form", logs.FORMATS)
def test_lines_to_the_journal_begin_with_their_priority(
    kind: str, number: int, form: str, reader: Reader, events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = os.fstat(reader.writer)
    monkeypatch.setenv("JOURNAL_STREAM", f"{status.st_dev}:{status.st_ino}")
    log = logs.setup("debug", form, events=events, stream_fd=reader.writer)
    events.emit(any_of(getattr(happened, kind)))
    log.close()
    assert reader.text().startswith(f"<{number}>")


@pytest.mark.parametrize("value", ["", "1:2", "nonsense"])
def test_lines_to_anything_else_have_no_priority(
    value: str, reader: Reader, events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JOURNAL_STREAM", value)
    log = logs.setup("info", "json", events=events, stream_fd=reader.writer)
    events.emit(any_of(happened.JobCompleted))
    log.close()
    assert reader.text().startswith("{")


@pytest.mark.usefixtures("log")
def test_records_of_the_standard_logging_become_lines(reader: Reader) -> None:
    logging.getLogger("asyncio").error("Task exception was never retrieved: %d", 7)
    logging.getLogger("asyncio").debug("Using selector")
    (document,) = reader.documents()
    assert document["event"] == "log_record"
    assert document["level"] == "error"
    assert document["logger"] == "asyncio"
    assert document["message"] == "Task exception was never retrieved: 7"


def test_http_libraries_are_heard_from_warning_on_whatever_the_level(reader: Reader, events: Events) -> None:
    log = logs.setup("debug", "json", events=events, stream_fd=reader.writer)
    logging.getLogger("httpx").info("HTTP Request: POST ...")
    logging.getLogger("httpcore.http11").debug("send_request_headers ...")
    logging.getLogger("httpx").warning("odd")
    log.close()
    assert [document["message"] for document in reader.documents()] == ["odd"]


def test_a_level_above_warning_holds_for_http_libraries_too(reader: Reader, events: Events) -> None:
    log = logs.setup("error", "json", events=events, stream_fd=reader.writer)
    logging.getLogger("httpx").warning("odd")
    log.close()
    assert reader.text() == ""


@pytest.mark.usefixtures("log")
def test_a_subscriber_that_fails_is_told_of_with_its_traceback(reader: Reader, events: Events) -> None:
    def broken(event: Event) -> None:
        raise ZeroDivisionError("in a subscriber")

    events.subscribe(broken)
    events.emit(any_of(happened.ChildReady))
    (document,) = reader.documents()
    assert document["level"] == "error"
    assert "ZeroDivisionError: in a subscriber" in document["exception"]


class Mute:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")

    __str__ = __repr__


def test_a_record_that_does_not_fit_its_arguments_harms_nobody(
    log: logs.EventLog, reader: Reader, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = logging.getLogger()  # pytest's own handlers raise for such records
    monkeypatch.setattr(root, "handlers", [h for h in root.handlers if type(h).__module__ == logs.__name__])
    logging.getLogger("anybody").warning("%d of %d", "x")
    assert "does not fit its arguments" in reader.documents()[0]["message"]
    logging.getLogger("anybody").warning(Mute())
    assert log.dropped == 1
    assert capfd.readouterr().err == ""


class LogsWhenCollected:
    def __init__(self) -> None:
        self.me = self

    def __del__(self) -> None:
        logging.getLogger("asyncio").error("Task was destroyed but it is pending!")


class LogsWhenShown:
    def __str__(self) -> str:
        logging.getLogger("inner").error("from within")
        return "outer"


def test_a_destructor_that_logs_while_we_write_neither_hangs_nor_tears_lines(
    log: logs.EventLog, reader: Reader, events: Events
) -> None:
    log.write(logging.INFO, "outer", value=LogsWhenShown())
    assert log.dropped == 1
    LogsWhenCollected()
    threshold = gc.get_threshold()
    gc.set_threshold(1)
    try:
        events.emit(any_of(happened.JobCompleted))
    finally:
        gc.set_threshold(*threshold)
    assert reader.names()[0] == "outer"


def test_lines_of_threads_do_not_mix(log: logs.EventLog, reader: Reader) -> None:
    def talk(letter: str) -> None:
        for _ in range(50):
            log.write(logging.INFO, "talk", text=letter * 100)

    threads = [threading.Thread(target=talk, args=(letter,)) for letter in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    written = [document["text"] for document in reader.documents()]
    assert sorted(written) == sorted(letter * 100 for letter in "abcd" for _ in range(50))
    assert log.dropped == 0


def test_close_leaves_logging_as_it_was_and_hears_nothing_more(reader: Reader, events: Events) -> None:
    root, httpx = logging.getLogger(), logging.getLogger("httpx")
    before = (root.level, list(root.handlers), httpx.level)
    log = logs.setup("debug", "json", events=events, stream_fd=reader.writer)
    assert (root.level, httpx.level) == (logging.DEBUG, logging.WARNING)
    log.close()
    log.close()
    assert (root.level, list(root.handlers), httpx.level) == before
    events.emit(any_of(happened.JobCompleted))
    assert reader.text() == ""


def test_a_level_or_format_that_does_not_exist_is_the_operators_business(events: Events) -> None:
    with pytest.raises(ConfigError) as caught:
        logs.setup("loud", "xml", events=events)
    assert caught.value.exit_code == EX_CONFIG
    assert [problem.split(":")[0] for problem in caught.value.problems] == ["--log-level", "--log-format"]

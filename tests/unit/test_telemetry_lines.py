"""Lines of text and JSON: one line, printable, bounded, without secrets, whatever a field holds."""

from __future__ import annotations

import json
import logging
import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spooled_supervisor.telemetry.lines import MASK, MAX_BODY_BYTES, MAX_SECRETS, Lines, level_name

FORMATS = ["text", "json"]
SECRET = 'sp_live_"quoted"\\and\nbroken-é\ud800'

any_text = st.text(st.characters(exclude_categories=()), max_size=60)
any_value = st.one_of(any_text, st.none(), st.booleans(), st.integers(), st.floats(), st.tuples(any_text, any_text))


def line(form: str, secrets: tuple[str, ...] = (), /, **fields: object) -> str:
    return Lines(form, secrets).line(logging.INFO, "child_exited", fields).decode()


def test_text_is_key_and_value_with_quotes_where_needed() -> None:
    written = line("text", pid=4711, cause="killed by SIGKILL", queues=("a", "b"), ok=True, empty="", nothing=None)
    at, rest = written.split(" ", 1)
    assert at.endswith("Z")
    assert rest == 'INFO  child_exited pid=4711 cause="killed by SIGKILL" queues=a,b ok=true empty=""'


def test_json_is_one_flat_object_with_time_level_and_event_first() -> None:
    document = json.loads(line("json", pid=4711, cause="killed", exit_code=None, queues=("a", "b")))
    assert list(document) == ["ts", "level", "event", "pid", "cause", "exit_code", "queues"]
    assert document["level"] == "info"
    assert document["event"] == "child_exited"
    assert document["exit_code"] is None
    assert document["queues"] == ["a", "b"]


@pytest.mark.parametrize(
    ("level", "word"),
    [(5, "debug"), (10, "debug"), (20, "info"), (25, "info"), (30, "warn"), (40, "error"), (50, "error")],
)
def test_levels_have_the_four_words_that_handlers_use(level: int, word: str) -> None:
    assert level_name(level) == word


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(
    "value", ["a\nb", "a\rb", "\x1b[31mred", "\x00", "\x7f", "\x9b31m", "\u2028", "\u202eabc", "\ud800", "\U000e0001"]
)
def test_what_could_move_a_terminal_or_break_a_line_is_escaped(form: str, value: str) -> None:
    written = line(form, message=value)
    assert written.isprintable()


def test_text_escapes_are_the_ones_people_know() -> None:
    written = line("text", message='say "hi"\t\\now\nthen \x1b \ud800')
    assert written.endswith(r'message="say \"hi\"\t\\now\nthen \x1b \ud800"')


def test_a_line_of_text_can_be_split_as_a_shell_does() -> None:
    assert shlex.split(line("text", cause="killed by = sign", job_id="a=b"))[3:] == [
        "cause=killed by = sign",
        "job_id=a=b",
    ]


@pytest.mark.parametrize("form", FORMATS)
@given(fields=st.dictionaries(st.sampled_from(["pid", "cause", "output", "names"]), any_value))
def test_any_values_make_one_printable_line(form: str, fields: dict[str, object]) -> None:
    written = line(form, **fields)
    assert written.isprintable()
    assert len(written.encode()) <= MAX_BODY_BYTES
    if form == "json":
        assert json.loads(written).keys() == {"ts", "level", "event", *fields}


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("filling", ["x", "\n", "\x00", "é", "\u2028", "\ud800", "😀", '"'])
@pytest.mark.parametrize("size", [8200, 100_000])
def test_a_long_value_is_cut_in_the_middle_with_a_mark(form: str, filling: str, size: int) -> None:
    written = line(form, message="head" + filling * size + "tail", pid=7, output="short")
    assert len(written.encode()) <= MAX_BODY_BYTES
    assert "characters cut]" in written
    assert "head" in written
    assert "tail" in written
    assert "short" in written
    if form == "json":
        assert json.loads(written)["pid"] == 7


@pytest.mark.parametrize("form", FORMATS)
def test_a_line_that_just_fits_is_not_cut(form: str) -> None:
    room = MAX_BODY_BYTES - len(line(form, message="xx")) + 2
    assert "x" * room in line(form, message="x" * room)
    assert "cut" in line(form, message="x" * (room + 1))


@pytest.mark.parametrize("form", FORMATS)
def test_long_lists_and_many_long_values_are_cut_too(form: str) -> None:
    written = line(form, names=tuple("n" * 50 for _ in range(10_000)), **{f"f{n}": "v" * 9000 for n in range(20)})
    assert len(written.encode()) <= MAX_BODY_BYTES
    assert "more]" in written


@pytest.mark.parametrize("form", FORMATS)
def test_more_fields_than_fit_leave_the_event_and_a_mark(form: str) -> None:
    written = line(form, **{f"field_{n}": "value" for n in range(5000)})
    assert len(written) < 200
    assert "child_exited" in written
    assert "cut" in written


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("secret", ["sp_live_0123456789", SECRET, "nothing", "a b", "ü", "\x7f\x9b"])
def test_secrets_are_masked_wherever_they_stand(form: str, secret: str) -> None:
    written = line(form, (secret,), message=f"key {secret}{secret}, again {secret}", names=(secret, "b"))
    shown = json.loads(written) if form == "json" else None
    assert written.count(MASK) == 4
    if shown is not None:
        assert shown["message"] == f"key {MASK}{MASK}, again {MASK}"
        assert shown["names"] == [MASK, "b"]


@pytest.mark.parametrize("form", FORMATS)
def test_a_secret_at_the_cut_does_not_show_its_half(form: str) -> None:
    secret = "sp_live_" + "s" * 40
    for offset in range(0, 60, 7):
        written = line(form, (secret,), message="x" * (3000 - offset) + secret + "y" * 9000)
        assert "sssss" not in written


@given(before=any_text, after=any_text)
def test_a_secret_is_masked_between_any_characters(before: str, after: str) -> None:
    for form in FORMATS:
        assert "sp_live_abc" not in line(form, ("sp_live_abc",), message=f"{before}sp_live_abc{after}")


def test_of_two_secrets_the_longer_is_masked_first_and_an_empty_one_is_ignored() -> None:
    assert json.loads(line("json", ("", "key", "key-long"), message="key-long key"))["message"] == f"{MASK} {MASK}"


@pytest.mark.parametrize("form", FORMATS)
def test_a_secret_that_comes_later_is_masked_and_of_many_the_latest_are(form: str) -> None:
    lines = Lines(form, ["key-0-"])
    for n in range(MAX_SECRETS):
        lines.keep_secret(f"key-{n}-")
    lines.keep_secret("")
    assert b"key-" not in lines.line(logging.INFO, "x", {"all": [f"key-{n}-" for n in range(MAX_SECRETS)]})
    lines.keep_secret("one-more")
    written = lines.line(logging.INFO, "x", {"all": ["key-0-", "key-1-", "one-more"]})
    assert b"key-0-" in written
    assert b"key-1-" not in written
    assert b"one-more" not in written


def test_a_backslash_before_a_secret_changes_nothing() -> None:
    assert json.loads(line("json", ("nfoo",), message="\nfoo"))["message"] == "\nfoo"


class Unspeakable:
    def __str__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.parametrize("form", FORMATS)
def test_objects_of_other_types_are_shown_by_their_text(form: str) -> None:
    written = line(form, error=ValueError("bad"), worse=Unspeakable(), big=2**80)
    assert "bad" in written
    assert "RuntimeError" in written
    assert str(2**80) in written

"""Jobs, and the words for outcomes that are no success."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spooled_supervisor.job import (
    MAX_ERROR_CHARS,
    Crashed,
    Failed,
    Job,
    Released,
    Succeeded,
    TimedOut,
    clip_error,
    error_text,
)
from tests.support.fakes import make_job

anything = st.text(st.characters(), max_size=100) | st.builds(
    lambda part, times: part * times, st.text(st.characters(), min_size=1, max_size=40), st.integers(1, 400)
)
surrogates = st.text(st.characters(categories=["Cs", "Cc", "Ll"]), max_size=3000)


def is_acceptable(text: str) -> bool:
    text.encode("utf-8")  # no lone surrogates
    return 1 <= len(text) <= MAX_ERROR_CHARS and "\x00" not in text and bool(text.strip())


@given(anything | surrogates)
def test_a_clipped_text_is_always_one_that_the_service_takes(text: str) -> None:
    assert is_acceptable(clip_error(text))


@given(anything | surrogates, anything, st.floats(0.0, 1e6))
def test_every_outcome_that_is_no_success_has_a_text_that_the_service_takes(a: str, b: str, limit_s: float) -> None:
    for outcome in (Failed(a), TimedOut(limit_s, a), Crashed(a, b), Released(a)):
        assert is_acceptable(error_text(outcome))


@given(st.text(st.characters(categories=["L", "N", "P"]), min_size=1, max_size=MAX_ERROR_CHARS))
def test_a_text_that_fits_is_left_as_it_is(text: str) -> None:
    assert clip_error(text) == text


def test_a_long_text_keeps_its_beginning_and_its_end() -> None:
    text = clip_error("A" * 3000 + "Z" * 3000)
    assert len(text) == MAX_ERROR_CHARS
    assert text.startswith("A" * 1000)
    assert text.endswith("Z" * 500)
    assert " [...] " in text


@pytest.mark.parametrize("text", ["", "   ", "\n\t"])
def test_a_blank_text_is_replaced_by_words(text: str) -> None:
    assert clip_error(text) == "the job failed without a message"


def test_what_utf_8_cannot_carry_is_spelled_out() -> None:
    assert clip_error("a\udc80b\x00c") == "a\\udc80b\\x00c"


def test_a_timeout_names_its_limit_and_where_the_handler_stood() -> None:
    text = error_text(TimedOut(90.0, "File app.py, line 3 in thumbnail"))
    assert "limit of 90 s" in text
    assert text.endswith("File app.py, line 3 in thumbnail")
    assert "\n" not in error_text(TimedOut(0.25))


def test_a_crash_tells_its_cause_and_the_last_output() -> None:
    assert error_text(Crashed("killed by SIGSEGV", "loading")) == "killed by SIGSEGV\nlast output:\nloading"
    assert error_text(Crashed("killed by SIGSEGV")) == "killed by SIGSEGV"


@pytest.mark.parametrize(
    ("retry_count", "max_retries", "is_last"), [(0, 3, False), (2, 3, False), (3, 3, True), (4, 3, True), (0, 0, True)]
)
def test_the_last_attempt_is_the_one_with_no_retries_left(retry_count: int, max_retries: int, is_last: bool) -> None:
    assert make_job(retry_count=retry_count, max_retries=max_retries).is_last_attempt is is_last


def test_two_leases_of_one_job_have_different_keys() -> None:
    assert make_job(lease_id="a").key != make_job(lease_id="b").key
    assert make_job(lease_id=None).key == ("job-1", None)


def test_neither_payload_nor_result_is_shown_in_a_repr() -> None:
    job = Job("j", "q", "l", b"secret", 0, 0, 1.0, 30.0, 0.0)
    assert "secret" not in repr(job)
    assert "secret" not in repr(Succeeded(b"secret"))

"""Exceptions: who must act, what the process ends with, and what their texts say."""

from __future__ import annotations

import ast
import inspect

import pytest

from spooled_supervisor import errors
from spooled_supervisor.errors import (
    EX_CONFIG,
    EX_FAILURE,
    EX_NOPERM,
    EX_USAGE,
    ApiRefused,
    ApiUnavailable,
    AppError,
    ConfigError,
    CredentialsRefused,
    IllegalTransition,
    JobAborted,
    LeaseLost,
    NonRetryableError,
    ProtocolError,
    SupervisorError,
)

OURS = [
    ConfigError("x"),
    AppError("x"),
    ApiUnavailable("x"),
    ApiRefused(422, "X", "x"),
    CredentialsRefused(401, "X", "x"),
    LeaseLost("job-1", "x"),
    ProtocolError("x"),
    IllegalTransition("x", "A", "B"),
]


@pytest.mark.parametrize("error", OURS, ids=lambda error: type(error).__name__)
def test_every_error_of_ours_has_one_base_and_ends_the_process_with_a_failure(error: SupervisorError) -> None:
    assert isinstance(error, SupervisorError)
    assert error.exit_code > 0
    assert str(error)


def test_exit_codes_follow_sysexits() -> None:
    assert (EX_FAILURE, EX_USAGE, EX_NOPERM, EX_CONFIG) == (1, 64, 77, 78)
    assert ApiRefused(403, "X", "x").exit_code == EX_FAILURE
    assert CredentialsRefused(401, "X", "x").exit_code == EX_NOPERM
    assert AppError("x").exit_code == EX_CONFIG


def test_a_configuration_error_says_every_problem_on_a_line_of_its_own() -> None:
    error = ConfigError(["first", "second"], exit_code=EX_USAGE)
    assert error.problems == ["first", "second"]
    assert str(error) == "first\nsecond"
    assert error.exit_code == EX_USAGE


def test_a_single_problem_is_a_list_of_one() -> None:
    assert ConfigError("only").problems == ["only"]


def test_a_problem_list_that_changes_later_does_not_change_the_error() -> None:
    problems = ["first"]
    error = ConfigError(problems)
    problems.append("second")
    assert error.problems == ["first"]


def test_messages_are_built_from_facts() -> None:
    assert str(ApiRefused(422, "VALIDATION_ERROR", "too long")) == "HTTP 422 VALIDATION_ERROR: too long"
    assert str(LeaseLost("job-1", "expired")) == "job job-1: lease lost: expired"
    assert str(IllegalTransition("ChildState", "GONE", "EXITED")) == "ChildState: EXITED cannot happen in GONE"


def test_what_handlers_meet_is_apart_from_what_the_supervisor_raises() -> None:
    assert not issubclass(JobAborted, Exception)
    assert not issubclass(NonRetryableError, SupervisorError)
    assert NonRetryableError.retryable is False
    assert JobAborted("timeout").reason == "timeout"


def test_an_except_exception_of_a_handler_does_not_swallow_an_abort() -> None:
    def handler() -> None:
        try:
            raise JobAborted("shutdown")
        except Exception:
            pytest.fail("swallowed")

    with pytest.raises(JobAborted):
        handler()


def test_the_module_imports_nothing() -> None:
    tree = ast.parse(inspect.getsource(errors))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    assert [ast.unparse(node) for node in imports] == ["from __future__ import annotations"]

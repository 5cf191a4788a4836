"""Every exception of the package, arranged by who has to act next.

    SupervisorError
    ├─ ConfigError        the operator: fix the option or the file      (exit 78; 64 where the command line is at fault)
    │  └─ AppError        the author of the app: it cannot be imported  (exit 78)
    ├─ ApiUnavailable     nobody: try again later                       (transport, 5xx, rate limit, a senseless answer)
    ├─ ApiRefused         the operator: our request is not allowed      (401, 403, 422, a quota)
    │  └─ CredentialsRefused                                            (exit 77 at start)
    ├─ LeaseLost          nobody: the job moved on; stop it, report nothing
    ├─ ProtocolError      the child broke the frames: kill it, its job counts as crashed
    └─ IllegalTransition  us: a bug in this package, crash loudly

`JobAborted` and `NonRetryableError` stand apart: handlers meet them, the supervisor never raises them.
Foreign exceptions are turned into these at one edge per foreign library. This module imports nothing.
"""

from __future__ import annotations

EX_OK = 0
EX_FAILURE = 1
EX_USAGE = 64
EX_UNAVAILABLE = 69
EX_NOPERM = 77
EX_CONFIG = 78


class SupervisorError(Exception):
    """Base of all of ours; `exit_code` is what the process ends with when nobody handles it."""

    exit_code = EX_FAILURE


class ConfigError(SupervisorError):
    """Settings that cannot be used: every problem at once, each naming option, value and rule."""

    def __init__(self, problems: list[str] | str, *, exit_code: int = EX_CONFIG) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        self.exit_code = exit_code
        super().__init__("\n".join(self.problems))


class AppError(ConfigError):
    """The app cannot be imported or is not one; the message ends with its own last traceback lines."""


class ApiUnavailable(SupervisorError):
    """The service gave no usable answer; the same request may be sent again after `retry_after_s` (or a back-off).

    `rate_limited` tells that the service refused before processing (429), so that even a claim may be repeated.
    """

    def __init__(self, reason: str, *, retry_after_s: float | None = None, rate_limited: bool = False) -> None:
        self.reason = reason
        self.retry_after_s = retry_after_s
        self.rate_limited = rate_limited
        super().__init__(reason)


class ApiRefused(SupervisorError):
    """The service understood the request and said no; repeating it unchanged will not help.

    `status` is the HTTP status, or 0 where there is none: over gRPC `code` says all.
    """

    def __init__(self, status: int, code: str, message: str) -> None:
        self.status = status
        self.code = code
        self.message = message
        super().__init__(f"HTTP {status} {code}: {message}" if status else f"gRPC {code}: {message}")

    @property
    def is_of_the_key(self) -> bool:
        """Whether what the key or the plan may do is refused, and not what was sent: that may change."""
        return self.status in (403, 429) or self.code in ("PERMISSION_DENIED", "QUOTA_EXCEEDED")


class CredentialsRefused(ApiRefused):
    """401: the API key is unknown or revoked."""

    exit_code = EX_NOPERM


class LeaseLost(SupervisorError):
    """The service does not accept our lease for this job any more; nothing may be reported for it."""

    def __init__(self, job_id: str, reason: str) -> None:
        self.job_id = job_id
        self.reason = reason
        super().__init__(f"job {job_id}: lease lost: {reason}")


class ProtocolError(SupervisorError):
    """A child (or the fork server) sent bytes that are no message; it cannot be trusted any further."""


class IllegalTransition(SupervisorError):
    """An event that its state has no row for."""

    def __init__(self, thing: str, state: object, event: object) -> None:
        super().__init__(f"{thing}: {event} cannot happen in {state}")


class NonRetryableError(Exception):
    """Raise it from a handler to fail the job for good. Any exception with `retryable = False` does the same."""

    retryable = False


class JobAborted(BaseException):
    """The running job was told to stop; `reason` is `shutdown`, `timeout`, `lease_lost` or `operator`.

    A BaseException, so that a handler's `except Exception` does not swallow it.
    """

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)

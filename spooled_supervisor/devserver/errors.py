"""Refusals: every answer of 400 and above, and the JSON body that it carries.

Owns status, `code` and wording; does not know who refuses. A handler raises `ApiError`, one exception handler turns it
into `{"error", "code", "message", "details"?}`. Clients decide by `code`; of the messages only "already completed" and
"does not match the job's current lease" are read by any, so those two are wordings to keep.
"""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from spooled_supervisor.devserver.database import DatabaseFault

NOT_FOUND_MESSAGE = "Resource not found"

_CODES = {
    400: "BAD_REQUEST",
    401: "UNAUTHORIZED",
    403: "ACCESS_DENIED",
    404: "NOT_FOUND",
    405: "METHOD_NOT_ALLOWED",
    408: "REQUEST_TIMEOUT",
    409: "CONFLICT",
    413: "PAYLOAD_TOO_LARGE",
    415: "UNSUPPORTED_MEDIA_TYPE",
    422: "VALIDATION_ERROR",
    429: "RATE_LIMIT_EXCEEDED",
}


class ApiError(Exception):
    """A request that is answered with a refusal. `code` defaults to the usual one of the status."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        details: list[dict[str, str]] | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code or _CODES.get(status, "INTERNAL_ERROR")
        self.details = details
        self.headers = headers

    def response(self) -> Response:
        body: dict[str, Any] = {"error": self.code.lower(), "code": self.code, "message": self.message}
        if self.details is not None:
            body["details"] = self.details
        return Response(msgspec.json.encode(body), self.status, self.headers, media_type="application/json")


def not_found() -> ApiError:
    return ApiError(404, NOT_FOUND_MESSAGE)


def conflict(message: str) -> ApiError:
    return ApiError(409, message)


def already(status: str) -> ApiError:
    """The job is not running any more; a client that repeats its own complete reads success from this."""
    return ApiError(409, f"Job is already {status}")


def lease_expired(message: str) -> ApiError:
    return ApiError(409, message, code="LEASE_EXPIRED")


def unauthorized(message: str) -> ApiError:
    return ApiError(401, message, headers={"WWW-Authenticate": "Bearer"})


def invalid_json(message: str) -> ApiError:
    return ApiError(400, message, code="INVALID_JSON")


def broken_rule(field: str, message: str, code: str) -> ApiError:
    """400: the field has the right type and a value that is not allowed."""
    details = [{"field": field, "message": message, "code": code}]
    return ApiError(400, message, code="VALIDATION_ERROR", details=details)


async def answer_refusal(_request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def answer_http_exception(request: Request, error: Exception) -> Response:
    """What the router itself refuses. A missing route is named, so that clients can tell it from a missing job."""
    assert isinstance(error, HTTPException)
    messages = {
        404: f"No route matches {request.method} {request.url.path}",
        405: f"{request.method} is not allowed on {request.url.path}",
    }
    headers = dict(error.headers) if error.headers else None
    return ApiError(error.status_code, messages.get(error.status_code, error.detail), headers=headers).response()


async def answer_fault(request: Request, error: Exception) -> Response:
    """500: Starlette raises the error again after this answer, so it reaches the log as well."""
    code = "DATABASE_ERROR" if isinstance(error, DatabaseFault) else "INTERNAL_ERROR"
    response = ApiError(500, "An internal error occurred", code=code).response()
    response.headers["X-Request-Id"] = request.state.request_id
    return response

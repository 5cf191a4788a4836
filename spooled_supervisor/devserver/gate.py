"""What every request passes: a request id, and the question who asks.

Owns the headers `X-Request-Id` and `Authorization`; does not know what is asked for. Everything under /api/v1 needs a
credential, but for the two paths that give one; health paths need none. A token in the query string counts only on the
event stream, which browsers cannot send headers to.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import uuid
from urllib.parse import parse_qs

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from spooled_supervisor.devserver.auth import Claims, Tokens
from spooled_supervisor.devserver.errors import ApiError, unauthorized

API_PREFIX = "/api/v1"
EVENTS_PATH = f"{API_PREFIX}/events"
OPEN_PATHS = frozenset({f"{API_PREFIX}/auth/login", f"{API_PREFIX}/auth/refresh"})

_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")


class Gate:
    """ASGI middleware; leaves `claims` (None without a token) and `request_id` in the request's state."""

    def __init__(self, app: ASGIApp, tokens: Tokens) -> None:
        self._app = app
        self._tokens = tokens

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        request_id = _request_id(headers)
        state = scope.setdefault("state", {})
        state["request_id"] = request_id.decode()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"].append((b"x-request-id", request_id))
            await send(message)

        try:
            state["claims"] = self._admit(scope["path"], headers, scope["query_string"])
        except ApiError as refusal:
            await refusal.response()(scope, receive, send_with_id)
        else:
            with contextlib.suppress(asyncio.CancelledError):  # uvicorn's, at a stop that has waited long enough
                await self._app(scope, receive, send_with_id)

    def _admit(self, path: str, headers: list[tuple[bytes, bytes]], query: bytes) -> Claims | None:
        if not path.startswith(API_PREFIX) or path in OPEN_PATHS:
            return None
        header = next((value for name, value in headers if name == b"authorization"), None)
        if header is not None:
            return self._tokens.authenticate(header.decode("latin-1"))
        given = parse_qs(query.decode("latin-1")) if path == EVENTS_PATH else {}
        for credential in given.get("token", []) + given.get("api_key", []):
            return self._tokens.check_credential(credential)
        raise unauthorized("Missing or invalid authorization header")


def _request_id(headers: list[tuple[bytes, bytes]]) -> bytes:
    for name, value in headers:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
            return value
    return str(uuid.uuid4()).encode()

"""Keys for tokens: login, refresh, me, validate, logout.

Owns the answers of /api/v1/auth; what a token is, `auth` knows. Workers do not need these: the API key is a bearer
itself. SDKs exchange it before they open an event stream.
"""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from spooled_supervisor.devserver import shapes
from spooled_supervisor.devserver.auth import ACCESS_LIFETIME_S, REFRESH_LIFETIME_S, Claims
from spooled_supervisor.devserver.config import MIN_API_KEY_CHARS
from spooled_supervisor.devserver.errors import ApiError, unauthorized
from spooled_supervisor.devserver.services import Services
from spooled_supervisor.devserver.shapes import json_response
from spooled_supervisor.devserver.validation import read_fields, read_optional_fields

MAX_TOKEN = 4096


class AuthRoutes:
    def __init__(self, services: Services) -> None:
        self._tokens = services.tokens

    def routes(self) -> list[Route]:
        return [
            Route("/auth/login", self.login, methods=["POST"]),
            Route("/auth/refresh", self.refresh, methods=["POST"]),
            Route("/auth/me", self.me, methods=["GET"]),
            Route("/auth/validate", self.validate, methods=["POST"]),
            Route("/auth/logout", self.logout, methods=["POST"]),
        ]

    async def login(self, request: Request) -> Response:
        """→ 200 with an access and a refresh token."""
        fields = await read_fields(request)
        api_key = fields.text("api_key", low=MIN_API_KEY_CHARS, high=MAX_TOKEN, required=True)
        fields.check()
        if not self._tokens.is_api_key(str(api_key)):
            raise unauthorized("Invalid API key")
        return json_response(
            {**self._access(), "refresh_token": self._tokens.issue("refresh"), "refresh_expires_in": REFRESH_LIFETIME_S}
        )

    async def refresh(self, request: Request) -> Response:
        """→ 200 with a new access token; the refresh token stays good."""
        fields = await read_fields(request)
        token = fields.text("refresh_token", high=MAX_TOKEN, required=True)
        fields.check()
        self._tokens.read(str(token), "refresh")
        return json_response(self._access())

    async def me(self, request: Request) -> Response:
        claims: Claims = request.state.claims or self._tokens.claims("access")
        return json_response(
            {
                "organization_id": claims.org_id,
                "api_key_id": claims.api_key_id,
                "queues": claims.queues,
                "issued_at": shapes.rfc3339(claims.iat),
                "expires_at": shapes.rfc3339(claims.exp),
            }
        )

    async def validate(self, request: Request) -> Response:
        """→ 200 `{"valid", "error"?, "claims"?}`, whether the token is good or not."""
        fields = await read_fields(request)
        token = fields.text("token", high=MAX_TOKEN, required=True)
        fields.check()
        try:
            claims = self._tokens.read(str(token), "access")
        except ApiError as refusal:
            return json_response({"valid": False, "error": refusal.message})
        return json_response({"valid": True, "claims": msgspec.structs.asdict(claims)})

    async def logout(self, request: Request) -> Response:
        """→ 204; the token asked with is revoked, and the refresh token in the body if there is one."""
        fields = await read_optional_fields(request, empty_json_allowed=True)
        token = fields.text("refresh_token", high=MAX_TOKEN)
        fields.check()
        if request.state.claims is not None:
            self._tokens.revoke(request.state.claims)
        if token is not None:
            self._tokens.revoke(self._tokens.read(token, "refresh"))
        return Response(status_code=204)

    def _access(self) -> dict[str, Any]:
        return {"access_token": self._tokens.issue("access"), "token_type": "Bearer", "expires_in": ACCESS_LIFETIME_S}

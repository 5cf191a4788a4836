"""Who may ask: the one API key, and the tokens that it can be exchanged for.

Owns making, reading and revoking tokens (RFC 7519, HS256 of RFC 7518 3.2); does not know requests. Tokens are signed
with a secret derived from the API key: they survive a restart and die with a change of the key. The algorithm is ours,
never the token's header. A refresh token is good for `refresh` only. Sources: /api/v1/auth/login and its siblings.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import uuid
from collections.abc import Callable
from typing import Literal, TypeAlias

import msgspec

from spooled_supervisor.devserver.config import JWT_PREFIX
from spooled_supervisor.devserver.database import Database
from spooled_supervisor.devserver.errors import unauthorized
from spooled_supervisor.devserver.shapes import ORGANIZATION_ID

ACCESS_LIFETIME_S = 24 * 3600
REFRESH_LIFETIME_S = 30 * 24 * 3600

API_KEY_ID = "00000000-0000-4000-8000-000000000002"

Kind: TypeAlias = Literal["access", "refresh"]
_LIFETIMES_S: dict[Kind, int] = {"access": ACCESS_LIFETIME_S, "refresh": REFRESH_LIFETIME_S}

_HEADER = b'{"alg":"HS256","typ":"JWT"}'
_SCHEME = "Bearer "


class Claims(msgspec.Struct, frozen=True, kw_only=True):
    """What a token says. `iat` and `exp` are epoch seconds, numbers as SDKs expect them."""

    org_id: str = ORGANIZATION_ID
    api_key_id: str = API_KEY_ID
    queues: tuple[str, ...] = ("*",)
    kind: str
    iat: int
    exp: int
    jti: str


class Tokens:
    def __init__(self, api_key: str, db: Database, clock: Callable[[], float]) -> None:
        self._api_key = api_key.encode()
        self._secret = hashlib.sha256(b"spooled dev-server token\0" + self._api_key).digest()
        self._db = db
        self._clock = clock

    def authenticate(self, header: str) -> Claims | None:
        """The claims behind an Authorization header: `Bearer KEY` or `Bearer TOKEN`, exactly so. Raises 401.

        None for the key, which says nothing by itself: `claims` makes what a token for it would say.
        """
        if not header.startswith(_SCHEME):
            raise unauthorized("Missing or invalid authorization header")
        return self.check_credential(header[len(_SCHEME) :])

    def check_credential(self, credential: str) -> Claims | None:
        if credential.startswith(JWT_PREFIX):
            return self.read(credential, "access")
        if not self.is_api_key(credential):
            raise unauthorized("Invalid API key")
        return None

    def is_api_key(self, credential: str) -> bool:
        return hmac.compare_digest(credential.encode(errors="replace"), self._api_key)

    def claims(self, kind: Kind) -> Claims:
        """Claims for a token made now."""
        now = int(self._clock())
        return Claims(kind=kind, iat=now, exp=now + _LIFETIMES_S[kind], jti=str(uuid.uuid4()))

    def issue(self, kind: Kind) -> str:
        signed = _base64(_HEADER) + b"." + _base64(msgspec.json.encode(self.claims(kind)))
        return (signed + b"." + self._signature(signed)).decode()

    def read(self, token: str, kind: Kind) -> Claims:
        """Raises 401 for a token that is not ours, of the other kind, expired or revoked."""
        signed, _, signature = token.encode(errors="replace").rpartition(b".")
        if not hmac.compare_digest(signature, self._signature(signed)):
            raise unauthorized("Invalid token")
        claims = _decode_claims(signed)
        if claims is None or claims.kind != kind:
            raise unauthorized("Invalid token")
        if claims.exp <= self._clock():
            raise unauthorized("Token expired")
        if self._db.value("SELECT 1 FROM revoked_tokens WHERE token_id = ?", (claims.jti,)):
            raise unauthorized("Token revoked")
        return claims

    def revoke(self, claims: Claims) -> None:
        sql = "INSERT OR IGNORE INTO revoked_tokens (token_id, expires_at) VALUES (?, ?)"
        self._db.execute(sql, (claims.jti, float(claims.exp)))

    def _signature(self, signed: bytes) -> bytes:
        return _base64(hmac.digest(self._secret, signed, "sha256"))


def _decode_claims(signed: bytes) -> Claims | None:
    body = signed.rpartition(b".")[2]
    try:
        return msgspec.json.decode(base64.urlsafe_b64decode(body + b"=" * (-len(body) % 4)), type=Claims)
    except msgspec.DecodeError:  # signed by us, so only another version of us could have meant something else
        return None


def _base64(data: bytes) -> bytes:
    """URL-safe, without padding (RFC 7515, appendix C)."""
    return base64.urlsafe_b64encode(data).rstrip(b"=")

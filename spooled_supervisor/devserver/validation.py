"""Request bodies: from bytes to checked values, with every problem named by its field.

Owns JSON decoding, field rules and limits; does not know what a request means. Two kinds of problem: a *shape* is wrong
(missing field, wrong JSON type: 422) or a *rule* is broken (too long, out of range: 400); shapes are told first.
Unknown fields are ignored. An absent field and null are the same, except for JSON values such as a payload.
JSON values keep the text they came in, so numbers of any size go out again digit for digit.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Collection
from datetime import UTC, datetime
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect, Request

from spooled_supervisor.devserver.errors import ApiError, invalid_json

MAX_BODY_BYTES = 2 << 20
MAX_PAYLOAD_BYTES = 1 << 20
MAX_METADATA_BYTES = 64 << 10
MAX_TEXT = 255
MAX_QUEUE_NAME = 100
BODY_LIMIT_S = 30.0
"""How long the whole body may take to come; a request that stalls is answered with 408."""

QUEUE_NAME = re.compile(r"\w[\w.\-]*")
"""Letters and digits of any script, `_`, `-`, `.`; the first is neither `.` nor `-` (POST /api/v1/jobs)."""

REGISTERED_QUEUE_NAME = re.compile(r"[\w.\-]+")
WORKER_ID = re.compile(r"[A-Za-z0-9._-]+")
HOSTNAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9._-]*[A-Za-z0-9_])?")

_JSON_TYPE = re.compile(r"application/(?:[\w.\-]+\+)?json\s*(?:;|$)", re.IGNORECASE)
_RAW_MEMBERS = msgspec.json.Decoder(dict[str, msgspec.Raw])


class Fields:
    """The members of one JSON object. Reading collects problems; `check()` raises them together.

    A getter takes several names where dialects differ: the first one present counts, problems carry the first name.
    Getters return None (or the default) for what is absent or wrong, so read everything, then check.
    """

    def __init__(self, values: dict[str, Any], text: bytes, prefix: str = "") -> None:
        self._values = values
        self._text = text
        self._prefix = prefix
        self._raw: dict[str, msgspec.Raw] | None = None
        self.shape_problems: list[dict[str, str]] = []
        self.rule_problems: list[dict[str, str]] = []

    def check(self) -> None:
        """Raise what was found: 422 for shapes, else 400 for rules."""
        if self.shape_problems:
            raise _refusal(422, self.shape_problems)
        if self.rule_problems:
            raise _refusal(400, self.rule_problems)

    def text(
        self,
        *names: str,
        low: int = 1,
        high: int = MAX_TEXT,
        required: bool = False,
        pattern: re.Pattern[str] | None = None,
        choices: Collection[str] | None = None,
    ) -> str | None:
        """A string of `low` to `high` characters that matches the whole pattern."""
        value = self._typed(names, str, "a string", required)
        if value is None:
            return None
        if not low <= len(value) <= high:
            self._rule(names[0], f"must have {low} to {high} characters", "length")
        elif pattern is not None and not pattern.fullmatch(value):
            self._rule(names[0], "contains characters that are not allowed", "invalid_characters")
        elif choices is not None and value not in choices:
            self._rule(names[0], f"must be one of {', '.join(sorted(choices))}", "invalid_value")
        else:
            return str(value)
        return None

    def whole(self, *names: str, low: int, high: int, required: bool = False) -> int | None:
        """An integer within bounds; `1.0` and `true` are none."""
        value = self._typed(names, int, "an integer", required)
        if value is None:
            return None
        if not low <= value <= high:
            self._rule(names[0], f"must be between {low} and {high}", "range")
            return None
        return int(value)

    def number(self, name: str, *, low: float, high: float, required: bool = False) -> float | None:
        value = self._typed((name,), (int, float), "a number", required)
        if value is None:
            return None
        if not low <= value <= high:
            self._rule(name, f"must be between {low:g} and {high:g}", "range")
            return None
        return float(value)

    def flag(self, name: str) -> bool | None:
        value = self._typed((name,), bool, "a boolean", False)
        return None if value is None else bool(value)

    def instant(self, name: str) -> float | None:
        """An RFC 3339 time with a zone, as epoch seconds."""
        value = self._typed((name,), str, "a timestamp", False)
        if value is None:
            return None
        at = parse_instant(value)
        if at is None:
            self._shape(name, "must be an RFC 3339 timestamp with a zone", "invalid_type")
        return at

    def texts(self, name: str, *, low: int = 0, high: int) -> list[str] | None:
        """An array of strings."""
        value = self._typed((name,), list, "an array of strings", False)
        if value is None:
            return None
        if not all(isinstance(item, str) for item in value):
            self._shape(name, "must be an array of strings", "invalid_type")
            return None
        if not low <= len(value) <= high:
            self._rule(name, f"must have {low} to {high} items", "length")
            return None
        return list(value)

    def json(self, name: str, *, limit: int, required: bool = False, containers_only: bool = False) -> bytes | None:
        """The text of any JSON value, null included; None only if the member is absent (or wrong)."""
        if name not in self._values:
            if required:
                self._shape(name, "is required", "missing_field")
            return None
        if containers_only and not isinstance(self._values[name], dict | list | None):
            self._shape(name, "must be an object or an array", "invalid_type")
            return None
        text = bytes(self._raw_members()[name])
        if len(text) > limit:
            self._rule(name, f"must be at most {limit} bytes of JSON", "too_large")
            return None
        return text

    def value(self, name: str) -> Any:
        """The decoded member, unchecked; None if absent."""
        return self._values.get(name)

    def items(self, name: str, *, low: int, high: int) -> list[Fields]:
        """The objects of a required array, each with its own problems; shapes that are wrong are ours."""
        value = self._typed((name,), list, "an array of objects", True)
        if value is None:
            return []
        if not all(isinstance(item, dict) for item in value):
            self._shape(name, "must be an array of objects", "invalid_type")
            return []
        if not low <= len(value) <= high:
            self._rule(name, f"must have {low} to {high} items", "length")
            return []
        texts = msgspec.json.decode(self._raw_members()[name], type=list[msgspec.Raw])
        pairs = enumerate(zip(value, texts, strict=True))
        return [Fields(item, bytes(text), f"{name}[{index}].") for index, (item, text) in pairs]

    def _typed(self, names: tuple[str, ...], kind: type | tuple[type, ...], wording: str, required: bool) -> Any:
        name = next((name for name in names if self._values.get(name) is not None), names[0])
        value = self._values.get(name)
        if value is None:
            if required and name in self._values:
                self._shape(name, f"must be {wording}", "invalid_type")
            elif required:
                self._shape(name, "is required", "missing_field")
            return None
        # JSON's true is no integer, although Python's is.
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            self._shape(name, f"must be {wording}", "invalid_type")
            return None
        return value

    def _raw_members(self) -> dict[str, msgspec.Raw]:
        if self._raw is None:
            try:
                self._raw = _RAW_MEMBERS.decode(self._text)
            except RecursionError as error:  # the first decoding began with fewer calls on the stack
                raise invalid_json(f"Malformed JSON: {error}") from error
        return self._raw

    def _shape(self, name: str, message: str, code: str) -> None:
        self.shape_problems.append(self._problem(name, message, code))

    def _rule(self, name: str, message: str, code: str) -> None:
        self.rule_problems.append(self._problem(name, message, code))

    def _problem(self, name: str, message: str, code: str) -> dict[str, str]:
        return {"field": self._prefix + name, "message": f"{name} {message}", "code": code}


def _refusal(status: int, problems: list[dict[str, str]]) -> ApiError:
    return ApiError(status, problems[0]["message"], code="VALIDATION_ERROR", details=problems)


async def read_fields(request: Request) -> Fields:
    """The JSON object that the request must carry."""
    if not _says_json(request):
        raise ApiError(415, "Expected a request with Content-Type: application/json")
    return parse_fields(await _read_body(request))


async def read_optional_fields(request: Request, *, empty_json_allowed: bool) -> Fields:
    """The JSON object that the request may carry.

    The service takes an empty body that claims to be JSON for malformed JSON on some paths (400) and ignores it on
    others; `empty_json_allowed` tells which kind this one is.
    """
    body = await _read_body(request)
    if not body and (empty_json_allowed or not _says_json(request)):
        return Fields({}, b"{}")
    if not _says_json(request):
        raise ApiError(415, "Expected a request with Content-Type: application/json")
    return parse_fields(body)


def parse_fields(body: bytes) -> Fields:
    """Raises 400 INVALID_JSON for text that is no JSON, 422 for JSON that is no object."""
    try:
        values = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise invalid_json(f"Malformed JSON: {error}") from error
    if not isinstance(values, dict):
        problem = {"field": "", "message": "the body must be a JSON object", "code": "invalid_type"}
        raise _refusal(422, [problem])
    return Fields(values, body)


def parse_instant(text: str) -> float | None:
    """Epoch seconds of an RFC 3339 time; None if it is none, names no zone, or is none of UTC's calendar."""
    try:
        named = datetime.fromisoformat(text)
        at = named.timestamp() if named.tzinfo is not None else None
    except (ValueError, OverflowError):
        return None
    return at if at is not None and is_in_calendar(at) else None


def is_in_calendar(at: float) -> bool:
    """Whether the instant can be written as a date again: what cannot would break every answer that shows it."""
    try:
        datetime.fromtimestamp(at, UTC)
    except (ValueError, OverflowError, OSError):
        return False
    return True


def _says_json(request: Request) -> bool:
    return _JSON_TYPE.match(request.headers.get("content-type", "")) is not None


async def _read_body(request: Request) -> bytes:
    """The whole body. A length that is announced is believed, one that is not is measured as it comes."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > MAX_BODY_BYTES:
        raise _too_large()
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_LIMIT_S):
            async for chunk in request.stream():
                body += chunk
                if len(body) > MAX_BODY_BYTES:
                    raise _too_large()
    except TimeoutError:
        headers = {"Connection": "close"}  # or the rest of the body would be awaited before the next request
        raise ApiError(408, "The request's body did not come in time", headers=headers) from None
    except ClientDisconnect:
        raise ApiError(400, "The request ended before its body did") from None  # nobody reads it; no traceback either
    return bytes(body)


def _too_large() -> ApiError:
    return ApiError(413, f"The request body is larger than {MAX_BODY_BYTES} bytes")

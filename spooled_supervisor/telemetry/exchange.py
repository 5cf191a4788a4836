"""One HTTP exchange: the head of a request in, a response out. No I/O.

A listener that only answers GET and HEAD needs little of HTTP, and that little is here rather than in a dependency that
the daemon would otherwise not have. Bodies are never read; every response closes the connection (RFC 9112 9.6), which
costs a scrape every few seconds nothing and leaves no state between requests.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from email.utils import formatdate
from http import HTTPStatus
from ipaddress import ip_address
from urllib.parse import urlsplit

from spooled_supervisor import timing
from spooled_supervisor.telemetry.texts import json_bytes

MAX_HEAD_BYTES = 16 * 1024

_END_OF_HEAD = re.compile(rb"\r?\n\r?\n")
_REQUEST_LINE = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+) (\S+) HTTP/1\.([01])")
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_HOST = re.compile(r"(\[[^\[\]]+\]|[^:\[\]]*)(?::[0-9]*)?")

# What we send is live, machine-made and for nobody else's page.
_HEADERS = {
    "Connection": "close",
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
}


@dataclass(frozen=True, slots=True)
class Request:
    """The head of a request; header names are in lower case, `host` has neither port nor brackets."""

    method: str
    path: str
    query: str
    host: str | None
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Response:
    """What is answered; `headers` are added to, and win over, those that every response has."""

    status: int
    body: bytes
    content_type: str = "application/json"
    headers: Mapping[str, str] = field(default_factory=dict)

    def encode(self, *, with_body: bool = True) -> bytes:
        """The bytes on the wire."""
        lines = {
            **_HEADERS,
            "Date": formatdate(timing.wall(), usegmt=True),
            "Content-Type": self.content_type,
            "Content-Length": str(len(self.body)),
            **self.headers,
        }
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        start = f"HTTP/1.1 {self.status} {HTTPStatus(self.status).phrase}\r\n{head}\r\n".encode("latin-1")
        return start + self.body if with_body else start


class BadRequest(Exception):
    """Bytes that are no request we can answer; carries the answer that says so."""

    def __init__(self, status: int, why: str) -> None:
        self.response = failure(status, why)
        super().__init__(why)


def json_response(status: int, value: object) -> Response:
    """A JSON document and a newline, for those who read it with curl."""
    return Response(status, json_bytes(value) + b"\n")


def failure(status: int, why: str, **headers: str) -> Response:
    """A refusal in JSON; underscores in header names stand for hyphens."""
    response = json_response(status, {"error": why})
    return Response(response.status, response.body, headers={k.replace("_", "-"): v for k, v in headers.items()})


def read_request(received: bytes) -> Request | None:
    """The request at the beginning of `received`, or None while its head is incomplete. Raises BadRequest."""
    received = received.lstrip(b"\r\n")  # RFC 9112 2.2: ignore empty lines before the request line
    end = _END_OF_HEAD.search(received)
    if (end.start() if end else len(received)) > MAX_HEAD_BYTES:
        raise BadRequest(431, f"the request's head is longer than {MAX_HEAD_BYTES} bytes")
    return _parse(received[: end.start()].decode("latin-1")) if end else None


def _parse(head: str) -> Request:
    first, *rest = re.split(r"\r?\n", head)
    line = _REQUEST_LINE.fullmatch(first)
    if line is None:
        raise BadRequest(400, "this is no HTTP/1.x request line")
    method, target, minor = line.groups()
    headers: dict[str, str] = {}
    for text in rest:
        # Not by one pattern: with blanks inside of a value, each of which may be the end, it takes their square.
        name, colon, value = text.partition(":")
        if not colon or _TOKEN.fullmatch(name) is None:
            raise BadRequest(400, "a header line cannot be read")
        name, value = name.lower(), value.strip(" \t")
        if name == "host" and name in headers:
            raise BadRequest(400, "there are two Host headers")
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    authority, path, query = _split_target(target)
    host = headers.get("host") if authority is None else authority
    if host is None and minor == "1":
        raise BadRequest(400, "HTTP/1.1 wants a Host header")
    return Request(method, path, query, None if host is None else _host_name(host), headers)


def _split_target(target: str) -> tuple[str | None, str, str]:
    """Authority, path and query of a request target; the first is None unless it is a whole URL (RFC 9112 3.2)."""
    try:
        parts = urlsplit(target)
    except ValueError:
        raise BadRequest(400, "the request target cannot be read") from None
    if target.startswith("/") and not target.startswith("//"):
        return None, parts.path, parts.query
    if parts.scheme in ("http", "https") and parts.netloc:
        return parts.netloc, parts.path or "/", parts.query
    if target == "*":
        return None, target, ""
    raise BadRequest(400, "the request target is neither a path nor a URL")


def _host_name(host: str) -> str:
    found = _HOST.fullmatch(host)
    if found is None:
        raise BadRequest(400, "the Host header cannot be read")
    return found[1].strip("[]").lower()


def is_local_name(host: str) -> bool:
    """Whether a Host can only have come from somebody who meant this machine or wrote an address.

    A web page on evil.example can make a browser connect to 127.0.0.1 by pointing its own name there (DNS rebinding);
    then the Host header still says evil.example.
    """
    if host == "localhost":
        return True
    try:
        ip_address(host)
    except ValueError:
        return False
    return True

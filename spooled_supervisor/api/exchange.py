"""One HTTP request with one total deadline. The only module that knows httpx; what is said and heard it does not know.

It talks to a transport directly: `AsyncClient` costs half as much CPU again per request, for what is not used here
(cookies, redirects, authentication flows).

    deadline      asyncio.timeout around everything: name lookup, connect, TLS, waiting, a body that trickles. The
                  time-outs of httpx start anew with every byte and are switched off.
    replay        a request that fails on a reused connection before it was answered is sent once more at once, because
                  servers and proxies close idle connections when they like; unless the caller forbids it.
    connections   HTTP/1.1, as many as there are calls: an acknowledgement or a renewal never waits behind a claim. The
                  supervisor bounds them itself: one claim per queue, one report and one renewal per job.
    cancellation  cancelling closes the connection (the server may have carried the request out or not) and leaves the
                  exchange usable.
"""

from __future__ import annotations

import asyncio
import importlib.util
import ssl
import sys
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import httpx

from spooled_supervisor import timing
from spooled_supervisor.api import answers
from spooled_supervisor.api.answers import Answer
from spooled_supervisor.errors import ApiUnavailable, ConfigError
from spooled_supervisor.events import ApiRequestFinished, Events

if importlib.util.find_spec("sniffio") is None:
    # httpcore tries to import it four times per request. A search that fails is not remembered and costs a tenth of the
    # request's CPU; None says at once that there is nothing to be found (the import system's "module cache").
    sys.modules["sniffio"] = None  # type: ignore[assignment]

Transport: TypeAlias = httpx.AsyncBaseTransport

KEEPALIVE_S = 15.0
"""How long an idle connection is kept: longer than polls and worker heartbeats are apart, shorter than the minute after
which common proxies and load balancers close theirs."""

MAX_IDLE_CONNECTIONS = 16
"""More are closed after their request. Each idle one costs 20 us per request, as httpcore looks at all of them."""

MAX_ANSWER_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Received:
    """An answer. `body` is None where it is content-encoded, which was not asked for; `replay` if it was sent twice.

    `started_at` (`timing.now`) is when the request that was answered was started.
    """

    answer: Answer
    body: bytes | None
    started_at: float
    replay: bool


class _Stale(ApiUnavailable):
    """A reused connection turned out to be closed."""


class Exchange:
    """Sends requests to one service with its API key, and emits ApiRequestFinished for each that was not cancelled."""

    def __init__(
        self,
        base_url: str,
        api_key: Callable[[], str],
        events: Events,
        *,
        ca_file: Path | None,
        user_agent: str,
        transport: Transport | None,
    ) -> None:
        self._prefix, netloc = _split(base_url)
        self._transport = transport or _make_transport(self._prefix, ca_file)
        self._api_key = api_key
        self._secret = ""  # the key of the latest request, to keep it out of messages
        self._events = events
        self._headers = [
            (b"Host", netloc),
            (b"User-Agent", user_agent.encode("ascii", "replace")),
            (b"Accept", b"application/json"),
            (b"Accept-Encoding", b"identity"),
            (b"Content-Type", b"application/json"),
        ]

    async def aclose(self) -> None:
        """Close all connections; requests that are still out fail."""
        await self._transport.aclose()

    async def post(
        self,
        operation: str,
        path: str,
        body: bytes,
        deadline: float,
        *,
        may_replay: bool = True,
        most_bytes: int = MAX_ANSWER_BYTES,
    ) -> Received:
        """`POST {base}/api/v1{path}` once (see `replay` above). Raises ApiUnavailable where there is no HTTP answer."""
        try:
            return await self._send(operation, path, body, deadline, most_bytes, replay=False)
        except _Stale:
            if not may_replay:
                raise
        return await self._send(operation, path, body, deadline, most_bytes, replay=True)

    async def _send(
        self, operation: str, path: str, body: bytes, deadline: float, most_bytes: int, *, replay: bool
    ) -> Received:
        request, watch = self._request(path, body)
        started_at = timing.now()
        if started_at >= deadline:
            raise ApiUnavailable("no time was left to send the request")
        response: httpx.Response | None = None
        status = "error"
        try:
            async with asyncio.timeout(deadline - started_at):
                response = await self._transport.handle_async_request(request)
                status = str(response.status_code)
                content = await _read_bounded(response, most_bytes)
        except TimeoutError as error:
            status = "timeout"
            raise ApiUnavailable("no answer in time") from error  # without a number, so that an outage has one reason
        except (httpx.HTTPError, OSError) as error:
            status = "timeout" if isinstance(error, httpx.TimeoutException) else "error"
            reason = answers.masked(f"{type(error).__name__}: {error}".rstrip(": "), self._secret)
            raise (_Stale if response is None and watch.reused else ApiUnavailable)(reason) from error
        except asyncio.CancelledError:
            status = ""
            raise
        finally:
            await asyncio.shield(watch.close() if response is None else _close(response))
            if status:
                self._events.emit(ApiRequestFinished(operation, status, timing.now() - started_at))
        return self._received(response, content, started_at, replay)

    def _request(self, path: str, body: bytes) -> tuple[httpx.Request, _Watch]:
        watch = _Watch()
        headers = [*self._headers, (b"Authorization", self._authorization()), (b"Content-Length", b"%d" % len(body))]
        request = httpx.Request(
            "POST",
            self._prefix + path,
            headers=headers,
            stream=httpx.ByteStream(body),
            extensions={"trace": watch},
        )
        return request, watch

    def _authorization(self) -> bytes:
        try:
            key = self._api_key().strip()
        except OSError as error:
            raise ApiUnavailable(f"the API key cannot be read: {error}") from error
        if not (key.isascii() and key.isprintable() and key and " " not in key):
            raise ApiUnavailable("the API key is empty, or has characters that no HTTP header can carry")
        self._secret = key
        return b"Bearer " + key.encode("ascii")

    def _received(self, response: httpx.Response, content: bytes, started_at: float, replay: bool) -> Received:
        header = response.headers.get
        if not content.startswith(b"{"):  # not of the service: its beginning may end in a log
            content = content.replace(self._secret.encode(), b"***")
        body = content if header("content-encoding", "identity").strip().lower() == "identity" else None
        answer = answers.facts(
            response.status_code,
            body,
            retry_after=header("retry-after"),
            date=header("date"),
            location=header("location"),
            secret=self._secret,
        )
        return Received(answer, body, started_at, replay)


class _Watch:
    """The `trace` extension of httpcore: whether a request has made a connection of its own, and which."""

    __slots__ = ("_connecting", "_sending", "_stream")

    def __init__(self) -> None:
        self._connecting = self._sending = False
        self._stream: Any = None

    async def __call__(self, event: str, info: Mapping[str, Any]) -> None:
        if event.endswith(".connect_tcp.started"):
            self._connecting = True
        elif event.endswith(".connect_tcp.complete"):
            self._stream = info["return_value"]
        elif event.endswith(".send_request_headers.started"):
            self._sending = True

    @property
    def reused(self) -> bool:
        """Whether the connection was kept from an earlier request."""
        return self._sending and not self._connecting

    async def close(self) -> None:
        """After a failure: httpcore forgets a connection whose TLS handshake is cancelled, without closing it."""
        if self._stream is not None:
            await self._stream.aclose()


async def _close(response: httpx.Response) -> None:
    """Give the connection back, or close it if the answer was not read to its end; does not wait for the network.

    Neither a deadline nor a cancellation may interrupt it: httpcore would never again know of the connection.
    """
    await response.stream.aclose()  # type: ignore[union-attr]  # ours are never the synchronous kind


async def _read_bounded(response: httpx.Response, most_bytes: int) -> bytes:
    chunks, size = [], 0
    async for chunk in response.stream:  # type: ignore[union-attr]
        size += len(chunk)
        if size > most_bytes:
            raise ApiUnavailable(f"HTTP {response.status_code} with an answer of more than {most_bytes} bytes")
        chunks.append(chunk)
    return b"".join(chunks)


# --- where to ---------------------------------------------------------------------------------------------------------


def _split(base_url: str) -> tuple[str, bytes]:
    """The prefix of every address, and the value of `Host`. A path in `base_url` is kept."""
    try:
        url = httpx.URL(base_url.strip())
    except httpx.InvalidURL as error:
        raise ConfigError(f"--api-url {base_url!r}: {error}") from error
    if url.scheme not in ("http", "https") or not url.host or url.query or url.fragment or url.userinfo:
        raise ConfigError(f"--api-url {base_url!r}: must be http(s)://host[:port][/path]")
    return str(url).rstrip("/").removesuffix("/api/v1") + "/api/v1", url.netloc


def _make_transport(prefix: str, ca_file: Path | None) -> httpx.AsyncBaseTransport:
    proxy = proxy_for(prefix)
    try:
        return httpx.AsyncHTTPTransport(
            verify=_trust(prefix, ca_file),
            http2=False,
            limits=httpx.Limits(
                max_connections=None,
                max_keepalive_connections=MAX_IDLE_CONNECTIONS,
                keepalive_expiry=KEEPALIVE_S,
            ),
            proxy=proxy,
        )
    except (OSError, ValueError, ImportError, httpx.InvalidURL) as error:
        about = f"CA file {str(ca_file)!r}" if isinstance(error, OSError) and ca_file else "connection settings"
        raise ConfigError(f"{about}: {error}") from error


def _trust(prefix: str, ca_file: Path | None) -> ssl.SSLContext | bool:
    """Certificates are always verified: against `ca_file`, else SSL_CERT_FILE / SSL_CERT_DIR, else the usual ones."""
    if ca_file is not None:
        return ssl.create_default_context(cafile=str(ca_file))
    # Reading the usual ones takes 20 ms; without TLS nobody needs to be trusted, and an empty context trusts nobody.
    return True if prefix.startswith("https:") else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


def proxy_for(url: str) -> str | None:
    """The proxy that the environment names for `url`: http_proxy, https_proxy, all_proxy, no_proxy (curl(1))."""
    target = httpx.URL(url)
    proxies = urllib.request.getproxies()
    proxy = proxies.get(target.scheme) or proxies.get("all")
    if not proxy or urllib.request.proxy_bypass(target.netloc.decode("ascii")):
        return None
    return proxy if "://" in proxy else f"http://{proxy}"

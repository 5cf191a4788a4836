"""HTTP by httpx, for what `wire.py` does not do: proxies, and transports that a caller brings. And where to connect to.

The only module that knows httpx. It talks to a transport directly: `AsyncClient` costs half as much CPU again per
request, for what is not used here (cookies, redirects, authentication flows). The time-outs of httpx start anew with
every byte; they are switched off, the caller's deadline counts.

Imported where it is used, as httpx and httpcore take 100 ms: the supervisor spends them while the fork server imports
the app.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import urllib.request
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import httpx

from spooled_supervisor.api.wire import KEEPALIVE_S, MAX_IDLE, DirectWire, Reply, Wire, WireError
from spooled_supervisor.errors import ConfigError

with contextlib.suppress(ImportError):  # a part of httpx, as of today
    import httpcore  # noqa: F401 # else it is loaded with the first client, the event stream's, just before the first job

Transport: TypeAlias = httpx.AsyncBaseTransport
CONNECT_LIMIT_S = 10.0


class HttpxWire:
    """A `Wire` over an httpx transport, which is closed with it."""

    def __init__(self, origin: str, transport: Transport) -> None:
        self._origin = origin
        self._transport = transport

    async def send(self, target: str, headers: bytes, body: bytes, most_bytes: int) -> Reply:
        watch = _Watch()
        lines = [line.split(b": ", 1) for line in headers.split(b"\r\n") if line]
        request = httpx.Request(
            "POST",
            self._origin + target,
            headers=[(name, value) for name, value in lines],
            stream=httpx.ByteStream(body),
            extensions={"trace": watch},
        )
        response: httpx.Response | None = None
        try:
            response = await self._transport.handle_async_request(request)
            content = await _read_bounded(response, most_bytes)
        except (httpx.HTTPError, OSError) as error:
            reason = f"{type(error).__name__}: {error}".rstrip(": ")
            raise WireError(reason, is_stale=response is None and watch.reused) from error
        finally:
            await asyncio.shield(watch.close() if response is None else _close(response))
        return Reply(response.status_code, {k.lower(): v for k, v in response.headers.items()}, content)

    async def aclose(self) -> None:
        await self._transport.aclose()


@contextlib.asynccontextmanager
async def open_lines(
    url: str, headers: Mapping[str, str], *, ca_file: Path | None, max_line: int
) -> AsyncIterator[AsyncIterator[str]]:
    """`GET url`: the lines of an endless text/event-stream. Raises WireError, also for any other kind of answer.

    A client of its own: one connection that lives for long. The caller's time limits count. The proxy is found as for
    all else that we send: httpx would read every variable about proxies, and raise for one that it cannot read.
    """
    limits = httpx.Timeout(None, connect=CONNECT_LIMIT_S)
    try:
        verify = trust(httpx.URL(url).scheme, ca_file) or ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        lone_client = httpx.AsyncClient(verify=verify, timeout=limits, trust_env=False, proxy=proxy_for(url))
    except (OSError, ValueError, ImportError, httpx.InvalidURL) as error:
        raise WireError(f"{type(error).__name__}: {error}") from error
    try:
        async with lone_client as client, client.stream("GET", url, headers=headers) as response:
            kind = response.headers.get("content-type", "")
            if response.status_code != 200 or not kind.startswith("text/event-stream"):
                raise WireError(f"HTTP {response.status_code} {kind}, no event stream", status=response.status_code)
            yield _bounded_lines(response, max_line)
    except (httpx.HTTPError, OSError) as error:
        raise WireError(f"{type(error).__name__}: {error}".rstrip(": ")) from error


async def _bounded_lines(response: httpx.Response, max_line: int) -> AsyncIterator[str]:
    rest = b""
    async for chunk in response.aiter_bytes():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line.decode("utf-8", "replace").rstrip("\r")
        if len(rest) > max_line:
            raise WireError("a line without an end")


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
            text = f"HTTP {response.status_code} with an answer of more than {most_bytes} bytes"
            raise WireError(text, status=response.status_code)
        chunks.append(chunk)
    return b"".join(chunks)


# --- where to ---------------------------------------------------------------------------------------------------------


def split_url(base_url: str) -> tuple[str, str, bytes]:
    """Origin, path prefix, and the value of `Host`. A path in `base_url` is kept. Raises ConfigError."""
    try:
        url = httpx.URL(base_url.strip())
    except httpx.InvalidURL as error:
        raise ConfigError(f"--api-url {base_url!r}: {error}") from error
    if url.scheme not in ("http", "https") or not url.host or url.query or url.fragment or url.userinfo:
        raise ConfigError(f"--api-url {base_url!r}: must be http(s)://host[:port][/path]")
    prefix = url.raw_path.decode("ascii").rstrip("/").removesuffix("/api/v1") + "/api/v1"
    return f"{url.scheme}://{url.netloc.decode('ascii')}", prefix, url.netloc


def make_wire(origin: str, ca_file: Path | None) -> Wire:
    """The direct way, or by httpx where the environment names a proxy. Raises ConfigError."""
    url = httpx.URL(origin)
    proxy = proxy_for(origin)
    try:
        tls = trust(url.scheme, ca_file)
        if proxy is None:
            port = url.port or (443 if url.scheme == "https" else 80)
            return DirectWire(url.host, port, tls)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=MAX_IDLE, keepalive_expiry=KEEPALIVE_S)
        # Without TLS nobody needs to be trusted, and an empty context trusts nobody.
        verify = tls or ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        return HttpxWire(origin, httpx.AsyncHTTPTransport(verify=verify, http2=False, limits=limits, proxy=proxy))
    except (OSError, ValueError, ImportError, httpx.InvalidURL) as error:
        about = f"CA file {str(ca_file)!r}" if isinstance(error, OSError) and ca_file else "connection settings"
        raise ConfigError(f"{about}: {error}") from error


def trust(scheme: str, ca_file: Path | None) -> ssl.SSLContext | None:
    """Certificates are always verified: against `ca_file`, else SSL_CERT_FILE / SSL_CERT_DIR, else the usual ones."""
    if scheme != "https":
        return None
    return ssl.create_default_context(cafile=str(ca_file)) if ca_file is not None else httpx.create_ssl_context()


def proxy_for(url: str) -> str | None:
    """The proxy that the environment names for `url`: http_proxy, https_proxy, all_proxy, no_proxy (curl(1))."""
    target = httpx.URL(url)
    proxies = urllib.request.getproxies()
    proxy = proxies.get(target.scheme) or proxies.get("all")
    if not proxy or urllib.request.proxy_bypass(target.netloc.decode("ascii")):
        return None
    return proxy if "://" in proxy else f"http://{proxy}"

"""Heads of requests as they come off the wire, well-formed or not, and responses as they go out."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from spooled_supervisor.telemetry.exchange import (
    MAX_HEAD_BYTES,
    BadRequest,
    Request,
    Response,
    failure,
    is_local_name,
    json_response,
    read_request,
)

GET = b"GET /health?verbose=1 HTTP/1.1\r\nHost: localhost:9464\r\nAccept: a\r\naccept: b\r\nX-Empty:\r\n\r\n"


def read(received: bytes) -> Request:
    request = read_request(received)
    assert request is not None
    return request


def refused(received: bytes) -> int:
    with pytest.raises(BadRequest) as caught:
        read_request(received)
    return caught.value.response.status


def test_a_head_is_read_into_its_parts() -> None:
    request = read(GET)
    assert (request.method, request.path, request.query, request.host) == ("GET", "/health", "verbose=1", "localhost")
    assert request.headers == {"host": "localhost:9464", "accept": "a, b", "x-empty": ""}


def test_an_incomplete_head_is_waited_for_at_every_split() -> None:
    for cut in range(len(GET)):
        assert read_request(GET[:cut]) is None


@pytest.mark.parametrize(
    "received",
    [
        b"\r\n\r\nGET / HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET / HTTP/1.1\nHost: a\n\n",
        b"GET / HTTP/1.1\r\nHost:   a \t\r\n\r\nbody that nobody reads",
        b"GET http://a/ HTTP/1.1\r\nHost: b\r\n\r\n",
        b"GET http://a HTTP/1.1\r\nHost: b\r\n\r\n",
        b"GET / HTTP/1.0\r\nHost: a:80\r\n\r\n",
    ],
)
def test_what_the_standard_lets_clients_do_is_understood(received: bytes) -> None:
    request = read(received)
    assert (request.path, request.host) == ("/", "a")


def test_an_old_client_may_leave_the_host_out() -> None:
    assert read(b"GET / HTTP/1.0\r\n\r\n").host is None


@pytest.mark.parametrize(
    ("host", "name"), [("LocalHost", "localhost"), ("[::1]:9464", "::1"), ("127.0.0.1:", "127.0.0.1"), ("", "")]
)
def test_a_host_loses_port_and_brackets(host: str, name: str) -> None:
    assert read(f"GET / HTTP/1.1\r\nHost: {host}\r\n\r\n".encode()).host == name


@pytest.mark.parametrize(
    "received",
    [
        b"nonsense\r\n\r\n",
        b"GET /\r\n\r\n",
        b"GET / HTTP/2.0\r\nHost: a\r\n\r\n",
        b"GET  / HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nno colon\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nX : b\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\n folded\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a:b:c\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: user@[::1\r\n\r\n",
        b"GET ftp://a/ HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET //a/ HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET http://[a HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET health HTTP/1.1\r\nHost: a\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\r\n\r\n",
        b"\xff\xfe\x00\r\n\r\n",
    ],
)
def test_what_is_no_request_is_refused(received: bytes) -> None:
    assert refused(received) == 400


@given(st.text("aX-: \t\r\x00\xa0\xe9", max_size=12))
@example("a:b")
@example("a \t: b")
@example("a: \t b \t c\t ")
def test_a_header_is_a_token_a_colon_and_a_value_without_the_blanks_around_it(line: str) -> None:
    head = f"GET / HTTP/1.1\r\nHost: h\r\nZ: z\r\n{line}\r\nZ: z\r\n\r\n".encode("latin-1")
    expected = re.fullmatch(r"([aX-]+):[ \t]*(.*?)[ \t]*", line)
    if expected is None:
        assert not line or refused(head) == 400  # an empty one ends the head
    else:
        assert read(head).headers[expected[1].lower()] == expected[2]


def test_the_blanks_in_a_header_cost_what_they_are_long_and_no_more() -> None:
    def cost_s(blanks: int) -> float:
        """Of the quickest of three: of each, what this thread has used."""
        costs = []
        for _ in range(3):
            started_at = time.thread_time()
            assert read(b"GET / HTTP/1.0\r\nX: a" + b" " * blanks + b"b\r\n\r\n").headers["x"][-2:] == " b"
            costs.append(time.thread_time() - started_at)
        return min(costs)

    assert cost_s(16_000) < max(8 * cost_s(4_000), 0.01)  # four times as many; by the square, sixteen times


def test_a_head_that_is_too_long_is_refused_before_it_ends() -> None:
    assert refused(b"GET /" + b"a" * MAX_HEAD_BYTES) == 431
    assert refused(b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"a" * MAX_HEAD_BYTES + b"\r\n\r\n") == 431
    assert read(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" + b"b" * 2 * MAX_HEAD_BYTES).path == "/"


@given(
    st.binary(max_size=200)
    | st.binary(max_size=100).map(lambda b: b"GET /" + b + b" HTTP/1.1\r\nHost: " + b + b"\r\n\r\n")
)
def test_any_bytes_are_a_request_or_refused_or_waited_for(received: bytes) -> None:
    try:
        request = read_request(received)
    except BadRequest as bad:
        status = bad.response.status
    else:
        status = 200
        assert request is None or request.path
    assert status in (200, 400, 431)


def test_a_response_has_length_date_and_headers_that_keep_it_private() -> None:
    head, _, body = json_response(200, {"a": 1}).encode().partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    assert lines[0] == "HTTP/1.1 200 OK"
    assert {"Connection: close", "Cache-Control: no-store", "X-Content-Type-Options: nosniff"} <= set(lines)
    assert "Content-Type: application/json" in lines
    assert f"Content-Length: {len(body)}" in lines
    assert any(line.startswith("Date: ") and line.endswith(" GMT") for line in lines)
    assert body == b'{"a":1}\n'


def test_an_answer_to_head_has_the_same_head_and_no_body() -> None:
    response = Response(200, b"body", "text/plain")
    head, _, body = response.encode(with_body=False).partition(b"\r\n\r\n")
    assert b"Content-Length: 4" in head
    assert body == b""


def test_headers_of_a_response_win_over_those_of_all() -> None:
    encoded = Response(200, b"", headers={"Cache-Control": "max-age=60"}).encode()
    assert b"Cache-Control: max-age=60\r\n" in encoded
    assert b"no-store" not in encoded


def test_a_failure_says_why_in_json() -> None:
    encoded = failure(405, "only GET", Allow="GET, HEAD").encode()
    assert b"HTTP/1.1 405 Method Not Allowed\r\n" in encoded
    assert b"Allow: GET, HEAD\r\n" in encoded
    assert encoded.endswith(b'{"error":"only GET"}\n')


def test_a_text_that_cannot_be_encoded_is_spelled_out() -> None:
    assert json_response(200, {"name\udcff": ["a\udcff", 1, None, float("nan")]}).body == (
        b'{"name\\\\udcff":["a\\\\udcff",1,null,null]}\n'
    )


@pytest.mark.parametrize(
    ("host", "is_local"),
    [
        ("localhost", True),
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("10.1.2.3", True),
        ("evil.example", False),
        ("localhost.evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("2130706433", False),
        ("", False),
    ],
)
def test_a_name_of_somebody_elses_is_not_local(host: str, is_local: bool) -> None:
    assert is_local_name(host) is is_local

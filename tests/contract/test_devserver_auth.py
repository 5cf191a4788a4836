"""Who may ask, request ids, and the answers that are the same on every path."""

from __future__ import annotations

import base64
import json
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.devserver import START_TIME, LocalServer, local_server

DAY_S = 86400


@pytest.fixture
def server() -> Iterator[LocalServer]:
    with local_server() as server:
        yield server


def login(server: LocalServer) -> dict[str, Any]:
    return dict(server.ok("POST", "/auth/login", {"api_key": server.api_key}, bearer=""))


def part(token: str, index: int) -> dict[str, Any]:
    text = token.split(".")[index]
    return dict(json.loads(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))))


# Credentials


@pytest.mark.parametrize("path", ["/jobs", "/workers", "/queues", "/events", "/auth/me", "/no/such/path"])
@pytest.mark.parametrize("header", ["", "Bearer", "Bearer wrong_key_here", "bearer {key}", "Basic {key}", "{key}"])
def test_nothing_below_the_prefix_is_told_to_strangers(server: LocalServer, path: str, header: str) -> None:
    headers = {"Authorization": header.format(key=server.api_key)}
    response = server.api("GET", path, headers=headers)
    assert (response.status_code, response.json()["code"]) == (401, "UNAUTHORIZED")
    assert response.headers["WWW-Authenticate"] == "Bearer"


def test_the_api_key_header_of_other_services_does_not_count(server: LocalServer) -> None:
    assert server.api("GET", "/jobs", bearer="", headers={"Authorization": "", "X-API-Key": server.api_key}).is_error


def test_a_key_in_the_query_counts_only_on_the_event_stream(server: LocalServer) -> None:
    nobody = {"Authorization": ""}
    assert server.api("GET", f"/jobs?api_key={server.api_key}", headers=nobody).status_code == 401
    # An allowed listener with a filter that is wrong: past the question who asks, and no stream to wait for.
    for name in ("token", "api_key"):
        assert server.api("GET", f"/events?queue=!&{name}={server.api_key}", headers=nobody).status_code == 400
    assert server.api("GET", "/events?queue=!&token=wrong_key_here", headers=nobody).status_code == 401


def test_a_key_buys_tokens_that_open_the_same_doors(server: LocalServer) -> None:
    tokens = login(server)
    assert (tokens["token_type"], tokens["expires_in"], tokens["refresh_expires_in"]) == ("Bearer", DAY_S, 30 * DAY_S)
    assert part(tokens["access_token"], 0) == {"alg": "HS256", "typ": "JWT"}
    assert part(tokens["access_token"], 1)["exp"] == START_TIME + DAY_S
    assert server.api("GET", "/jobs", bearer=tokens["access_token"]).status_code == 200


@pytest.mark.parametrize(("key", "status"), [("wrong_key_here", 401), ("short", 400), (None, 422)])
def test_a_login_with_another_key_is_refused(server: LocalServer, key: str | None, status: int) -> None:
    assert server.api("POST", "/auth/login", {"api_key": key}, bearer="").status_code == status


def test_a_refresh_token_buys_access_and_opens_nothing(server: LocalServer) -> None:
    refresh_token = login(server)["refresh_token"]
    assert server.api("GET", "/jobs", bearer=refresh_token).status_code == 401
    server.clock.advance(DAY_S)
    answer = server.ok("POST", "/auth/refresh", {"refresh_token": refresh_token}, bearer="")
    assert (answer["token_type"], answer["expires_in"]) == ("Bearer", DAY_S)
    assert server.api("GET", "/jobs", bearer=answer["access_token"]).status_code == 200


def test_an_access_token_cannot_refresh(server: LocalServer) -> None:
    token = login(server)["access_token"]
    assert server.api("POST", "/auth/refresh", {"refresh_token": token}, bearer="").status_code == 401


def test_a_token_ends_with_its_time(server: LocalServer) -> None:
    token = login(server)["access_token"]
    server.clock.advance(DAY_S)
    assert server.api("GET", "/jobs", bearer=token).json()["message"] == "Token expired"


def forgeries(token: str) -> Iterator[str]:
    header, claims, signature = token.split(".")
    none = base64.urlsafe_b64encode(b'{"alg":"none"}').rstrip(b"=").decode()
    yield f"{none}.{claims}."
    yield f"{none}.{claims}.{signature}"
    yield f"{header}.{claims}"
    yield f"{header}.{claims[:-2]}AA.{signature}"
    yield f"{header}.{claims}.{'A' * len(signature)}"
    yield "eyJ"
    yield "eyJ..."


def test_a_token_that_was_tampered_with_is_refused(server: LocalServer) -> None:
    for forgery in forgeries(login(server)["access_token"]):
        assert server.api("GET", "/jobs", bearer=forgery).status_code == 401, forgery


def test_a_token_of_another_key_is_refused(server: LocalServer) -> None:
    with local_server(api_key="sp_test_another_key") as other:
        token = login(other)["access_token"]
    assert server.api("GET", "/jobs", bearer=token).status_code == 401


def test_who_asks_is_told_who_he_is(server: LocalServer) -> None:
    token = login(server)["access_token"]
    for bearer in (token, server.api_key):
        me = server.ok("GET", "/auth/me", bearer=bearer)
        assert me["queues"] == ["*"]
        assert uuid.UUID(me["organization_id"])
        assert uuid.UUID(me["api_key_id"])
        assert me["issued_at"] == "2023-11-14T22:13:20.000000+00:00"
        assert me["expires_at"] == "2023-11-15T22:13:20.000000+00:00"


def test_a_token_can_be_asked_about(server: LocalServer) -> None:
    token = login(server)["access_token"]
    answer = server.ok("POST", "/auth/validate", {"token": token})
    assert answer["valid"] is True
    assert answer["claims"].items() >= {"queues": ["*"], "exp": START_TIME + DAY_S}.items()
    assert server.ok("POST", "/auth/validate", {"token": "nonsense"}) == {"valid": False, "error": "Invalid token"}


def test_logging_out_ends_both_tokens(server: LocalServer) -> None:
    tokens = login(server)
    body = {"refresh_token": tokens["refresh_token"]}
    assert server.api("POST", "/auth/logout", body, bearer=tokens["access_token"]).status_code == 204
    assert server.api("GET", "/jobs", bearer=tokens["access_token"]).json()["message"] == "Token revoked"
    assert server.api("POST", "/auth/refresh", body, bearer="").status_code == 401


def test_logging_out_without_a_body_ends_the_access_token_alone(server: LocalServer) -> None:
    tokens = login(server)
    assert server.api("POST", "/auth/logout", content=b"", bearer=tokens["access_token"]).status_code == 204
    assert server.api("GET", "/jobs", bearer=tokens["access_token"]).status_code == 401
    assert server.api("POST", "/auth/refresh", {"refresh_token": tokens["refresh_token"]}, bearer="").is_success


def test_logging_out_with_the_key_ends_the_refresh_token_alone(server: LocalServer) -> None:
    body = {"refresh_token": login(server)["refresh_token"]}
    assert server.api("POST", "/auth/logout", body).status_code == 204
    assert server.api("POST", "/auth/refresh", body, bearer="").status_code == 401
    assert server.api("GET", "/jobs").is_success


# Health


def test_health_is_open_to_everybody(server: LocalServer) -> None:
    answer = server.request("GET", "/health", bearer="", headers={"Authorization": ""})
    assert answer.json() == {"status": "healthy", "database": True, "cache": True}
    for path in ("/health/live", "/health/ready"):
        response = server.request("GET", path, headers={"Authorization": ""})
        assert (response.status_code, response.content) == (200, b"")


def test_a_server_without_its_database_is_not_ready(server: LocalServer) -> None:
    server.services.db.close()
    assert server.request("GET", "/health").status_code == 503
    assert server.request("GET", "/health/ready").status_code == 503
    assert server.request("GET", "/health/live").status_code == 200
    response = server.api("GET", "/jobs")
    assert (response.status_code, response.json()["code"]) == (500, "DATABASE_ERROR")
    assert response.headers["X-Request-Id"]


# Request ids


def test_a_request_id_is_echoed_or_made(server: LocalServer) -> None:
    assert server.api("GET", "/jobs", headers={"X-Request-Id": "abc-1"}).headers["X-Request-Id"] == "abc-1"
    assert uuid.UUID(server.api("GET", "/jobs").headers["X-Request-Id"])
    assert uuid.UUID(server.api("GET", "/jobs", headers={"X-Request-Id": "not ok"}).headers["X-Request-Id"])


@pytest.mark.parametrize("path", ["/api/v1/jobs/nobody", "/api/v1/no/such/path", "/health"])
def test_every_answer_has_a_request_id(server: LocalServer, path: str) -> None:
    assert server.request("GET", path).headers["X-Request-Id"]
    assert server.request("GET", path, headers={"Authorization": "Bearer wrong"}).headers["X-Request-Id"]


# Refusals that any path can give


def test_a_path_that_does_not_exist_is_named(server: LocalServer) -> None:
    response = server.api("POST", "/jobs/x/no-such-thing", {})
    assert (response.status_code, response.json()["code"]) == (404, "NOT_FOUND")
    assert response.json()["message"] == "No route matches POST /api/v1/jobs/x/no-such-thing"
    assert server.api("GET", "/jobs/").status_code == 404
    assert server.request("GET", "/").json()["code"] == "NOT_FOUND"


def test_a_method_that_a_path_does_not_have_is_refused(server: LocalServer) -> None:
    response = server.api("PATCH", "/jobs/claim", {})
    assert (response.status_code, response.json()["code"]) == (405, "METHOD_NOT_ALLOWED")
    assert "POST" in response.headers["Allow"]


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_a_body_that_does_not_claim_to_be_json_is_refused(server: LocalServer, content_type: str) -> None:
    response = server.api("POST", "/jobs", content=b"{}", headers={"Content-Type": content_type})
    assert (response.status_code, response.json()["code"]) == (415, "UNSUPPORTED_MEDIA_TYPE")


@pytest.mark.parametrize("content_type", ["application/json; charset=utf-8", "Application/JSON", "application/ld+json"])
def test_json_may_be_called_by_its_longer_names(server: LocalServer, content_type: str) -> None:
    content = b'{"queue_name": "q", "payload": 1}'
    assert server.api("POST", "/jobs", content=content, headers={"Content-Type": content_type}).status_code == 201


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"{}}", b'{"a": }', b"nonsense", b'{"payload": NaN}', b'{"a": "\xff"}', b'{"a": 1e999}', b"[" * 9999],
)
def test_malformed_json_is_refused_as_such(server: LocalServer, content: bytes) -> None:
    response = server.api("POST", "/jobs", content=content)
    assert (response.status_code, response.json()["code"]) == (400, "INVALID_JSON")


@pytest.mark.parametrize("content", [b"[]", b"1", b"null", b'"text"'])
def test_json_that_is_no_object_is_refused(server: LocalServer, content: bytes) -> None:
    response = server.api("POST", "/jobs", content=content)
    assert (response.status_code, response.json()["code"]) == (422, "VALIDATION_ERROR")


def test_every_problem_of_a_body_is_told_at_once_shapes_first(server: LocalServer) -> None:
    body = {"priority": "high", "max_retries": 500, "queue_name": "q"}
    response = server.api("POST", "/jobs", body)
    assert response.status_code == 422
    assert response.json() == {
        "error": "validation_error",
        "code": "VALIDATION_ERROR",
        "message": "payload is required",
        "details": [
            {"field": "payload", "message": "payload is required", "code": "missing_field"},
            {"field": "priority", "message": "priority must be an integer", "code": "invalid_type"},
        ],
    }


def test_a_body_over_two_mebibytes_is_refused(server: LocalServer) -> None:
    response = server.api("POST", "/jobs", content=b" " * ((2 << 20) + 1))
    assert (response.status_code, response.json()["code"]) == (413, "PAYLOAD_TOO_LARGE")

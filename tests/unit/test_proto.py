"""The generated gRPC code, and JSON as a Struct."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spooled_supervisor.proto import spooled_pb2 as pb
from spooled_supervisor.proto.generate import HERE, NAMES, TOOLS, generate, tools_version
from spooled_supervisor.proto.structs import MAX_DEPTH, MAX_WHOLE, carries, fill, plain


@pytest.mark.skipif(tools_version() != TOOLS, reason="needs the grpcio-tools that the code was written with")
@pytest.mark.parametrize("name", NAMES)
def test_the_generated_code_is_that_of_the_proto_file(name: str) -> None:
    assert generate()[name] == (HERE / name).read_text("utf-8"), "run `make proto`"


def test_the_tools_of_the_tests_are_those_of_the_generated_code() -> None:
    text = (HERE.parents[1] / "pyproject.toml").read_text("utf-8")
    assert f'"grpcio-tools=={TOOLS}"' in text


@pytest.mark.parametrize("first", ["spooled.grpc.stubs", "spooled_supervisor.proto"])
def test_the_sdk_may_be_loaded_beside_it(first: str) -> None:
    second = {"spooled.grpc.stubs", "spooled_supervisor.proto"} - {first}
    code = "".join(f"from {name} import spooled_pb2\n" for name in (first, *second))
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_retry_that_is_not_said_is_no_false() -> None:
    assert not pb.FailRequest().HasField("retry")
    assert pb.FailRequest.FromString(pb.FailRequest(retry=False).SerializeToString()).HasField("retry")


def through(value: dict[str, Any]) -> dict[str, Any]:
    job = pb.Job()
    fill(job.payload, value)
    return plain(pb.Job.FromString(job.SerializeToString()).payload)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-MAX_WHOLE, MAX_WHOLE)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(st.dictionaries(st.text(), JSON, max_size=5))
def test_an_object_that_a_struct_carries_comes_back_equal(value: dict[str, Any]) -> None:
    assert carries(value)
    assert through(value) == value


def test_whole_numbers_come_back_whole() -> None:
    back = through({"n": 3, "x": 3.5, "big": 1e300})
    assert (repr(back["n"]), back["x"], back["big"]) == ("3", 3.5, 1e300)


def test_an_empty_object_is_there() -> None:
    job = pb.Job()
    fill(job.payload, {})
    assert job.HasField("payload")


def nested(depth: int) -> Any:
    return {"in": nested(depth - 1)} if depth else 1


@pytest.mark.parametrize(
    "value", [None, True, 1, "text", [1], {"n": MAX_WHOLE + 1}, {"n": [-MAX_WHOLE - 1]}, nested(MAX_DEPTH + 1)]
)
def test_what_a_struct_does_not_carry_is_told(value: Any) -> None:
    assert not carries(value)


def test_what_is_nested_as_deep_as_allowed_gets_through() -> None:
    assert carries(nested(MAX_DEPTH))
    assert through(nested(MAX_DEPTH)) == nested(MAX_DEPTH)

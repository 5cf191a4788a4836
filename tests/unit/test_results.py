"""What a handler may return, and how it is told what it may not."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import json
import math
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spooled_supervisor.results import MAX_DEPTH, NotJson, encode_result

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8")),
    lambda inner: (
        st.lists(inner, max_size=5) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner, max_size=5)
    ),
    max_leaves=25,
)


def nested(depth: int) -> Any:
    value: Any = 1
    for level in range(depth):
        value = [value] if level % 2 else {"k": value}
    return value


@dataclasses.dataclass
class Page:
    number: int


class Color(enum.Enum):
    RED = 1


# --- what passes ------------------------------------------------------------------------------------------------------


@given(json_values)
def test_what_json_can_say_comes_back_equal(value: Any) -> None:
    assert json.loads(encode_result(value)) == value


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_floats_keep_every_bit(value: float) -> None:
    found = json.loads(encode_result(value))
    assert isinstance(found, float)
    assert math.copysign(1.0, found) == math.copysign(1.0, value)
    assert found == value


@pytest.mark.parametrize(
    ("value", "encoded"),
    [
        (None, b"null"),
        (True, b"true"),
        (1, b"1"),
        (10**100, b"1" + b"0" * 100),
        (-0.0, b"-0.0"),
        ("é\n", '"é\\n"'.encode()),
        ("a\u2028b", b'"a\xe2\x80\xa8b"'),
        ((1, (2,)), b"[1,[2]]"),
        ({}, b"{}"),
        ({"": []}, b'{"":[]}'),
    ],
)
def test_values_are_encoded_short_and_in_utf_8(value: Any, encoded: bytes) -> None:
    assert encode_result(value) == encoded


def test_subclasses_of_the_plain_types_pass_as_what_they_are() -> None:
    class Name(str):
        def __str__(self) -> str:
            raise RuntimeError("not to be asked")

    class Level(enum.IntEnum):
        HIGH = 3

    class Mode(enum.StrEnum):
        FAST = "fast"

    class Celsius(float):
        def __repr__(self) -> str:
            return "warm"

    class Count(int):
        def __repr__(self) -> str:
            return "many"

    point = namedtuple("point", "x y")
    value = {
        "name": Name("x"),
        "level": Level.HIGH,
        "mode": Mode.FAST,
        Mode.FAST: 1,
        "celsius": Celsius(21.5),
        "count": Count(7),
        "bool": True,
        "point": point(1, 2),
        "ordered": OrderedDict(a=1),
        "default": defaultdict(list, b=[2]),
    }
    assert json.loads(encode_result(value)) == {
        "name": "x",
        "level": 3,
        "mode": "fast",
        "fast": 1,
        "celsius": 21.5,
        "count": 7,
        "bool": True,
        "point": [1, 2],
        "ordered": {"a": 1},
        "default": {"b": [2]},
    }


def test_a_hundred_levels_pass_and_one_more_does_not() -> None:
    assert json.loads(encode_result(nested(MAX_DEPTH))) == nested(MAX_DEPTH)
    with pytest.raises(NotJson, match="nested deeper than 100 levels"):
        encode_result(nested(MAX_DEPTH + 1))


def test_the_same_object_may_appear_twice() -> None:
    part = {"a": 1}
    assert encode_result([part, part]) == b'[{"a":1},{"a":1}]'


# --- what does not ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"pages": [1, 2, {3}]}, "result.pages[2] is of type set"),
        ({"a": b"bytes"}, "result.a is of type bytes"),
        ([[None, object()]], "result[0][1] is of type object"),
        (Page(1), "result is of type Page"),
        ({"page": (0, Page(1))}, "result.page[1] is of type Page"),
        (Color.RED, "result is of type Color"),
        (decimal.Decimal("1.5"), "result is of type Decimal"),
        ({"at": datetime.datetime(2024, 1, 1)}, "result.at is of type datetime"),
        (3j, "result is of type complex"),
        (range(3), "result is of type range"),
        ((n for n in range(3)), "result is of type generator"),
        (frozenset(), "result is of type frozenset"),
        (bytearray(), "result is of type bytearray"),
        (json, "result is of type module"),
        (float("nan"), "result is nan, and JSON has only finite numbers"),
        ({"x": [float("inf")]}, "result.x[0] is inf, and JSON has only finite numbers"),
        ([-float("inf")], "result[0] is -inf, and JSON has only finite numbers"),
        ({1: "x"}, "result has the key 1 of type int, keys must be strings"),
        ({"a": {None: 1}}, "result.a has the key None of type NoneType, keys must be strings"),
        ({"a": {True: 1}}, "result.a has the key True of type bool, keys must be strings"),
        ({"a": {(1, 2): 1}}, "result.a has the key (1, 2) of type tuple, keys must be strings"),
        ({b"a": 1}, "result has the key b'a' of type bytes, keys must be strings"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_no_json_is_named_with_its_path_and_type(value: Any, message: str) -> None:
    with pytest.raises(NotJson) as caught:
        encode_result(value)
    assert str(caught.value) == message


def test_an_async_result_that_was_never_awaited_is_named() -> None:
    async def result() -> int:
        return 1

    coroutine = result()
    with pytest.raises(NotJson, match="result is of type coroutine"):
        encode_result(coroutine)
    coroutine.close()


@pytest.mark.parametrize("value", ["\udc80", {"a": ["x\ud800y"]}, {"\udfff": 1}, ["ok", ("\ud83d",)]])
def test_a_lone_surrogate_is_refused_wherever_it_is(value: Any) -> None:
    with pytest.raises(NotJson, match="lone surrogate"):
        encode_result(value)


def test_a_value_that_holds_itself_is_refused() -> None:
    circle: list[Any] = []
    circle.append(circle)
    with pytest.raises(NotJson, match="deeper than 100"):
        encode_result(circle)


def test_a_path_of_long_names_is_cut() -> None:
    value: Any = 1
    for _ in range(MAX_DEPTH + 1):
        value = {"k" * 1000: value}
    with pytest.raises(NotJson) as caught:
        encode_result(value)
    assert len(str(caught.value)) < 300


def test_an_integer_that_python_will_not_write_is_refused() -> None:
    with pytest.raises(NotJson, match="ValueError"):
        encode_result({"big": 10**5000})


class Angry(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text either")


class FailingItems(dict[str, Any]):
    def items(self) -> Any:
        raise Angry


class FailingIterator(list[Any]):
    def __iter__(self) -> Iterator[Any]:
        raise OSError("not today")


class FailingKey:
    def __repr__(self) -> str:
        raise Angry


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (FailingItems(a=1), "result cannot be encoded: Angry: its text cannot be made"),
        ([FailingIterator([1])], "result cannot be encoded: OSError: not today"),
        ({FailingKey(): 1}, "result cannot be encoded: Angry: its text cannot be made"),
    ],
)
def test_whatever_a_subclass_raises_is_no_json(value: Any, message: str) -> None:
    with pytest.raises(NotJson) as caught:
        encode_result(value)
    assert str(caught.value) == message


def test_a_dict_that_changes_its_mind_is_never_half_encoded() -> None:
    class Moody(dict[str, Any]):
        asked = 0

        def items(self) -> Any:
            self.asked += 1
            return [("a", 1)] if self.asked == 1 else [("a", float("nan"))]

    with pytest.raises(NotJson):
        encode_result(Moody(a=1))


def test_an_abort_goes_through() -> None:
    class Interrupted(dict[str, Any]):
        def items(self) -> Any:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        encode_result(Interrupted(a=1))

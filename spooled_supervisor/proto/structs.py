"""JSON objects as `google.protobuf.Struct`, and back. No I/O.

A Struct is narrower than JSON: its top is an object, its numbers are doubles, and decoders of protobuf refuse what is
nested too deeply (each level of JSON is three messages of the 100 that they allow). `carries` tells what gets through
unchanged. Back again, a number without a fraction becomes an integer: JSON does not tell the two apart, Python does.
"""

from __future__ import annotations

from typing import Any

from google.protobuf.struct_pb2 import Struct, Value

MAX_DEPTH = 30
MAX_WHOLE = 2**53
"""Beyond it a double skips whole numbers."""


def carries(value: object) -> bool:
    """Whether a Struct can hold exactly this JSON value."""
    return isinstance(value, dict) and _fits(value, MAX_DEPTH)


def _fits(value: object, depth: int) -> bool:
    if isinstance(value, int):
        return -MAX_WHOLE <= value <= MAX_WHOLE
    if isinstance(value, dict):
        return depth > 0 and all(_fits(member, depth - 1) for member in value.values())
    if isinstance(value, list):
        return depth > 0 and all(_fits(member, depth - 1) for member in value)
    return True


def fill(struct: Struct, value: dict[str, Any]) -> None:
    """Put the object into an empty Struct of a message, which then has it even if the object is empty."""
    struct.SetInParent()
    struct.update(value)


def plain(struct: Struct) -> dict[str, Any]:
    """The object in a Struct, for a JSON encoder."""
    return {name: _plain(value) for name, value in struct.fields.items()}


def _plain(value: Value) -> Any:
    match value.WhichOneof("kind"):
        case "number_value":
            number = value.number_value
            return int(number) if number.is_integer() and abs(number) <= MAX_WHOLE else number
        case "string_value":
            return value.string_value
        case "bool_value":
            return value.bool_value
        case "struct_value":
            return plain(value.struct_value)
        case "list_value":
            return [_plain(member) for member in value.list_value.values]
        case _:
            return None

"""`faults.toml` is complete, and every test that it names exists."""

from __future__ import annotations

import ast
import functools
import tomllib
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parent
TABLE: dict[str, dict[str, dict[str, Any]]] = tomllib.loads((TESTS / "faults.toml").read_text("utf-8"))

GAPS = {5, 7, 17, 19, 24, 30, 39, 43, 46, 49, 54, 66, 74, 77, 78, 86, 87, 88, 91, 96, 97, 98, 106, 107, 113, 115, 118}
"""Numbers that were never given."""
FAULTS = [f"F{number:02}" for number in range(1, 121) if number not in GAPS]
TRAPS = [str(number) for number in range(1, 29)]
ANSWERS = (
    "live",
    "expired",
    "other_lease",
    "swept_or_claimed_by_others",
    "claimed_again_by_us",
    "complete_repeated",
    "fail_repeated",
    "other_status",
    "deleted",
)
ENTRIES = [(part, name) for part, entries in TABLE.items() for name in entries]


def test_the_table_has_every_entry_once() -> None:
    assert len(FAULTS) == 93
    assert list(TABLE["faults"]) == FAULTS
    assert list(TABLE["traps"]) == TRAPS
    assert tuple(TABLE["answers"]) == ANSWERS


@pytest.mark.parametrize(("part", "name"), ENTRIES, ids=[f"{part}-{name}" for part, name in ENTRIES])
def test_an_entry_names_tests_that_exist_or_says_why_there_are_none(part: str, name: str) -> None:
    entry = TABLE[part][name]
    assert entry["title"]
    assert bool(entry.get("tests")) != bool(entry.get("none"))
    missing = [test for test in entry.get("tests", ()) if not exists(test)]
    assert not missing


def exists(test: str) -> bool:
    """Whether there is this function in this file, or this file."""
    file, _, function = test.partition("::")
    return (TESTS / file).is_file() and (not function or function in functions(file))


@functools.cache
def functions(file: str) -> frozenset[str]:
    """The tests of a file, by name."""
    tree = ast.parse((TESTS / file).read_text("utf-8"))
    found = (node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))
    return frozenset(node.name for node in found if node.name.startswith("test_"))

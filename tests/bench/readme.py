"""The README's tables of figures: made here from a run, and written between two marks.

All figures that have a bound, and how cost grows.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from tests.bench import growth
from tests.bench.figures import Result, table

README = Path(__file__).resolve().parents[2] / "README.md"
BEGIN, END = "<!-- written by `make bench BENCH_ARGS=--readme` -->", "<!-- end of what the benchmark has written -->"


def write(results: Sequence[Result], circumstances: str) -> None:
    """Put the tables of this run into the README. Raises ValueError if it has no place for them."""
    text = README.read_text()
    pattern = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)
    if pattern.search(text) is None:
        raise ValueError(f"{README.name} has no line {BEGIN} with a line {END} after it")
    README.write_text(pattern.sub(lambda _: f"{BEGIN}\n\n{block(results, circumstances)}\n\n{END}", text))


def block(results: Sequence[Result], circumstances: str) -> str:
    bounded = [result for result in results if result.figure.bound is not None and not growth.has(result)]
    return "\n".join(
        (
            "<!-- table: benchmark -->",
            table(bounded),
            "",
            "How cost grows; an exponent of 1 is linear:",
            "",
            "<!-- table: growth -->",
            growth.table(results),
            "",
            f"{circumstances}.",
        )
    )

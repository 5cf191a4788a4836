"""Figures: what is reported, in which unit, against which bound; and their way from repetitions to a table and JSON.

Pure: nothing here measures anything.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Bound:
    """What a figure must not be beyond."""

    value: float
    is_upper: bool

    def is_met(self, value: float) -> bool:
        return value <= self.value if self.is_upper else value >= self.value

    def __str__(self) -> str:
        return f"{'<=' if self.is_upper else '>='} {self.value:g}"


def at_most(value: float) -> Bound:
    return Bound(value, is_upper=True)


def at_least(value: float) -> Bound:
    return Bound(value, is_upper=False)


@dataclass(frozen=True, slots=True)
class Figure:
    """One row of the table. `key` is its name within its scenario."""

    key: str
    title: str
    unit: str = ""
    bound: Bound | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """A figure with what the repetitions gave."""

    scenario: str
    figure: Figure
    values: tuple[float, ...]

    @property
    def name(self) -> str:
        return f"{self.scenario}.{self.figure.key}"

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def is_met(self) -> bool | None:
        """None: there is no bound."""
        return None if self.figure.bound is None else self.figure.bound.is_met(self.median)

    def as_json(self) -> dict[str, Any]:
        bound = self.figure.bound
        return {
            "name": self.name,
            "title": self.figure.title,
            "unit": self.figure.unit,
            "median": self.median,
            "low": min(self.values),
            "high": max(self.values),
            "values": list(self.values),
            "bound": None if bound is None else {"at_most" if bound.is_upper else "at_least": bound.value},
            "met": self.is_met,
        }


def collect(scenario: str, figures: Sequence[Figure], repetitions: Sequence[Mapping[str, float]]) -> list[Result]:
    """The scenario's results in the order of its figures. Raises KeyError unless each repetition gave each figure."""
    return [Result(scenario, figure, tuple(one[figure.key] for one in repetitions)) for figure in figures]


def quantile(values: Iterable[float], share: float) -> float:
    """The smallest value that at least this share of all is not above (nearest rank: always one that occurred).

    >>> quantile([4, 1, 3, 2], 0.5), quantile(range(1, 101), 0.99), quantile([7], 0.99)
    (2, 99, 7)
    """
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def number(value: float) -> str:
    """Three significant digits, more where they are whole ones; never an exponent.

    >>> [number(value) for value in (0.0, 0.97256, 2.7184, 31.42, 314.2, 31415.9, 0.00123)]
    ['0', '0.973', '2.72', '31.4', '314', '31416', '0.00123']
    """
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    decimals = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:.{decimals}f}"


HEAD = ("figure", "value", "spread", "bound", "met")
_MET = {True: "yes", False: "NO", None: ""}


def row(result: Result) -> tuple[str, ...]:
    low, high = min(result.values), max(result.values)
    bound = result.figure.bound
    unit = f" {result.figure.unit}" if result.figure.unit else ""
    return (
        result.figure.title,
        number(result.median) + unit,
        f"{number(low)} .. {number(high)}" if len(result.values) > 1 else "",
        "" if bound is None else f"{bound}{unit}",
        _MET[result.is_met],
    )


def table(results: Sequence[Result]) -> str:
    """All rows with aligned columns, as a Markdown table."""
    return aligned([HEAD, *(row(result) for result in results)])


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells, the head first, as a Markdown table with aligned columns."""
    widths = [max(len(cells[column]) for cells in rows) for column in range(len(rows[0]))]
    lines = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |"
             for cells in rows]  # fmt: skip
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)

"""Counters and histograms: numbers by label values, handed to prometheus_client when somebody scrapes.

prometheus_client's own Counter and Histogram are not used, for one reason each of which would be enough. When it is
imported while PROMETHEUS_MULTIPROC_DIR is set (an operator's web server has it, a program that uses us as a library may
have imported it long ago), each value becomes a slot in a file in that directory, shared with strangers; its switch is
read once at import and is not ours to turn. And it takes a lock per value and makes a `_created` gauge per series,
while ours are counted by one thread and a job costs a dictionary entry.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate

from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily, Metric

Labels = tuple[str, ...]


class Counter:
    """A number that only grows, per combination of label values. `name` ends in `_total`."""

    def __init__(self, name: str, text: str, *label_names: str) -> None:
        self.name = name
        self._text = text
        self._label_names = label_names
        self._values: dict[Labels, float] = {}

    def declare(self, *labels: str) -> None:
        """Show this series from now on, at zero: a rate over a series that begins at one misses the first event."""
        self._values.setdefault(labels, 0.0)

    def add(self, amount: float, *labels: str) -> None:
        """Count `amount`, which is not negative."""
        self._values[labels] = self._values.get(labels, 0.0) + amount

    def family(self) -> Metric:
        """All series as they are now."""
        family = CounterMetricFamily(self.name, self._text, labels=self._label_names)
        for labels, value in self._values.items():
            family.add_metric(labels, value)
        return family

    def outline(self) -> Metric:
        """The family without its series, by which a registry finds names that are taken."""
        return CounterMetricFamily(self.name, self._text, labels=self._label_names)


class Histogram:
    """How often a value fell at or below each bound, per combination of label values; bounds in rising order."""

    def __init__(self, name: str, text: str, bounds: Sequence[float], *label_names: str) -> None:
        self.name = name
        self._text = text
        self._label_names = label_names
        self._bounds = tuple(bounds)
        self._bound_names = [*(str(float(bound)) for bound in bounds), "+Inf"]
        self._cells: dict[Labels, list[int]] = {}
        self._sums: dict[Labels, float] = {}

    def declare(self, *labels: str) -> None:
        """Show this series from now on, empty."""
        self._cells.setdefault(labels, [0] * len(self._bound_names))
        self._sums.setdefault(labels, 0.0)

    def observe(self, value: float, *labels: str) -> None:
        """Count one value. A negative one counts as 0, as a sum that falls looks like a restart."""
        if labels not in self._cells:
            self.declare(*labels)
        value = max(0.0, value)
        self._cells[labels][bisect_left(self._bounds, value)] += 1
        self._sums[labels] += value

    def family(self) -> Metric:
        """All series as they are now."""
        family = HistogramMetricFamily(self.name, self._text, labels=self._label_names)
        for labels, cells in self._cells.items():
            buckets = list(zip(self._bound_names, accumulate(cells), strict=True))
            family.add_metric(labels, buckets, self._sums[labels])
        return family

    def outline(self) -> Metric:
        """The family without its series, by which a registry finds names that are taken."""
        return HistogramMetricFamily(self.name, self._text, labels=self._label_names)


class Closed:
    """A closed set of label values: what is not in it is `other`, so that nobody outside can make series."""

    OTHER = "other"

    def __init__(self, values: Iterable[str]) -> None:
        self._values = frozenset(values)

    def __call__(self, value: str) -> str:
        return value if value in self._values else self.OTHER


class FirstCome:
    """The first `limit` values that are seen, then `other`: for words that our own code chooses, and as a belt."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._seen: set[str] = set()

    def __call__(self, value: str) -> str:
        if value not in self._seen:
            if len(self._seen) >= self._limit:
                return Closed.OTHER
            self._seen.add(value)
        return value

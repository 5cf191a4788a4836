"""The supervisor's half of handlers' own metrics: one page for what all children count (`childmetrics` is the other).

What children add is summed over all that ever lived, so a counter does not go back when a child is replaced or killed.
Gauges and enums are each child's own: they have a label `slot` (a label of that name of the app's is `exported_slot`)
and are gone when the child is; where a slot has two children for a moment, the one that spoke up last is shown. An info
is shown once, whoever has it.

Nothing that a child says is trusted: the number of series is bounded, per child and in all; names must be what
Prometheus takes, and may not be, or look like, one of ours; what does not fit is left out and counted by reason. Two
children may disagree about what a metric is (kind, buckets): after a reload the newer generation is right, and the
metric begins again from zero; within one generation the first one is.
"""

from __future__ import annotations

import math
import re
from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import msgspec
from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from spooled_supervisor.childmetrics import (
    MAX_SERIES,
    OWN_NAMES,
    SAMPLE_OF,
    SUMMED,
    Family,
    Kind,
    Report,
    Series,
    values_of,
    weight,
)

MAX_ALL_SERIES = 10_000
"""Of all children that live or have lived; sums of the dead ones stay."""
REASONS = ("child", "collision", "invalid", "limit")
"""Why something is not shown: left out by the child itself, a name that another metric has, nothing that Prometheus
would take, too many series."""
RESERVED_PREFIXES = ("spooled_supervisor_", "scrape_")
RESERVED_NAMES = ("up", "ALERTS", "ALERTS_FOR_STATE", "target_info", "process_cpu_seconds_total", *OWN_NAMES)
"""Prometheus makes these itself, some with the prefix above."""
SUFFIXES: Mapping[str, Sequence[str]] = {
    "counter": ("_total", "_created"),
    "summary": ("_sum", "_count", "_created"),
    "histogram": ("_bucket", "_sum", "_count", "_created"),
    "info": ("_info",),
}
_METRIC_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL_NAME = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")
_BOUND = re.compile(r"[-+]?[0-9][0-9.]*(e[-+]?[0-9]+)?")
_POSSIBLE = {"info": (1.0,), "stateset": (0.0, 1.0)}
_RESERVED_LABELS = {"histogram": "le", "summary": "quantile"}

_LabelKey = tuple[tuple[str, str], ...]


@dataclass(slots=True, eq=False)
class _Cell:
    """Numbers of one series: shared by all children where they are summed, else of one child."""

    family: _Shown
    key: _LabelKey
    labels: dict[str, str]
    values: list[float]
    weight: int


@dataclass(slots=True, eq=False)
class _Shown:
    """One metric on the page."""

    name: str
    kind: Kind
    help: str
    bounds: list[str]
    generation: int
    sums: dict[_LabelKey, _Cell] = field(default_factory=dict)
    own: dict[_Cell, None] = field(default_factory=dict)  # of living children, in the order they told of them

    @property
    def cells(self) -> Iterable[_Cell]:
        """What is shown, a combination of label values once."""
        return self.sums.values() if self.kind in SUMMED else {cell.key: cell for cell in self.own}.values()


@dataclass(slots=True)
class _Child:
    """What a living child has told of."""

    cells: dict[int, _Cell | None] = field(default_factory=dict)  # None: it is not shown
    weight: int = 0


class ChildMetrics(Collector):
    """Takes reports, gives metric families. `taken` are names of the page that are not to be had."""

    def __init__(self, taken: Iterable[str] = ()) -> None:
        self._taken = {*taken, *RESERVED_NAMES}
        self._shown: dict[str, _Shown] = {}
        self._names: dict[str, str] = {}  # all names that a metric appears by: its own
        self._children: dict[int, _Child] = {}
        self._weight = 0
        self._dropped: Tally[str] = Tally(dict.fromkeys(REASONS, 0))
        self._decode: Callable[[bytes], Report] = msgspec.msgpack.Decoder(Report).decode

    def take(self, slot: int, generation: int, pid: int, body: bytes) -> None:
        """A report of this child."""
        try:
            report = self._decode(body)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            self._dropped["invalid"] += 1
            return
        child = self._children.setdefault(pid, _Child())
        self._dropped["child"] += report.dropped
        for index in report.gone:
            self._forget(child, index)
        for family in report.families:
            shown = self._show(family, generation)
            for series in family.series:
                self._forget(child, series.index)
                child.cells[series.index] = self._place(child, shown, series, slot) if shown is not None else None
            if shown is not None:
                self._hide_if_empty(shown)  # none of its series was taken
        for index, values in report.changes.items():
            self._apply(child, index, values)

    def gone(self, pid: int) -> None:
        """This child is dead: what is its own vanishes, what it has added stays."""
        child = self._children.pop(pid, None)
        if child is not None:
            for index in list(child.cells):
                self._forget(child, index)

    def collect(self) -> Iterator[Metric]:
        """All that is shown now, and how much is not."""
        for shown in self._shown.values():
            metric = Metric(shown.name, shown.help, shown.kind)
            for cell in shown.cells:
                _add_samples(metric, shown, cell)
            yield metric
        dropped = CounterMetricFamily(
            "spooled_supervisor_child_metrics_dropped_total",
            "Series and values of handlers' own metrics that are not shown, by reason.",
            labels=("reason",),
        )
        for reason, count in self._dropped.items():
            dropped.add_metric((reason,), count)
        yield dropped

    # --- metrics and series ------------------------------------------------------------------------------------------

    def _show(self, family: Family, generation: int) -> _Shown | None:
        """The metric on the page, made if it is new; None if it cannot be there."""
        shown = self._shown.get(family.name)
        if shown is not None and generation > shown.generation:
            if (shown.kind, shown.bounds) != (family.kind, family.bounds):
                self._hide(shown)
                shown = None
            else:
                shown.generation = generation
        if shown is None:
            if not _is_valid(family):
                self._dropped["invalid"] += len(family.series)
                return None
            names = appears_by(family.name, family.kind)
            if family.name.startswith(RESERVED_PREFIXES) or any(n in self._taken or n in self._names for n in names):
                self._dropped["collision"] += len(family.series)
                return None
            text = family.help.strip() or "A metric of the app's handlers."
            shown = self._shown[family.name] = _Shown(family.name, family.kind, text, family.bounds, generation)
            self._names.update(dict.fromkeys(names, family.name))
        elif (shown.kind, shown.bounds) != (family.kind, family.bounds):
            self._dropped["collision"] += len(family.series)
            return None
        return shown

    def _hide(self, shown: _Shown) -> None:
        """Take a metric off the page. Cells of it that children still have are counted in vain from now on."""
        self._weight -= sum(cell.weight for cell in (*shown.sums.values(), *shown.own))
        shown.sums.clear()
        shown.own.clear()
        del self._shown[shown.name]
        for name in appears_by(shown.name, shown.kind):
            del self._names[name]

    def _hide_if_empty(self, shown: _Shown) -> None:
        if not shown.sums and not shown.own and self._shown.get(shown.name) is shown:
            self._hide(shown)

    def _place(self, child: _Child, shown: _Shown, series: Series, slot: int) -> _Cell | None:
        """A series of this child's on the page; None if it is not shown."""
        labels = series.labels
        if not _are_valid(labels, shown):
            self._dropped["invalid"] += 1
            return None
        if shown.kind not in SUMMED and shown.kind != "info":
            if "slot" in labels:
                labels = {"exported_slot" if name == "slot" else name: value for name, value in labels.items()}
            labels = labels | {"slot": str(slot)}
        n_series = weight(shown.kind, len(shown.bounds))
        key = tuple(sorted(labels.items()))
        cell = shown.sums.get(key)
        added = 0 if cell is not None else n_series
        if child.weight + n_series > MAX_SERIES or self._weight + added > MAX_ALL_SERIES:
            self._dropped["limit"] += 1
            return None
        if cell is None:
            values = [1.0] if shown.kind == "info" else [0.0] * values_of(shown.kind, len(shown.bounds))
            cell = _Cell(shown, key, labels, values, n_series)
            if shown.kind in SUMMED:
                shown.sums[key] = cell
            else:
                shown.own[cell] = None
        child.weight += n_series
        self._weight += added
        return cell

    def _forget(self, child: _Child, index: int) -> None:
        """The child has this series no more, or gives its index to another one."""
        cell = child.cells.pop(index, None)
        if cell is None:
            return
        child.weight -= cell.weight
        if cell in cell.family.own:
            del cell.family.own[cell]
            self._weight -= cell.weight
            self._hide_if_empty(cell.family)

    def _apply(self, child: _Child, index: int, values: list[float]) -> None:
        cell = child.cells.get(index)
        if cell is None:
            if index not in child.cells:
                self._dropped["invalid"] += 1
            return
        kind = cell.family.kind
        if len(values) != len(cell.values) or not _are_possible(values, kind, len(cell.family.bounds)):
            self._dropped["invalid"] += 1
        elif kind not in SUMMED:
            cell.values = values
        elif math.inf not in (sums := list(map(float.__add__, cell.values, values))):
            cell.values = sums


def appears_by(name: str, kind: str) -> list[str]:
    """The names of a metric's family and of its samples."""
    return [name, *(name + suffix for suffix in SUFFIXES.get(kind, ()))]


def _is_valid(family: Family) -> bool:
    """Whether the page can have it: one bad name and Prometheus refuses the whole page."""
    if not _METRIC_NAME.fullmatch(family.name) or (family.bounds and family.kind != "histogram"):
        return False
    if not all(_BOUND.fullmatch(bound) for bound in family.bounds):
        return False
    try:
        bounds = [float(bound) for bound in family.bounds]
    except ValueError:  # two points
        return False
    return all(low < high for low, high in pairwise([*bounds, math.inf]))


def _are_valid(labels: Mapping[str, str], shown: _Shown) -> bool:
    """Whether a series may have these labels."""
    if shown.kind == "stateset" and shown.name not in labels:
        return False
    reserved = _RESERVED_LABELS.get(shown.kind)
    return all(_LABEL_NAME.fullmatch(name) and name != reserved for name in labels)


def _are_possible(values: list[float], kind: Kind, bounds: int) -> bool:
    """Whether the numbers make sense: additions are finite and not negative, counts are whole, and a histogram's
    buckets do not shrink as they widen. A gauge may be anything."""
    if kind not in SUMMED:
        return values[0] in _POSSIBLE.get(kind, values)
    if not all(0.0 <= value < math.inf for value in values):
        return False
    if kind != "counter" and not all(map(float.is_integer, values[:-1])):  # the last one is the sum
        return False
    return not bounds or all(low <= high for low, high in pairwise(values[: bounds + 1]))


def _add_samples(metric: Metric, shown: _Shown, cell: _Cell) -> None:
    name, labels, values = shown.name, cell.labels, cell.values
    match shown.kind:
        case "histogram":
            for bound, value in zip((*shown.bounds, "+Inf"), values[:-1], strict=True):
                metric.add_sample(name + "_bucket", {**labels, "le": bound}, value)
            metric.add_sample(name + "_count", labels, values[-2])
            metric.add_sample(name + "_sum", labels, values[-1])
        case "summary":
            metric.add_sample(name + "_count", labels, values[0])
            metric.add_sample(name + "_sum", labels, values[1])
        case kind:
            metric.add_sample(name + SAMPLE_OF[kind], labels, values[0])

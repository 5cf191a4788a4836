"""The child's half of handlers' own metrics: what prometheus_client counts in this process, told to the supervisor.

Handlers use prometheus_client as anywhere: its default registry is read, once somebody has imported it. Counters,
histograms and summaries are told as what was added since the last report, beginning with the child's birth, as the
values of before were copied from the fork server by fork(2) and belong to nobody; gauges as they are. A report goes
out when the child is ready, after a job, while a job tells its progress, and when the child leaves; one in INTERVAL_S
at most, and one that was put off is sent as soon as it may be, if no job comes in between. So a child that is killed
takes with it what its job has counted since its last report, and jobs that ended within INTERVAL_S before this one.

No files: prometheus_client's own multi-process mode leaves one for every process that ever lived. Nothing here takes
part in outcomes: whatever the registry does, the job that has ended has ended.

A report is the body of one `frames.Metrics`:

    Report   [families, gone, changes, dropped]
    Family   [name, kind, help, bounds, [Series, ...]]     series that are told for the first time
    Series   [index, labels]                               `index` is this child's name for it, used again when gone
    changes  {index: values}
    values   counter [added]          summary   [count added, sum added]
             gauge   [value]          histogram [added at or below each bound ..., added in all, sum added]
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal, cast

import msgspec
from msgspec import Meta, Struct

if TYPE_CHECKING:
    from prometheus_client import Metric

INTERVAL_S = 1.0
COST_SHARE = 0.02
"""Reading the registry may take this share of the time: a slow collector of the app's is asked less often."""
MAX_SERIES = 1000
"""Per child, counted as Prometheus does: each bucket, count and sum is one."""
MAX_NAME = 200
MAX_HELP = 500
MAX_LABELS = 20
MAX_LABEL_VALUE = 500
MAX_LABEL_BYTES = 2000
"""Of all labels of one series together."""
MAX_BOUNDS = 200
MAX_BOUND = 32
SERIES_PER_REPORT = 40
"""New ones; more are told in further reports, so that none exceeds what a frame may hold."""
CHANGES_PER_REPORT = 2500
"""Numbers; as above."""
OWN_NAMES = frozenset(
    (
        *("process_virtual_memory_bytes", "process_resident_memory_bytes", "process_start_time_seconds"),
        *("process_cpu_seconds", "process_open_fds", "process_max_fds", "python_info"),
        *("python_gc_objects_collected", "python_gc_objects_uncollectable", "python_gc_collections"),
    )
)
"""Of prometheus_client's default collectors; the supervisor has these figures itself, of every child."""

Kind = Literal["counter", "gauge", "histogram", "info", "stateset", "summary", "unknown"]
SUMMED: frozenset[Kind] = frozenset(("counter", "histogram", "summary"))
SAMPLE_OF: Mapping[str, str] = {"counter": "_total", "info": "_info", "gauge": "", "stateset": "", "unknown": ""}
"""What a kind with one number a series appends to the family's name for it."""

Index = Annotated[int, Meta(ge=0, lt=MAX_SERIES)]
Name = Annotated[str, Meta(max_length=MAX_NAME)]
Bound = Annotated[str, Meta(max_length=MAX_BOUND)]
Labels = dict[Name, Annotated[str, Meta(max_length=MAX_LABEL_VALUE)]]


class Series(Struct, frozen=True, array_like=True):
    """One combination of label values; without `le`, as a histogram's buckets go together."""

    index: Index
    labels: Annotated[Labels, Meta(max_length=MAX_LABELS)]


class Family(Struct, frozen=True, array_like=True):
    """A metric. `bounds` are a histogram's, without the last one, `+Inf`; else there are none."""

    name: Name
    kind: Kind
    help: Annotated[str, Meta(max_length=MAX_HELP)]
    bounds: Annotated[list[Bound], Meta(max_length=MAX_BOUNDS)]
    series: Annotated[list[Series], Meta(max_length=MAX_SERIES)]


class Report(Struct, frozen=True, array_like=True):
    """What is new; `dropped` series or values were left out here."""

    families: Annotated[list[Family], Meta(max_length=MAX_SERIES)]
    gone: Annotated[list[Index], Meta(max_length=MAX_SERIES)]
    changes: dict[Index, Annotated[list[float], Meta(max_length=MAX_BOUNDS + 2)]]
    dropped: Annotated[int, Meta(ge=0, le=1 << 31)]


def weight(kind: Kind, bounds: int) -> int:
    """For how many series one combination of label values counts."""
    return {"histogram": bounds + 3, "summary": 2}.get(kind, 1)


def values_of(kind: Kind, bounds: int) -> int:
    """How many numbers a report has for it."""
    return {"histogram": bounds + 2, "summary": 2}.get(kind, 1)


@dataclass(slots=True)
class _Cell:
    """A series that the supervisor knows, or is about to be told of; index -1: one it never will."""

    index: int
    weight: int
    values: list[float]
    is_bad: bool = False  # its number is no number, and that was counted


@dataclass(frozen=True, slots=True)
class _Reading:
    """One series as the registry has it now."""

    name: str
    kind: Kind
    help: str
    bounds: list[str]
    labels: dict[str, str]
    values: list[float]


_Key = tuple[str, str, tuple[str, ...], tuple[tuple[str, str], ...]]
_encode = msgspec.msgpack.Encoder().encode


class Reporter:
    """Reads this process's registry and hands reports to `send`. For the main thread only."""

    def __init__(self, send: Callable[[bytes], None], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._send = send
        self._clock = clock
        self._cells: dict[_Key, _Cell] = {}
        self._free: list[int] = []
        self._next = 0
        self._weight = 0
        self._dropped = 0
        self._due_at = 0.0
        self._is_put_off = False
        self._is_reading = False
        self._is_whole = False  # the last reading came to its end
        self._has_complained = False

    @property
    def wait_ms(self) -> float | None:
        """How long the child may sleep before a report that was put off is due; None if there is none."""
        return max(0.0, self._due_at - self._clock()) * 1000 + 1 if self._is_put_off else None

    def begin(self) -> None:
        """At birth, before any code of the app runs here: what is summed begins at what was inherited."""
        if "prometheus_client" not in sys.modules:
            return
        for reading in self._read():
            if reading.kind in SUMMED:
                self._cells[_key_of(reading)] = _Cell(-1, 0, reading.values)

    def report_if_due(self) -> None:
        """As `report`, unless the last one was a moment ago: then `wait_ms` tells when to try again."""
        if "prometheus_client" not in sys.modules:
            return
        if self._clock() >= self._due_at:
            self.report()
        else:
            self._is_put_off = True

    def report(self) -> None:
        """Tell what has changed. Raises nothing of the registry's; does nothing where nobody uses prometheus_client."""
        if "prometheus_client" not in sys.modules or self._is_reading:
            return  # a collector of the app's that calls us while we ask it
        self._is_reading = True
        self._is_put_off = False
        began_at = self._clock()
        try:
            for report in self._reports():
                self._send(_encode(report))
        finally:
            ended_at = self._clock()
            self._due_at = ended_at + max(INTERVAL_S, (ended_at - began_at) / COST_SHARE)
            self._is_reading = False

    def _reports(self) -> Iterator[Report]:
        readings = {_key_of(reading): reading for reading in self._read()}
        gone = self._gone(readings) if self._is_whole else []
        families: list[Family] = []
        changes: dict[int, list[float]] = {}
        new, numbers = 0, 0
        for key, reading in readings.items():
            cell, is_new = self._cell(key, reading)
            change = self._change(cell, reading) if cell.index >= 0 else None
            if is_new:
                change = change or [0.0] * len(reading.values)
                _add(families, reading, cell.index)
                new += 1
            if change is None:
                continue
            changes[cell.index] = change
            numbers += len(change)
            if new >= SERIES_PER_REPORT or numbers >= CHANGES_PER_REPORT:
                yield self._made(families, gone, changes)
                families, gone, changes, new, numbers = [], [], {}, 0, 0
        if families or changes or gone or self._dropped:
            yield self._made(families, gone, changes)

    def _made(self, families: list[Family], gone: list[int], changes: dict[int, list[float]]) -> Report:
        dropped, self._dropped = self._dropped, 0
        return Report(families, gone, changes, dropped)

    def _cell(self, key: _Key, reading: _Reading) -> tuple[_Cell, bool]:
        """The cell of this series, and whether the supervisor is to be told of it."""
        cell = self._cells.get(key)
        if cell is None:
            cell = self._cells[key] = _Cell(-1, 0, [0.0] * len(reading.values))
        elif cell.index >= 0 or cell.weight:
            return cell, False
        cell.weight = weight(reading.kind, len(reading.bounds))
        if self._weight + cell.weight > MAX_SERIES or not _is_sendable(reading):
            self._dropped += 1
            return cell, False  # it has a weight and no index: it was looked at, and is left out for good
        self._weight += cell.weight
        if self._free:
            cell.index = self._free.pop()
        else:
            cell.index = self._next
            self._next += 1
        return cell, True

    def _change(self, cell: _Cell, reading: _Reading) -> list[float] | None:
        """What to tell of the series, None if nothing; from now on it counts as told."""
        values = reading.values
        if reading.kind in SUMMED and not all(map(math.isfinite, values)):
            self._dropped += not cell.is_bad
            cell.is_bad = True
            values = [new if math.isfinite(new) else old for new, old in zip(values, cell.values, strict=True)]
        if values == cell.values:
            return None
        before, cell.values = cell.values, values
        if reading.kind not in SUMMED:
            return values
        return _added(before, values, has_sum=reading.kind != "counter")

    def _gone(self, there: Mapping[_Key, _Reading]) -> list[int]:
        """Forget series that are not there any more; the indices of those that the supervisor knows."""
        indices = []
        for key in [key for key in self._cells if key not in there]:
            cell = self._cells.pop(key)
            if cell.index >= 0:
                indices.append(cell.index)
                self._weight -= cell.weight
        self._free += indices
        return indices

    def _read(self) -> Iterator[_Reading]:
        """Every series that there is. What a collector of the app's raises ends it, and hides the rest."""
        self._is_whole = False
        try:
            for metric in sys.modules["prometheus_client"].REGISTRY.collect():
                if metric.name not in OWN_NAMES:
                    yield from _readings(metric)
            self._is_whole = True
        except Exception:  # a collector; or prometheus_client is half imported, by a thread
            if not self._has_complained:
                self._has_complained = True
                self._dropped += 1
                logging.getLogger(__name__).warning("metrics of this child cannot be read to their end", exc_info=True)


def _key_of(reading: _Reading) -> _Key:
    return (reading.name, reading.kind, tuple(reading.bounds), tuple(reading.labels.items()))


def _add(families: list[Family], reading: _Reading, index: int) -> None:
    """One more series; those of one metric come one after the other."""
    last = families[-1] if families else None
    if last is None or (last.name, last.kind, last.bounds) != (reading.name, reading.kind, reading.bounds):
        last = Family(reading.name, reading.kind, reading.help, reading.bounds, [])
        families.append(last)
    last.series.append(Series(index, reading.labels))


def _added(before: list[float], now: list[float], *, has_sum: bool) -> list[float]:
    """What came on top. A count that went back has begun again from zero (`reset`, `clear`), and its sum with it. A sum
    that went back by itself has met a negative observation, which adds nothing: a total that falls reads as a restart.
    """
    counts = len(now) - has_sum
    if len(before) != len(now) or any(new < old for old, new in zip(before[:counts], now[:counts], strict=True)):
        return [max(0.0, value) for value in now]
    return [max(0.0, new - old) for old, new in zip(before, now, strict=True)]


def _is_sendable(reading: _Reading) -> bool:
    """Whether it has all its numbers and keeps the bounds of `Report`; the supervisor looks at the rest anyway."""
    labels = reading.labels
    return (
        len(reading.values) == values_of(reading.kind, len(reading.bounds))
        and len(reading.name) <= MAX_NAME
        and reading.name.isascii()
        and len(labels) <= MAX_LABELS
        and len(reading.bounds) <= MAX_BOUNDS
        and all(len(name) <= MAX_NAME and len(value) <= MAX_LABEL_VALUE for name, value in labels.items())
        and all(len(bound) <= MAX_BOUND for bound in reading.bounds)
        and sum(len(text.encode()) for pair in labels.items() for text in pair) <= MAX_LABEL_BYTES
    )


def _readings(metric: Metric) -> Iterable[_Reading]:
    """The series of one metric of the registry."""
    text = _utf8(metric.documentation)[:MAX_HELP]
    if metric.type in SAMPLE_OF:
        kind, name = cast("Kind", metric.type), metric.name + SAMPLE_OF[metric.type]
        for sample in metric.samples:
            if sample.name == name:  # not `_created`
                yield _Reading(metric.name, kind, text, [], _utf8_labels(sample.labels), [float(sample.value)])
    elif metric.type in ("histogram", "summary"):
        yield from _grouped(metric, text)
    else:
        yield _Reading(metric.name, "unknown", text, [], {}, [])  # without a number: it is counted as left out


def _grouped(metric: Metric, text: str) -> Iterable[_Reading]:
    """Series of several samples. A histogram's count is its last bucket's; one with negative bounds has no sum."""
    groups: dict[tuple[str, ...], _Reading] = {}
    kind = cast("Kind", metric.type)
    counts = metric.name + ("_bucket" if kind == "histogram" else "_count")
    for sample in metric.samples:
        if sample.name not in (counts, metric.name + "_sum"):
            continue
        labels = sample.labels
        bound = None
        if kind == "histogram" and "le" in labels:
            labels = dict(labels)
            bound = _utf8(labels.pop("le"))
        key = tuple(labels.values())
        group = groups.get(key)
        if group is None:
            group = groups[key] = _Reading(metric.name, kind, text, [], _utf8_labels(labels), [])
        group.values.append(float(sample.value))
        if bound is not None and bound != "+Inf":
            group.bounds.append(bound)
    return groups.values()


def _utf8(text: str) -> str:
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def _utf8_labels(labels: Mapping[str, str]) -> dict[str, str]:
    return {_utf8(name): _utf8(value) for name, value in labels.items()}

"""What a child tells of its prometheus_client registry: what was added, what is there, what is gone, and when."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator

import msgspec
import prometheus_client
import pytest
from prometheus_client import CollectorRegistry, Counter, Enum, Gauge, Histogram, Info, Metric, Summary
from prometheus_client.metrics_core import GaugeHistogramMetricFamily
from prometheus_client.registry import Collector

from spooled_supervisor import frames
from spooled_supervisor.childmetrics import INTERVAL_S, MAX_SERIES, Report, Reporter

decode = msgspec.msgpack.Decoder(Report).decode


class Child:
    """A registry of its own, a reporter that reads it, a clock that stands still."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.now = 100.0
        self.sent: list[bytes] = []
        self.reporter = Reporter(self.sent.append, clock=lambda: self.now)
        self.known: dict[int, str] = {}

    def reports(self) -> list[Report]:
        """What was sent since the last time."""
        taken, self.sent[:] = [decode(body) for body in self.sent], []
        for report in taken:
            for family in report.families:
                for series in family.series:
                    labels = ",".join(f"{name}={value}" for name, value in series.labels.items())
                    self.known[series.index] = f"{family.name}{{{labels}}}" if labels else family.name
        return taken

    def tell(self) -> dict[str, list[float]]:
        """A report, as changes by name."""
        self.reporter.report()
        changes: dict[str, list[float]] = {}
        for report in self.reports():
            changes |= {self.known[index]: values for index, values in report.changes.items()}
        return changes

    def dropped(self) -> int:
        self.reporter.report()
        return sum(report.dropped for report in self.reports())


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch) -> Child:
    registry = CollectorRegistry()
    monkeypatch.setattr(prometheus_client, "REGISTRY", registry)
    return Child(registry)


def test_nothing_is_done_where_nobody_uses_prometheus_client(child: Child, monkeypatch: pytest.MonkeyPatch) -> None:
    Counter("jobs", "Text.", registry=child.registry).inc()
    monkeypatch.delitem(sys.modules, "prometheus_client")
    child.reporter.begin()
    child.reporter.report_if_due()
    child.reporter.report()
    assert child.sent == []
    assert child.reporter.wait_ms is None


def test_nothing_is_sent_where_nothing_is_registered(child: Child) -> None:
    assert child.tell() == {}
    assert child.sent == []


def test_what_is_new_is_told_at_zero_and_then_what_was_added(child: Child) -> None:
    counter = Counter("pages", "Pages.", ["kind"], registry=child.registry)
    counter.labels("a4")
    assert child.tell() == {"pages{kind=a4}": [0]}
    counter.labels("a4").inc(2)
    counter.labels("a5").inc()
    assert child.tell() == {"pages{kind=a4}": [2], "pages{kind=a5}": [1]}
    counter.labels("a4").inc(0.5)
    assert child.tell() == {"pages{kind=a4}": [0.5]}
    assert child.tell() == {}
    assert child.sent == []


def test_what_was_counted_before_the_birth_is_not_told(child: Child) -> None:
    counter = Counter("pages", "Pages.", registry=child.registry)
    histogram = Histogram("size", "Sizes.", buckets=(1, 2), registry=child.registry)
    gauge = Gauge("models", "Models.", registry=child.registry)
    counter.inc(7)
    histogram.observe(1.5)
    gauge.set(3)
    child.reporter.begin()
    assert child.sent == []
    counter.inc()
    histogram.observe(0.5)
    assert child.tell() == {"pages": [1], "size": [1, 1, 1, 0.5], "models": [3]}


@pytest.mark.parametrize("back", ["reset", "clear"])
def test_a_counter_that_goes_back_has_begun_again(child: Child, back: str) -> None:
    counter = Counter("pages", "Pages.", ["kind"], registry=child.registry)
    counter.labels("a4").inc(5)
    child.tell()
    if back == "reset":
        counter.labels("a4").reset()
    else:
        counter.clear()
    counter.labels("a4").inc(2)
    assert child.tell() == {"pages{kind=a4}": [2]}


def test_a_histogram_that_is_cleared_begins_again_with_its_sum(child: Child) -> None:
    histogram = Histogram("size", "Sizes.", ["kind"], buckets=(1, 2), registry=child.registry)
    for _ in range(3):
        histogram.labels("a").observe(5)
    child.tell()
    histogram.clear()
    histogram.labels("a").observe(20)
    assert child.tell() == {"size{kind=a}": [0, 0, 1, 20]}


def test_a_negative_observation_adds_nothing_to_the_sum(child: Child) -> None:
    summary = Summary("gain", "Gains.", registry=child.registry)
    summary.observe(5)
    child.tell()
    summary.observe(-2)
    assert child.tell() == {"gain": [1, 0]}


def test_every_kind_is_told_with_its_numbers(child: Child) -> None:
    Summary("took", "Text.", registry=child.registry).observe(3)
    Info("model", "Text.", registry=child.registry).info({"version": "1"})
    Enum("state", "Text.", states=["up", "down"], registry=child.registry).state("down")
    Gauge("level", "Text.", registry=child.registry).set(-1)
    Histogram("size", "Text.", ["kind"], buckets=(0.5, 1000000), registry=child.registry).labels("a").observe(1)
    child.reporter.report()
    (report,) = child.reports()
    assert {family.name: (family.kind, family.bounds) for family in report.families} == {
        "took": ("summary", []),
        "model": ("info", []),
        "state": ("stateset", []),
        "level": ("gauge", []),
        "size": ("histogram", ["0.5", "1e+06"]),
    }
    assert {child.known[index]: values for index, values in report.changes.items()} == {
        "took": [1, 3],
        "model{version=1}": [1],
        "state{state=up}": [0],
        "state{state=down}": [1],
        "level": [-1],
        "size{kind=a}": [0, 1, 1, 1],
    }


def test_the_process_s_own_figures_are_left_out(child: Child) -> None:
    prometheus_client.ProcessCollector(registry=child.registry)
    prometheus_client.PlatformCollector(registry=child.registry)
    prometheus_client.GCCollector(registry=child.registry)
    assert child.tell() == {}


def test_a_metric_of_the_app_may_begin_like_them(child: Child) -> None:
    prometheus_client.Counter("process_pages", "pages", registry=child.registry).inc()
    prometheus_client.Gauge("python_workers", "workers", registry=child.registry).set(3)
    assert set(child.tell()) == {"process_pages", "python_workers"}


def test_gauges_that_are_gone_are_said_to_be_and_their_indices_used_again(child: Child) -> None:
    gauge = Gauge("level", "Levels.", ["tank"], registry=child.registry)
    for round_ in range(3 * MAX_SERIES):
        gauge.clear()
        gauge.labels(str(round_)).set(1)
        child.reporter.report()
    reports = child.reports()
    assert {index for report in reports for index in report.changes} == {0}
    assert all(report.gone == [0] and not report.dropped for report in reports[1:])


def test_what_exceeds_the_limit_is_counted_once_and_taken_when_there_is_room(child: Child) -> None:
    gauge = Gauge("level", "Levels.", ["tank"], registry=child.registry)
    for n in range(MAX_SERIES + 5):
        gauge.labels(str(n)).set(1)
    child.reporter.report()
    reports = child.reports()
    assert sum(len(family.series) for report in reports for family in report.families) == MAX_SERIES
    assert sum(report.dropped for report in reports) == 5
    assert child.dropped() == 0
    gauge.clear()
    gauge.labels("new").set(1)
    assert child.tell() == {"level{tank=new}": [1]}


def test_each_bucket_counts_as_a_series(child: Child) -> None:
    histogram = Histogram("size", "Sizes.", ["n"], buckets=range(1, 98), registry=child.registry)
    for n in range(12):
        histogram.labels(str(n)).observe(1)
    child.reporter.report()
    reports = child.reports()
    assert sum(len(family.series) for report in reports for family in report.families) == 10
    assert sum(report.dropped for report in reports) == 2


def test_any_number_of_series_of_any_size_fits_into_frames(child: Child) -> None:
    for n in range(500):
        counter = Counter(f"c{n}_" + "x" * 180, "\U0001f40c" * 3000, ["a", "b", "c", "d"], registry=child.registry)
        counter.labels(*["\U0001f40c" * 120] * 4).inc()
    for n in range(4):
        Histogram(f"h{n}", "Text.", ["a"], buckets=[1e9 + b for b in range(120)], registry=child.registry).labels("x")
    child.reporter.report()
    decoder = frames.decoder_of_child()
    for body in child.sent:
        (message,) = decoder.feed(frames.encode_frame(frames.Metrics(body)))
        assert message == frames.Metrics(body)
    assert sum(len(report.changes) for report in child.reports()) == 504


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_counter_without_a_number_is_counted_once_and_stands_still(child: Child, value: float) -> None:
    counter = Counter("pages", "Pages.", registry=child.registry)
    counter.inc(2)
    child.tell()
    counter.inc(value)
    assert child.dropped() == 1
    assert child.tell() == {}


def test_a_sum_without_a_number_does_not_stop_the_counts(child: Child) -> None:
    histogram = Histogram("size", "Sizes.", buckets=(1,), registry=child.registry)
    histogram.observe(0.5)
    child.tell()
    histogram.observe(math.nan)
    histogram.observe(0.5)
    assert child.tell() == {"size": [1, 1, 0]}


def test_a_gauge_may_be_anything(child: Child) -> None:
    Gauge("level", "Text.", registry=child.registry).set(math.inf)
    assert child.tell() == {"level": [math.inf]}


class Odd(Collector):
    """What an app's own collector may give."""

    def __init__(self, *metrics: Metric | Exception) -> None:
        self.metrics = metrics

    def collect(self) -> Iterator[Metric]:
        for metric in self.metrics:
            if isinstance(metric, Exception):
                raise metric
            yield metric


def a_metric(name: str, kind: str, *samples: tuple[str, dict[str, str], float]) -> Metric:
    metric = Metric(name, "Text.", kind)
    for sample in samples:
        metric.add_sample(*sample)
    return metric


@pytest.mark.parametrize(
    "metric",
    [
        a_metric("b", "gauge", ("b", {"x" * 201: "v"}, 1)),
        a_metric("b", "gauge", ("b", {"x": "v" * 501}, 1)),
        a_metric("b", "gauge", ("b", {f"x{n}": "v" for n in range(21)}, 1)),
        a_metric("b", "gauge", ("b", {f"x{n}": "é" * 400 for n in range(4)}, 1)),
        a_metric("b" * 201, "gauge", ("b" * 201, {}, 1)),
        a_metric("bé", "gauge", ("bé", {}, 1)),
        a_metric("b", "histogram", ("b_bucket", {"le": "1"}, 1), ("b_bucket", {"le": "+Inf"}, 1), ("b_count", {}, 1)),
        a_metric("b", "summary", ("b_count", {}, 1)),
        a_metric(
            "b", "histogram", ("b_bucket", {"le": "1" * 40}, 1), ("b_bucket", {"le": "+Inf"}, 1), ("b_sum", {}, 1)
        ),
        GaugeHistogramMetricFamily("b", "Text.", buckets=[("1", 1.0), ("+Inf", 2.0)], gsum_value=1),
    ],
)
def test_what_cannot_be_told_is_left_out_counted_and_hides_nothing(child: Child, metric: Metric) -> None:
    child.registry.register(Odd(metric))
    Counter("pages", "Pages.", registry=child.registry).inc()
    child.reporter.report()
    (report,) = child.reports()
    assert ([family.name for family in report.families], report.dropped) == (["pages"], 1)
    assert child.dropped() == 0


def test_lone_surrogates_are_spelled_out(child: Child) -> None:
    Counter("pages", "P\udcff", ["path"], registry=child.registry).labels("\udcff").inc()
    assert child.tell() == {"pages{path=\\udcff}": [1]}


def test_a_collector_that_raises_hides_what_comes_after_it_and_ends_nothing(
    child: Child, caplog: pytest.LogCaptureFixture
) -> None:
    before = Gauge("before", "Text.", registry=child.registry)
    odd = Odd(a_metric("odd", "gauge", ("odd", {}, 1)))
    child.registry.register(odd)
    Gauge("after", "Text.", registry=child.registry)
    assert child.tell() == {"before": [0], "odd": [1], "after": [0]}
    odd.metrics = (RuntimeError("no database"),)
    before.set(2)
    for _ in range(2):
        child.reporter.report()
    (report,) = child.reports()
    assert (report.changes, report.gone, report.dropped) == ({0: [2]}, [], 1)
    assert [record.getMessage() for record in caplog.records] == ["metrics of this child cannot be read to their end"]
    odd.metrics = ()
    child.reporter.report()
    (report,) = child.reports()
    assert report.gone == [1]


def test_a_collector_that_calls_us_is_no_endless_loop(child: Child) -> None:
    class Nosy(Collector):
        def collect(self) -> Iterator[Metric]:
            child.reporter.report()
            return iter([a_metric("nosy", "gauge", ("nosy", {}, 1))])

    child.registry.register(Nosy())
    assert child.tell() == {"nosy": [1]}


def test_one_report_in_an_interval_and_the_one_put_off_is_not_forgotten(child: Child) -> None:
    counter = Counter("pages", "Pages.", registry=child.registry)
    child.reporter.report_if_due()
    assert len(child.sent) == 1
    assert child.reporter.wait_ms is None
    for _ in range(5):
        counter.inc()
        child.now += INTERVAL_S / 10
        child.reporter.report_if_due()
    assert len(child.sent) == 1
    assert child.reporter.wait_ms == pytest.approx(INTERVAL_S * 500, abs=2)
    child.now += INTERVAL_S
    child.reporter.report_if_due()
    assert len(child.sent) == 2
    assert child.reporter.wait_ms is None
    child.reporter.report()
    assert len(child.sent) == 2


def test_a_slow_collector_is_asked_less_often(child: Child) -> None:
    class Slow(Collector):
        def collect(self) -> Iterator[Metric]:
            child.now += 0.5
            return iter([])

    child.registry.register(Slow())
    child.reporter.report_if_due()
    child.reporter.report_if_due()
    assert child.reporter.wait_ms == pytest.approx(25_000, abs=2)

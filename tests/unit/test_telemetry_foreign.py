"""The children's metrics on the supervisor's page: sums that never fall, gauges that vanish, hostile reports."""

from __future__ import annotations

import math
import random
import re
import shutil
import subprocess
from collections.abc import Mapping

import msgspec
import prometheus_client
import pytest
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from spooled_supervisor import events as happened
from spooled_supervisor.childmetrics import MAX_SERIES, Family, Kind, Report, Reporter, Series
from spooled_supervisor.events import Events
from spooled_supervisor.telemetry.foreign import MAX_ALL_SERIES, REASONS, ChildMetrics
from spooled_supervisor.telemetry.metrics import Metrics
from tests.unit.test_telemetry_metrics import OPENMETRICS, busy_page, parse_openmetrics, some

needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
encode = msgspec.msgpack.encode


def a_family(name: str, kind: Kind = "counter", *labels: Mapping[str, str], bounds: tuple[str, ...] = ()) -> Family:
    series = [Series(n, dict(each)) for n, each in enumerate(labels or ({},))]
    return Family(name, kind, "Text.", list(bounds), series)


def a_report(
    *families: Family, changes: Mapping[int, list[float]] | None = None, gone: tuple[int, ...] = (), dropped: int = 0
) -> bytes:
    return encode(Report(list(families), list(gone), dict(changes or {}), dropped))


class Page:
    """The children's metrics, and single values of them."""

    def __init__(self) -> None:
        self.children = ChildMetrics(["taken", "taken_total"])
        self.registry = CollectorRegistry()
        self.registry.register(self.children)

    def take(self, body: bytes, *, slot: int = 0, generation: int = 1, pid: int = 100) -> None:
        self.children.take(slot, generation, pid, body)

    def samples(self) -> dict[str, float]:
        """All but the dropped ones, as they stand on the page."""
        found = {}
        for family in self.registry.collect():
            for sample in family.samples:
                labels = ",".join(f"{name}={value}" for name, value in sample.labels.items())
                found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
        return {name: value for name, value in found.items() if not name.startswith("spooled_supervisor_")}

    def dropped(self) -> dict[str, float]:
        name = "spooled_supervisor_child_metrics_dropped_total"
        counts = {reason: self.registry.get_sample_value(name, {"reason": reason}) for reason in REASONS}
        return {reason: count for reason, count in counts.items() if count}

    def encode(self) -> str:
        return choose_encoder(OPENMETRICS)[0](self.registry).decode()

    def parsed(self) -> list[Metric]:
        return list(parse_openmetrics(self.encode()))


@pytest.fixture
def page() -> Page:
    return Page()


def test_what_children_add_is_summed_and_stays_when_they_are_gone(page: Page) -> None:
    for pid in (1, 2, 3):
        page.take(a_report(a_family("pages"), changes={0: [2]}), slot=pid % 2, pid=pid)
        page.take(a_report(changes={0: [0.5]}), slot=pid % 2, pid=pid)
        page.children.gone(pid)
    assert page.samples() == {"pages_total": 7.5}


def test_histograms_and_summaries_are_summed_number_by_number(page: Page) -> None:
    families = (
        a_family("size", "histogram", {"kind": "a"}, bounds=("0.5", "1e+06")),
        Family("took", "summary", "Text.", [], [Series(1, {})]),
    )
    for pid in (1, 2):
        page.take(a_report(*families, changes={0: [0, 1, 1, 3.0], 1: [2, 5.0]}), pid=pid)
    assert page.samples() == {
        "size_bucket{kind=a,le=0.5}": 0,
        "size_bucket{kind=a,le=1e+06}": 2,
        "size_bucket{kind=a,le=+Inf}": 2,
        "size_count{kind=a}": 2,
        "size_sum{kind=a}": 6,
        "took_count": 4,
        "took_sum": 10,
    }
    page.parsed()


def test_gauges_have_a_slot_and_vanish_with_their_child(page: Page) -> None:
    for slot in (0, 1):
        page.take(a_report(a_family("level", "gauge", {"tank": "a"}), changes={0: [slot + 5]}), slot=slot, pid=slot)
    assert page.samples() == {"level{tank=a,slot=0}": 5, "level{tank=a,slot=1}": 6}
    page.take(a_report(changes={0: [math.inf]}), slot=1, pid=1)
    page.children.gone(0)
    assert page.samples() == {"level{tank=a,slot=1}": math.inf}
    page.children.gone(1)
    assert page.samples() == {}
    assert [family.name for family in page.registry.collect()] == ["spooled_supervisor_child_metrics_dropped"]


def test_a_label_of_the_app_that_is_called_slot_is_renamed(page: Page) -> None:
    pages = Family("pages", "counter", "Text.", [], [Series(1, {"slot": "y"})])
    page.take(a_report(a_family("level", "gauge", {"slot": "x"}), pages))
    assert set(page.samples()) == {"level{exported_slot=x,slot=0}", "pages_total{slot=y}"}


def test_of_two_children_of_one_slot_the_newer_one_is_shown(page: Page) -> None:
    page.take(a_report(a_family("level", "gauge"), changes={0: [1]}), pid=1)
    page.take(a_report(a_family("level", "gauge"), changes={0: [2]}), pid=2)
    assert page.samples() == {"level{slot=0}": 2}
    page.parsed()
    page.children.gone(1)
    assert page.samples() == {"level{slot=0}": 2}


def test_an_info_is_shown_once_and_an_enum_by_slot(page: Page) -> None:
    for pid in (1, 2):
        families = (
            a_family("model", "info", {"version": "1"}),
            Family("state", "stateset", "Text.", [], [Series(1, {"state": "up"}), Series(2, {"state": "down"})]),
        )
        page.take(a_report(*families, changes={0: [1], 1: [0], 2: [1]}), slot=pid, pid=pid)
    assert page.samples() == {
        "model_info{version=1}": 1,
        "state{state=up,slot=1}": 0,
        "state{state=down,slot=1}": 1,
        "state{state=up,slot=2}": 0,
        "state{state=down,slot=2}": 1,
    }
    page.parsed()


def test_a_series_that_is_gone_gives_its_index_to_another_one(page: Page) -> None:
    page.take(a_report(a_family("level", "gauge", {"tank": "a"}), changes={0: [1]}))
    page.take(a_report(a_family("level", "gauge", {"tank": "b"}), gone=(0,), changes={0: [2]}))
    assert page.samples() == {"level{tank=b,slot=0}": 2}
    page.take(a_report(gone=(0,)))
    assert page.samples() == {}
    page.take(a_report(a_family("pages", "counter", {"kind": "a"}), changes={0: [3]}))
    page.take(a_report(gone=(0,)))
    assert page.samples() == {"pages_total{kind=a}": 3}


@pytest.mark.parametrize(
    "values",
    [[-1.0], [math.nan], [math.inf], [], [1.0, 2.0]],
)
def test_a_counter_takes_nothing_but_additions(page: Page, values: list[float]) -> None:
    page.take(a_report(a_family("pages"), changes={0: [2]}))
    page.take(a_report(changes={0: values}))
    assert page.samples() == {"pages_total": 2}
    assert page.dropped() == {"invalid": 1}


def test_a_histogram_s_buckets_do_not_shrink_as_they_widen(page: Page) -> None:
    page.take(a_report(a_family("size", "histogram", bounds=("1", "2")), changes={0: [3, 2, 5, 1.0]}))
    assert page.samples()["size_count"] == 0
    assert page.dropped() == {"invalid": 1}


def test_a_sum_never_becomes_infinite(page: Page) -> None:
    page.take(a_report(a_family("pages"), changes={0: [1.7e308]}))
    page.take(a_report(changes={0: [1.7e308]}))
    assert page.samples() == {"pages_total": 1.7e308}


NAMES = ["", "1a", "a b", "a\n", "é", "a{b}", "a" * 201]


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        *[(a_family(name), "invalid") for name in NAMES],
        *[(a_family("pages", "counter", {name: "v"}), "invalid") for name in [*NAMES, "__name__", "a:b"]],
        (a_family("size", "histogram", {"le": "1"}, bounds=("1",)), "invalid"),
        (a_family("took", "summary", {"quantile": "1"}), "invalid"),
        (a_family("pages", bounds=("1",)), "invalid"),
        *[
            (a_family("size", "histogram", bounds=bounds), "invalid")
            for bounds in [("2", "1"), ("1", "1"), ("+Inf",), ("nan",), ("1.1.1",), ("1e999",), ('1"',), ("",)]
        ],
        *[
            (a_family(name, "gauge"), "collision")
            for name in ["up", "scrape_duration_seconds", "process_open_fds", "python_info", "spooled_supervisor_x"]
        ],
        *[
            (a_family(name, "counter"), "collision")
            for name in ["process_cpu_seconds", "python_gc_collections", "spooled_supervisor_x"]
        ],
        (a_family("taken"), "collision"),
        (a_family("taken_total", "gauge"), "collision"),
    ],
)
def test_what_prometheus_would_not_take_or_what_is_ours_is_left_out(page: Page, family: Family, reason: str) -> None:
    page.take(a_report(family, changes={0: [1.0]}))
    assert page.samples() == {}
    assert page.dropped() == {reason: 1}
    page.parsed()


def test_no_name_appears_twice_whatever_children_call_their_metrics(page: Page) -> None:
    for n, name in enumerate(("a", "a_total", "a_created")):
        page.take(a_report(a_family(name, "gauge" if n else "counter")), pid=n)
    for n, name in enumerate(("b", "b_count", "b_sum", "b_bucket", "b_created")):
        page.take(a_report(a_family(name, "gauge" if n else "histogram", bounds=() if n else ("1",))), pid=10 + n)
    page.take(a_report(a_family("c_sum", "gauge")), pid=20)
    page.take(a_report(a_family("c", "summary")), pid=21)
    assert {family.name for family in page.parsed()} == {"a", "b", "c_sum", "spooled_supervisor_child_metrics_dropped"}
    assert page.dropped() == {"collision": 7}


def test_within_a_generation_the_first_definition_counts(page: Page) -> None:
    page.take(a_report(a_family("size", "histogram", bounds=("1",)), changes={0: [1, 1, 1.0]}), pid=1)
    page.take(a_report(a_family("size", "histogram", bounds=("2",)), changes={0: [1, 1, 1.0]}), pid=2)
    page.take(a_report(a_family("size", "gauge"), changes={0: [1.0]}), pid=3)
    assert page.samples()["size_count"] == 1
    assert page.dropped() == {"collision": 2}


def test_after_a_reload_the_newer_generation_says_what_a_metric_is(page: Page) -> None:
    page.take(a_report(a_family("size", "histogram", bounds=("1",)), changes={0: [1, 1, 1.0]}), pid=1)
    page.take(a_report(a_family("size", "histogram", bounds=("2",)), changes={0: [1, 1, 2.0]}), pid=2, generation=2)
    page.take(a_report(changes={0: [1, 1, 1.0]}), pid=1)
    assert page.samples() == {"size_bucket{le=2}": 1, "size_bucket{le=+Inf}": 1, "size_count": 1, "size_sum": 2}
    page.take(a_report(a_family("size", "gauge"), changes={0: [5.0]}), pid=3, generation=3)
    page.children.gone(1)
    assert page.samples() == {"size{slot=0}": 5}


def test_after_a_reload_sums_go_on_where_nothing_changed(page: Page) -> None:
    for generation in (1, 2, 1):
        page.take(a_report(a_family("pages"), changes={0: [1]}), pid=generation, generation=generation)
    assert page.samples() == {"pages_total": 3}
    assert page.dropped() == {}


def test_a_child_may_have_so_many_series_and_no_more(page: Page) -> None:
    labels = [{"n": str(n)} for n in range(MAX_SERIES)]
    page.take(a_report(a_family("size", "histogram", *labels[:500], bounds=("1", "2"))))
    assert len(page.samples()) == MAX_SERIES
    assert page.dropped() == {"limit": 300}


def test_all_children_may_have_so_many_series_and_no_more(page: Page) -> None:
    for pid in range(30):
        labels = [{"n": f"{pid}-{n}"} for n in range(MAX_SERIES)]
        page.take(a_report(a_family(f"pages{pid % 2}", "counter" if pid % 2 else "gauge", *labels)), slot=pid, pid=pid)
    assert len(page.samples()) == MAX_ALL_SERIES
    assert page.dropped() == {"limit": 20 * MAX_SERIES}
    for pid in range(30):
        page.children.gone(pid)
    assert len(page.samples()) == MAX_ALL_SERIES / 2
    page.take(a_report(a_family("pages0", "gauge", *labels)), pid=99)
    assert len(page.samples()) == MAX_ALL_SERIES / 2 + MAX_SERIES


def test_five_hundred_respawns_leave_as_many_series_as_one(page: Page) -> None:
    for pid in range(500):
        page.take(a_report(a_family("pages"), changes={0: [1]}), slot=pid % 4, pid=pid)
        page.take(a_report(Family("level", "gauge", "Text.", [], [Series(1, {})])), slot=pid % 4, pid=pid)
        assert page.samples() == {"pages_total": pid + 1, f"level{{slot={pid % 4}}}": 0}
        page.children.gone(pid)
    assert page.samples() == {"pages_total": 500}


@pytest.mark.parametrize(
    "body", [b"", b"junk", b"\xc1", encode([]), encode([[], [], {}, -1]), encode([[], [1000], {}, 0])]
)
def test_junk_is_counted_and_nothing_else(page: Page, body: bytes) -> None:
    page.take(a_report(a_family("pages"), changes={0: [1]}))
    page.take(body)
    assert page.samples() == {"pages_total": 1}
    assert page.dropped() == {"invalid": 1}


def test_changes_of_what_was_never_told_are_counted(page: Page) -> None:
    page.take(a_report(changes={5: [1.0]}, dropped=3))
    assert page.dropped() == {"invalid": 1, "child": 3}


@pytest.mark.parametrize("seed", range(50))
def test_whatever_children_say_the_page_can_be_read_and_sums_do_not_fall(seed: int) -> None:
    random_ = random.Random(seed)
    page = Page()
    totals: dict[str, float] = {}
    for _ in range(20):
        page.take(a_hostile_report(random_), slot=random_.randrange(3), generation=1, pid=random_.randrange(4))
        if random_.random() < 0.2:
            page.children.gone(random_.randrange(4))
        page.parsed()
        samples = page.samples()
        sums = {name: value for name, value in samples.items() if re.match(r"\w+_(total|count|sum|bucket)\b", name)}
        summed = {name: value for name, value in sums.items() if "slot=" not in name}
        assert all(summed[name] >= value for name, value in totals.items())
        totals = summed


def a_hostile_report(random_: random.Random) -> bytes:
    names = ["a", "a_total", "a_count", "b", "b_sum", "a\nb", "up", "é", "c"]
    kinds: list[Kind] = ["counter", "gauge", "histogram", "info", "stateset", "summary", "unknown"]
    numbers = [0.0, 1.0, -1.0, math.nan, math.inf, 1e308, 2.5]
    labels = [
        {},
        {"x": "1"},
        {"x": '\n"\\'},
        {"slot": "1"},
        {"le": "1"},
        {"a": "up"},
        {"slot": "", "exported_slot": ""},
    ]
    families = [
        Family(
            random_.choice(names),
            random_.choice(kinds),
            random_.choice(["", "Text.", "a\nb\\"]),
            random_.choice([[], [], ["1"], ["1", "2"], ["2", "1"], ["x"]]),
            [Series(random_.randrange(5), dict(random_.choice(labels))) for _ in range(random_.randrange(3))],
        )
        for _ in range(random_.randrange(4))
    ]
    changes = {random_.randrange(6): [random_.choice(numbers)] * random_.randrange(5) for _ in range(4)}
    return a_report(*families, changes=changes, gone=tuple(random_.randrange(6) for _ in range(random_.randrange(2))))


def a_round_trip(registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch, metrics: Metrics) -> Reporter:
    monkeypatch.setattr(prometheus_client, "REGISTRY", registry)
    return Reporter(lambda body: metrics.children.take(1, 1, 100, body))


@pytest.fixture
def app_registry() -> CollectorRegistry:
    """Metrics as an app would have them."""
    registry = CollectorRegistry()
    prometheus_client.Counter("app_pages", "Pages.", ["kind"], registry=registry).labels('"\n\\é').inc(2)
    prometheus_client.Histogram("app_render_seconds", "Render time.", registry=registry).observe(0.3)
    prometheus_client.Summary("app_wait_seconds", "Wait.", registry=registry).observe(2)
    prometheus_client.Gauge("app_models", "Models.", registry=registry).set(3)
    prometheus_client.Gauge("app_untold", "", registry=registry).set(3)
    prometheus_client.Info("app_model", "Model.", registry=registry).info({"version": "1"})
    prometheus_client.Enum("app_state", "State.", states=["up", "down"], registry=registry).state("down")
    return registry


@needs_promtool
def test_promtool_finds_nothing_wrong_with_the_page(
    app_registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = busy_page()
    a_round_trip(app_registry, monkeypatch, page.metrics).report()
    body = page.metrics.render("")[0]
    assert b'app_models{slot="1"} 3.0' in body
    checked = subprocess.run(["promtool", "check", "metrics"], input=body, capture_output=True, check=False)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b"")


def test_both_formats_can_be_read_and_the_own_names_are_safe(
    app_registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = busy_page()
    own = list(page.families())
    for family in own:  # an app that uses our names
        with_labels = Metric(family.name, "Text.", "gauge")
        with_labels.add_sample(family.name, {}, 666)
        app_registry.register(Given(with_labels))
    a_round_trip(app_registry, monkeypatch, page.metrics).report()
    families = {family.name: family for family in page.families()}
    assert {family.name for family in own} <= set(families)
    assert not [s for family in families.values() for s in family.samples if s.value == 666]
    assert {"app_pages", "app_render_seconds", "app_wait_seconds", "app_models", "app_model", "app_state"} <= set(
        families
    )
    assert families["app_state"].type == "stateset"
    assert b"app_pages_total" in page.metrics.render(OPENMETRICS)[0]


class Given(Collector):
    def __init__(self, metric: Metric) -> None:
        self.metric = metric

    def collect(self) -> list[Metric]:
        return [self.metric]


def test_the_exit_of_a_child_takes_its_gauges_off_the_page() -> None:
    events = Events()
    metrics = Metrics(events, lambda: busy_page().now)
    metrics.children.take(0, 1, 100, a_report(a_family("level", "gauge"), changes={0: [1]}))
    assert metrics.registry.get_sample_value("level", {"slot": "0"}) == 1
    events.emit(some(happened.ChildExited, pid=100, reason="crash"))
    assert metrics.registry.get_sample_value("level", {"slot": "0"}) is None

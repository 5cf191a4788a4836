"""The benchmark itself: its statistics, its table, its bookkeeping, and one quick run of the real thing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.bench import __main__ as command
from tests.bench import efficiency, meters, records, stage
from tests.bench.figures import Figure, Result, at_least, at_most, collect, number, quantile, row, table
from tests.bench.records import Record
from tests.bench.scenario import QUICK, Effort, Scenario
from tests.bench.scenarios import ALL, chosen
from tests.bench.stage import NotMeasured

REPOSITORY = Path(__file__).resolve().parents[2]
COST = Figure("cost_ms", "cost", "ms", at_most(3.0))
SHARE = Figure("share", "share", "", at_least(0.95))
PLAIN = Figure("plain", "plain", "/s")


# --- statistics -------------------------------------------------------------------------------------------------------


def test_a_bound_includes_its_own_value() -> None:
    assert [at_most(3.0).is_met(value) for value in (2.9, 3.0, 3.1)] == [True, True, False]
    assert [at_least(0.95).is_met(value) for value in (0.94, 0.95, 0.96)] == [False, True, True]


def test_the_median_is_judged_and_not_the_best_or_the_worst() -> None:
    assert Result("s", COST, (9.0, 2.0, 2.5)).is_met is True
    assert Result("s", COST, (1.0, 3.1, 3.2)).is_met is False
    assert Result("s", PLAIN, (1.0,)).is_met is None


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [([5.0], 0.99, 5.0), ([1, 2, 3, 4], 0.5, 2), (range(1, 201), 0.99, 198), ([3, 1, 2], 0.0, 1), ([3, 1, 2], 1.0, 3)],
)
def test_a_quantile_is_a_value_that_occurred(values: list[float], share: float, expected: float) -> None:
    assert quantile(values, share) == expected


def test_results_come_in_the_order_of_the_figures_with_all_repetitions() -> None:
    results = collect("s", (COST, SHARE), [{"share": 0.9, "cost_ms": 2.0}, {"share": 0.8, "cost_ms": 4.0}])
    assert [(result.name, result.values) for result in results] == [("s.cost_ms", (2.0, 4.0)), ("s.share", (0.9, 0.8))]


def test_a_figure_that_a_repetition_did_not_give_is_an_error() -> None:
    with pytest.raises(KeyError, match="share"):
        collect("s", (COST, SHARE), [{"cost_ms": 2.0}])


# --- what is shown ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.0123456, "0.0123"),
        (-6.2, "-6.20"),
        (0.95, "0.950"),
        (2.0, "2.00"),
        (99.97, "100.0"),
        (12345.6, "12346"),
    ],
)
def test_numbers_have_three_digits_and_no_exponent(value: float, text: str) -> None:
    assert number(value) == text


def test_a_row_tells_value_spread_bound_and_whether_it_is_met() -> None:
    assert row(Result("s", COST, (2.0, 2.5, 4.0))) == ("cost", "2.50 ms", "2.00 .. 4.00", "<= 3 ms", "yes")
    assert row(Result("s", SHARE, (0.9, 0.91))) == ("share", "0.905", "0.900 .. 0.910", ">= 0.95", "NO")
    assert row(Result("s", PLAIN, (300.0,))) == ("plain", "300 /s", "", "", "")


def test_the_table_is_markdown_with_aligned_columns() -> None:
    lines = table([Result("s", COST, (2.0,)), Result("s", PLAIN, (1234.0,))]).splitlines()
    assert lines == [
        "| figure | value   | spread | bound   | met |",
        "|--------|---------|--------|---------|-----|",
        "| cost   | 2.00 ms |        | <= 3 ms | yes |",
        "| plain  | 1234 /s |        |         |     |",
    ]


def test_json_has_every_value_and_the_bound() -> None:
    assert Result("s", SHARE, (0.9, 1.0, 0.96)).as_json() == {
        "name": "s.share",
        "title": "share",
        "unit": "",
        "median": 0.96,
        "low": 0.9,
        "high": 1.0,
        "values": [0.9, 1.0, 0.96],
        "bound": {"at_least": 0.95},
        "met": True,
    }


# --- scenarios --------------------------------------------------------------------------------------------------------


def test_names_of_scenarios_and_figures_are_unique() -> None:
    names = [f"{scenario.name}.{figure.key}" for scenario in ALL for figure in scenario.figures]
    titles = [figure.title for scenario in ALL for figure in scenario.figures]
    assert len(set(names)) == len(names)
    assert len(set(titles)) == len(titles)


def test_a_beginning_chooses_scenarios_in_the_order_of_the_table() -> None:
    assert [scenario.name for scenario in chosen(["kill", "noop-p"])] == ["noop-p0", "noop-p1", "noop-p4", "kill"]
    assert chosen([]) == ALL


def test_a_beginning_that_fits_nothing_is_refused_with_what_there_is() -> None:
    with pytest.raises(ValueError, match=r"'nope'.*noop-p0, .*life"):
        chosen(["kill", "nope"])


def test_quick_takes_one_of_each_kind_unless_told_otherwise() -> None:
    kinds = {scenario.name.partition("-")[0] for scenario in ALL}
    quick = chosen([], is_quick=True)
    assert {scenario.name.partition("-")[0] for scenario in quick} == kinds
    assert len(quick) == len(kinds)
    assert [scenario.name for scenario in chosen(["noop-p0"], is_quick=True)] == ["noop-p0"]


# --- efficiency -------------------------------------------------------------------------------------------------------


def runs(pid: int, starts: list[float], job_s: float) -> list[Record]:
    return [Record(pid, 0.0, start, start + job_s) for start in starts]


def test_efficiency_counts_as_many_jobs_as_gaps() -> None:
    worked, lasted, gaps = efficiency.tally(runs(1, [0.0, 10.0, 12.0, 14.0], 1.0), 1.0, warmup=1)
    assert (worked, lasted, gaps) == (2.0, 4.0, [1.0, 1.0])


def test_each_child_counts_from_its_own_start_to_its_own_start() -> None:
    both = runs(1, [0.0, 1.0, 2.0], 1.0) + runs(2, [100.0, 102.0], 1.0)
    worked, lasted, gaps = efficiency.tally(both, 1.0, warmup=0)
    assert (worked, lasted, gaps) == (3.0, 4.0, [0.0, 0.0, 1.0])


def test_a_job_that_was_held_up_counts_for_its_nominal_length_only() -> None:
    worked, lasted, _ = efficiency.tally([Record(1, 0, 0.0, 3.0), Record(1, 0, 3.0, 4.0)], 1.0, warmup=0)
    assert worked / lasted == pytest.approx(1 / 3)


def test_children_without_enough_jobs_give_no_efficiency() -> None:
    with pytest.raises(NotMeasured):
        efficiency.tally(runs(1, [0.0, 1.0], 1.0), 1.0, warmup=1)


def test_records_of_several_children_come_back_by_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "records"
    monkeypatch.setenv(records.VARIABLE, str(path))
    writer = records.Writer()
    writer.open()
    writer.write(0.5, 2.0, 3.0)
    writer.write(0.25, 1.0, 1.5)
    path.write_bytes(path.read_bytes() + b"cut")
    pid = os.getpid()
    assert records.read(path) == [Record(pid, 0.25, 1.0, 1.5), Record(pid, 0.5, 2.0, 3.0)]
    writer.close()


# --- meters -----------------------------------------------------------------------------------------------------------


def test_the_cpu_clock_of_a_process_is_its_process_time() -> None:
    before = time.process_time()
    assert before <= meters.cpu_s(os.getpid()) <= time.process_time()


def test_the_cpu_clock_of_nobody_is_an_error() -> None:
    with pytest.raises(ProcessLookupError):
        meters.cpu_s(2**22 + 1)


def test_private_memory_is_part_of_what_is_resident() -> None:
    assert 0 < meters.private_bytes(os.getpid()) <= meters.resident_bytes(os.getpid())


def test_samples_are_summed_over_their_labels() -> None:
    page = '# TYPE a counter\na_total{x="1"} 2.0\na_total{x="2"} 3.0\n# TYPE b gauge\nb 7\n'
    assert meters.samples(page) == {"a_total": 5.0, "b": 7.0}


def test_an_event_happened_when_its_line_says() -> None:
    assert stage.instant({"ts": "1970-01-01T00:01:00.250Z"}) == 60.25


# --- the command ------------------------------------------------------------------------------------------------------


def fake(name: str, figure: Figure, *values: float) -> Scenario:
    left = list(values)
    return Scenario(name, (figure,), lambda effort: {figure.key: left.pop(0)})


def test_repetitions_go_round() -> None:
    order: list[str] = []

    def scenario(name: str) -> Scenario:
        def run(effort: Effort) -> dict[str, float]:
            assert effort is QUICK
            order.append(name)
            return {"plain": float(len(order))}

        return Scenario(name, (PLAIN,), run)

    results, others = command.measure([scenario("a"), scenario("b")], repetitions=2, is_quick=True)
    assert order == ["a", "b", "a", "b"]
    assert [result.values for result in results] == [(1.0, 3.0), (2.0, 4.0)]
    assert {name: len(cores) for name, cores in others.items()} == {"a": 2, "b": 2}


def test_patience_keeps_the_least_disturbed_try_and_ends_with_a_quiet_one(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = [0.9, 0.5, 0.1, 0.0]
    monkeypatch.setattr(meters, "wait_for_quiet", lambda cores, deadline: None)
    monkeypatch.setattr(meters.Disturbance, "cores", lambda self: cores.pop(0))
    scenario = fake("s", COST, 1.0, 2.0, 3.0, 4.0)
    assert command.run_undisturbed(scenario, QUICK, 60.0) == ({"cost_ms": 3.0}, 0.1)


def test_without_patience_one_try_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meters.Disturbance, "cores", lambda self: 1.5)
    assert command.run_undisturbed(fake("s", COST, 1.0), QUICK, 0.0) == ({"cost_ms": 1.0}, 1.5)


@pytest.mark.parametrize(("flags", "value", "status"), [([], 9.0, 0), (["--check"], 9.0, 1), (["--check"], 2.0, 0)])
def test_a_missed_bound_matters_only_with_check(
    flags: list[str], value: float, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "chosen", lambda only, is_quick: (fake("s", COST, value),))
    assert command.main(["--repeat", "1", *flags]) == status
    printed = capsys.readouterr()
    assert "| cost " in printed.out
    assert ("bounds missed: s.cost_ms" in printed.err) is (status == 1)


def test_what_cannot_be_measured_has_a_status_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(effort: Effort) -> dict[str, float]:
        raise NotMeasured("it did not start")

    monkeypatch.setattr(command, "chosen", lambda only, is_quick: (Scenario("s", (COST,), run),))
    assert command.main([]) == 2
    assert "s could not be measured: it did not start" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["--only", "nope"], ["--repeat", "0"], ["--quick", "--check"]])
def test_a_wrong_command_line_is_refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        command.main(argv)
    assert "error: " in capsys.readouterr().err


def test_a_quick_run_measures_the_real_daemon(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    run = subprocess.run(
        [sys.executable, "-m", "tests.bench", "--quick", "--repeat", "1", "--json", str(path), "--only",
         "noop-p1", "efficiency-10ms-p1-c1", "life"],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=50, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    document = json.loads(path.read_text())
    value = {figure["name"]: figure["median"] for figure in document["figures"]}
    assert 0 < value["noop-p1.supervisor_ms"] < 100
    assert value["noop-p1.requests"] > 1
    assert 0 < value["efficiency-10ms-p1-c1.efficiency"] <= 1
    assert value["life.stop_ms"] > 0
    assert document["context"]["quick"] is True
    assert all(figure["title"] in run.stdout for figure in document["figures"])

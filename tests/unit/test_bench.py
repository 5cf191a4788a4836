"""The benchmark itself: its statistics, its table, its bookkeeping, and one quick run of the real thing."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.bench import __main__ as command
from tests.bench import chatty, efficiency, growth, meters, readme, records, stage
from tests.bench.distance import away
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
    assert chosen([], is_long=True) == ALL


def test_what_takes_minutes_is_left_out_unless_it_is_asked_for() -> None:
    long = [scenario.name for scenario in ALL if scenario.is_long]
    assert long == ["leak-long", "idle-settled"]
    assert [scenario.name for scenario in ALL if scenario not in chosen([])] == long
    assert [scenario.name for scenario in chosen(["leak"])] == ["leak", "leak-long"]


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


def test_buckets_are_summed_over_labels_and_keep_their_bounds() -> None:
    page = (
        "# TYPE h histogram\n"
        'h_bucket{q="a",le="0.1"} 1.0\nh_bucket{q="a",le="+Inf"} 2.0\n'
        'h_bucket{q="b",le="0.1"} 3.0\nh_bucket{q="b",le="+Inf"} 3.0\n'
    )
    assert meters.buckets(page, "h_bucket") == {0.1: 4.0, math.inf: 5.0}


def test_a_quantile_of_a_histogram_is_the_bound_above_it() -> None:
    assert chatty.quantile_of({0.1: 98, 0.25: 99, math.inf: 100}, 0.99) == 0.25
    with pytest.raises(NotMeasured):
        chatty.quantile_of({0.1: 0, math.inf: 0}, 0.99)


# --- a server some way off --------------------------------------------------------------------------------------------


def test_a_server_is_as_far_away_as_was_asked_for_and_every_byte_arrives() -> None:
    data = os.urandom(300_000)
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        port = stack.enter_context(away(server.getsockname()[1], 0.02))
        near = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10))
        far = stack.enter_context(server.accept()[0])
        asked_at = time.monotonic()
        near.sendall(b"?")
        assert far.recv(1) == b"?"
        far.sendall(b"!")
        assert near.recv(1) == b"!"
        assert time.monotonic() - asked_at >= 0.02
        far.sendall(data)
        far.shutdown(socket.SHUT_WR)
        assert b"".join(iter(lambda: near.recv(1 << 16), b"")) == data


# --- how cost grows ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("points", "exponent"),
    [
        ([(1, 3.0), (4, 3.0), (16, 3.0)], 0.0),
        ([(1, 1.0), (10, 10.0)], 1.0),
        ([(1, 1.0), (2, 1.5), (4, 6.0)], 2.0),  # the steepest step counts, not the way from end to end
        ([(0, 1.0), (10, 2.0), (100, 2.0)], 0.0),
    ],
)
def test_growth_is_the_exponent_of_its_steepest_step(points: list[tuple[float, float]], exponent: float) -> None:
    assert growth.steepest(points) == pytest.approx(exponent)


def made_up(scenario: Scenario, value: float = 2.0) -> list[Result]:
    return [Result(scenario.name, figure, (value,)) for figure in scenario.figures]


def test_the_table_of_growth_has_a_line_for_each_cost_and_says_whether_it_is_linear() -> None:
    (leases,) = [scenario for scenario in ALL if scenario.name == "growth-leases"]
    lines = growth.table(made_up(leases)).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in (lines[0], *lines[2:])]
    assert cells == [
        list(growth.HEAD),
        ["supervisor CPU per renewal", "leases held: 20, 100, 1000", "2.00, 2.00, 2.00 ms", "2.00", "<= 1", "NO"],
        ["lateness of renewals", "leases held: 20, 100, 1000", "2.00, 2.00, 2.00 ms", "2.00", "<= 1", "NO"],
    ]


# --- the README -------------------------------------------------------------------------------------------------------


def test_the_readme_gets_all_that_has_a_bound_between_its_marks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "README.md"
    path.write_text(f"before\n\n{readme.BEGIN}\nold\n{readme.END}\n\nafter\n")
    monkeypatch.setattr(readme, "README", path)
    results = [result for scenario in ALL for result in made_up(scenario)]
    for _ in range(2):  # writing it again changes nothing
        readme.write(results, "on a quiet machine")
        text = path.read_text()
        assert text.startswith("before\n\n")
        assert text.endswith("\n\nafter\n")
        assert "old" not in text
        bounded = [r.figure.title for r in results if r.figure.bound is not None and not growth.has(r)]
        assert [title for title in bounded if f"| {title} " not in text] == []
        assert growth.table(results) in text
        assert text.count("on a quiet machine") == 1


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


def test_what_takes_long_is_repeated_less_often() -> None:
    scenarios = [fake("once", PLAIN, 1.0), fake("thrice", COST, 1.0, 2.0, 3.0)]
    results, _ = command.measure([dataclasses.replace(scenarios[0], most=1), scenarios[1]], repetitions=3)
    assert [result.values for result in results] == [(1.0,), (1.0, 2.0, 3.0)]


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
    monkeypatch.setattr(command, "chosen", lambda only, **_: (fake("s", COST, value),))
    assert command.main(["--repeat", "1", *flags]) == status
    printed = capsys.readouterr()
    assert "| cost " in printed.out
    assert ("bounds missed: s.cost_ms" in printed.err) is (status == 1)


def test_what_cannot_be_measured_has_a_status_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(effort: Effort) -> dict[str, float]:
        raise NotMeasured("it did not start")

    monkeypatch.setattr(command, "chosen", lambda only, **_: (Scenario("s", (COST,), run),))
    assert command.main([]) == 2
    assert "s could not be measured: it did not start" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv",
    [
        ["--only", "nope"],
        ["--repeat", "0"],
        ["--quick", "--check"],
        ["--readme", "--only", "kill"],
        ["--readme", "--quick"],
    ],
)
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

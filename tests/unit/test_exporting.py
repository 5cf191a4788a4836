"""What `export` prints: the shipped files to the byte; rules that promtool tests; a dashboard that holds together."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spooled_supervisor import exporting
from spooled_supervisor.errors import ConfigError, SupervisorError
from spooled_supervisor.exporting import FILES, run_export, shared_file, with_program

REPOSITORY = Path(__file__).parents[2]
SHIPPED = REPOSITORY / "systemd"
RULES = SHIPPED / "alert-rules.yml"
RULE_TESTS = REPOSITORY / "tests" / "rules" / "alerts.yml"
RANGE = "$__rate_interval"
VARIABLES = ("datasource", "job", "instance", "queue")

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed (it comes with Debian's package `prometheus`)"
)


def promtool(*words: str | Path) -> str:
    """Run it; it must find nothing wrong."""
    done = subprocess.run(["promtool", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FILES)
def test_the_shipped_file_is_printed_to_the_byte(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run_export([name], {}) == 0
    assert capfd.readouterr() == ((SHIPPED / FILES[name][0]).read_text(), "")


def test_every_file_that_is_shipped_can_be_exported() -> None:
    assert {file for file, _ in FILES.values()} == {path.name for path in SHIPPED.iterdir()}


@pytest.mark.parametrize("argv", [[], ["poem"], ["config", "--exec-start", "/bin/x"], ["config", "more"]])
def test_bad_usage_is_told_and_64(argv: list[str]) -> None:
    with pytest.raises((ConfigError, SystemExit)) as raised:
        run_export(argv, {})
    error = raised.value
    assert getattr(error, "exit_code", getattr(error, "code", None)) == 64


def test_an_installed_file_comes_before_one_around_it_and_a_missing_one_is_told(tmp_path: Path) -> None:
    package = tmp_path / "spooled_supervisor"
    for directory in (package / "share", tmp_path / "systemd"):
        directory.mkdir(parents=True)
        (directory / "a").write_text(directory.name)
    (tmp_path / "systemd" / "b").touch()
    assert shared_file("a", package) == package / "share" / "a"
    assert shared_file("b", package) == tmp_path / "systemd" / "b"
    with pytest.raises(SupervisorError, match=r"c is missing: .*share nor in .*systemd; is the package installed"):
        shared_file("c", package)


def test_a_reader_that_has_seen_enough_is_no_failure() -> None:
    program = "import sys; from spooled_supervisor.exporting import run_export; sys.exit(run_export(sys.argv[1:], {}))"
    process = subprocess.Popen(
        [sys.executable, "-c", program, "grafana-dashboard"],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert (process.wait(20), process.stderr.read()) == (0, b"")
    process.stderr.close()


UNIT = "[Service]\n# ExecStart= is below\nExecStart=/opt/x/spooled-supervisor run --config /etc/c.toml\nRestart=no\n"


@pytest.mark.parametrize(
    ("path", "word"),
    [
        ("/usr/bin/spooled-supervisor", "/usr/bin/spooled-supervisor"),
        ("/opt/my apps/x", '"/opt/my apps/x"'),
        ("/opt/100%/x", "/opt/100%%/x"),
        (r"/opt/a\1/x", r'"/opt/a\\1/x"'),
        ('/opt/"/x', r'"/opt/\"/x"'),
    ],
)
def test_another_program_is_put_into_the_unit_and_nothing_else_changes(path: str, word: str) -> None:
    expected = UNIT.replace("/opt/x/spooled-supervisor", word)
    assert with_program(UNIT, path) == expected


@pytest.mark.parametrize("path", ["", "bin/x", "~/x", "/bin/x\nExecStartPre=/bin/evil", "/bin/\x1b"])
def test_a_program_that_systemd_would_not_take_is_refused(path: str) -> None:
    with pytest.raises(ConfigError, match="--exec-start") as raised:
        run_export(["systemd-unit", "--exec-start", path], {})
    assert raised.value.exit_code == 64


def test_the_exported_unit_runs_the_given_program(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_export(["systemd-unit", "--exec-start", "/srv/venv/bin/spooled-supervisor"], {}) == 0
    printed = capfd.readouterr().out.splitlines()
    shipped = (SHIPPED / "spooled-supervisor.service").read_text().splitlines()
    changed = [(new, old) for new, old in zip(printed, shipped, strict=True) if new != old]
    assert len(changed) == 1
    assert changed[0][0] == "ExecStart=/srv/venv/bin/spooled-supervisor run --config /etc/spooled/supervisor.toml"


def test_the_exported_configuration_is_toml() -> None:
    assert tomllib.loads((SHIPPED / "spooled-supervisor.toml").read_text())["app"]


# --- rules ------------------------------------------------------------------------------------------------------------


def alerts() -> dict[str, str]:
    """The text of each alert by its name."""
    pieces = re.split(r"(?m)^      - (?:alert|record): ", RULES.read_text())[1:]
    return {piece.split("\n")[0]: piece for piece in pieces if "\n        for: " in piece}


def test_every_alert_waits_has_a_severity_and_says_what_to_do() -> None:
    text = RULES.read_text()
    assert len(alerts()) == text.count("- alert: ") > 20
    for name, piece in alerts().items():
        assert name.startswith("Spooled"), name
        assert re.search(r"\n        for: \d+[mh]\n", piece), name
        assert re.search(r"\n          severity: (critical|warning|info)\n", piece), name
        summary = re.search(r"\n          summary: (.+)\n", piece)
        assert summary is not None, name
        assert "$labels.instance" in summary[1] or "no spooled-supervisor at all" in summary[1], name
        description = re.search(r"\n          description: >-\n((?: {12}.+\n)+)", piece)
        assert description is not None, name
        assert len(description[1].split()) > 15, name


@needs_promtool
def test_promtool_finds_nothing_wrong_with_the_rules() -> None:
    assert f"SUCCESS: {RULES.read_text().count('expr: ')} rules found" in promtool("check", "rules", RULES)


@needs_promtool
def test_every_alert_fires_when_it_should_and_not_before() -> None:
    promtool("test", "rules", RULE_TESTS)


def test_every_alert_has_a_silent_and_a_firing_case_and_every_recording_rule_a_value() -> None:
    text = RULE_TESTS.read_text()
    for name in alerts():
        cases = re.findall(rf'alertname="{name}".*\n +eval_time: .+\n +exp_samples:(.*)\n', text)
        assert " []" in cases, f"{name}: no silent case"
        assert "" in cases, f"{name}: no firing case"
    for name in re.findall(r"- record: (\S+)", RULES.read_text()):
        assert re.search(rf"expr: (round\()?{name}\)?\n", text), name


@needs_promtool
def test_no_test_of_an_alert_is_passed_by_an_alert_that_never_fires(tmp_path: Path) -> None:
    never = re.sub(
        r"(\n        expr:)(?: \|\n(?: {10}.*\n)+| .*\n)(        for:)", r"\1 vector(0) > 1\n\2", RULES.read_text()
    )
    (tmp_path / "rules.yml").write_text(never)
    (tmp_path / "tests.yml").write_text(RULE_TESTS.read_text().replace("../../systemd/alert-rules.yml", "rules.yml"))
    done = subprocess.run(
        ["promtool", "test", "rules", tmp_path / "tests.yml"], capture_output=True, text=True, check=False
    )
    failed = re.findall(r'ALERTS\{alertname=\\"(\w+)\\"', done.stdout + done.stderr)
    assert sorted(failed) == sorted(alerts())


# --- dashboard --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    return dict(json.loads((SHIPPED / "grafana-dashboard.json").read_text()))


def targets(dashboard: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Title of the panel, expression."""
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]


def test_panels_have_ids_of_their_own_and_do_not_overlap(dashboard: dict[str, Any]) -> None:
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids)) > 30
    taken: dict[tuple[int, int], str] = {}
    for panel in dashboard["panels"]:
        grid = panel["gridPos"]
        assert grid["x"] >= 0
        assert grid["w"] > 0
        assert grid["x"] + grid["w"] <= 24
        for place in (
            (x, y) for x in range(grid["x"], grid["x"] + grid["w"]) for y in range(grid["y"], grid["y"] + grid["h"])
        ):
            assert place not in taken, f"{panel['title']} lies on {taken[place]}"
            taken[place] = panel["title"]


def test_rows_are_those_that_a_person_looks_for(dashboard: dict[str, Any]) -> None:
    rows = [panel["title"] for panel in dashboard["panels"] if panel["type"] == "row"]
    assert rows == ["Overview", "Jobs", "Latency", "Children", "Leases and service", "Outbox", "Resources"]


def test_every_panel_has_a_title_a_description_and_the_chosen_data_source(dashboard: dict[str, Any]) -> None:
    for panel in dashboard["panels"]:
        if panel["type"] == "row":
            continue
        assert panel["title"]
        assert re.search(r"[.!]$", panel["description"]), panel["title"]
        for item in (panel, *panel["targets"]):
            assert item["datasource"] == {"type": "prometheus", "uid": "${datasource}"}, panel["title"]
        references = [target["refId"] for target in panel["targets"]]
        assert len(references) == len(set(references)), panel["title"]


def test_the_variables_are_there_and_every_expression_obeys_them(dashboard: dict[str, Any]) -> None:
    assert [variable["name"] for variable in dashboard["templating"]["list"]] == list(VARIABLES)
    for title, expr in targets(dashboard):
        assert set(re.findall(r"\$(\w+)", expr)) <= {*VARIABLES, "__rate_interval"}, title
        selectors = re.findall(r"\{(.*?)\}", expr)
        assert selectors, title
        assert all('job=~"$job", instance=~"$instance"' in selector for selector in selectors), title
    assert dashboard["id"] is None
    assert "__inputs" not in dashboard or dashboard["__inputs"] == []


@needs_promtool
def test_every_expression_of_the_dashboard_can_be_parsed(dashboard: dict[str, Any], tmp_path: Path) -> None:
    rules = [
        {"record": f"panel{n}:expr", "expr": re.sub(r"\$(\w+)", ".*", expr.replace(RANGE, "5m"))}
        for n, (_, expr) in enumerate(targets(dashboard))
    ]
    generated = tmp_path / "dashboard.yml"
    generated.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))  # JSON is YAML
    assert f"SUCCESS: {len(rules)} rules found" in promtool("check", "rules", generated)


def test_the_place_of_the_files_is_that_of_the_package() -> None:
    assert Path(exporting.__file__).parent.name == "spooled_supervisor"

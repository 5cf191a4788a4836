"""What the exported rules and the dashboard name is really there: on the page of a daemon that has run a job."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.daemon import REPOSITORY, Daemon, daemon, wait_until
from tests.support.devserver import DevServer, Producer

pytestmark = pytest.mark.timeout(120)

OURS = re.compile(r"(?:spooled_supervisor|worker|process)_\w+")
NOT_FROM_THE_PAGE = {"job", "instance", "up"}
"""Prometheus adds the labels and the metric itself."""
SEEN_WHEN_IT_HAPPENS = "spooled_supervisor_api_requests_total"
"""Its label values are what the service answers."""


def export(what: str) -> str:
    """As a user would."""
    line = [sys.executable, "-m", "spooled_supervisor", "export", what]
    return subprocess.run(line, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout


def rule_expressions() -> list[str]:
    """Of all rules; a recording rule's name is one, too, that others may use."""
    text = export("alert-rules")
    return re.findall(r"(?m)^        expr: (?:\|\n)?((?:.+\n)(?: {10}.+\n)*)", text)


def dashboard_expressions() -> list[str]:
    """Of all panels, variables and annotations."""
    text = export("grafana-dashboard")
    document = json.loads(text)
    expressions = [target["expr"] for panel in document["panels"] for target in panel.get("targets", ())]
    expressions += [variable.get("definition", "") for variable in document["templating"]["list"]]
    return expressions + [note.get("expr", "") for note in document["annotations"]["list"]]


def selectors(expressions: list[str]) -> Iterator[tuple[str, str, list[str]]]:
    """Metric, label and the values that are asked for, where they are plain words."""
    for expression in expressions:
        for metric, inside in re.findall(r"([\w:]+)\{(.*?)\}", expression):
            for label, operator, value in re.findall(r'(\w+)(=~?|!=)"(.*?)"', inside):
                is_plain = re.fullmatch(r"[\w|]+", value) and operator != "!="
                yield metric, label, value.split("|") if is_plain else []


@pytest.fixture(scope="module")
def expressions() -> list[str]:
    found = rule_expressions() + dashboard_expressions()
    assert len(found) > 80
    return found


@pytest.fixture
def worker(server: DevServer, client: Producer) -> Iterator[Daemon]:
    """A daemon that has run one job of each outcome."""
    with daemon("counted", url=server.url, api_key=server.api_key, procs=1) as running:
        running.wait_until_running()
        for queue, payload, status in (("count", {}, "completed"), ("count", "not a dict", "deadletter")):
            job_id = client.create(queue, payload, max_retries=0)
            client.wait_for(job_id, status, timeout_s=20)
        yield running


def test_every_metric_label_and_value_that_is_named_is_on_the_page(worker: Daemon, expressions: list[str]) -> None:
    tokens = {token for expression in expressions for token in re.findall(r"[a-zA-Z_:][\w:]*", expression)}
    records = set(re.findall(r"record: (\S+)", export("alert-rules")))
    assert {token for token in tokens if ":" in token} <= records
    named = {token for token in tokens if OURS.fullmatch(token)}
    assert len(named) > 40

    def samples() -> dict[str, list[dict[str, str]]]:
        found: dict[str, list[dict[str, str]]] = {}
        for family in text_string_to_metric_families(worker.get("/metrics")[1]):
            for sample in family.samples:
                found.setdefault(sample.name, []).append(sample.labels)
        return found

    with contextlib.suppress(AssertionError):  # told better below
        wait_until(lambda: named <= set(samples()), "all metrics, some of which are sampled")
    page = samples()
    assert named <= set(page), f"not on the page: {sorted(named - set(page))}"
    for metric, label, values in selectors(expressions):
        if label in NOT_FROM_THE_PAGE or metric in NOT_FROM_THE_PAGE:
            continue
        assert all(label in labels for labels in page[metric]), f"{metric} has no label {label}"
        if metric != SEEN_WHEN_IT_HAPPENS:
            missing = set(values) - {labels[label] for labels in page[metric]}
            assert not missing, f"{metric} never has {label}={missing}"


@pytest.mark.parametrize(
    ("what", "file"),
    [
        ("systemd-unit", "spooled-supervisor.service"),
        ("systemd-child-cgroups", "child-cgroups.conf"),
        ("config", "spooled-supervisor.toml"),
        ("alert-rules", "alert-rules.yml"),
        ("grafana-dashboard", "grafana-dashboard.json"),
    ],
)
def test_the_command_prints_the_file(what: str, file: str) -> None:
    assert export(what) == Path(REPOSITORY, "systemd", file).read_text()


def test_help_names_every_file() -> None:
    text = export("--help")
    assert all(
        name in text for name in ("systemd-unit", "systemd-child-cgroups", "config", "alert-rules", "grafana-dashboard")
    )

"""Gauges: the numbers of a `Snapshot` as metric families, made anew for each scrape.

Values of one label are added up first (a slot has two children while one replaces the other), as a page that names a
series twice is refused whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from prometheus_client.metrics_core import GaugeMetricFamily, Metric

from spooled_supervisor.telemetry.series import Closed
from spooled_supervisor.telemetry.snapshot import CHILD_STATES, PHASES, ChildSnapshot, Snapshot

_state = Closed(CHILD_STATES)


def gauges(now: Snapshot, queue_label: Callable[[str], str]) -> Iterator[Metric]:
    """All gauges; `queue_label` turns a queue's name into its label value."""
    in_progress: Counter[str] = Counter()
    waiting: Counter[str] = Counter()
    for queue in now.queues:
        in_progress[queue_label(queue.name)] += queue.in_progress
        waiting[queue_label(queue.name)] += queue.waiting
    yield _labelled("worker_jobs_in_progress", "Jobs that run in a child now.", "queue", in_progress)
    yield _labelled("spooled_supervisor_jobs_waiting", "Jobs that are claimed and have no child yet.", "queue", waiting)

    states: Counter[str] = Counter()
    for state, count in now.children_by_state().items():
        states[_state(state)] += count
    yield _labelled("spooled_supervisor_children", "Children by what they do now.", "state", states)
    phases = {phase: int(phase == now.phase) for phase in PHASES}
    yield _labelled("spooled_supervisor_phase", "The phase the supervisor is in is 1.", "phase", phases)
    pss, uss = _by_slot(now, lambda child: child.pss_bytes), _by_slot(now, lambda child: child.uss_bytes)
    yield _labelled(
        "spooled_supervisor_child_pss_bytes", "Memory of a child, shared pages by their share.", "slot", pss
    )
    yield _labelled("spooled_supervisor_child_uss_bytes", "Memory that only this child has.", "slot", uss)

    yield _plain("procs", "Children that are wanted.", now.procs)
    yield _plain(
        "slots_backed_off", "Slots whose last child failed and that have no other that is ready.", now.slots_backed_off
    )
    yield _plain("leases_held", "Leases that are renewed.", now.leases_held)
    yield _plain("unsettled", "Jobs whose outcome the service does not have yet.", now.unsettled)
    yield _plain("outbox_depth", "Outcomes that wait to be reported.", now.outbox_depth)
    yield _plain("outbox_on_disk", "Whether outcomes are kept on disk, and not in memory only.", now.outbox_on_disk)
    yield _plain("outbox_age_seconds", "Age of the oldest outcome that waits, 0 if none does.", now.outbox_age_s)
    yield _plain("heartbeat_age_seconds", "Time since the service took a heartbeat.", now.heartbeat_age_s)
    yield _plain("registered", "Whether the service knows this worker.", now.registered)
    yield _plain("quiet", "Whether claiming is switched off.", now.quiet)
    yield _plain("held_back", "Whether nothing is claimed for load or memory pressure.", now.held_back is not None)
    yield _plain("ready", "Whether a job would be taken now, as /readyz says.", not now.reasons)
    yield _plain("healthy", "Whether nothing is broken, as /health says.", not now.unhealthy)


def _plain(name: str, text: str, value: float | None) -> Metric:
    family = GaugeMetricFamily(f"spooled_supervisor_{name}", text)
    if value is not None:
        family.add_metric((), float(value))
    return family


def _labelled(name: str, text: str, label: str, values: Mapping[str, int]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=(label,))
    for value, number in values.items():
        family.add_metric((value,), number)
    return family


def _by_slot(now: Snapshot, size: Callable[[ChildSnapshot], int | None]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for child in now.children:
        n_bytes = size(child)
        if n_bytes is not None:
            sizes[str(child.slot)] = sizes.get(str(child.slot), 0) + n_bytes
    return sizes

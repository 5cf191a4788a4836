"""For tests of handlers: run one job, in this process or in a real child; an embedded server and a supervisor.

    from spooled_supervisor.testing import run_handler, run_in_child

    def test_a_thumbnail_is_made():
        run = run_handler(app, {"pages": 3}, queue_name="thumbnails")
        assert run.outcome == "succeeded" and run.result == {"pages": 3}

    def test_a_hanging_converter_is_stopped():
        assert run_in_child(app, {"file": "endless.pdf"}, queue_name="thumbnails", timeout_s=1).outcome == "timed_out"

`pytest_plugins = ["spooled_supervisor.testing.pytest_plugin"]` in a conftest.py brings the fixtures `spooled_server`
and `spooled_supervisor_daemon`; without pytest `embedded_server` and `supervisor` are the context managers behind them.
Both need the extra `dev-server`.
"""

from __future__ import annotations

from spooled_supervisor.testing.inchild import run_in_child
from spooled_supervisor.testing.inprocess import run_handler
from spooled_supervisor.testing.programs import EmbeddedServer, RunningSupervisor, embedded_server, supervisor
from spooled_supervisor.testing.values import HandlerRun, LogLine, ProgressReport

__all__ = [
    "EmbeddedServer",
    "HandlerRun",
    "LogLine",
    "ProgressReport",
    "RunningSupervisor",
    "embedded_server",
    "run_handler",
    "run_in_child",
    "supervisor",
]

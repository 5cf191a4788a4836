from tasks import app

from spooled_supervisor.testing import run_handler, run_in_child


def test_pages_are_counted():
    run = run_handler(app, {"pages": 2})
    assert (run.outcome, run.result) == ("succeeded", {"pages": 2})
    assert [report.message for report in run.progress] == ["page 0", "page 1"]
    assert run.logs[0].message == "rendered"


def test_an_empty_document_is_not_tried_again():
    run = run_handler(app, {"pages": 0})
    assert (run.outcome, run.retryable) == ("failed", False)


def test_a_slow_document_is_stopped():
    assert run_in_child(app, {"pages": 1, "seconds": 30}, timeout_s=0.5).outcome == "timed_out"


def test_a_thumbnail_is_made_by_a_real_supervisor(spooled_server, spooled_supervisor_daemon):
    spooled_supervisor_daemon("tasks", procs=1)
    job = spooled_server.client.jobs.create(queue_name="thumbnails", payload={"pages": 1})
    assert spooled_server.wait_for_job(job.id).result == {"pages": 1}

"""A run, and what its child may say of it."""

from __future__ import annotations

import math

import pytest

from spooled_supervisor.childlink import Run
from spooled_supervisor.job import Job
from spooled_supervisor.leases import LeaseBook

GIVEN_AT, READ_AT = 100.0, 100.5


@pytest.mark.parametrize(
    ("said", "believed"),
    [
        (GIVEN_AT, GIVEN_AT),
        (100.25, 100.25),
        (READ_AT, READ_AT),
        (GIVEN_AT - 0.001, READ_AT),
        (READ_AT + 0.001, READ_AT),
        (-math.inf, READ_AT),
        (math.inf, READ_AT),
        (math.nan, READ_AT),
    ],
)
def test_a_start_that_cannot_be_true_is_not_believed(said: float, believed: float) -> None:
    job = Job(
        id="j",
        queue_name="q",
        lease_id="l",
        payload=b"{}",
        retry_count=0,
        max_retries=0,
        timeout_s=1.0,
        lease_duration_s=30.0,
        requested_at=GIVEN_AT,
    )
    lease = LeaseBook(fraction=0.5, abort_grace_s=1.0).hold(job)
    assert lease is not None
    run = Run(1, lease, claimed_at=GIVEN_AT, timeout_s=1.0, given_at=GIVEN_AT)
    assert run.believable_start(said, READ_AT) == believed

"""The gate: claims wait at least the hint, at most the cap, and never in step."""

from __future__ import annotations

import random

import pytest

from spooled_supervisor.api.gate import CAP_S, UNHINTED_S, RateGate


def waits(hint_s: float | None, count: int = 200) -> list[float]:
    rng = random.Random(7)
    gates = [RateGate(rng=rng) for _ in range(count)]
    for gate in gates:
        gate.note(hint_s, 100.0)
    return [gate.wait_for_claim(100.0) for gate in gates]


def test_nothing_noted_means_no_wait() -> None:
    assert RateGate().wait_for_claim(0.0) == 0.0


@pytest.mark.parametrize("hint_s", [0.5, 3.0, 30.0, 54.0])
def test_a_hint_is_waited_for_and_spread(hint_s: float) -> None:
    found = waits(hint_s)
    assert hint_s <= min(found)
    assert max(found) <= min(hint_s * 1.1 + 1e-9, CAP_S)
    assert max(found) - min(found) > hint_s * 0.05


@pytest.mark.parametrize("hint_s", [61.0, 300.0, float("inf")])
def test_a_huge_hint_is_capped_and_still_spread(hint_s: float) -> None:
    found = waits(hint_s)
    assert min(found) >= CAP_S * 0.9
    assert max(found) <= CAP_S
    assert max(found) - min(found) > 3.0


@pytest.mark.parametrize("hint_s", [0.0, -5.0])
def test_a_hint_of_nothing_is_still_a_pause(hint_s: float) -> None:
    assert all(0.0 < wait < 1.0 for wait in waits(hint_s))


def test_without_a_hint_a_second_is_waited() -> None:
    assert all(UNHINTED_S <= wait <= UNHINTED_S * 1.1 for wait in waits(None))


def test_a_shorter_hint_never_shortens_the_wait_and_time_ends_it() -> None:
    gate = RateGate(rng=random.Random(1))
    gate.note(30.0, 100.0)
    blocked_until = gate.claims_blocked_until
    gate.note(1.0, 101.0)
    assert gate.claims_blocked_until == blocked_until
    assert gate.wait_for_claim(blocked_until - 1.0) == pytest.approx(1.0)
    assert gate.wait_for_claim(blocked_until) == 0.0

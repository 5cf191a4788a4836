"""How far the limit of open files is raised for children, and when they do not fit."""

from __future__ import annotations

import resource

import pytest

from spooled_supervisor import descriptors

NO_LIMIT = resource.RLIM_INFINITY


def limits_after(monkeypatch: pytest.MonkeyPatch, children: int, soft: int, hard: int) -> tuple[int, int, str | None]:
    """Soft and hard limit when room was made, and why it could not be."""
    limits = [(soft, hard)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, wanted: limits.append(wanted))
    lack = descriptors.make_room(children)
    return (*limits[-1], lack)


@pytest.mark.parametrize(
    ("children", "soft", "hard", "expected"),
    [
        (4, 1024, 4096, 1024),
        (100, 1024, 4096, 1512),
        (600, 1024, 4096, 4096),
        (1000, 1024, NO_LIMIT, 10512),
        (1000, NO_LIMIT, NO_LIMIT, NO_LIMIT),
        (1, 64, 64, 64),
    ],
)
def test_many_children_get_the_descriptors_that_they_take(
    monkeypatch: pytest.MonkeyPatch, children: int, soft: int, hard: int, expected: int
) -> None:
    assert limits_after(monkeypatch, children, soft, hard) == (expected, hard, None)


@pytest.mark.parametrize(
    ("children", "soft", "hard", "needed"), [(118, 64, 64, 783), (157, 256, 1024, 1028), (1000, 1024, 4096, 6298)]
)
def test_children_that_do_not_fit_are_told_and_change_no_limit(
    monkeypatch: pytest.MonkeyPatch, children: int, soft: int, hard: int, needed: int
) -> None:
    *limits, lack = limits_after(monkeypatch, children, soft, hard)
    assert limits == [soft, hard]
    assert lack is not None
    assert f"{children} children do not fit into the limit of {hard} open files" in lack
    assert "5 descriptors each" in lack
    assert f"it is {needed} in all" in lack
    assert "LimitNOFILE=" in lack

"""How many descriptors children take of the supervisor, and the limit that is raised for them (getrlimit(2)).

A supervisor that has none left can neither fork, nor answer, nor say why, so children that do not fit are refused
beforehand. The soft limit is ours to raise as far as the hard one, which the service manager sets (LimitNOFILE=).
"""

from __future__ import annotations

import resource

from spooled_supervisor.plan import RENEWED_AT_ONCE

PER_CHILD = 5
"""Jobs, reports, output, stack, pidfd."""
OTHERS = 48
"""For all else: some 30 in a quiet hour, and connections to the service, from Prometheus and from status pages."""
COMFORT = 512
"""More where the hard limit allows it: a limit of 1024 is seldom meant."""


def make_room(children: int) -> str | None:
    """Raise the soft limit as far as so many children may need it; why they do not fit, if so."""
    needed = PER_CHILD * (children + max(1, children // RENEWED_AT_ONCE)) + OTHERS
    wanted = 2 * PER_CHILD * children + COMFORT
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return None
    most = max(soft, wanted if hard == resource.RLIM_INFINITY else min(wanted, hard))
    if most < needed:
        return (
            f"{children} children do not fit into the limit of {hard} open files: they take {PER_CHILD} descriptors "
            f"each, and with those that replace others and the supervisor's own it is {needed} in all; raise "
            "LimitNOFILE= of the unit (ulimit -Hn), or have fewer children"
        )
    if most > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return None

"""`python -m tests.bench`: run scenarios, print the table, write JSON. What is measured and how: see the package."""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tests.bench
from tests.bench import growth, meters, readme
from tests.bench.figures import Result, collect, number, table
from tests.bench.scenario import FULL, QUICK, Effort, Scenario
from tests.bench.scenarios import chosen
from tests.bench.stage import NotMeasured

REPETITIONS = 3
QUIET_CORES = 0.15
"""What others may use before `--patience` counts it as a disturbance."""
EXIT_MISSED, EXIT_NOT_MEASURED = 1, 2


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and report; the exit status."""
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        scenarios = chosen(args.only, is_quick=args.quick, is_long=args.long or args.readme)
    except ValueError as error:
        parser.error(str(error))
    if args.readme and (args.only or args.quick):
        parser.error("--readme wants all figures, in earnest: neither --only nor --quick goes with it")
    context = {**meters.context(), "quick": args.quick, "repetitions": args.repeat}
    try:
        results, context["cores_of_others"] = measure(
            scenarios, repetitions=args.repeat, is_quick=args.quick, patience_s=args.patience
        )
    except NotMeasured as failure:
        print(failure, file=sys.stderr)
        return EXIT_NOT_MEASURED
    _report(results, context, args.json)
    if args.readme:
        readme.write(results, _circumstances(context))
    missed = [result.name for result in results if result.is_met is False]
    if missed and args.check:
        print(f"bounds missed: {', '.join(missed)}", file=sys.stderr)
        return EXIT_MISSED
    return 0


def measure(
    scenarios: Sequence[Scenario], *, repetitions: int, is_quick: bool = False, patience_s: float = 0.0
) -> tuple[list[Result], dict[str, list[float]]]:
    """Every scenario once, then again, but those that take long less often; the results, and how many cores others used
    meanwhile, by scenario."""
    effort = QUICK if is_quick else FULL
    values: dict[str, list[Mapping[str, float]]] = {scenario.name: [] for scenario in scenarios}
    others: dict[str, list[float]] = {scenario.name: [] for scenario in scenarios}
    for repetition in range(1, repetitions + 1):
        for scenario in (scenario for scenario in scenarios if repetition <= scenario.most):
            began_at = time.monotonic()
            figures, cores = run_undisturbed(scenario, effort, patience_s)
            values[scenario.name].append(figures)
            others[scenario.name].append(cores)
            told = ", ".join(f"{key} {number(value)}" for key, value in figures.items())
            took = f"{time.monotonic() - began_at:.0f} s, {cores} cores busy with something else"
            print(f"{scenario.name} {repetition}/{repetitions} ({took}): {told}", file=sys.stderr, flush=True)
    results = [one for scenario in scenarios for one in collect(scenario.name, scenario.figures, values[scenario.name])]
    return results, others


def run_undisturbed(scenario: Scenario, effort: Effort, patience_s: float) -> tuple[Mapping[str, float], float]:
    """One repetition, and how many cores others used: the least disturbed of those that the patience allowed.

    Chosen by the disturbance alone, whatever the figures are.
    """
    deadline = time.monotonic() + patience_s
    tries: list[tuple[Mapping[str, float], float]] = []
    while not tries or (tries[-1][1] > QUIET_CORES and time.monotonic() < deadline):
        meters.wait_for_quiet(QUIET_CORES, deadline)
        disturbance = meters.Disturbance()
        try:
            tries.append((scenario.run(effort), round(disturbance.cores(), 2)))
        except NotMeasured as failure:
            raise NotMeasured(f"{scenario.name} could not be measured: {failure}") from failure
    return min(tries, key=lambda one: one[1])


def _report(results: Sequence[Result], context: Mapping[str, Any], path: Path | None) -> None:
    if plain := [result for result in results if not growth.has(result)]:
        print(table(plain))
    if len(plain) < len(results):
        print(f"\nHow cost grows:\n\n{growth.table(results)}")
    print(f"\n{_circumstances(context)}" + ("; quick: the figures mean nothing" if context["quick"] else ""))
    if path is not None:
        document = {"context": context, "figures": [result.as_json() for result in results]}
        path.write_text(json.dumps(document, indent=2) + "\n")


def _circumstances(context: Mapping[str, Any]) -> str:
    others = [cores for repetitions in context["cores_of_others"].values() for cores in repetitions]
    return (
        f"Python {context['python']}, {context['system']}, {context['cpus']} CPUs; repetitions: "
        f"{context['repetitions']}; cores busy with something else: {statistics.median(others):.2f}, at most "
        f"{max(others):.2f}"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench",
        description=tests.bench.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="scenarios whose names begin so")
    parser.add_argument("--repeat", type=_count, default=REPETITIONS, metavar="N", help="default %(default)s")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the figures there, too")
    parser.add_argument(
        "--patience",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="for each repetition wait up to so long until nobody else uses the machine, and repeat what was disturbed",
    )
    parser.add_argument("--long", action="store_true", help="also the scenarios that take minutes each")
    parser.add_argument("--readme", action="store_true", help="everything, and write the tables into the README")
    judging = parser.add_mutually_exclusive_group()
    judging.add_argument("--check", action="store_true", help="exit with 1 if a bound is missed")
    judging.add_argument("--quick", action="store_true", help="too little of everything: only to see that it works")
    return parser


def _count(text: str) -> int:
    if (count := int(text)) < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return count


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # by way of what has to be cleaned up
    sys.exit(main())

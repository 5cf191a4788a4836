"""`status` and `ctl`: the command line's end of the control socket.

Which socket is meant is told by the same options as the daemon's (`--app`, `--state-dir`, `--control-socket`), or by
what is found in the usual places if just one listens there. Exit codes: 0 done, 1 refused or failed, 64 usage, 69
nobody is there.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from spooled_supervisor import config as configuration
from spooled_supervisor.config import OptionParser
from spooled_supervisor.control import ask, may_listen
from spooled_supervisor.errors import EX_FAILURE, EX_OK, EX_UNAVAILABLE, EX_USAGE, ConfigError

WHERE = ("app", "state_dir", "control_socket", "config")
ANSWER_LIMIT_S = 10.0
RELOAD_LIMIT_S = 600.0


def run_status(argv: Sequence[str], env: Mapping[str, str]) -> int:
    """A table for people, or the snapshot as JSON."""
    from spooled_supervisor import statusview

    parser = OptionParser(prog="spooled-supervisor status", description="What runs now.")
    parser.add_argument("--watch", action="store_true", help="draw it again every second, until Ctrl-C")
    parser.add_argument("--json", action="store_true", help="everything, as one JSON object")
    configuration.add_options(parser, WHERE)
    flags = parser.parse_args(argv)
    path = _socket(flags, env)

    def fetch() -> dict[str, Any]:
        answer = ask(path, {"command": "status"}, timeout_s=ANSWER_LIMIT_S)
        snapshot = answer.get("status")
        if not isinstance(snapshot, dict):
            raise ValueError(str(answer.get("text", "an answer without sense")))
        return snapshot

    try:
        first = [fetch()]
    except (OSError, ValueError) as error:
        return _complain(path, error, env)
    return statusview.show(
        lambda: first.pop() if first else fetch(), watch=flags.watch, as_json=flags.json, stream=sys.stdout
    )


def run_ctl(argv: Sequence[str], env: Mapping[str, str]) -> int:
    """Send one command, print its answer: without what a terminal obeys, as a job's stack has names of the job's."""
    from spooled_supervisor.statusview import printable_lines

    flags = _ctl_parser().parse_args(argv)
    path = _socket(flags, env)
    limit_s = RELOAD_LIMIT_S if flags.command == "reload" else ANSWER_LIMIT_S
    try:
        answer = ask(path, _request(flags), timeout_s=limit_s)
    except (OSError, ValueError) as error:
        return _complain(path, error, env)
    is_ok = answer.get("ok") is True
    print(printable_lines(str(answer.get("text", ""))), file=sys.stdout if is_ok else sys.stderr)
    return EX_OK if is_ok else EX_FAILURE


def _ctl_parser() -> argparse.ArgumentParser:
    parser = OptionParser(prog="spooled-supervisor ctl", description="Tell a running supervisor what to do.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, text in (
        ("quiet", "claim nothing more; what runs goes on"),
        ("resume", "claim again"),
        ("reload", "import the app anew and replace the children as they finish"),
        ("stacks", "where the busy children stand; into the log as well"),
        ("stop", "drain and exit; asked again, stop at once"),
    ):
        configuration.add_options(commands.add_parser(name, help=text, description=text), WHERE)
    scale = commands.add_parser("scale", help="have N children")
    scale.add_argument("n", type=int, metavar="N")
    recycle = commands.add_parser("recycle", help="replace the child of SLOT, or all, by fresh ones")
    recycle.add_argument("slot", type=int, nargs="?", metavar="SLOT")
    kill = commands.add_parser("kill-job", help="stop a job and fail it (it is retried)")
    kill.add_argument("id", metavar="ID")
    for command in (scale, recycle, kill):
        configuration.add_options(command, WHERE)
    return parser


def _request(flags: argparse.Namespace) -> dict[str, Any]:
    request = {"command": flags.command, "by": "ctl"}
    given = {name: getattr(flags, name, None) for name in ("n", "slot", "id")}
    return request | {name: value for name, value in given.items() if value is not None}


def _socket(flags: argparse.Namespace, env: Mapping[str, str]) -> Path:
    paths = configuration.control_sockets(flags, env)
    if len(paths) > 1:
        paths = list(filter(may_listen, paths))
    if len(paths) == 1:
        return paths[0]
    if not paths:
        raise ConfigError(
            "no supervisor was found; say which one with --app, --state-dir or --control-socket",
            exit_code=EX_UNAVAILABLE,
        )
    raise ConfigError(f"several supervisors were found; say which one is meant:{_listed(paths)}", exit_code=EX_USAGE)


def _listed(paths: Iterable[Path]) -> str:
    return "".join(f"\n  --control-socket {path}" for path in paths)


def _complain(path: Path, error: Exception, env: Mapping[str, str]) -> int:
    """Where nobody listens, what does elsewhere is named and not taken: `ctl stop --app a` must not stop another app.

    A unit's daemon listens in its RUNTIME_DIRECTORY, which neither app nor file tells.
    """
    others = list(filter(may_listen, configuration.usual_sockets(env))) if _is_nobody_there(error) else []
    hint = f"; listening elsewhere:{_listed(others)}" if others else ""
    print(f"spooled-supervisor: {path}: {_why(error)}{hint}", file=sys.stderr)
    return EX_UNAVAILABLE


def _is_nobody_there(error: Exception) -> bool:
    return isinstance(error, (FileNotFoundError, ConnectionRefusedError))


def _why(error: Exception) -> str:
    if _is_nobody_there(error):
        return "no supervisor listens there"
    if isinstance(error, TimeoutError):
        return "it does not answer"
    return str(error)

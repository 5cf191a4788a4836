"""`export`: print a file that comes with the package, ready to be used as it is.

The files lie in `systemd/` of the source tree and are installed as `spooled_supervisor/share`. They are printed to the
byte; only the unit file can be told another path of the program.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from spooled_supervisor.config import OptionParser
from spooled_supervisor.errors import EX_OK, EX_USAGE, ConfigError, SupervisorError

FILES = {
    "systemd-unit": ("spooled-supervisor.service", "the unit, to /etc/systemd/system/spooled-supervisor.service"),
    "systemd-child-cgroups": (
        "child-cgroups.conf",
        "a drop-in for a control group per child, to /etc/systemd/system/spooled-supervisor.service.d",
    ),
    "config": ("spooled-supervisor.toml", "the configuration with all options, to /etc/spooled/supervisor.toml"),
    "alert-rules": ("alert-rules.yml", "alerts and recording rules, to a directory in Prometheus's rule_files"),
    "grafana-dashboard": ("grafana-dashboard.json", "a dashboard, for Grafana's import"),
}
"""By the name on the command line: the file, and where it goes."""
_EXEC_START = re.compile(r"(?m)^(ExecStart=)\S+")


def run_export(argv: Sequence[str], env: Mapping[str, str]) -> int:
    """The command; its exit code."""
    parser = OptionParser(prog="spooled-supervisor export", description="Print a file that comes with the package.")
    commands = parser.add_subparsers(dest="file", metavar="FILE", required=True)
    for name, (_, text) in FILES.items():
        command = commands.add_parser(name, help=text, description=f"Print {text}.")
        if name == "systemd-unit":
            command.add_argument("--exec-start", metavar="PATH", help="where the program is, instead of /opt/...")
    flags = parser.parse_args(argv)
    text = shared_file(FILES[flags.file][0]).read_text(encoding="utf-8")
    if getattr(flags, "exec_start", None) is not None:
        text = with_program(text, flags.exec_start)
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return EX_OK


def shared_file(name: str, package: Path = Path(__file__).parent) -> Path:
    """A file that comes with the package: installed with it, or in the source tree around it."""
    places = (package / "share", package.parent / "systemd")
    for place in places:
        if (place / name).is_file():
            return place / name
    looked = " nor in ".join(map(str, places))
    raise SupervisorError(f"{name} is missing: it is neither in {looked}; is the package installed completely?")


def with_program(unit: str, path: str) -> str:
    """The unit file with another program in `ExecStart=`; its arguments stay."""
    if not path.startswith("/") or not path.isprintable():
        raise ConfigError(f"--exec-start {path!r}: systemd wants an absolute path", exit_code=EX_USAGE)
    # systemd.service(5), COMMAND LINES: `%` begins a specifier, backslash and quotes are its own, words end at blanks.
    word = path.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    if re.search(r"[\s\"'\\;]", path):
        word = f'"{word}"'
    return _EXEC_START.sub(lambda found: found[1] + word, unit, count=1)

"""`python -m spooled_supervisor.devserver`: the server alone, with the same flags as the command `dev-server`."""

from __future__ import annotations

import argparse
import sys
from typing import NoReturn

from spooled_supervisor.devserver.command import add_arguments, run
from spooled_supervisor.errors import EX_USAGE


class _Parser(argparse.ArgumentParser):
    """argparse leaves with 2 on a usage error; here that is 64, as for every command of the package."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(EX_USAGE, f"{self.prog}: error: {message}\n")


def main() -> int:
    parser = _Parser(prog="spooled-supervisor dev-server", description="An embedded Spooled server on loopback.")
    add_arguments(parser)
    return run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())

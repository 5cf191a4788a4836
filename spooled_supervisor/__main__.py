"""`python -m spooled_supervisor` is `spooled-supervisor`."""

from spooled_supervisor.cli import main

main()

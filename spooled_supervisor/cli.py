"""Commands and exit codes; the only place that prints, and that knows argv, the environment and `sys.exit`.

`run` is the default: `spooled-supervisor --procs 4` works. Everything slow is imported inside its command, so that
`--help` is quick and a signal that comes early finds a handler.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence

from spooled_supervisor.errors import EX_OK, EX_USAGE, ConfigError, SupervisorError

USAGE = """\
usage: spooled-supervisor [run] [options]      run the daemon
       spooled-supervisor demo [options]       a picture, drawn by CPU-bound jobs on all cores
       spooled-supervisor dev-server [options] the embedded server alone
       spooled-supervisor check [options]      report every problem of a configuration, start nothing
       spooled-supervisor status [options]     what runs now (--watch: again and again; --json)
       spooled-supervisor ctl COMMAND          quiet, resume, scale N, reload, recycle [SLOT], kill-job ID, stacks, stop
       spooled-supervisor export FILE          systemd-unit, systemd-child-cgroups, config, alert-rules,
                                               grafana-dashboard
       spooled-supervisor COMMAND --help       the options of a command
       spooled-supervisor --version
"""

EARLY_SIGNALS = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTTIN, signal.SIGTTOU, signal.SIGTSTP)
"""Those of `supervisor.COMMAND_SIGNALS` and their kin, for the time before its loop takes them."""


def main(argv: Sequence[str] | None = None) -> None:
    """The console script. Never returns: the process ends here, whatever threads are left (a resolver, say)."""
    code = 1
    try:
        code = dispatch(list(sys.argv[1:] if argv is None else argv), os.environ)
    except SystemExit as exit:  # argparse, after --help or --version
        code = exit.code if isinstance(exit.code, int) else 1
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    except ConfigError as error:
        _complain(error.problems)
        code = error.exit_code
    except SupervisorError as error:
        _complain([str(error)])
        code = error.exit_code
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError, AttributeError):
                continue  # closed, or never there
        os._exit(code)


def dispatch(argv: list[str], env: Mapping[str, str]) -> int:
    """Find the command and run it; its exit code."""
    commands: dict[str, Callable[[list[str], Mapping[str, str]], int]] = {
        "run": run,
        "check": check,
        "demo": demo,
        "dev-server": dev_server,
        "status": status,
        "ctl": ctl,
        "export": export,
    }
    if argv[:1] == ["help"] or (argv and argv[0] in ("-h", "--help")):
        print(USAGE, end="")
        return EX_OK
    if argv and not argv[0].startswith("-"):
        if argv[0] not in commands:
            known = ", ".join(commands)
            raise ConfigError(f"unknown command {argv[0]!r}; the commands are: {known}", exit_code=EX_USAGE)
        return commands[argv[0]](argv[1:], env)
    return run(argv, env)


def run(argv: list[str], env: Mapping[str, str]) -> int:
    """The daemon."""
    # Before anything slow: a stop that comes now finds nothing to stop, and PID 1 would ignore it.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, lambda *_: os._exit(EX_OK))
    # What asks a running daemon for something would end or stop one that is not there yet. Not SIG_IGN: it is kept over
    # exec.
    for number in EARLY_SIGNALS:
        signal.signal(number, lambda *_: None)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # an inherited SIG_IGN would make waiting for children impossible
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    _open_standard_streams()

    from spooled_supervisor import config as configuration

    config = configuration.load(argv, env, is_tty=os.isatty(2))
    import asyncio
    import faulthandler

    from spooled_supervisor import kernel, timing
    from spooled_supervisor.events import Events
    from spooled_supervisor.statedir import StateDir
    from spooled_supervisor.supervisor import Supervisor
    from spooled_supervisor.telemetry import logs
    from spooled_supervisor.telemetry.systemd import Notifier

    faulthandler.enable(2)  # the watchdog's SIGABRT leaves a traceback; by number, as sys.stderr may be None
    kernel.widen_signal_stack()
    kernel.set_child_subreaper(True)
    notifier = Notifier.take(os.environ)
    os.environ.pop("SPOOLED_API_KEY", None)
    events = Events()
    log = logs.setup(config.log.level, config.log.format, events=events, secrets=[config.api.key.reveal()])
    for warning in configuration.warnings(config):
        log.write(30, "config_warning", warning=warning)
    with StateDir(config.state_dir) as state, asyncio.Runner(loop_factory=timing.new_event_loop) as runner:
        supervisor = Supervisor(config, state, events=events, log=log, notifier=notifier)
        code = runner.run(supervisor.run())
        log.close()
        os._exit(code)  # not through the runner's end: it would wait for a resolver's thread


def check(argv: list[str], env: Mapping[str, str]) -> int:
    """Validate the configuration and import the app, in a process of its own; tell every problem; start nothing.

    `--online` tries the key at the service as well, if nothing is wrong with the options.
    """
    from spooled_supervisor import cgroups, descriptors
    from spooled_supervisor import config as configuration
    from spooled_supervisor.checking import app_problems, online_problem

    is_online = "--online" in argv
    parser = configuration.make_parser(prog="spooled-supervisor check", usage="%(prog)s [options]")
    parser.add_argument("--online", action="store_true", help="try the API key at the service, too")
    config, problems = configuration.examine(argv, env, parser=parser)
    is_online = is_online and not problems
    for problem in app_problems(config) if config.app else []:
        problems.add(problem)
    offline = online_problem(config) if is_online else None
    if lack := descriptors.make_room(config.pool.procs):
        problems.add(f"procs: {lack}")
    if offline is not None:
        if not problems:
            raise offline  # it has an exit code of its own
        problems.add(str(offline))
    problems.raise_if_any()
    for warning in configuration.warnings(config):
        print(f"warning: {warning}")
    if config.pool.child_memory_limit_bytes is not None and cgroups.delegated() is None:
        print(
            "note: child_memory_limit is looked at twice a second; in a cgroup that is delegated to the daemon "
            "(`export systemd-child-cgroups`) the kernel enforces it"
        )
    queues = ", ".join(queue.name for queue in config.queues) or "all that the app has handlers for"
    print(f"ok: {config.app}, {config.pool.procs} children, {config.api.url}, queues: {queues}")
    return EX_OK


def demo(argv: list[str], env: Mapping[str, str]) -> int:
    """The embedded server, a supervisor and an app that draws a picture."""
    from spooled_supervisor.demo.show import run_demo

    return run_demo(argv, env)


def dev_server(argv: list[str], env: Mapping[str, str]) -> int:
    """The embedded server alone."""
    from spooled_supervisor import devserver
    from spooled_supervisor.config import OptionParser

    parser = OptionParser(prog="spooled-supervisor dev-server", description="The embedded Spooled server.")
    devserver.add_arguments(parser)
    return devserver.run(parser.parse_args(argv))


def status(argv: list[str], env: Mapping[str, str]) -> int:
    """What runs now."""
    from spooled_supervisor import operating

    return operating.run_status(argv, env)


def ctl(argv: list[str], env: Mapping[str, str]) -> int:
    """One command to a running supervisor."""
    from spooled_supervisor import operating

    return operating.run_ctl(argv, env)


def export(argv: list[str], env: Mapping[str, str]) -> int:
    """Print a file that comes with the package."""
    from spooled_supervisor.exporting import run_export

    return run_export(argv, env)


def _open_standard_streams() -> None:
    """0, 1 and 2 are open whatever the service manager left: else a pipe of ours would get such a number."""
    while True:
        fd = os.open(os.devnull, os.O_RDWR)
        if fd > 2:
            os.close(fd)
            return


def _complain(problems: Sequence[str]) -> None:
    stream = sys.stderr
    if stream is not None:
        for problem in problems:
            print(f"spooled-supervisor: {problem}", file=stream)


if __name__ == "__main__":
    main()

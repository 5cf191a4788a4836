"""The project's benchmark: what the daemon costs, and how long it keeps jobs and children waiting.

    python -m tests.bench                        everything, some minutes
    python -m tests.bench --only noop kill       scenarios whose names begin so
    python -m tests.bench --repeat 5 --patience 60 --json out.json --check
    python -m tests.bench --quick                a smoke of seconds, one scenario of each kind; no figure to believe

It prints a table (also valid Markdown): figure, value, spread, bound, met or not. A value is the median over the
repetitions, the spread their lowest and highest. Repetitions go round: each scenario once, then each again, always with
a new server, a new database and a new daemon, so that a disturbance of seconds does not hit one figure only. The exit
status is 0; 1 with `--check` if a bound is missed; 2 if something could not be measured.

How it is measured. The daemon runs as users run it (`python -m spooled_supervisor`, log level info, metrics on), the
embedded dev-server in a process of its own, both on this machine. Everything that is started here dies with the
benchmark (PR_SET_PDEATHSIG). Wall time is at the mercy of whatever else runs here, so bounds are on CPU time and on
ratios where that is possible, and the last line tells how many cores were busy with something else meanwhile. Beyond a
tenth or two of a core believe the CPU times, and repeat the rest with `--patience`, which waits for better moments.

*CPU time* is the process's own clock (clock_getcpuclockid(3): all its threads, in nanoseconds, the figure that
/proc/PID/stat rounds to 10 ms). Supervisor, fork server, children and dev-server are always apart.

*No-op jobs* (`noop-pN`: 2 children, N jobs claimed ahead per child). More jobs than are counted wait in the queue; the
window opens after a warm-up and closes while there are some left, so that neither start nor end is in it. Requests per
job are the difference of the daemon's own counters (`/metrics`) around the window.

*Efficiency* (`efficiency-…`) is work done / (children x time). A job's work is to keep its child busy for a nominal
time by the *wall clock*, in a pure Python loop (it holds the GIL and a core, as real work does). By the wall clock and
not by CPU time, because here supervisor, server and children share the cores: on 2 CPUs, 2 children that need 10 ms of
CPU for each job cannot be 95 % busy beside a server and a supervisor that need CPU too, whatever the supervisor does.
So it tells how long children are without work between two jobs, which is what the supervisor is answerable for. What a
child loses in a job to others that run (it looks at the clock too late) counts against it. Time counts for each child
from its first start after the warm-up to its last start: as many jobs as there are gaps. `gap` is the median time
from the end of one job to the start of the next one in the same child. With one child there is a core for
everybody else; with two, they compete.

*Latency* (`latency`): jobs are offered at random instants (a Poisson process, far below what the daemon can do) to 2
children, prefetch 0, at log level debug, whose events carry the figures. From the claim's answer to the handler's start
is `job_started.wait_s`, which ends when the supervisor hears of the start. From enqueueing to start is from before the
producer sends its request to the handler's first instruction; without an event stream that is mostly the poll interval.

*Kills* (`kill`): handlers that go on after their deadline and after the grace, one at a time. From the events' own
timestamps, which are whole milliseconds.

*Memory* (`memory`): private bytes (/proc/PID/smaps_rollup, Private_Clean + Private_Dirty) of the child that has most,
of an app that preloads 200 MB of small Python objects.

*Life* (`life`): from the start of the process (a job is waiting) to that job's handler; from SIGTERM to the exit.

What the others measure, and how, is said in their modules: `childside`, `chatty`, `many`, `leak`, `idle`, `importing`
and `growth`. Those that take minutes run with `--long`.

Adding a figure: a scenario module returns numbers by key and declares them as `Figure`s with their bounds in the same
file; `scenarios.py` lists the scenarios.
"""

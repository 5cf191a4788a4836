"""What runs in the forked process: take a job from the pipe, run its handler in the main thread, answer.

It knows neither the service nor the API key, and trusts nothing about the process it was forked from but the app that
was imported there. Its promises: every job that was taken is answered exactly once or the process ends; it never
returns into the fork server's frames (the only way out is `os._exit`); it dies with the supervisor; its protocol pipes
are high descriptors that no program it starts inherits.

An abort travels as a frame on the job pipe, because it has a reason; a real-time signal only wakes the main thread to
read it. faulthandler(3.11 docs, `register`) hangs on the same signal in C and writes the Python stack into a memfd of
the supervisor's first, so that the stack is there even when a C call never lets the interpreter run its own handler.
"""

from __future__ import annotations

import contextvars
import faulthandler
import gc
import inspect
import json
import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from spooled_supervisor import cgroups, childmetrics, frames, kernel, timing
from spooled_supervisor.app import AbortSignal, App, Handler, JobContext
from spooled_supervisor.errors import JobAborted
from spooled_supervisor.family import lower_priority, raised_oom_score
from spooled_supervisor.highfd import move_high
from spooled_supervisor.job import MAX_RESULT_BYTES, clip_error
from spooled_supervisor.rates import LineRate
from spooled_supervisor.results import NotJson, encode_result
from spooled_supervisor.tidy import Baseline
from spooled_supervisor.wording import PACKAGE_DIR, clip_text, describe_error, safe_text

if TYPE_CHECKING:
    import asyncio

    from spooled_supervisor.childloop import ChildLoop

ABORT_SIGNAL = signal.SIGRTMIN + 3
STACK_SIGNAL = signal.SIGRTMIN + 4
QUIET_SIGNALS = (
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGTTIN,
    signal.SIGTTOU,
)
"""Caught by a handler that does nothing: `systemctl kill` sends them to every process of the unit, and SIG_IGN would
be inherited by the programs that a handler starts (execve(2))."""
DEFAULT_SIGNALS = (signal.SIGCHLD, signal.SIGALRM, signal.SIGTSTP, signal.SIGCONT)

EXIT_LEFT = 0
EXIT_SUPERVISOR_GONE = 3
EXIT_BOOT_FAILED = 4
READ_BYTES = 64 * 1024
"""All that a pipe holds (pipe(7)). A megabyte would be mapped and given back for every frame, which takes 10 us."""
NEXT_JOB_MS = 2
"""A child that has no other job after this is idle, as far as its title tells."""
# Our own references: what a handler replaces in the module, it keeps. (gevent does so with `poll`, which then blocks.)
_decode, _dumps, _poll = json.JSONDecoder().decode, json.dumps, select.poll


NO_SIGNAL = AbortSignal()


class Child:
    """One child's life. Everything here runs in the main thread but `send`, which handlers' threads reach too.

    It is made in the fork server, once, and each child begins with its own copy of it: what is made after the fork, or
    is used for the first time then, costs every child the pages around it. Here that is 200 kB.
    """

    def __init__(self, app: App, settings: frames.Preload) -> None:
        self._app = app
        self._settings = settings
        self._slot = self._jobs_fd = self._reports_fd = self._stack_fd = self._wake_fd = -1  # until it is born
        self._null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        self._oom_score = raised_oom_score()
        self._decoder = frames.decoder_of_jobs()
        self._inbox: list[frames.ToChild] = []
        self._poll = _poll()
        self._lock = threading.RLock()
        self._sending = False
        self._unsent: list[bytes] = []
        self._run = 0  # the number of the running job, 0 while idle
        self._on_abort = "signal"
        self._signal = NO_SIGNAL
        self._raised = False  # JobAborted was raised inside the running handler
        self.raise_later = False  # ... or will be, when the call into us is over
        self._task: asyncio.Task[Any] | None = None
        self._abort_waits = False  # the abort signal came while no job was running
        self._is_taking = False  # the job pipe is being read for aborts
        self._leaving = False
        self._cgroup_error = ""
        self._log_rate: LineRate | None = None  # made by the first line: an idle child should own little
        self._loop: ChildLoop | None = None
        self._context = contextvars.copy_context()  # the hooks run in it, and each job in a copy
        self._is_copy = False  # a process that a handler has forked
        self._baseline = Baseline(on_signals_lost=self._install_signals, kill_leftovers=settings.kills_leftovers)
        self._metrics = childmetrics.Reporter(lambda report: self.send(frames.Metrics(report)))

    def live(self, slot: int, fds: Sequence[int]) -> NoReturn:
        """Be a child until told to leave. Called right after the fork, with all signals blocked; never returns.

        `fds` are its ends of the pipes, which it takes over: jobs (in), reports, output, stack (out).
        """
        status = 1
        try:
            jobs_fd, reports_fd, output_fd, stack_fd = fds
            self._take_pipes(slot, jobs_fd, reports_fd, stack_fd)
            self._become_a_child(output_fd)
            status = self._serve()
        except BaseException as error:
            # Nobody is left to tell but the output pipe; the supervisor reports the exit with these lines as its tail.
            sys.excepthook(type(error), error, error.__traceback__)
        finally:
            _flush_streams()
            os._exit(status)

    def _serve(self) -> int:
        """From the adoption to the exit status."""
        if not self._be_adopted():
            return EXIT_SUPERVISOR_GONE
        try:
            self._start()
        except BaseException as error:
            self.send(frames.BootFailed(clip_text(f"on_child_start failed: {describe_error(error)}")))
            return EXIT_BOOT_FAILED
        self.send(frames.Hello(self._slot, self._settings.generation, os.getpid(), self._cgroup_error))
        self._metrics.report()
        while (job := self._next_job()) is not None:
            self._run_job(job)
        self.send(frames.Leaving())
        self._metrics.report()  # now, as a stop hook may hang ...
        for hook in self._app.child_stop_hooks:
            self._call_hook(hook)
        self._metrics.report()  # ... and what the hooks have counted
        return EXIT_LEFT

    # --- becoming a child ----------------------------------------------------------------------------------------

    def _take_pipes(self, slot: int, jobs_fd: int, reports_fd: int, stack_fd: int) -> None:
        self._slot = slot
        self._jobs_fd, self._reports_fd = move_high(jobs_fd), move_high(reports_fd)
        self._stack_fd = move_high(stack_fd)
        self._wake_fd = move_high(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
        self._poll.register(self._jobs_fd, select.POLLIN)
        self._poll.register(self._wake_fd, select.POLLIN)

    def _become_a_child(self, output_fd: int) -> None:
        # 1. A session and process group of its own: terminal signals do not reach it, and the group can be killed.
        os.setsid()
        # 2. Signals: what the fork server has left to us, and nothing stays blocked.
        self._install_own_signals()
        # 3. Standard streams: no input; output is a pipe to the supervisor.
        for fd, source in ((0, self._null), (1, output_fd), (2, output_fd)):
            os.dup2(source, fd)
        os.close(self._null)
        os.close(output_fd)
        # 4. What its handlers start stays below it, and what they fork is none of us.
        kernel.set_child_subreaper(True)
        os.register_at_fork(after_in_child=self._let_go)
        # 5. The supervisor must win: priority, and the out-of-memory killer's choice.
        lower_priority(self._settings.child_nice, self._oom_score)
        if self._settings.pins_cpus:
            cpus = sorted(os.sched_getaffinity(0))
            os.sched_setaffinity(0, {cpus[self._slot % len(cpus)]})
        # 6. Its own randomness, and a collector that works again.
        _reseed()
        gc.enable()

    def _install_signals(self) -> None:
        """Ours, whatever a handler has put in their place. Not the quiet ones, which the baseline has: a start hook may
        have its own there."""
        signal.set_wakeup_fd(-1)
        self._install_own_signals()

    def _install_own_signals(self) -> None:
        kernel.set_handler(signal.SIGTERM, self._on_terminate)
        for of_ours in (ABORT_SIGNAL, STACK_SIGNAL):
            faulthandler.unregister(of_ours)  # else it believes that it is in place, whatever a handler has put there
        kernel.set_handler(ABORT_SIGNAL, self._on_abort_signal)
        self._register_dumps()
        kernel.widen_signal_stack()
        kernel.pthread_sigmask(signal.SIG_SETMASK, ())

    def _register_dumps(self) -> None:
        """After signal.signal: faulthandler chains to whatever was there before it. Nothing if it is registered."""
        # By position: file, all_threads, chain. With names each takes three times as long, after every job.
        faulthandler.register(ABORT_SIGNAL, self._stack_fd, True, True)
        faulthandler.register(STACK_SIGNAL, self._stack_fd, True, False)

    def _let_go(self) -> None:
        """In a process that a handler forked: it must neither take our frames nor write any, and it ends by SIGTERM as
        any other does (`multiprocessing` terminates its processes so), where our handler would only raise in it. What
        it logs is printed."""
        self._is_copy = True
        self._lock, self._sending, self._unsent = threading.RLock(), False, []  # of a thread that was not copied, maybe
        for fd in (self._jobs_fd, self._reports_fd, self._wake_fd):
            try:
                os.close(fd)
            except OSError:
                continue  # closed already: a fork of a fork
        if kernel.getsignal(signal.SIGTERM) == self._on_terminate:
            kernel.set_handler(signal.SIGTERM, kernel.SIG_DFL)

    def _be_adopted(self) -> bool:
        """Wait for the first frame, then tie our life to the supervisor's; False if it is gone.

        The order matters. Armed before the adoption, PDEATHSIG would fire when the intermediate parent leaves
        (prctl(2), PR_SET_PDEATHSIG); and a supervisor that died before it was armed shows only in getppid.
        """
        frame = self._receive_one()
        if not isinstance(frame, frames.Adopted):
            return False
        kernel.set_parent_death_signal(signal.SIGKILL)
        if os.getppid() != frame.supervisor_pid:
            return False
        if frame.cgroup:
            self._join_cgroup(frame.cgroup)
        return True

    def _join_cgroup(self, directory: bytes) -> None:
        """Before hooks and jobs, so that all they start is born there. Without it we go on all the same."""
        try:
            cgroups.join(os.fsdecode(directory))
        except OSError as error:
            self._cgroup_error = error.strerror or str(error)

    def _start(self) -> None:
        self._set_title("starting")
        LOG_HANDLER.child = self
        self._metrics.begin()
        for hook in self._app.child_start_hooks:
            self._call_hook(hook)
        self._baseline.take(hooks_have_run=bool(self._app.child_start_hooks))

    def _call_hook(self, hook: Callable[[], Any]) -> None:
        result = self._context.run(hook)
        if inspect.iscoroutine(result):
            self._async_loop().run(result, self._context)

    def _set_title(self, what: str) -> None:
        kernel.set_title(f"spooled-supervisor: child {self._slot} {what}")

    # --- frames --------------------------------------------------------------------------------------------------

    def send(self, message: frames.FromChild) -> None:
        """Write a frame, whole. Safe from any thread, and from a signal handler that interrupts a write of ours."""
        data = frames.encode_frame(message)
        with self._lock:
            if self._sending:  # this thread was interrupted inside the loop below; that loop will write it
                self._unsent.append(data)
                return
            self._unsent.append(data)
            while self._unsent:
                self._sending = True
                try:
                    # Nothing, if an interruption just before the line above has written it all.
                    self._write_all(self._unsent.pop(0) if self._unsent else b"")
                finally:  # also when a signal handler of the job's raises: half a frame is noticed, silence is not
                    self._sending = False  # before the list is looked at again: an interruption now writes by itself

    def _write_all(self, data: bytes) -> None:
        try:
            while data:
                data = data[os.write(self._reports_fd, data) :]
        except OSError:  # EPIPE: the supervisor is gone, or has given us up
            os._exit(EXIT_SUPERVISOR_GONE)

    def _receive_one(self) -> frames.ToChild | None:
        """The next frame, waiting for it; None at the end of the pipe."""
        while not self._inbox:
            if not self._read_pipe():
                return None
        return self._inbox.pop(0)

    def _read_pipe(self) -> bool:
        data = os.read(self._jobs_fd, READ_BYTES)
        self._inbox.extend(self._decoder.feed(data))
        return bool(data)

    def _next_job(self) -> frames.RunJob | None:
        """Sleep until there is a job; None when it is time to leave. Aborts of runs that are over are dropped."""
        while True:
            while self._inbox:
                frame = self._inbox.pop(0)
                if isinstance(frame, frames.RunJob):
                    return frame
                if isinstance(frame, frames.Leave):
                    self._leaving = True
            if self._leaving:
                return None
            ready = dict(self._poll.poll(NEXT_JOB_MS))
            if not ready:  # else the title would change twice between two jobs, and only cost them time
                self._set_title("idle")
                ready = dict(self._poll.poll(self._metrics.wait_ms))
            if not ready:
                self._metrics.report_if_due()
            if self._jobs_fd in ready and not self._read_pipe():
                return None  # the supervisor closed the pipe

    # --- signals -------------------------------------------------------------------------------------------------

    def _on_terminate(self, _number: int, _frame: FrameType | None) -> None:
        self._leaving = True
        os.eventfd_write(self._wake_fd, 1)

    def _on_abort_signal(self, _number: int, frame: FrameType | None) -> None:
        if not self._run:
            self._abort_waits = True
            return
        self._take_aborts()
        if self._signal.aborted and self._on_abort == "raise":
            self._interrupt(frame)

    def _take_aborts(self) -> None:
        """Read what the pipe has and set the signal if it tells this run to stop. The job pipe is never empty of
        meaning while a job runs: only Abort and Leave can follow it, as at most one job is given at a time."""
        self._abort_waits = True
        if self._is_taking:  # interrupted by another signal: the loop below goes round once more
            return
        self._is_taking = True
        try:
            poll = _poll()
            poll.register(self._jobs_fd, select.POLLIN)
            while self._abort_waits:
                self._abort_waits = False
                if poll.poll(0):
                    self._read_pipe()
        finally:  # also when a signal handler of the job's raises: the next abort must be read
            self._is_taking = False
        for frame in self._inbox:
            if isinstance(frame, frames.Abort) and frame.run == self._run:
                self._signal.abort(frame.reason)

    def _interrupt(self, frame: FrameType | None) -> None:
        """Raise JobAborted in the handler, once, if it was the handler that was interrupted and not code of ours."""
        if self._raised or self.raise_later:
            return
        if self._task is not None:
            self._task.get_loop().call_soon_threadsafe(self._task.cancel)
        elif _is_inside_handler(frame):
            self._raised = True
            raise JobAborted(self._signal.reason or "")
        else:
            self.raise_later = True

    def _raise_if_due(self) -> None:
        """At the end of a call from the handler into us: what could not be raised in the middle of it."""
        if self.raise_later and threading.current_thread() is threading.main_thread():
            self.raise_now()

    def raise_now(self) -> NoReturn:
        """Raise what `raise_later` has put off."""
        self.raise_later, self._raised = False, True
        raise JobAborted(self._signal.reason or "")

    # --- one job -------------------------------------------------------------------------------------------------

    def _run_job(self, job: frames.RunJob) -> None:
        self._signal, self._raised, self.raise_later = AbortSignal(self._raise_if_due), False, False
        handler = self._app.handlers.get(job.queue_name)
        self._on_abort = handler.on_abort if handler else "signal"
        self._set_title(f"running {job.queue_name}")
        self._run = job.run
        if self._abort_waits or self._inbox:  # told to stop before we were listening
            self._abort_waits = False
            self._take_aborts()
            if self._signal.aborted and self._on_abort == "raise":
                self.raise_later = True
        self.send(frames.Started(job.run, timing.now()))
        cpu_before = time.process_time()
        answer = self._answer(job, handler)
        with self._lock:  # a thread that the handler has left behind may be reporting at this moment
            self._run = 0
        self._signal.close()
        _flush_streams()
        cpu_s = time.process_time() - cpu_before
        swept = self._baseline.clear_leftovers()
        leaving = self._baseline.restore() or self._unfit()
        self._register_dumps()
        self.send(msgspec.structs.replace(answer, cpu_s=cpu_s, leaving=leaving, left_behind=list(swept.names)))
        self._metrics.report_if_due()

    def _answer(self, job: frames.RunJob, handler: Handler | None) -> frames.Answer:
        """Run the handler; whatever it does short of ending the process becomes an answer."""
        if handler is None:
            return self._failure(job.run, f"this app has no handler for queue {job.queue_name!r}", retryable=True)
        try:
            payload = _decode(str(job.payload, "utf-8", "surrogatepass"))  # as json.loads, which would guess the coding
        except (ValueError, RecursionError) as error:
            return self._failure(job.run, f"the payload cannot be decoded: {error}", retryable=False)
        context = JobContext(
            job_id=job.job_id,
            queue_name=job.queue_name,
            payload=payload,
            retry_count=job.retry_count,
            max_retries=job.max_retries,
            timeout_s=job.timeout_s,
            signal=self._signal,
            reporter=_Reporter(self, job.run),
        )
        try:
            result = self._call(handler, context)
            return self._success(job.run, result)
        except BaseException as error:
            return self._failure_of(job.run, error)

    def _call(self, handler: Handler, context: JobContext) -> Any:
        if handler.is_async:
            return self._async_loop().run(self._run_async(handler, context), self._context.copy())
        return self._context.copy().run(call_handler, handler.function, context, self)

    async def _run_async(self, handler: Handler, context: JobContext) -> Any:
        """Run an async handler as this task, and cancel the tasks that it leaves behind."""
        import asyncio

        before = asyncio.all_tasks()
        task = asyncio.current_task()
        self._task = task
        try:
            if self._signal.aborted and self._on_abort == "raise":
                raise JobAborted(self._signal.reason or "")
            return await handler.function(context)
        except asyncio.CancelledError as error:
            if self._signal.aborted:
                raise JobAborted(self._signal.reason or "") from error
            raise
        finally:
            self._task = None
            left = asyncio.all_tasks() - before
            for other in left:
                other.cancel()
            await asyncio.gather(*left, return_exceptions=True)

    def _async_loop(self) -> ChildLoop:
        if self._loop is None:
            from spooled_supervisor.childloop import ChildLoop

            self._loop = ChildLoop()
        return self._loop

    def _success(self, run: int, value: Any) -> frames.Answer:
        try:
            result = encode_result(value)
        except NotJson as problem:
            if inspect.iscoroutine(value):
                value.close()  # it was never awaited, and nobody will
            return self._failure(run, f"the result is not JSON: {problem}", retryable=True)
        if len(result) > MAX_RESULT_BYTES:
            text = f"the result is too large: {len(result)} bytes, {MAX_RESULT_BYTES} are allowed"
            return self._failure(run, text, retryable=True)
        return frames.Answer(run, result=result)

    def _failure_of(self, run: int, error: BaseException) -> frames.Answer:
        if isinstance(error, JobAborted):
            # A handler may raise it by itself, with anything for a reason.
            reason = self._signal.reason or clip_text(safe_text(getattr(error, "reason", "")))
            text = "aborted by worker shutdown" if reason == "shutdown" else clip_error(f"aborted: {reason}")
            return frames.Answer(run, error=text, aborted=reason[:32])
        try:
            retryable = getattr(error, "retryable", True) is not False
        except BaseException:  # a property that raises
            retryable = True
        return self._failure(run, describe_error(error), retryable=retryable)

    def _failure(self, run: int, text: str, *, retryable: bool) -> frames.Answer:
        return frames.Answer(run, error=clip_error(text), retryable=retryable)

    def _unfit(self) -> str | None:
        """Why this child must not run another job."""
        if self._loop is not None and (why := self._loop.unfit()) is not None:
            return why
        if self._raised:
            return "aborted"  # JobAborted was raised somewhere inside: locks may be held for ever
        return "terminated" if self._leaving else None

    # --- what handlers say -----------------------------------------------------------------------------------------

    def report_progress(self, run: int, percent: float, message: str | None) -> None:
        """Of a run that is over, by a thread that it has left behind, nothing is told; nor by a copy of the process."""
        if self._is_copy:
            return
        frame = frames.Progress(run, percent, None if message is None else clip_text(message))
        with self._lock:
            if run == self._run:
                self.send(frame)
        if threading.current_thread() is threading.main_thread():
            self._metrics.report_if_due()
        self._raise_if_due()

    def report_log(self, severity: str, message: str, meta: str | None, source: str) -> None:
        """One line; beyond the rate it is only counted, so that a chatty handler cannot keep the supervisor busy."""
        if self._is_copy:
            print(f"{severity}: {message}", file=sys.stderr)  # noqa: T201 # the job's output, which is logged, too
            return
        if self._may_log():
            self.send(frames.Log(self._run, severity, clip_text(message), meta, source))
        self._raise_if_due()

    def _may_log(self) -> bool:
        rate = self._log_rate = self._log_rate or LineRate()
        if not rate.allows():
            return False
        if dropped := rate.take_dropped():
            self.send(frames.LogsDropped(self._run, dropped))
        return True


class _Reporter:
    """`app.Reporter` of a running job."""

    __slots__ = ("_child", "_run")

    def __init__(self, child: Child, run: int) -> None:
        self._child = child
        self._run = run

    def progress(self, percent: float, message: str | None) -> None:
        self._child.report_progress(self._run, percent, message)

    def log(self, level: str, message: str, meta: dict[str, Any]) -> None:
        text = clip_text(_dumps(meta, default=safe_text, skipkeys=True)) if meta else None
        self._child.report_log(level, message, text, "log")


class _LogHandler(logging.Handler):
    """Standard logging to the supervisor. It takes no part in job outcomes: what fails here is dropped.

    Made and installed before the fork: a child of its own would cost every child a tenth of a megabyte.
    """

    child: Child | None = None

    def emit(self, record: logging.LogRecord) -> None:
        try:
            message = self.format(record)
        except Exception:
            self.handleError(record)
            return
        severity = _SEVERITIES.get(record.levelno // 10, "error")
        if self.child is None:  # still in the fork server: the app logs while it is imported
            print(f"{severity}: {message}", file=sys.stderr)  # noqa: T201 # goes to the supervisor's log
        else:
            self.child.report_log(severity, message, None, "logging")


LOG_HANDLER = _LogHandler()


def install_logging(log_level: str) -> None:
    """Standard logging goes to the supervisor, unless the app has set logging up itself (then it is printed)."""
    root = logging.getLogger()
    if not root.handlers:
        root.addHandler(LOG_HANDLER)
        if root.level == logging.WARNING:  # the default: nobody has chosen a level
            root.setLevel(logging.getLevelNamesMapping().get(log_level.upper(), logging.INFO))


_SEVERITIES = {0: "debug", 1: "debug", 2: "info", 3: "warn", 4: "error"}


def call_handler(function: Callable[[JobContext], Any], context: JobContext, child: Child) -> Any:
    """The one frame between our code and the handler's; `_is_inside_handler` looks for it on the stack.

    No gap: an abort before this frame exists has left the flag that is looked at here, without a call, and one that
    comes later finds this frame and raises from it.
    """
    if child.raise_later:
        child.raise_now()
    return function(context)


def _is_inside_handler(frame: FrameType | None) -> bool:
    """Whether `frame` belongs to the handler's own call: below it on the stack only the handler's and library code
    until `call_handler`, and nothing of this package (a half-written frame would be the end of the pipe)."""
    while frame is not None:
        code = frame.f_code
        if code is call_handler.__code__:
            return True
        if code.co_filename.startswith(PACKAGE_DIR):
            return False
        frame = frame.f_back
    return False


def install_quiet_signals() -> None:
    """What a child and its fork server have in common: caught and nothing done, or as the kernel has it."""
    signal.set_wakeup_fd(-1)
    for number in QUIET_SIGNALS:
        kernel.set_handler(number, do_nothing)
    for number in DEFAULT_SIGNALS:
        kernel.set_handler(number, kernel.SIG_DFL)


def do_nothing(_number: int, _frame: FrameType | None) -> None:
    """A signal handler."""


def _flush_streams() -> None:
    """Whatever the handler has done to them: None, closed, replaced, full."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:
            continue


def _reseed() -> None:
    """Generators whose state a fork copies. `random` reseeds itself then; NumPy's and Torch's global ones do not."""
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(int.from_bytes(os.urandom(4), "little"))
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(int.from_bytes(os.urandom(7), "little"))

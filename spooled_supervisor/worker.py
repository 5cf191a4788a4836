"""`SpooledWorker`: the worker inside a program of yours. A thin face on the supervisor; concurrency is child processes.

    worker = SpooledWorker(SpooledClient(), queue_name="emails", concurrency=4)

    @worker.process
    def send(ctx):
        ...

    worker.start()          # blocks; TERM, INT or worker.stop() end it

Where handlers come from: if the program has exactly one thread and no running event loop when the worker starts, it is
forked twice (`copies.py`), and anything that can be called can be a handler. Else a fresh interpreter imports the
handler by its name; one that has none it could be imported by is refused. Never is a program with threads forked.

The program stays itself: signals, title, memory, its own children and their statuses are left alone or put back. Only
processes that we forked, that are in their sessions, or that began with our marker in their environment are killed or
reaped. Events reach the log as records of the logger `spooled_supervisor`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, overload

import msgspec

from spooled_supervisor import config as configuration
from spooled_supervisor import events as ev
from spooled_supervisor import forkserver, hosting, timing
from spooled_supervisor import workerevents as we
from spooled_supervisor.app import App, OnAbort
from spooled_supervisor.checking import preload
from spooled_supervisor.client import SpooledClient
from spooled_supervisor.config import Config, cpus_available
from spooled_supervisor.copies import Copies
from spooled_supervisor.errors import ConfigError, SupervisorError
from spooled_supervisor.events import Events
from spooled_supervisor.family import Kin
from spooled_supervisor.forkclient import NoCopyLeft, Spawn, child_environment, spawn_interpreter
from spooled_supervisor.frames import Preload
from spooled_supervisor.lifecycle import Phase
from spooled_supervisor.statedir import StateDir
from spooled_supervisor.supervisor import Guest, Supervisor
from spooled_supervisor.telemetry.logs import StandardLog
from spooled_supervisor.telemetry.systemd import Notifier
from spooled_supervisor.telling import Callback, Callbacks, Teller

F = TypeVar("F", bound=Callable[..., Any])
HELPERS = 4
"""Threads of a loop: for the disk and name servers, which are slow one at a time."""
THREADS_END_S = 1.0
"""How long the loop's helper threads may take to end after it; one that asks a name server is left to itself."""


class WorkerError(SupervisorError):
    """The worker cannot be used like that; the message says how else."""


class SpooledWorker:
    """Takes jobs of one queue and runs them in child processes.

    `state`: idle, starting, running, stopping, stopped, error. A worker that has stopped can be started again.
    Callbacks of `on` run in the thread that the worker runs in, between its other duties: they must be quick. All
    methods may be called from any thread, and from callbacks.
    """

    def __init__(
        self,
        client: SpooledClient,
        queue_name: str,
        *,
        concurrency: int = 5,
        poll_interval: float = 1.0,
        lease_duration: int = 30,
        heartbeat_fraction: float = 0.5,
        auto_start: bool = False,
        shutdown_timeout: float = 30.0,
        worker_id: str | None = None,
        hostname: str | None = None,
        worker_type: str = "python",
        version: str | None = None,
        metadata: Mapping[str, str] | None = None,
        job_timeout: float | None = None,
        abort_grace: float = 5.0,
        boot_timeout: float = 60.0,
        prefetch: int = 0,
        max_jobs_per_child: int | None = None,
        child_nice: int = 5,
        listen_to_events: bool = True,
        state_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        """Durations are seconds. Raises ConfigError with everything that is wrong.

        `auto_start`: a thread of its own runs the worker as soon as `process` has given it a handler.
        `state_dir`: where unsent outcomes survive the program; None: a private directory that goes with the worker.
        `worker_id` None: made anew at every start, or kept in `state_dir`.
        """
        said: dict[str, Any] = {
            "procs": concurrency,
            "poll_interval": poll_interval,
            "lease_duration": lease_duration,
            "heartbeat_fraction": heartbeat_fraction,
            "shutdown_timeout": shutdown_timeout,
            "worker_id": worker_id,
            "hostname": hostname,
            "worker_type": worker_type,
            "worker_version": version,
            "metadata": None if metadata is None else [_pair(key, value) for key, value in metadata.items()],
            "job_timeout": job_timeout,
            "abort_grace": abort_grace,
            "boot_timeout": boot_timeout,
            "prefetch": prefetch,
            "max_jobs_per_child": max_jobs_per_child,
            "child_nice": child_nice,
            "no_events": not listen_to_events,
            "ca_file": None if client.ca_file is None else str(client.ca_file),
            "state_dir": None if state_dir is None else os.fspath(state_dir),
        }
        self._values = {key: value for key, value in said.items() if value is not None}
        self._values |= {"app": "handlers", "queues": [queue_name], "api_url": client.base_url, "http_listen": "off"}
        self._client = client
        if not forkserver.is_fork_server:  # which imports it, and has no key
            self._check()
        self.queue_name = queue_name
        self._auto_start = auto_start
        self._app = App()
        self._callbacks = Callbacks()
        self._lock = threading.RLock()  # a signal handler of the program's may call `stop` wherever we are
        self._state = "idle"
        self._ended = threading.Event()
        self._ended.set()
        self._stop_asked = False  # before or while it runs; the next run begins with a clean slate
        self._life: _Life | None = None
        self._thread: threading.Thread | None = None  # of `auto_start`
        self._worker_id: str | None = None
        self.error: BaseException | None = None  # what has ended the last run

    def __repr__(self) -> str:
        return f"<SpooledWorker of {self.queue_name!r}, {self._state}>"

    # --- handlers and callbacks --------------------------------------------------------------------------------------

    @overload
    def process(self, handler: F, *, on_abort: OnAbort = "signal") -> F: ...

    @overload
    def process(self, *, on_abort: OnAbort = "signal") -> Callable[[F], F]: ...

    def process(self, handler: Any = None, *, on_abort: OnAbort = "signal") -> Any:
        """Run jobs with this handler; also a decorator, with or without parentheses. `on_abort` as in `App.handler`.

        Raises ValueError if there is one already. With `auto_start` the worker starts here.
        """
        register = self._app.handler(self.queue_name, on_abort=on_abort)

        def accept(function: F) -> F:
            register(function)
            # In a fork server this module is being imported for its handler.
            if self._auto_start and not forkserver.is_fork_server:
                _start_in_background(self)
            return function

        return accept if handler is None else accept(handler)

    def on(self, event: str, callback: Callback) -> Callable[[], None]:
        """Call back with an event of `workerevents.py` from now on; returns the function that ends it.

        Callbacks run in the worker's thread. What one raises is logged. Raises ValueError for an unknown name.
        """
        self._callbacks.add(event, callback)
        has_ended = False

        def unsubscribe() -> None:
            nonlocal has_ended
            if not has_ended:
                has_ended = True
                self._callbacks.remove(event, callback)

        return unsubscribe

    def off(self, event: str, callback: Callback) -> None:
        """End what `on` has begun; nothing if it has not."""
        self._callbacks.remove(event, callback)

    # --- its life ----------------------------------------------------------------------------------------------------

    @property
    def state(self) -> str:
        return self._state

    @property
    def worker_id(self) -> str | None:
        """What the service calls this worker; None before the first start."""
        return self._worker_id

    @property
    def active_job_count(self) -> int:
        """Jobs that children run at this moment."""
        life = self._life
        return 0 if life is None else len(life.teller.running)

    def start(self) -> None:
        """Work until `stop` is called, or a signal comes (TERM and INT, if this is the main thread). Blocks.

        A first signal stops as `stop` does; a second one kills the jobs; a third one has its default effect. The
        handlers of the program are in place again when this returns. Raises what has ended the worker: ConfigError,
        CredentialsRefused, WorkerError (this handler cannot be served like this; both copies of the program are dead).
        """
        run_workers(self)

    def stop(self) -> None:
        """Ask it to stop, and return at once; `join` waits. It takes nothing more, and running jobs are told.

        May be called at any time and any number of times. Before `start` it makes the next `start` return at once.
        """
        with self._lock:
            self._stop_asked = self._state in ("idle", "starting", "running", "stopping")
            life = self._life
        if life is not None:
            life.ask_to_stop("stop was called")

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait until it runs no more (not from a callback); whether it came true in time."""
        give_up_at = None if timeout_s is None else timing.now() + timeout_s
        if not self._ended.wait(timeout_s):
            return False
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(None if give_up_at is None else max(0.0, give_up_at - timing.now()))
            return not thread.is_alive()
        return True

    # --- for the functions below -------------------------------------------------------------------------------------

    def _check(self) -> None:
        """Raises ConfigError with everything that is wrong."""
        problems = []
        if self._values["procs"] == "auto":  # for the daemon, which has the machine for itself
            problems.append("procs: 'auto' must be a whole number from 1 to 1000")
        try:
            self._configuration(Path(os.devnull))
        except ConfigError as error:
            problems += error.problems
        if problems:
            raise ConfigError(problems)

    def _configuration(self, state_dir: Path) -> Config:
        values = {"state_dir": str(state_dir), **self._values}
        return configuration.of_values(values, api_key=self._client.api_key.reveal())

    def _begin(self, is_alone: bool) -> _Life | None:
        """Get ready; fork if this program `is_alone` in its process. None: it was stopped before it was started."""
        if forkserver.is_fork_server:
            raise WorkerError("no worker can be started in a child of a worker; ask for __name__ == '__main__' first")
        with self._lock:
            if not self._ended.is_set():
                raise WorkerError(f"the worker of queue {self.queue_name!r} is {self._state} already")
            if self._stop_asked:
                self._stop_asked, self._state = False, "stopped"
                return None
            self._ended.clear()
            self._state, self.error = "starting", None
        try:
            life = _Life(self, is_alone=is_alone)
        except BaseException as error:
            self._end(error)
            raise
        with self._lock:
            self._life = life
        return life

    def _end(self, error: BaseException | None, reason: str = "", unsettled: int = 0) -> None:
        """The run is over, by this error if there is one."""
        with self._lock:
            self._life, self.error, self._stop_asked = None, error, False
            self._state = "stopped" if error is None else "error"
        try:
            if error is not None:
                self._callbacks.tell("error", we.WorkerErrored(self._worker_id, error))
            else:
                self._callbacks.tell("stopped", we.WorkerStopped(self._worker_id or "", reason, unsettled))
        finally:
            self._ended.set()


def _pair(key: Any, value: Any) -> Any:
    """As in a file of the daemon: what `key=value` would not say stays what it is, and is rejected."""
    is_sayable = isinstance(key, str) and isinstance(value, str) and "=" not in key
    return f"{key}={value}" if is_sayable else {key: value}


class _Life:
    """One run of a worker: what exists from its start to its end. `run` and what it calls is for the loop's thread."""

    def __init__(self, worker: SpooledWorker, *, is_alone: bool) -> None:
        """Raises WorkerError if its handler cannot be served, OSError if the machine has no room."""
        self._worker = worker
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wanted, self._why = Phase.BOOTING, ""
        self._reason = ""
        self._unsettled = 0
        self._spent: NoCopyLeft | None = None
        self._supervisor: Supervisor | None = None
        self.broken_by: BaseException | None = None  # it comes from no life; all of them are cancelled then
        self.events = Events()
        self.teller = Teller(self.events, worker._callbacks)
        handler = _handler_of(worker)
        name = None if is_alone else importable_name(handler)
        self._temporary = None if "state_dir" in worker._values else tempfile.mkdtemp(prefix="spooled-worker-")
        try:
            self._config = worker._configuration(Path(self._temporary or "."))
            self._kin = Kin(str(self._config.state_dir))
            self._copies = self._fork() if name is None else None
        except BaseException:
            self.close()
            raise
        self._name = name or repr(handler)

    def _fork(self) -> Copies:
        worker = self._worker
        worker._client.close()  # its connections are not for the copies
        share = cpus_available() // self._config.pool.procs
        return Copies(worker._app, child_environment(os.environ, marker=str(self._config.state_dir), threads=share))

    def close(self) -> None:
        """After `run`, or instead of it."""
        copies = getattr(self, "_copies", None)
        if copies is not None:
            copies.close()
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)

    def fail(self, error: BaseException) -> None:
        """It ends with this error, which is logged and told; nothing if it has ended."""
        if self._worker._life is not self:
            return
        self.close()
        self._log_failure(error)
        self._worker._end(error)

    # --- from any thread ---------------------------------------------------------------------------------------------

    def ask_to_stop(self, why: str, to: Phase = Phase.DRAINING) -> None:
        """Stop as far as this phase; not heard any more after the end."""
        loop = self._loop
        if loop is None:
            self._climb(to, why)
            return
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(self._climb, to, why)

    def _climb(self, to: Phase, why: str) -> None:
        if to > self._wanted:
            self._wanted, self._why = to, why
        if self._supervisor is not None:
            self._supervisor.climb(self._wanted, self._why)

    # --- the run -----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """From the start to the end; afterwards the worker is stopped or in error. Raises what has ended it."""
        worker = self._worker
        self._loop = asyncio.get_running_loop()
        try:
            await self._serve()
            if self.broken_by is not None:
                raise self.broken_by
        except BaseException as error:
            self.fail(self.broken_by or error)
            raise
        self.close()
        worker._end(self._spent, self._reason or self._why, self._unsettled)
        if self._spent is not None:
            raise self._spent

    async def _serve(self) -> None:
        config = self._config
        with StateDir(config.state_dir) as state:
            log = StandardLog(self.events, [config.api.key.reveal()])
            for warning in configuration.warnings(config):
                log.write(logging.WARNING, "config_warning", warning=warning)
            self._listen()
            guest = Guest(
                kin=self._kin,
                preload=self._preload,
                spawn=self._spawn,
                on_spent=self._on_spent,
                on_over=self.teller.on_over,
            )
            supervisor = Supervisor(config, state, events=self.events, log=log, notifier=Notifier({}), guest=guest)
            self._supervisor = supervisor
            self._worker._worker_id = supervisor.worker_id
            if self._wanted > Phase.BOOTING or self._worker._stop_asked:
                self._climb(max(self._wanted, Phase.DRAINING), self._why or "stop was called")
            await supervisor.run()

    def _preload(self, generation: int) -> Preload:
        settings = preload(self._config, generation)
        handler = self._worker._app.handlers[self._worker.queue_name]
        return msgspec.structs.replace(
            settings, app=self._name, on_abort=handler.on_abort, search_path=_search_path(), process_name=self._kin.name
        )

    @property
    def _spawn(self) -> Spawn:
        return spawn_interpreter if self._copies is None else self._copies.spawn

    def _on_spent(self) -> None:
        self._spent = NoCopyLeft("the fork server has died, and the one that stood by for it too")
        self._climb(Phase.DRAINING, str(self._spent))

    def _listen(self) -> None:
        subscribe, kin = self.events.subscribe, self._kin
        subscribe(lambda event: kin.born(event.pid), ev.ChildStarted, ev.ForkServerStarted)
        subscribe(lambda event: kin.died(event.pid), ev.ChildExited, ev.ForkServerExited)
        subscribe(self._on_phase, ev.PhaseChanged)
        subscribe(self._on_started, ev.SupervisorStarted)
        subscribe(self._on_stopped, ev.SupervisorStopped)

    def _on_phase(self, event: ev.PhaseChanged) -> None:
        if event.phase == "running":
            self._worker._state = "running"
        elif event.phase in ("draining", "stopping"):
            self._worker._state = "stopping"
            self._reason = self._reason or event.reason

    def _on_started(self, event: ev.SupervisorStarted) -> None:
        self._worker._callbacks.tell("started", we.WorkerStarted(event.worker_id, self._worker.queue_name))

    def _on_stopped(self, event: ev.SupervisorStopped) -> None:
        self._unsettled = event.unsettled

    def _log_failure(self, error: BaseException) -> None:
        is_ours = isinstance(error, SupervisorError)
        logging.getLogger("spooled_supervisor").error(
            "the worker of queue %r has failed: %s", self._worker.queue_name, error, exc_info=None if is_ours else error
        )


def run_workers(*workers: SpooledWorker) -> None:
    """Start several workers and work until all have stopped. Blocks; otherwise as `SpooledWorker.start`.

    They share a thread, and the signals if that is the main one; each has children of its own. If one of them fails,
    the others are stopped in peace, and then its error is raised.
    """
    with _outlasting_the_main_thread() if hosting.is_waited_for() else contextlib.nullcontext() as helpers:
        _serve(_prepare(workers), helpers)


def _start_in_background(worker: SpooledWorker) -> None:
    """Fork in this thread, if that may be; then serve in another one, which the program waits for at its end."""
    lives = _prepare([worker])
    waited_for = contextlib.ExitStack()

    def serve() -> None:
        with waited_for, contextlib.suppress(Exception):  # it is logged, told by `error`, and kept in `worker.error`
            _serve(lives, helpers)

    worker._thread = threading.Thread(target=serve, name=f"spooled worker {worker.queue_name}", daemon=False)
    try:
        helpers = waited_for.enter_context(_outlasting_the_main_thread())  # which may end before the thread has begun
        worker._thread.start()
    except BaseException as error:
        waited_for.close()
        worker._thread = None
        for life in lives:
            life.fail(error)
        raise


def _prepare(workers: Sequence[SpooledWorker]) -> list[_Life]:
    """Begin the lives of all: the forks come first, while there is nothing else."""
    is_alone = hosting.has_one_thread() and asyncio._get_running_loop() is None
    lives: list[_Life] = []
    try:
        for worker in workers:
            life = worker._begin(is_alone)
            if life is not None:
                lives.append(life)
    except BaseException:
        for life in lives:
            life.close()
            life._worker._end(None, "another worker of the program has failed")
        raise
    return lives


def _serve(lives: Sequence[_Life], helpers: _Helpers | None = None) -> None:
    """Run them in a loop of this thread. Whatever is raised has ended all of them."""
    if not lives:
        return
    try:
        if asyncio._get_running_loop() is not None:
            raise WorkerError(
                "start() blocks, and here runs an event loop: say `await asyncio.to_thread(worker.start)`"
            )
        _turn(lives, helpers or _Helpers())
    except BaseException as error:
        for life in lives:
            life.fail(error)
        raise


def _turn(lives: Sequence[_Life], helpers: _Helpers) -> None:
    """Not all that ends it comes from a life: a signal handler of the program's may raise at any moment."""
    loop = timing.new_event_loop()
    loop.set_default_executor(helpers)
    main = loop.create_task(_run_all(lives))

    def break_off(error: BaseException) -> None:
        for life in lives:
            life.broken_by = error
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(main.cancel)

    with hosting.handing_over(break_off) as raised:
        try:
            with hosting.subreaper(), hosting.waitable_children(), hosting.stop_signals(loop, _Signals(lives)):
                try:
                    loop.run_until_complete(main)
                except BaseException as error:
                    for life in lives:
                        life.broken_by = life.broken_by or error
                    hosting.unwind(loop, main)
                    if not raised:
                        raise
        finally:
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()
            helpers.end()
    if raised:
        raise raised[0]


@contextlib.contextmanager
def _outlasting_the_main_thread() -> Iterator[_Helpers]:
    """For another thread: the end of the program waits, and the helpers of the loop are all there from the beginning.

    Python 3.12 begins no thread any more when the main one has ended.
    """
    with hosting.exit_waits():
        helpers = _Helpers()
        meeting = threading.Barrier(HELPERS)
        try:
            for _ in range(HELPERS):
                helpers.submit(meeting.wait)  # nobody is idle before the last one has come, so each gets a thread
            yield helpers
        finally:
            meeting.abort()  # nobody waits there but in a program that has no room for so many
            helpers.end()


class _Helpers(concurrent.futures.ThreadPoolExecutor):
    """The threads of one loop."""

    def __init__(self) -> None:
        self._all: list[threading.Thread] = []
        note = self._all.append
        super().__init__(HELPERS, "spooled-worker", initializer=lambda: note(threading.current_thread()))

    def end(self) -> None:
        """See them end, so that a program that had one thread has one again, and can be forked by the next start."""
        self.shutdown(wait=False)
        give_up_at = timing.now() + THREADS_END_S
        for thread in self._all:
            thread.join(max(0.0, give_up_at - timing.now()))


async def _run_all(lives: Sequence[_Life]) -> None:
    tasks = [asyncio.ensure_future(life.run()) for life in lives]

    def look(task: asyncio.Future[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            for life in lives:
                life.ask_to_stop("another worker of the program has failed")

    for task in tasks:
        task.add_done_callback(look)
    results = await asyncio.gather(*tasks, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result


class _Signals:
    """What TERM and INT do: drain, kill, and then their default."""

    def __init__(self, lives: Sequence[_Life]) -> None:
        self._lives = lives
        self._count = 0

    def __call__(self, number: signal.Signals) -> None:
        self._count += 1
        if self._count > 2:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            os._exit(128 + number)  # still here: the kernel spares PID 1 of a container the default action
        for life in self._lives:
            life.events.emit(ev.CommandReceived("signal", number.name, True))
            life.ask_to_stop(number.name, Phase.STOPPING if self._count > 1 else Phase.DRAINING)


# --- handlers by name -------------------------------------------------------------------------------------------------


def importable_name(handler: Callable[..., Any]) -> str:
    """`module:qualname`, by which a fresh interpreter finds the handler. Raises WorkerError, with both ways out."""
    module, name = getattr(handler, "__module__", None), getattr(handler, "__qualname__", None)
    why = _why_not_importable(handler, module, name)
    if not why:
        return f"{module}:{name}"
    threads = hosting.thread_count()
    busy = f"it has {threads} threads" if threads > 1 else "it runs an event loop"
    raise WorkerError(
        f"the handler {handler!r} cannot be served: this program cannot be forked, as {busy}, and the handler cannot "
        f"be imported by a fresh interpreter, as {why}. Either start the worker before anything else starts threads or "
        "an event loop, or put the handler at the top level of a module that can be imported"
    )


def _why_not_importable(handler: Callable[..., Any], module: str | None, name: str | None) -> str:
    if not module or not name:
        return "it is an object without a name"
    if module == "__main__":
        return "it is defined in the program's main file"
    if "<" in name:
        return "it is defined inside a function" if "<locals>" in name else "it is a lambda"
    home = sys.modules.get(module)
    found: Any = home
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is None and getattr(getattr(home, "__spec__", None), "_initializing", False):
        return ""  # it is being defined at this moment, by a decorator; the fork server will see
    return "" if found is handler else f"{module}.{name} is something else"


def _handler_of(worker: SpooledWorker) -> Callable[..., Any]:
    handler = worker._app.handlers.get(worker.queue_name)
    if handler is None:
        raise WorkerError(f"the worker of queue {worker.queue_name!r} has no handler: give it one with process()")
    return handler.function


def _search_path() -> list[str]:
    return [os.path.abspath(entry) for entry in sys.path]

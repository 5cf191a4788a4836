"""Wires the parts together and climbs the shutdown ladder.

One TaskGroup holds all that runs: a bug in any part ends the process (the contexts close first; children die with the
supervisor anyway) and the service manager starts it again. Draining is a phase that the parts look at; cancellation is
what happens at the very end. Signal handlers only say how far to climb; `run` walks. A phase never goes back:

    RUNNING    TERM or INT: drain. QUIT: stop.
    DRAINING   claims end; the service hears `draining`, heartbeats and renewals go on; jobs are asked to stop and have
               `shutdown_timeout` for it. A second signal: stop.
    STOPPING   families are killed and seen dead, what is decided is settled, within STOP_LIMIT_S. A third signal: its
               default action; children die with us (PR_SET_PDEATHSIG).
    STOPPED    the worker is deregistered, unless something is held or unsent: older services would hand out its jobs
               at once, so the registration is then left to the next start.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import os
import signal
from collections.abc import Callable, Coroutine, Iterator, Mapping
from typing import Any

from spooled_supervisor import __version__, descriptors, family, frames, kernel, processes
from spooled_supervisor import events as ev
from spooled_supervisor.api.events import JobEvents
from spooled_supervisor.api.gate import RateGate
from spooled_supervisor.api.rest import RestApi
from spooled_supervisor.api.transports import BothApi, make_api
from spooled_supervisor.checking import preload
from spooled_supervisor.childcgroups import ChildCgroups
from spooled_supervisor.childlink import Run
from spooled_supervisor.claiming import Claimer
from spooled_supervisor.commands import Commands
from spooled_supervisor.config import Config, QueueConfig, cpus_available
from spooled_supervisor.control import Command, ControlSocket, Refused
from spooled_supervisor.errors import EX_FAILURE, EX_OK, ConfigError, CredentialsRefused
from spooled_supervisor.events import Events
from spooled_supervisor.forkclient import ForkServerKeeper, Spawn, child_environment, spawn_interpreter
from spooled_supervisor.holding import Holder
from spooled_supervisor.job import Job, Outcome, Released
from spooled_supervisor.keys import ApiKey
from spooled_supervisor.leases import LeaseBook
from spooled_supervisor.lifecycle import Phase
from spooled_supervisor.observer import Observer, Standing, boot_snapshot
from spooled_supervisor.outbox import Outbox
from spooled_supervisor.poison import PoisonList
from spooled_supervisor.pool import Pool
from spooled_supervisor.pressure import Pressure
from spooled_supervisor.progress import ProgressSender
from spooled_supervisor.registration import Registration
from spooled_supervisor.settling import Settler
from spooled_supervisor.statedir import StateDir
from spooled_supervisor.streaming import Streamer
from spooled_supervisor.telemetry.endpoints import Endpoints
from spooled_supervisor.telemetry.history import History
from spooled_supervisor.telemetry.logs import EventLog, StandardLog
from spooled_supervisor.telemetry.metrics import Metrics
from spooled_supervisor.telemetry.snapshot import Snapshot
from spooled_supervisor.telemetry.systemd import Notifier
from spooled_supervisor.timing import Alarm, now
from spooled_supervisor.troubles import Troubles

STOP_LIMIT_S = 5.0
"""From the kill to the exit: what cannot be settled by then is left to its lease."""
FLUSH_LIMIT_S = 5.0
"""After the last job has ended in peace: how long its report may take, and before that a claim in flight."""
LEAVE_LIMIT_S = 2.0
"""For idle children's stop hooks at the end of a drain."""
DEREGISTER_TIMEOUT_S = 2.0
TELL_INTERVAL_S = 2.0
"""How often systemd is asked for more time and told the status; it is granted three of these at a time."""
STOP_SIGNALS = {
    signal.SIGTERM: Phase.DRAINING,
    signal.SIGINT: Phase.DRAINING,
    signal.SIGQUIT: Phase.STOPPING,
}
COMMAND_SIGNALS: Mapping[signal.Signals, tuple[str, Mapping[str, Any]]] = {
    signal.SIGHUP: ("reload", {}),
    signal.SIGTTIN: ("scale", {"step": 1}),
    signal.SIGTTOU: ("scale", {"step": -1}),
    signal.SIGUSR1: ("stacks", {}),
}
UNUSED_SIGNALS = (signal.SIGUSR2,)
MAX_UNKNOWN = 100


@dataclasses.dataclass(frozen=True, slots=True)
class Guest:
    """What is different in a program that is not ours, but runs us: children, signals, title and memory are its own.

    It tells us to stop (`Supervisor.climb`); there is no control socket.
    """

    kin: family.Kin
    preload: Callable[[int], frames.Preload]
    spawn: Spawn
    on_spent: Callable[[], None]
    on_over: Callable[[Run, Outcome | None], None]


class Supervisor:
    """One run of the daemon, or of a guest in another program: `await run()` gives the exit code."""

    def __init__(
        self,
        config: Config,
        state: StateDir,
        *,
        events: Events,
        log: EventLog | StandardLog,
        notifier: Notifier,
        guest: Guest | None = None,
    ) -> None:
        self._guest = guest
        self._config = config
        self._state = state
        self._events = events
        self._log = log
        self._notifier = notifier
        self._standing = Standing(
            config.worker.worker_id or state.worker_id(config.worker.hostname),
            hostname=config.worker.hostname,
            api_url=config.api.url,
        )
        self._history = History(events, mask=log.mask)
        self._troubles = Troubles(events)
        self._gate = RateGate()
        self._pressure = Pressure(
            max_load=config.claims.max_load, max_memory_pressure=config.claims.max_memory_pressure
        )
        self._leases = LeaseBook(fraction=config.claims.heartbeat_fraction, abort_grace_s=config.pool.abort_grace_s)
        self._alarm = Alarm()  # `run` waits here: something has changed that the walk may be waiting for
        self._wanted = Phase.BOOTING  # how far the ladder is to be climbed
        self._why = ""
        self._signals = 0
        self._fatal: CredentialsRefused | None = None
        self._drain_ends_at = 0.0
        self._told_at = 0.0
        self._pinged_at = 0.0
        self._spawned: set[asyncio.Task[None]] = set()
        self._observer: Observer | None = None
        self._commands: Commands | None = None
        self._reload_trouble = ""
        self._unknown_commands: set[str] = set()
        self._was_told_no = False  # who asked whether it may claim, since the last tick

    # --- the walk ------------------------------------------------------------------------------------------------

    async def run(self) -> int:
        """Boot, work until told to stop, drain, stop; the exit code.

        Raises AppError (the app cannot be imported), ConfigError (too many children for the limit of open files, the
        listener cannot be bound), CredentialsRefused (the service does not know the key, and never has); an
        ExceptionGroup is a bug in one of the parts.
        """
        self._set_title()
        refusal: ConfigError | CredentialsRefused | None = None
        with self._signal_handling() if self._guest is None else contextlib.nullcontext():
            async with asyncio.TaskGroup() as self._tasks:
                try:
                    async with contextlib.AsyncExitStack() as stack:
                        return await self._walk(stack)
                except (ConfigError, CredentialsRefused) as error:
                    refusal = error  # raised below: the TaskGroup would wrap it, and it is for people, not a bug
                finally:
                    for task in tuple(self._spawned):
                        task.cancel()
        assert refusal is not None
        raise refusal

    async def _walk(self, stack: contextlib.AsyncExitStack) -> int:
        config = self._config
        if lack := descriptors.make_room(config.pool.procs):
            raise ConfigError(f"{'procs' if self._guest is None else 'concurrency'}: {lack}")
        metrics = Metrics(self._events, self.snapshot, log_lines_dropped=lambda: self._log.dropped)
        if config.http_listen is not None:
            host, port = config.http_listen
            endpoints = Endpoints(host, port, snapshot=self.snapshot, metrics=metrics, log=self._log)
            await stack.enter_async_context(endpoints)
        self._outbox = stack.enter_context(self._make_outbox())
        self._cgroups = ChildCgroups(self._events, memory_limit_bytes=config.pool.child_memory_limit_bytes)
        stack.callback(self._cgroups.close)
        if self._guest is None:  # a program that is not ours stays where it is
            self._cgroups.open()
        # All that is known of earlier lives is read before anything is written: a full disk ends both.
        self._leftovers, self._poison = self._outbox.leftovers(), PoisonList(self._outbox)
        self._kill_survivors()
        # In the end, whatever it was: what the app has started while it was imported is nobody's child or orphan.
        stack.callback(family.kill_marked, str(self._state.path))
        keeper = self._make_keeper()
        stack.push_async_callback(keeper.close)
        if not await self._is_booted(keeper):
            return EX_OK
        if self._guest is None:
            kernel.set_dumpable(False)  # children of the same user can read neither our memory nor the key in it
        self._queues = config.queues or tuple(QueueConfig(name) for name in keeper.queue_names)
        metrics.declare_queues(queue.name for queue in self._queues)
        self._wire(await stack.enter_async_context(self._make_api()), keeper, metrics)
        stack.push_async_callback(self._pool.close)
        if self._guest is None:
            control = ControlSocket(config.control_socket, self._wire_commands(keeper, metrics).table())
            await stack.enter_async_context(control)
        self._start()
        await self._work()
        return await self._stop()

    async def _is_booted(self, keeper: ForkServerKeeper) -> bool:
        """Whether the app is imported; False if we were told to stop meanwhile."""
        boot = asyncio.ensure_future(keeper.start())
        boot.add_done_callback(lambda _: self._alarm.ring())
        await asyncio.sleep(0)  # now it is spawned
        from spooled_supervisor.api import httpx_wire  # noqa: F401 # takes long, so it is loaded beside the app

        await self._until(lambda: boot.done() or self._wanted > Phase.RUNNING)
        if not boot.done():
            boot.cancel()
            await asyncio.gather(boot, return_exceptions=True)
            return False
        boot.result()
        return True

    def _make_outbox(self) -> Outbox:
        return Outbox(
            self._state.path,
            api_url=self._config.api.url,
            worker_id=self._standing.worker_id,
            on_reopened=lambda missed: self._holder.hold_again(missed),
        )

    def _kill_survivors(self) -> None:
        """Children of an earlier life die with it, but not what they had started; nobody of them may go on."""
        boot = processes.boot_id()
        killed = 0
        for pid, start_time in self._outbox.survivors():
            if processes.is_same_process(pid, start_time, boot):
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
                    killed += 1
        killed += sum(family.kill_cgroup(cgroup.path).killed for cgroup in self._cgroups.leftovers())
        killed += family.kill_marked(str(self._state.path)).killed
        self._outbox.forget_survivors()
        if killed:
            self._events.emit(ev.SurvivorsKilled(killed))

    def _make_keeper(self) -> ForkServerKeeper:
        config = self._config
        share = cpus_available() // config.pool.procs
        guest = self._guest
        return ForkServerKeeper(
            functools.partial(preload, config) if guest is None else guest.preload,
            child_environment(os.environ, marker=str(self._state.path), threads=share),
            boot_timeout_s=config.pool.boot_timeout_s,
            events=self._events,
            on_ready=self._on_fork_server_ready,
            spawn=spawn_interpreter if guest is None else guest.spawn,
            on_spent=(lambda: None) if guest is None else guest.on_spent,
        )

    def _make_api(self) -> RestApi | BothApi:
        config = self._config.api
        return make_api(config, ApiKey(config, self._log.keep_secret), self._standing.worker_id, self._events)

    def _make_job_events(self) -> JobEvents:
        config = self._config.api
        return JobEvents(
            config.url,
            ApiKey(config, self._log.keep_secret),
            ca_file=config.ca_file,
            troubles=self._troubles,
            on_job=self._claimer.hint,
            on_up=self._claimer.on_stream,
        )

    def _wire(self, api: RestApi | BothApi, keeper: ForkServerKeeper, metrics: Metrics) -> None:
        config, events, queues = self._config, self._events, self._queues

        def on_over(run: Run, outcome: Outcome | None) -> None:
            metrics.add_job_cpu(run.job.queue_name, run.cpu_s)
            if self._guest is not None:
                self._guest.on_over(run, outcome)
            self._holder.on_over(run, outcome)

        pool = self._pool = Pool(
            config.pool,
            keeper,
            events=events,
            caps={queue.name: queue.max_procs for queue in queues if queue.max_procs is not None},
            on_over=on_over,
            on_change=self._on_pool_change,
            spawn=self._spawn,
            on_metrics=metrics.children.take,
            kin=None if self._guest is None else self._guest.kin,
            cgroups=self._cgroups,
        )
        self._claimer = self._make_claimer(api)
        self._breakers = {name: queue.breaker for name, queue in self._claimer.queues.items()}
        self._holder = Holder(
            api,
            pool,
            self._leases,
            Settler(
                self._leases,
                events=events,
                troubles=self._troubles,
                gate=self._gate,
                on_refused=self._on_refused,
            ),
            events=events,
            gate=self._gate,
            progress=ProgressSender(api, pool, self._gate, self._spawn),
            outbox=self._outbox,
            poison=self._poison,
            breakers=self._breakers,
            abort_grace_s=config.pool.abort_grace_s,
            limit_of=self._limit_of,
            is_draining=lambda: self._standing.phase > Phase.RUNNING,
            on_refused=self._on_refused,
            on_tick=self._on_tick,
            spawn=self._spawn,
        )
        self._registration = Registration(
            api,
            config.worker,
            worker_id=self._standing.worker_id,
            queue_names=tuple(queue.name for queue in queues),
            max_concurrency=config.pool.procs,
            events=events,
            troubles=self._troubles,
            vitals=lambda: observer.vitals(),
            on_command=self._on_command,
            on_refused=self._on_refused,
        )
        observer = self._observer = Observer(
            self._standing,
            queues,
            pool=pool,
            keeper=keeper,
            leases=self._leases,
            holder=self._holder,
            claimer=self._claimer,
            registration=self._registration,
            troubles=self._troubles,
            outbox=self._outbox,
            cpus=cpus_available(),
            history=self._history,
            mask=self._log.mask,
        )

    def _make_claimer(self, api: RestApi | BothApi) -> Claimer:
        """Who brings jobs: asked for, or pushed through streams."""
        kind: Callable[..., Claimer] = Claimer
        if isinstance(api, BothApi) and self._config.api.transport == "grpc-stream":
            kind = functools.partial(Streamer, api.grpc, self._leases)
        return kind(
            api,
            self._pool,
            self._queues,
            self._config.claims,
            events=self._events,
            troubles=self._troubles,
            gate=self._gate,
            spawn=self._spawn,
            may_claim=self._may_claim,
            on_claim=lambda claim, asked: self._holder.take(claim, asked),
            on_refused=self._on_refused,
        )

    def _wire_commands(self, keeper: ForkServerKeeper, metrics: Metrics) -> Commands:
        assert self._observer is not None
        observer = self._observer

        def on_reloaded() -> None:
            if not self._config.queues:
                self._queues = tuple(QueueConfig(name) for name in keeper.queue_names)
                metrics.declare_queues(keeper.queue_names)
                self._claimer.set_queues(self._queues)
                self._breakers.update((name, queue.breaker) for name, queue in self._claimer.queues.items())
                observer.set_queues(self._queues)
                self._registration.describe(queue_names=keeper.queue_names)

        def on_reloading(is_begin: bool, text: str) -> None:
            self._reload_trouble = "" if is_begin else text
            if is_begin:
                self._notifier.reloading()
            else:
                self._notifier.ready(self._status_text())

        self._commands = Commands(
            self._standing,
            pool=self._pool,
            keeper=keeper,
            holder=self._holder,
            observer=observer,
            events=self._events,
            abort_grace_s=self._config.pool.abort_grace_s,
            set_quiet=self._set_quiet,
            stop=self._stop_by_command,
            on_reloaded=on_reloaded,
            on_reloading=on_reloading,
        )
        return self._commands

    def _start(self) -> None:
        assert self._observer is not None
        if self._guest is None:  # the hint is worth having, not needed
            asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, self._pool.sweep_hint)
        self._events.subscribe(self._on_request, ev.ApiRequestFinished)
        self._events.subscribe(self._on_child_started, ev.ChildStarted)
        self._events.subscribe(self._on_scaled, ev.Scaled)
        self._events.subscribe(lambda exited: self._outbox.child_gone(exited.pid), ev.ChildExited)
        self._holder.restore(self._leftovers)
        self._spawn(self._claimer.run(), "claim")
        self._spawn(self._holder.keep_leases(), "keep leases")
        self._spawn(self._registration.run(), "register and beat")
        self._spawn(self._observer.sample(), "sample memory")
        if self._config.claims.listens_to_events:
            self._spawn(self._make_job_events().run(), "listen to events")
        self._pool.turn()

    async def _work(self) -> None:
        """Until somebody wants us to stop. Ready is said when the first child is; the service need not answer."""
        await self._until(lambda: self._pool.usable > 0 or self._wanted > Phase.RUNNING)
        if self._wanted > Phase.RUNNING:
            return
        self._look_at_pressure(now())  # before the first claim, too
        self._enter(Phase.RUNNING, "the first child is ready")
        config = self._config
        names = tuple(queue.name for queue in self._queues)
        self._events.emit(
            ev.SupervisorStarted(
                os.getpid(), __version__, self._standing.worker_id, names, config.pool.procs, config.api.url
            )
        )
        self._notifier.ready(self._status_text())
        self._claimer.wake()
        await self._until(lambda: self._wanted > Phase.RUNNING)

    async def _stop(self) -> int:
        """Down the rest of the ladder; the exit code."""
        given_up_before = self._holder.given_up
        if self._fatal is not None:
            raise self._fatal
        if self._wanted is Phase.DRAINING:
            await self._drain()
        if self._pool.jobs_held or self._wanted is Phase.STOPPING:
            await self._kill()
        else:
            await self._holder.wait_until_settled(now() + FLUSH_LIMIT_S)
            self._pool.retire_idle()
            await self._until(lambda: self._pool.is_empty, now() + LEAVE_LIMIT_S)
        unsettled = self._holder.held + self._holder.given_up - given_up_before
        if not unsettled:
            await self._registration.deregister(DEREGISTER_TIMEOUT_S)
        self._enter(Phase.STOPPED, "done")
        code = EX_FAILURE if unsettled else EX_OK
        uptime_s = round(now() - self._standing.started_at, 3)
        self._events.emit(ev.SupervisorStopped(code, unsettled, uptime_s))
        return code

    async def _drain(self) -> None:
        self._drain_ends_at = now() + self._config.shutdown_timeout_s
        self._enter(Phase.DRAINING, self._why)
        self._claimer.wake()  # before any job is told to stop: a stream whose job is over asks for the next
        self._notifier.stopping(self._status_text())
        self._notifier.extend_timeout(3 * TELL_INTERVAL_S)  # the next tick that asks may come after TimeoutStopSec=
        self._registration.beat_now()
        self._holder.return_waiting()
        if not self._pool.waiting:
            self._pool.stop_replacing()  # one that is born now would only have to be told to leave
        self._pool.abort_all("shutdown")
        finish = self._spawn(self._claimer.finish(), "finish claims")
        finish.add_done_callback(lambda _: self._alarm.ring())

        def is_over() -> bool:
            return (finish.done() and not self._pool.jobs_held) or self._wanted is Phase.STOPPING

        await self._until(is_over, self._drain_ends_at)
        if not is_over() and not self._pool.jobs_held:
            # What a claim in flight brings is ours, too: unheard, its jobs would wait for the ends of their leases.
            self._drain_ends_at = now() + FLUSH_LIMIT_S
            await self._until(is_over, self._drain_ends_at)

    async def _kill(self) -> None:
        """Kill what is left, see it dead, settle what is decided; STOP_LIMIT_S for all of it."""
        ends_at = now() + STOP_LIMIT_S
        is_forced = self._wanted is Phase.STOPPING
        self._enter(Phase.STOPPING, self._why if is_forced else "the drain's time is over")
        self._claimer.wake()
        self._notifier.stopping(self._status_text())
        self._registration.beat_now()
        self._holder.return_all_waiting()
        self._pool.kill_all("shutdown", verdict=Released("Worker shutdown" if is_forced else "Worker shutdown timeout"))
        await self._until(lambda: not self._pool.jobs_held, ends_at)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(ends_at - DEREGISTER_TIMEOUT_S / 2):
                await self._claimer.finish()
        await self._holder.wait_until_settled(ends_at)

    async def _until(self, is_true: Callable[[], bool], deadline: float = float("inf")) -> None:
        """Wait until a condition holds, looking whenever the alarm rings; at most until `deadline`."""
        while not is_true() and now() < deadline and self._fatal is None:
            await self._alarm.wait_until(deadline)

    # --- what changes the walk -------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _signal_handling(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        handlers: dict[signal.Signals, Callable[[], None]] = {
            number: functools.partial(self._on_stop_signal, number, to) for number, to in STOP_SIGNALS.items()
        }
        handlers[signal.SIGTSTP] = lambda: self._set_quiet("SIGTSTP")
        handlers[signal.SIGCONT] = lambda: self._set_quiet(None, "SIGCONT")
        for number, (command, request) in COMMAND_SIGNALS.items():
            handlers[number] = functools.partial(self._on_command_signal, number, command, request)
        for number in UNUSED_SIGNALS:
            handlers[number] = functools.partial(self._on_unused_signal, number)
        for number, handler in handlers.items():
            loop.add_signal_handler(number, handler)
        try:
            yield
        finally:
            for number in (*handlers, signal.SIGCHLD):
                loop.remove_signal_handler(number)

    def _on_stop_signal(self, number: signal.Signals, to: Phase) -> None:
        self._signals += 1
        self._events.emit(ev.CommandReceived("signal", number.name, True))
        if self._signals > 2:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            os._exit(128 + number)  # still here: the kernel spares PID 1 of a container the default action
        self.climb(Phase.STOPPING if self._signals > 1 else to, number.name)

    def _on_command_signal(self, number: signal.Signals, command: str, request: Mapping[str, Any]) -> None:
        is_obeyed = self._commands is not None
        self._events.emit(ev.CommandReceived("signal", number.name, is_obeyed))
        if self._commands is not None:
            self._spawn(self._carry_out(self._commands.table()[command], request), command)

    async def _carry_out(self, command: Command, request: Mapping[str, Any]) -> None:
        """A command that nobody waits for an answer to."""
        try:
            await command(request)
        except Refused as refused:
            self._events.emit(ev.CommandRefused(str(refused)))

    def _stop_by_command(self, why: str) -> None:
        self.climb(Phase.STOPPING if self._wanted >= Phase.DRAINING else Phase.DRAINING, why)

    def _on_unused_signal(self, number: signal.Signals) -> None:
        """Caught, as its default would end us."""
        self._events.emit(ev.CommandReceived("signal", number.name, False))

    def climb(self, to: Phase, why: str) -> None:
        """Go down to this phase, unless that has been asked for already. From the loop's thread only."""
        if to > self._wanted:
            self._wanted, self._why = to, why
            self._alarm.ring()

    def _on_command(self, command: str) -> None:
        """What the service asked for in the answer to a heartbeat; it asks again until it is done, so told once."""
        source = "service"
        match command.lower():
            case "drain" | "stop":
                if self._wanted <= Phase.RUNNING:
                    self._events.emit(ev.CommandReceived(source, command, True))
                self.climb(Phase.DRAINING, f"the service said {command}")
            case "pause":
                self._set_quiet("the service said pause")
            case "resume":
                self._set_quiet(None, "the service said resume")
            case unknown if unknown not in self._unknown_commands and len(self._unknown_commands) < MAX_UNKNOWN:
                self._unknown_commands.add(unknown)
                self._events.emit(ev.CommandReceived(source, command[:100], False))

    def _set_quiet(self, reason: str | None, why: str = "") -> None:
        """Claim nothing from now on, or go on. Resuming counts only while running: systemd sends CONT after TERM."""
        if reason is not None and self._standing.quiet_reason is None:
            self._standing.quiet_reason = reason
            self._claimer.wake()
            self._events.emit(ev.Quieted(reason))
        elif reason is None and self._standing.quiet_reason is not None and self._wanted <= Phase.RUNNING:
            self._standing.quiet_reason = None
            self._events.emit(ev.Resumed(why))
            self._claimer.wake()

    def _on_refused(self, refused: CredentialsRefused) -> None:
        """Before the service has ever accepted the key it is a wrong one: stop with 77. Later it may be rotated."""
        if not self._standing.is_proven:
            self._fatal = refused
            self.climb(Phase.STOPPING, "the API key is refused")
        else:
            self._standing.refused = refused.message

    def _on_request(self, request: ev.ApiRequestFinished) -> None:
        if request.status.startswith("2") and (not self._standing.is_proven or self._standing.refused is not None):
            if self._standing.refused is not None:
                self._claimer.forget_pauses()
            self._standing.is_proven = True
            self._standing.refused = None
            self._claimer.wake()

    def _on_scaled(self, scaled: ev.Scaled) -> None:
        self._registration.describe(max_concurrency=scaled.procs)

    def _on_child_started(self, started: ev.ChildStarted) -> None:
        start_time = processes.start_time(started.pid)
        if start_time is not None:
            self._outbox.child_born(started.pid, start_time)

    # --- what the parts ask --------------------------------------------------------------------------------------

    def _spawn(self, coroutine: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = self._tasks.create_task(coroutine, name=name)
        self._spawned.add(task)
        task.add_done_callback(self._spawned.discard)
        return task

    def _may_claim(self) -> bool:
        standing = self._standing
        is_free = standing.quiet_reason is None and standing.refused is None and standing.pressure is None
        may_claim = standing.phase is Phase.RUNNING and is_free and not self._outbox.is_full
        self._was_told_no = self._was_told_no or not may_claim
        return may_claim

    def _limit_of(self, job: Job) -> float:
        """The job's own limit, the queue's and ours: the shortest counts."""
        queue = next((queue for queue in self._queues if queue.name == job.queue_name), None)
        limits = (job.timeout_s, self._config.pool.job_timeout_s, None if queue is None else queue.timeout_s)
        return min(limit for limit in limits if limit is not None)

    def _on_pool_change(self) -> None:
        if self._standing.phase is not Phase.RUNNING:  # while it runs, the walk waits for an order only
            self._alarm.ring()
        self._claimer.wake()

    def _on_fork_server_ready(self) -> None:
        if self._observer is not None:  # not the first one: the pool waits for it
            self._pool.turn()

    def _on_tick(self, at: float) -> None:
        """From the loop that keeps the leases: while it turns, the watchdog is fed, in a drain too."""
        self._look_at_pressure(at)
        if (limit := self._config.pool.child_memory_limit_bytes) is not None:
            self._pool.kill_if_above(limit)
        was_told_no, self._was_told_no = self._was_told_no, False
        if was_told_no and self._may_claim():  # the outbox has room again, which nobody else tells the claimer
            self._claimer.wake()
        self._notifier.repeat()
        interval_s = self._notifier.watchdog_interval_s
        if interval_s is not None and at - self._pinged_at >= interval_s / 2:
            self._pinged_at = at
            self._notifier.watchdog()
        if at - self._told_at >= TELL_INTERVAL_S:
            self._told_at = at
            if self._standing.phase >= Phase.DRAINING and at < self._drain_ends_at + STOP_LIMIT_S:
                self._notifier.extend_timeout(3 * TELL_INTERVAL_S)
            self._notifier.status(self._status_text())

    def _look_at_pressure(self, at: float) -> None:
        before, reason = self._standing.pressure, self._pressure.reason(at)
        self._standing.pressure = reason
        if before is None and reason is not None:
            self._claimer.wake()
            self._events.emit(ev.PressureRose(reason))
        elif before is not None and reason is None:
            self._events.emit(ev.PressureFell())
            self._claimer.wake()

    # --- what it shows ---------------------------------------------------------------------------------------------

    @property
    def worker_id(self) -> str:
        return self._standing.worker_id

    def snapshot(self) -> Snapshot:
        """Everything, as it is now."""
        if self._observer is None:
            return boot_snapshot(self._standing, self._config.pool.procs)
        return self._observer.snapshot()

    def _enter(self, phase: Phase, reason: str) -> None:
        if phase > self._standing.phase:
            self._standing.phase = phase
            self._events.emit(ev.PhaseChanged(phase.name.lower(), reason))
            self._set_title()

    def _set_title(self) -> None:
        if self._guest is None:
            kernel.set_title(f"spooled-supervisor: supervisor {self._standing.phase.name.lower()}")

    def _status_text(self) -> str:
        """Of no snapshot: that reads /proc for each child, and this is told every other second."""
        assert self._observer is not None
        busy = sum(child.run is not None for child in self._pool.children)
        text = f"{self._standing.phase.name.lower()}: {busy} of {len(self._pool.slots)} children busy"
        return "; ".join(filter(None, (text, self._reload_trouble, *self._observer.unhealthy())))

"""What has become of tiles and children, as far as the supervisor's log tells.

Fed with the log's records (one JSON object for each event) and with tiles that have come; asked by the display and for
the summary. No I/O and no clock: whoever feeds it says what time it is, in seconds since the demo began.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from spooled_supervisor.demo.picture import Tile


class TileState(Enum):
    WAITING = auto()  # at the server; perhaps after a run that failed
    RUNNING = auto()  # a child draws it
    OVERDUE = auto()  # ... and was told that its time is up
    DONE = auto()  # its pixels are here
    LOST = auto()  # the service will not try it again


@dataclass(slots=True)
class Child:
    """A place in the pool and what its present child does."""

    slot: int
    is_ready: bool = False
    tile: Tile | None = None
    percent: float = 0.0
    since_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Note:
    """Something to be told to a person."""

    at_s: float
    text: str
    is_bad: bool


@dataclass(slots=True)
class Progress:
    """One demo run. `by_job` is filled when the jobs are made; `finished` are jobs whose outcome the server has."""

    tiles: tuple[Tile, ...]
    procs: int
    limit_s: float  # of the tile that never ends
    by_job: dict[str, Tile] = field(default_factory=dict)
    states: dict[int, TileState] = field(default_factory=dict)  # by tile number
    children: list[Child] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    errors: dict[int, str] = field(default_factory=dict)  # by tile number: how its last failed run ended
    killed: list[str] = field(default_factory=list)  # which tile and why, for each run that ended so
    crashed: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    retried: list[Tile] = field(default_factory=list)
    done: int = 0
    started_s: float | None = None  # the first tile
    ended_s: float | None = None  # the last tile
    cpu_s: float = 0.0  # of the runs that drew the tiles
    run_s: float = 0.0  # the same by the wall clock
    _was_killed: set[int] = field(default_factory=set)  # tiles whose present run was
    _causes: dict[int, str] = field(default_factory=dict)  # by slot: how its last child ended

    def __post_init__(self) -> None:
        self.states = {tile.number: TileState.WAITING for tile in self.tiles}
        self.children = [Child(slot) for slot in range(self.procs)]

    @property
    def total(self) -> int:
        return len(self.tiles)

    @property
    def lost(self) -> list[Tile]:
        return [tile for tile in self.tiles if self.states[tile.number] is TileState.LOST]

    @property
    def missing(self) -> list[str]:
        """Jobs whose tiles have not come and may yet."""
        over = (TileState.DONE, TileState.LOST)
        return [job_id for job_id, tile in self.by_job.items() if self.states[tile.number] not in over]

    @property
    def rendering_s(self) -> float:
        """From the first tile's start to the last one's arrival."""
        return (self.ended_s or 0.0) - (self.started_s or 0.0)

    @property
    def waited_share(self) -> float:
        """How much of their time tiles waited for a CPU, 0 to 1."""
        return max(0.0, 1 - self.cpu_s / self.run_s) if self.run_s else 0.0

    def count(self, state: TileState) -> int:
        return sum(each is state for each in self.states.values())

    def arrived(self, tile: Tile, cpu_s: float, at_s: float) -> None:
        """Its pixels are here; `cpu_s` is what it says that it took."""
        if self.states[tile.number] is TileState.DONE:
            return
        self.states[tile.number] = TileState.DONE
        self.done += 1
        self.cpu_s += cpu_s
        self.ended_s = at_s
        if tile.number in self.errors:
            self._note(at_s, f"tile {tile.number} is drawn, by another run", is_bad=False)

    def lose(self, tile: Tile) -> None:
        """There will be no other run."""
        self.states[tile.number] = TileState.LOST

    def observe(self, record: Mapping[str, Any], at_s: float) -> None:
        """One event of the supervisor; those that do not concern us are passed over."""
        slot = record.get("slot")
        child = self.children[slot] if isinstance(slot, int) and 0 <= slot < self.procs else None
        tile = self.by_job.get(str(record.get("job_id")))
        match record.get("event"):
            case "child_ready" if child:
                child.is_ready = True
            case "child_exited" if child:
                self.children[child.slot] = Child(child.slot)
                self._causes[child.slot] = str(record.get("cause"))
            case "job_started" if child and tile:
                self._start(tile, child, at_s)
            case "job_progressed" if child:
                child.percent = float(record.get("percent") or 0.0)
            case "job_aborting" if tile and record.get("reason") == "timeout":
                self._overrun(tile, at_s)
            case "child_killed" if tile and record.get("reason") == "timeout":
                self._was_killed.add(tile.number)
            case "job_completed":
                self.run_s += float(record.get("duration_s") or 0.0)
                _leave(child)
            case "job_failed" if tile:
                _leave(child)
                self._fail(tile, record, at_s)
            case "outcome_settled" if tile and record.get("status") == "completed":
                self.finished.append(str(record["job_id"]))

    def _start(self, tile: Tile, child: Child, at_s: float) -> None:
        if self.states[tile.number] is TileState.DONE:
            return  # it was fetched before we read of its start
        child.is_ready, child.tile, child.percent, child.since_s = True, tile, 0.0, at_s
        self.states[tile.number] = TileState.RUNNING
        if self.started_s is None:
            self.started_s = at_s
        if tile.number in self.errors:
            self.retried.append(tile)

    def _overrun(self, tile: Tile, at_s: float) -> None:
        if self.states[tile.number] is TileState.RUNNING:
            self.states[tile.number] = TileState.OVERDUE
            text = f"tile {tile.number} loops for ever; its limit of {self.limit_s:g} s is over"
            self._note(at_s, text, is_bad=True)

    def _fail(self, tile: Tile, record: Mapping[str, Any], at_s: float) -> None:
        """A run that did not end well; what follows is the server's decision, which the supervisor foresees."""
        kind = record.get("kind")
        if kind == "released":  # given back, because the supervisor stops
            self.states[tile.number] = TileState.WAITING
            return
        error = str(record.get("error")).strip().partition("\n")[0]
        if kind == "crashed":
            error = self._causes.get(record.get("slot", -1), error)
            self.crashed.append(f"tile {tile.number}, {error}")
            what = f"crashed: {error}"
        elif kind == "timed_out" and tile.number in self._was_killed:
            ran_s = record.get("duration_s") or self.limit_s
            self.killed.append(
                f"tile {tile.number}, which held a child for {ran_s:.1f} s; its limit is {self.limit_s:g} s"
            )
            what = f"was killed after {ran_s:.1f} s"
        else:
            self.failed.append(f"tile {tile.number}, {error}")
            what = f"failed: {error}"
        self._was_killed.discard(tile.number)
        self.errors[tile.number] = error
        will_retry = bool(record.get("will_retry"))
        self.states[tile.number] = TileState.WAITING if will_retry else TileState.LOST
        self._note(at_s, f"tile {tile.number} {what}; {'runs again' if will_retry else 'given up'}", is_bad=True)

    def _note(self, at_s: float, text: str, *, is_bad: bool) -> None:
        self.notes.append(Note(at_s, text, is_bad))


def _leave(child: Child | None) -> None:
    if child is not None:
        child.tile, child.percent = None, 0.0

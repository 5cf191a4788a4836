"""What has become of tiles and children, as far as the supervisor's log tells.

Fed with the log's records (one JSON object for each event) and with tiles that have come; asked by the display and for
the summary. No I/O and no clock: whoever feeds it says what time it is, in seconds since the demo began.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
    done: int = 0
    killed: int = 0
    crashed: int = 0
    failed: int = 0
    retried: int = 0
    started_s: float | None = None  # the first tile
    ended_s: float | None = None  # the last tile
    cpu_s: float = 0.0

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

    def count(self, *states: TileState) -> int:
        return sum(state in states for state in self.states.values())

    def arrived(self, tile: Tile, cpu_s: float, at_s: float) -> None:
        """Its pixels are here; `cpu_s` is what it says that it took."""
        if self.states[tile.number] is TileState.DONE:
            return
        self.states[tile.number] = TileState.DONE
        self.done += 1
        self.cpu_s += cpu_s
        self.ended_s = at_s
        if tile.number in self.errors:
            self._note(at_s, f"tile {tile.number} is drawn, after another run", is_bad=False)

    def lose(self, tile: Tile) -> None:
        """There will be no other run."""
        self.states[tile.number] = TileState.LOST

    def observe(self, record: Mapping[str, Any], at_s: float) -> None:
        """One event of the supervisor; those that do not concern us are passed over."""
        match record:
            case {"event": "child_ready", "slot": int(slot)} if self._knows(slot):
                self.children[slot].is_ready = True
            case {"event": "child_exited", "slot": int(slot)} if self._knows(slot):
                self.children[slot] = Child(slot)
            case {"event": "job_started", "job_id": str(job_id), "slot": int(slot)} if self._knows(slot):
                self._start(self.by_job.get(job_id), self.children[slot], at_s)
            case {"event": "job_progressed", "slot": int(slot), "percent": int() | float() as percent}:
                if self._knows(slot):
                    self.children[slot].percent = percent
            case {"event": "job_aborting", "job_id": str(job_id), "reason": "timeout"}:
                self._overrun(self.by_job.get(job_id), at_s)
            case {"event": "child_killed", "reason": "timeout"}:
                self.killed += 1
            case {"event": "job_completed", "slot": int(slot)} if self._knows(slot):
                self._leave(slot)
            case {"event": "job_failed", "job_id": str(job_id)}:
                self._fail(self.by_job.get(job_id), record, at_s)
            case {"event": "outcome_settled", "job_id": str(job_id), "status": "completed"}:
                self.finished.append(job_id)

    def _knows(self, slot: int) -> bool:
        return 0 <= slot < len(self.children)

    def _start(self, tile: Tile | None, child: Child, at_s: float) -> None:
        if tile is None or self.states[tile.number] is TileState.DONE:
            return
        child.is_ready, child.tile, child.percent, child.since_s = True, tile, 0.0, at_s
        self.states[tile.number] = TileState.RUNNING
        if self.started_s is None:
            self.started_s = at_s
        if tile.number in self.errors:
            self.retried += 1

    def _overrun(self, tile: Tile | None, at_s: float) -> None:
        if tile is None or self.states[tile.number] is not TileState.RUNNING:
            return
        self.states[tile.number] = TileState.OVERDUE
        text = f"tile {tile.number} loops for ever: over its limit of {self.limit_s:g} s and does not listen"
        self._note(at_s, text, is_bad=True)

    def _leave(self, slot: int) -> None:
        self.children[slot].tile = None
        self.children[slot].percent = 0.0

    def _fail(self, tile: Tile | None, record: Mapping[str, Any], at_s: float) -> None:
        if tile is None:
            return
        slot, kind = record.get("slot"), record.get("kind")
        if isinstance(slot, int) and self._knows(slot):
            self._leave(slot)
        error = _first_line(str(record.get("error", "")))
        next_step = "it will be run again" if record.get("will_retry") else "there is no further try"
        if kind == "released":  # cut short, because the supervisor stops
            self.states[tile.number] = TileState.WAITING
            return
        self.errors[tile.number] = error
        if kind == "timed_out":
            ran_s = record.get("duration_s") or self.limit_s
            self._note(at_s, f"tile {tile.number} was killed after {ran_s:.1f} s; {next_step}", is_bad=True)
        elif kind == "crashed":
            self.crashed += 1
            self._note(at_s, f"tile {tile.number} crashed: {error}; {next_step}", is_bad=True)
        else:
            self.failed += 1
            self._note(at_s, f"tile {tile.number} failed: {error}; {next_step}", is_bad=True)
        self.states[tile.number] = TileState.WAITING if record.get("will_retry") else TileState.LOST

    def _note(self, at_s: float, text: str, *, is_bad: bool) -> None:
        self.notes.append(Note(at_s, text, is_bad))


def mishaps(progress: Progress) -> Iterable[str]:
    """One line for each tile that had a run fail, for the summary."""
    for number, error in sorted(progress.errors.items()):
        end = "then drawn" if progress.states[number] is TileState.DONE else "never drawn"
        yield f"tile {number}: {error}; {end}"


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]

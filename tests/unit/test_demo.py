"""The demo without its processes: tiles, colours, the PNG file, options, what the log means, what is shown."""

from __future__ import annotations

import base64
import json
import re
import struct
import sys
import zlib
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spooled_supervisor import AbortSignal, JobAborted, JobContext
from spooled_supervisor.demo import follow, mandelbrot, plan
from spooled_supervisor.demo.display import Ink, Layout, Live, Plain, Thumbnail, frame, make_display
from spooled_supervisor.demo.follow import Follower
from spooled_supervisor.demo.picture import (
    INSIDE,
    SIGNATURE,
    TURNS,
    Picture,
    Tile,
    colour,
    cut,
    output_problem,
    payload,
    png,
    write_png,
)
from spooled_supervisor.demo.plan import Options, Plan, affordable_size, check_installed, parse
from spooled_supervisor.demo.programs import DemoFailed, environment
from spooled_supervisor.demo.progress import Progress, TileState
from spooled_supervisor.demo.show import Stopped, summary
from spooled_supervisor.errors import ConfigError
from spooled_supervisor.job import MAX_RESULT_BYTES

# --- PNG --------------------------------------------------------------------------------------------------------------


def decode(data: bytes) -> tuple[int, int, list[bytes]]:
    """Width, height and rows of a PNG as `png` writes it, read by the book: every chunk, every checksum."""
    assert data.startswith(SIGNATURE)
    chunks, at = [], len(SIGNATURE)
    while at < len(data):
        (length,) = struct.unpack_from(">I", data, at)
        kind, body = data[at + 4 : at + 8], data[at + 8 : at + 8 + length]
        assert struct.unpack_from(">I", data, at + 8 + length) == (zlib.crc32(kind + body),)
        chunks.append((kind, body))
        at += 12 + length
    assert [kind for kind, _ in chunks] == [b"IHDR", b"IDAT", b"IEND"]
    width, height, depth, colour_type, compression, filters, interlace = struct.unpack(">IIBBBBB", chunks[0][1])
    assert (depth, colour_type, compression, filters, interlace) == (8, 2, 0, 0, 0)
    raw = zlib.decompress(chunks[1][1])
    rows = [raw[n : n + 1 + 3 * width] for n in range(0, len(raw), 1 + 3 * width)]
    assert len(rows) == height
    assert all(row[0] == 0 for row in rows), "filter type none"
    return width, height, [row[1:] for row in rows]


def test_a_png_holds_the_pixels_row_by_row() -> None:
    picture = Picture(2, 3)
    for number in range(18):
        picture.pixels[number] = number
    assert decode(png(picture)) == (2, 3, [bytes(range(0, 6)), bytes(range(6, 12)), bytes(range(12, 18))])


def test_a_picture_is_replaced_as_a_whole_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / "p.png"
    for width in (1, 2):
        write_png(path, png(Picture(width, 1)))
        assert decode(path.read_bytes())[0] == width
    assert list(tmp_path.iterdir()) == [path]


def test_a_png_may_be_replaced(tmp_path: Path) -> None:
    path = tmp_path / "p.png"
    assert output_problem(path) is None
    path.write_bytes(png(Picture(1, 1)))
    assert output_problem(path) is None


@pytest.mark.parametrize("content", [b"dear diary", b"\x89PNG", b"\xff\xd8\xff"])
def test_what_is_no_png_is_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "p.png"
    path.write_bytes(content)
    assert output_problem(path) == "exists and is no PNG file, so it is left alone"


def test_a_directory_cannot_be_the_picture_and_must_exist(tmp_path: Path) -> None:
    assert output_problem(tmp_path) == "is no regular file"
    assert output_problem(tmp_path / "no" / "p.png") == f"there is no directory {tmp_path / 'no'}"
    assert "\0" not in str(output_problem(Path("/dev/null")))


# --- tiles ------------------------------------------------------------------------------------------------------------

sides = st.integers(16, 300)


@given(sides, sides, st.integers(1, 400))
def test_tiles_cover_the_picture_exactly(width: int, height: int, count: int) -> None:
    covered = bytearray(width * height)
    for tile in cut(width, height, count):
        assert tile.width > 0
        assert tile.height > 0
        for y in range(tile.top, tile.top + tile.height):
            for x in range(tile.left, tile.left + tile.width):
                covered[y * width + x] += 1
    assert covered == b"\x01" * (width * height)


@given(st.integers(16, 8192), st.integers(16, 8192), st.integers(4, 5000))
def test_there_are_about_as_many_tiles_as_asked_for(width: int, height: int, count: int) -> None:
    made = len(cut(width, height, min(count, width * height)))
    assert count / 2 <= made <= count * 3 / 2 or made >= width * height / 16 / 16


@given(st.integers(2, 600))
def test_one_tile_hangs_and_one_crashes(count: int) -> None:
    tiles = cut(300, 200, count)
    assert [tile.number for tile in tiles] == list(range(1, len(tiles) + 1))
    assert sorted(tile.mishap for tile in tiles if tile.mishap) == ["crash", "hang"]


def test_the_middle_is_drawn_first_and_the_mishaps_are_cheap_tiles() -> None:
    tiles = cut(300, 200, 96)
    first, last = tiles[0], tiles[-1]
    assert first.left <= 150 <= first.left + first.width
    assert first.top <= 100 <= first.top + first.height
    assert last.left == 0 or last.left + last.width == 300
    for tile in tiles:
        if tile.mishap:
            assert payload(tile, 300, 200)["limit"] == TURNS
            assert mandelbrot.colour_of(complex(*corner(tile)), TURNS) != INSIDE


def corner(tile: Tile) -> tuple[float, float]:
    asked = payload(tile, 300, 200)
    return asked["left"], asked["top"]


# --- drawing ----------------------------------------------------------------------------------------------------------


class Silent:
    """A reporter that remembers how far the handler says it is."""

    def __init__(self) -> None:
        self.percents: list[float] = []

    def progress(self, percent: float, message: str | None) -> None:
        self.percents.append(percent)

    def log(self, level: str, message: str, meta: dict[str, Any]) -> None:
        raise AssertionError("the handler does not log")


def context(tile: Mapping[str, Any], *, retry_count: int = 0, abort: str | None = None) -> tuple[JobContext, Silent]:
    signal, reporter = AbortSignal(), Silent()
    if abort is not None:
        signal.abort(abort)
    ctx = JobContext(
        job_id="j",
        queue_name=mandelbrot.QUEUE,
        payload=tile,
        retry_count=retry_count,
        max_retries=3,
        timeout_s=60.0,
        signal=signal,
        reporter=reporter,
    )
    return ctx, reporter


def test_a_picture_of_tiles_is_the_same_as_one_drawn_at_once() -> None:
    width, height = 45, 30
    picture = Picture(width, height)
    for tile in cut(width, height, 12):
        ctx, _ = context(payload(tile, width, height), retry_count=1)
        picture.paste(tile, base64.b64decode(mandelbrot.draw_tile(ctx)["pixels"]))
    whole = payload(Tile(1, 0, 0, width, height), width, height)
    at_once = b"".join(mandelbrot.rows(whole))
    differing = sum(a != b for a, b in zip(picture.pixels, at_once, strict=True))
    assert differing < len(at_once) / 100, "but for rounding at a tile's corner"


def test_a_tile_reports_progress_and_its_cpu_time() -> None:
    ctx, reporter = context(payload(Tile(1, 0, 0, 4, 40), 4, 40))
    assert mandelbrot.draw_tile(ctx)["cpu_s"] > 0
    assert reporter.percents == [0.0, 40.0, 80.0]


def test_a_tile_that_is_told_to_stop_stops() -> None:
    ctx, _ = context(payload(Tile(1, 0, 0, 4, 4), 4, 4), abort="shutdown")
    with pytest.raises(JobAborted):
        mandelbrot.draw_tile(ctx)


@pytest.mark.parametrize("point", [0j, -1 + 0j, complex(-0.1, 0.1)])
def test_points_inside_are_black(point: complex) -> None:
    assert mandelbrot.colour_of(point, TURNS) == INSIDE


@pytest.mark.parametrize("point", [2 + 0j, -2.01 + 0j, complex(0.5, 0.6), complex(1e300, 1e300)])
def test_points_outside_are_not(point: complex) -> None:
    assert mandelbrot.colour_of(point, TURNS) != INSIDE


@given(st.floats(min_value=-10, max_value=1e9))
def test_every_number_of_turns_has_a_colour(turns: float) -> None:
    assert len(colour(turns)) == 3


def test_colours_change_smoothly() -> None:
    shades = [colour(1 + n / 100) for n in range(10_000)]
    steps = [abs(a - b) for one, two in pairwise(shades) for a, b in zip(one, two, strict=True)]
    assert max(steps) < 12


def test_a_tile_of_the_wrong_size_is_refused() -> None:
    with pytest.raises(ValueError, match="11 bytes are no tile of 2 x 2 pixels"):
        Picture(4, 4).paste(Tile(1, 0, 0, 2, 2), bytes(11))


# --- options and plan -------------------------------------------------------------------------------------------------


def test_all_problems_of_the_command_line_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        parse(["--procs", "many", "--size", "12by9", "--tiles", "3"])
    assert caught.value.exit_code == 64
    assert caught.value.problems == [
        "--procs 'many': must be auto or a whole number from 1 to 1000",
        "--size '12by9': must be WIDTHxHEIGHT, each a whole number from 16 to 8192",
        "--tiles '3': must be a whole number from 4 to 5000",
    ]


@pytest.mark.parametrize(
    "size", ["0x9", "15x100", "100x8193", "100x", "x", "-5x5", "1e3x100", "100x100x100", "٣٣x٣٣", ""]
)
def test_odd_sizes_are_refused(size: str) -> None:
    with pytest.raises(ConfigError, match="--size"):
        parse([f"--size={size}"])


def test_too_few_tiles_for_a_large_picture_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--tiles 4: for a picture of 8000x8000 pixels at least 512 are needed"):
        parse(["--size", "8000x8000", "--tiles", "4", "--output", str(tmp_path / "p.png")])


@pytest.mark.parametrize("output", ["", ".", "/dev/null", "a\0b", "/no/such/directory/p.png"])
def test_odd_outputs_are_refused(output: str) -> None:
    with pytest.raises(ConfigError, match="--output"):
        parse([f"--output={output}"])


def test_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "link.png").symlink_to(tmp_path / "p.png")
    assert parse(["--output", str(tmp_path / "link.png")]).output == tmp_path / "p.png"


def test_the_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(ConfigError, match=r"needs uvicorn: pip install 'spooled-supervisor\[dev-server\]'") as caught:
        check_installed()
    assert caught.value.exit_code == 78


@pytest.mark.parametrize(
    ("pixel_s", "procs", "size"),
    [
        (9e-6, 2, (1800, 1200)),
        (50e-6, 2, (720, 480)),
        (1.0, 1, plan.SMALLEST),
        (9e-6, 64, plan.LARGEST),
    ],
)
def test_the_size_follows_the_machine(pixel_s: float, procs: int, size: tuple[int, int]) -> None:
    assert affordable_size(pixel_s, procs) == size


def test_the_speed_of_this_machine_is_measured() -> None:
    assert 0 < plan.seconds_per_pixel() < 0.1


@given(st.integers(16, 2000), st.integers(16, 2000), st.integers(1, 1000))
def test_a_tile_fits_into_a_result(width: int, height: int, procs: int) -> None:
    made = Plan.of(Options(procs, Path("p.png"), (width, height), None), 1e-5)
    largest = max(tile.width * tile.height for tile in made.tiles)
    assert len(base64.b64encode(bytes(3 * largest))) + 100 < MAX_RESULT_BYTES


def test_the_largest_picture_in_the_fewest_tiles_fits_too(tmp_path: Path) -> None:
    options = parse(["--size", "8192x8192", "--tiles", "537", "--output", str(tmp_path / "p.png")])
    largest = max(tile.width * tile.height for tile in Plan.of(options, 1e-5).tiles)
    assert largest <= plan.MAX_TILE_PIXELS


def test_the_endless_tile_gets_time_enough_for_its_second_run() -> None:
    assert Plan.of(Options(1, Path("p.png"), (1800, 1200), None), 9e-6).endless_limit_s == 2
    assert Plan.of(Options(1, Path("p.png"), (900, 600), 4), 100e-6).endless_limit_s == 36


def test_programs_do_not_see_the_settings_of_a_real_worker() -> None:
    ours = {"PATH": "/bin", "HOME": "/root", "LANG": "C"}
    theirs = {
        "SPOOLED_API_KEY": "sp_live_x",
        "SPOOLED_CONFIG": "/etc/x",
        "HTTP_PROXY": "http://proxy",
        "all_proxy": "socks://proxy",
        "NOTIFY_SOCKET": "/run/x",
        "STATE_DIRECTORY": "/var/lib/x",
        "CREDENTIALS_DIRECTORY": "/run/credentials",
    }
    assert environment({**ours, **theirs}, SPOOLED_API_KEY="mine") == {**ours, "SPOOLED_API_KEY": "mine"}


# --- what the log means -----------------------------------------------------------------------------------------------


def make_progress(*, procs: int = 2, count: int = 6) -> Progress:
    tiles = tuple(cut(60, 40, count))
    progress = Progress(tiles, procs, 2)
    progress.by_job.update({f"job-{tile.number}": tile for tile in tiles})
    return progress


def observe(progress: Progress, event: str, at_s: float = 1.0, **fields: Any) -> None:
    progress.observe({"event": event, **fields}, at_s)


def start(progress: Progress, number: int, slot: int, at_s: float = 1.0) -> None:
    observe(progress, "job_started", at_s, job_id=f"job-{number}", slot=slot)


def finish(progress: Progress, number: int, slot: int, at_s: float = 2.0) -> None:
    observe(progress, "job_completed", at_s, job_id=f"job-{number}", slot=slot, duration_s=1.0)
    observe(progress, "outcome_settled", at_s, job_id=f"job-{number}", status="completed")
    assert progress.finished.pop() == f"job-{number}"
    progress.arrived(progress.tiles[number - 1], 0.5, at_s)


def test_a_tile_is_drawn() -> None:
    progress = make_progress()
    observe(progress, "child_ready", slot=0)
    start(progress, 1, 0, at_s=1.0)
    observe(progress, "job_progressed", job_id="job-1", slot=0, percent=40.0)
    child = progress.children[0]
    assert (child.tile, child.percent) == (progress.tiles[0], 40.0)
    assert progress.states[1] is TileState.RUNNING
    finish(progress, 1, 0, at_s=2.5)
    assert (child.tile, child.is_ready) == (None, True)
    assert (progress.states[1], progress.done, progress.cpu_s) == (TileState.DONE, 1, 0.5)
    assert progress.rendering_s == 1.5
    assert progress.waited_share == 0.5
    assert progress.missing == ["job-2", "job-3", "job-4", "job-5", "job-6"]
    assert progress.notes == []


def test_a_tile_that_came_twice_counts_once() -> None:
    progress = make_progress()
    for _ in range(2):
        progress.arrived(progress.tiles[0], 0.5, 1.0)
    assert (progress.done, progress.cpu_s) == (1, 0.5)


def test_a_crash_and_its_retry() -> None:
    progress = make_progress()
    start(progress, 1, 1)
    observe(progress, "child_exited", slot=1, cause="killed by SIGSEGV")
    observe(
        progress,
        "job_failed",
        job_id="job-1",
        slot=1,
        kind="crashed",
        error="the child was killed by SIGSEGV without an outcome",
        will_retry=True,
    )
    assert progress.states[1] is TileState.WAITING
    assert progress.crashed == ["tile 1, killed by SIGSEGV"]
    start(progress, 1, 0)
    assert [tile.number for tile in progress.retried] == [1]
    finish(progress, 1, 0)
    assert [note.text for note in progress.notes] == [
        "tile 1 crashed: killed by SIGSEGV; runs again",
        "tile 1 is drawn, by another run",
    ]


def test_a_tile_over_its_limit_and_its_kill() -> None:
    progress = make_progress()
    start(progress, 2, 0)
    observe(progress, "job_aborting", 3.0, job_id="job-2", slot=0, reason="timeout")
    assert progress.states[2] is TileState.OVERDUE
    observe(progress, "child_killed", 3.5, slot=0, reason="timeout", job_id="job-2")
    observe(progress, "child_exited", 3.5, slot=0, cause="killed by SIGKILL")
    failed: dict[str, Any] = {
        "job_id": "job-2",
        "slot": 0,
        "kind": "timed_out",
        "error": "timed out",
        "will_retry": True,
    }
    observe(progress, "job_failed", 3.5, **failed, duration_s=2.5)
    assert progress.killed == ["tile 2, which held a child for 2.5 s; its limit is 2 s"]
    assert progress.failed == []
    assert [note.text for note in progress.notes] == [
        "tile 2 loops for ever; its limit of 2 s is over",
        "tile 2 was killed after 2.5 s; runs again",
    ]


def test_a_tile_without_another_try_is_lost() -> None:
    progress = make_progress()
    start(progress, 3, 0)
    failed: dict[str, Any] = {
        "job_id": "job-3",
        "slot": 0,
        "kind": "failed",
        "error": "ValueError: no\n  at x",
        "will_retry": False,
    }
    observe(progress, "job_failed", **failed)
    assert [tile.number for tile in progress.lost] == [3]
    assert progress.failed == ["tile 3, ValueError: no"]
    assert "job-3" not in progress.missing


def test_a_run_that_was_given_back_is_no_failure() -> None:
    progress = make_progress()
    start(progress, 3, 0)
    observe(progress, "job_failed", job_id="job-3", slot=0, kind="released", error="shutdown", will_retry=True)
    assert (progress.failed, progress.notes) == ([], [])
    assert progress.states[3] is TileState.WAITING


@pytest.mark.parametrize(
    "record",
    [
        {},
        {"event": "something_new", "slot": 0},
        {"event": "job_started"},
        {"event": "job_started", "job_id": "unknown", "slot": 0},
        {"event": "job_started", "job_id": "job-1", "slot": 99},
        {"event": "job_progressed", "slot": 0},
        {"event": "job_failed", "job_id": "unknown"},
        {"event": "child_exited", "slot": None},
        {"event": "outcome_settled", "status": "completed"},
        {"event": 7},
    ],
)
def test_records_that_do_not_concern_us_change_nothing(record: dict[str, Any]) -> None:
    progress, untouched = make_progress(), make_progress()
    progress.observe(record, 1.0)
    assert progress == untouched


# --- following the log ------------------------------------------------------------------------------------------------


class Scripted:
    """A supervisor whose log is given, and a server that has all the tiles in `ready`; nothing is run."""

    def __init__(self, *log: Any, ends_with: int | None = None, ready: tuple[str, ...] = (), status: str = "completed"):
        self.log = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in log]
        self.ends_with = ends_with
        self.ready = ready
        self.status = status
        self.asked = 0
        self.picture = Picture(60, 40)
        self.progress = make_progress()

    def lines(self, timeout_s: float) -> list[bytes]:
        lines, self.log = self.log, []
        return lines

    def ended(self) -> int | None:
        return self.ends_with

    def fetch(self, job_id: str) -> tuple[bytes, float]:
        tile = self.progress.by_job[job_id]
        return bytes([tile.number]) * (3 * tile.width * tile.height), 0.5

    def statuses(self, job_ids: list[str]) -> dict[str, str]:
        self.asked += 1
        return {job_id: self.status if job_id in self.ready else "pending" for job_id in job_ids}

    def follow(self, check_stop: Callable[[], None] = lambda: None) -> None:
        me: Any = self
        display = Plain("title", write=lambda text: None)
        Follower(me, me, self.progress, self.picture, display, elapsed_s=lambda: 1.0, check_stop=check_stop).follow()


def settled(*numbers: int) -> list[dict[str, Any]]:
    return [{"event": "outcome_settled", "job_id": f"job-{n}", "status": "completed"} for n in numbers]


ALL = tuple(f"job-{n}" for n in range(1, 7))


def test_tiles_are_fetched_when_the_log_says_that_they_are_there() -> None:
    run = Scripted(*settled(1, 2, 3, 4, 5, 6, 6), b"not json", {"event": "unknown"}, 7)
    run.follow()
    assert (run.progress.done, run.asked) == (6, 0)
    for tile in run.progress.tiles:
        assert (
            run.picture.mean(tile.left, tile.top, tile.left + tile.width, tile.top + tile.height) == (tile.number,) * 3
        )


def test_lines_that_the_log_left_out_are_made_up_for_by_asking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "ASK_AFTER_S", 0.0)
    run = Scripted(*settled(1), ready=ALL)
    run.follow()
    assert run.progress.done == 6
    assert run.asked == 1


def test_tiles_that_will_never_come_end_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "ASK_AFTER_S", 0.0)
    run = Scripted(*settled(1, 2, 3, 4), ready=ALL, status="deadletter")
    with pytest.raises(DemoFailed, match="2 of 6 tiles did not come, so there is no picture\n  tile 5: unknown"):
        run.follow()


def test_a_supervisor_that_ends_early_is_quoted() -> None:
    run = Scripted(b"spooled-supervisor: app: no", {"level": "error", "event": "x", "error": "bad"}, ends_with=78)
    with pytest.raises(DemoFailed, match="the supervisor ended with status 78\n  spooled-supervisor: app: no\n  bad"):
        run.follow()


def test_a_stall_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "STALL_LIMIT_S", 0.0)
    with pytest.raises(DemoFailed, match="no tile has come for 0 s"):
        Scripted().follow()


def test_a_signal_ends_the_wait() -> None:
    def stop() -> None:
        raise Stopped

    with pytest.raises(Stopped):
        Scripted().follow(stop)


# --- what is shown ----------------------------------------------------------------------------------------------------

ASCII_INK = Ink(0, has_blocks=False)
RICH_INK = Ink(2**24, has_blocks=True)
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def show(progress: Progress, columns: int = 80, lines: int = 24, ink: Ink = ASCII_INK, at_s: float = 5.0) -> list[str]:
    """A frame as the terminal gets it, without a thumbnail."""
    layout = Layout(columns, min(progress.procs, lines), 0)
    return [ink.render(line, columns) for line in frame(progress, None, layout, ink, at_s, "title")]


def test_a_frame_tells_of_children_counts_and_mishaps() -> None:
    progress = make_progress(procs=3)
    observe(progress, "child_ready", slot=1)
    start(progress, 1, 0)
    observe(progress, "job_progressed", slot=0, percent=50.0)
    progress.arrived(progress.tiles[4], 0.1, 1.0)
    progress.arrived(progress.tiles[5], 0.1, 1.0)
    progress.crashed.append("tile 2, killed by SIGSEGV")
    assert show(progress) == [
        "title",
        "",
        "child 0  tile 1    ######......  50 %",
        "child 1  idle",
        "child 2  starting",
        "",
        "#" * 19 + "." * 38 + "  2 of 6 tiles  5.0 s",
        "1 running, 3 waiting   1 crashed",
        "",
    ]


def test_a_child_over_its_time_says_so() -> None:
    progress = make_progress()
    start(progress, 1, 0, at_s=1.0)
    observe(progress, "job_aborting", 3.0, job_id="job-1", slot=0, reason="timeout")
    shown = show(progress, at_s=3.2)
    assert "child 0  tile 1    over its time: 2.2 s" in shown
    assert "  3.0 s  tile 1 loops for ever; its limit of 2 s is over" in shown


def test_children_that_do_not_fit_are_counted() -> None:
    progress = make_progress(procs=64)
    start(progress, 1, 63)
    shown = show(progress, lines=4)
    assert shown[5] == "and 61 more, 1 of them busy"
    assert not any("child 3 " in line for line in shown)


@given(
    st.integers(1, 200), st.integers(1, 80), st.integers(1, 200), st.sampled_from([0, 16, 256, 2**24]), st.booleans()
)
def test_no_line_is_wider_than_the_terminal(columns: int, lines: int, procs: int, colours: int, blocks: bool) -> None:
    progress, ink = make_progress(procs=procs), Ink(colours, blocks)
    start(progress, 1, 0)
    observe(progress, "job_aborting", 3.0, job_id="job-1", slot=0, reason="timeout")
    layout = Layout.of(columns, lines, procs, 1.5)
    thumbnail = None
    if layout.thumbnail_columns:
        size = (layout.thumbnail_columns, layout.panel_rows)
        thumbnail = Thumbnail(
            Picture(60, 40), progress.tiles, *size, dots_per_row=2 if ink.has_thumbnail_colours else 1
        )
    for line in frame(progress, thumbnail, layout, ink, 5.0, "title " * 20):
        rendered = ink.render(line, columns)
        text = ESCAPE.sub("", rendered)
        assert len(text) <= columns
        assert text.isprintable()
        assert blocks or text.isascii()
        assert (colours > 0) or text == rendered


@pytest.mark.parametrize(("columns", "lines"), [(80, 24), (100, 30), (200, 60), (64, 24)])
def test_a_frame_with_a_thumbnail_fits_the_terminal(columns: int, lines: int) -> None:
    layout = Layout.of(columns, lines, 2, 1.5)
    assert layout.thumbnail_columns >= 12
    assert layout.panel_rows + 4 + 2 + 5 < lines
    assert layout.thumbnail_columns / layout.panel_rows / 2 == pytest.approx(1.5, rel=0.2)


@pytest.mark.parametrize(("columns", "lines"), [(40, 24), (80, 12), (20, 5), (1, 1)])
def test_small_terminals_get_no_thumbnail(columns: int, lines: int) -> None:
    assert Layout.of(columns, lines, 2, 1.5).thumbnail_columns == 0


@pytest.mark.parametrize(
    ("env", "encoding", "ink"),
    [
        ({"TERM": "xterm-256color"}, "utf-8", Ink(256, True)),
        ({"TERM": "xterm", "COLORTERM": "truecolor"}, "UTF-8", Ink(2**24, True)),
        ({"TERM": "linux"}, "ascii", Ink(16, False)),
        ({"TERM": "xterm-256color", "COLORTERM": "truecolor", "NO_COLOR": "1"}, "utf-8", Ink(0, True)),
        ({"TERM": "xterm", "NO_COLOR": ""}, None, Ink(16, False)),
    ],
)
def test_ink_follows_the_terminal(env: dict[str, str], encoding: str | None, ink: Ink) -> None:
    assert Ink.of(env, encoding) == ink


@given(st.tuples(*[st.integers(0, 255)] * 3))
def test_every_colour_has_one_near_it_among_256(wanted: tuple[int, int, int]) -> None:
    _, style = Ink(256, True).two_dots(wanted, wanted)
    number = int(style.split(";")[2])
    if number >= 232:
        near = (8 + 10 * (number - 232),) * 3
    else:
        levels = (0, 95, 135, 175, 215, 255)
        near = (levels[(number - 16) // 36], levels[(number - 16) // 6 % 6], levels[(number - 16) % 6])
    assert max(abs(a - b) for a, b in zip(wanted, near, strict=True)) <= 48


def test_the_thumbnail_shows_what_has_come_and_what_has_not() -> None:
    tiles = tuple(cut(40, 20, 2))
    left = min(tiles, key=lambda tile: tile.left)
    picture = Picture(40, 20)
    picture.paste(left, b"\xff\xf0\x00" * (20 * 20))
    states = {tile.number: TileState.DONE if tile is left else TileState.RUNNING for tile in tiles}
    thumbnail = Thumbnail(picture, tiles, 8, 4, dots_per_row=1)
    assert thumbnail.line(0, states, ASCII_INK) == [("%%%%oooo", "")]
    thumbnail = Thumbnail(picture, tiles, 8, 4, dots_per_row=2)
    assert thumbnail.dot(0, 0, states) == (255, 240, 0)
    assert thumbnail.dot(7, 7, states) is TileState.RUNNING
    assert thumbnail.line(3, states, RICH_INK)[0] == ("▀", "38;2;255;240;0;48;2;255;240;0")


class Terminal:
    """What was written, and a size that can change."""

    def __init__(self) -> None:
        self.text = ""
        self.size = (80, 24)

    def write(self, text: str) -> None:
        self.text += text

    def taken(self) -> str:
        text, self.text = self.text, ""
        return text


def live(terminal: Terminal, progress: Progress) -> Live:
    return Live(Picture(60, 40), progress.tiles, "title", RICH_INK, size=lambda: terminal.size, write=terminal.write)


def test_the_view_is_drawn_over_itself_and_gives_the_cursor_back() -> None:
    terminal, progress = Terminal(), make_progress()
    display = live(terminal, progress)
    assert terminal.taken() == "\x1b[?25l"
    display.update(progress, 0.0)
    first = terminal.taken()
    assert not first.startswith("\x1b[2J")
    display.update(progress, 0.05)
    assert terminal.taken() == "", "not more often than is pleasant"
    display.update(progress, 0.2)
    assert terminal.taken().startswith(f"\x1b[{first.count(chr(10))}A\r")
    terminal.size = (100, 40)
    display.update(progress, 0.4)
    assert terminal.taken().startswith("\x1b[2J\x1b[H"), "a new size, a clean screen"
    display.close()
    assert terminal.taken().endswith("\x1b[J\x1b[?25h")
    display.close()
    assert terminal.taken() == ""


def test_the_view_never_scrolls_a_small_terminal() -> None:
    terminal, progress = Terminal(), make_progress(procs=50)
    terminal.size = (80, 6)
    display = live(terminal, progress)
    display.update(progress, 0.0)
    display.close()
    assert terminal.text.count("\n") == 2 * 5


def test_plain_lines_are_few_and_have_no_escapes() -> None:
    said: list[str] = []
    progress = make_progress(count=96)
    display = Plain("title", write=said.append)
    for number, tile in enumerate(progress.tiles):
        progress.arrived(tile, 0.1, float(number))
        display.update(progress, float(number))
    start(progress, 1, 0)
    display.close()
    assert said[0] == "title\n"
    assert said[1] == "   7.0 s  8 of 96 tiles\n"
    assert said[-1] == "  95.0 s  96 of 96 tiles\n"
    assert len(said) == 13
    assert "\x1b" not in "".join(said)


class Stream:
    """Standard output as `make_display` sees it."""

    encoding = "utf-8"

    def __init__(self, is_terminal: bool) -> None:
        self._is_terminal = is_terminal
        self.text = ""

    def isatty(self) -> bool:
        return self._is_terminal

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None:
        pass


@pytest.mark.parametrize(("is_terminal", "term"), [(False, "xterm"), (True, "dumb"), (True, None)])
def test_without_a_real_terminal_there_are_plain_lines(is_terminal: bool, term: str | None) -> None:
    stream: Any = Stream(is_terminal)
    env = {} if term is None else {"TERM": term}
    assert isinstance(make_display(stream, env, Picture(1, 1), (), "title"), Plain)
    assert stream.text == "title\n"


# --- the summary ------------------------------------------------------------------------------------------------------


def finished_plan(change: Callable[[Progress], None] = lambda _: None) -> list[str]:
    made = Plan(2, Path("/tmp/p.png"), 60, 40, tuple(cut(60, 40, 6)), 2)
    progress = make_progress()
    progress.started_s, progress.run_s = 1.0, 4.1
    for tile in progress.tiles:
        progress.arrived(tile, 0.65, 3.0)
    change(progress)
    return summary(made, progress, 2048)


def test_the_summary_says_how_fast_it_was_and_how_that_is_known() -> None:
    assert finished_plan() == [
        "picture   /tmp/p.png (60 x 40, 2 KiB)",
        "jobs      6 tiles in 2.0 s by 2 children, 3.0 jobs per second",
        "speed-up  1.95 times one process: the tiles report 3.9 s of CPU time",
    ]


def test_the_summary_says_when_the_machine_was_busy_with_other_things() -> None:
    def slow(progress: Progress) -> None:
        progress.run_s = 7.8

    assert (
        "          (they waited 50% of their time for a CPU: other programs, or more children than CPUs)"
        in finished_plan(slow)
    )


def test_the_summary_names_what_went_wrong() -> None:
    def unlucky(progress: Progress) -> None:
        progress.killed.append("tile 2, which held a child for 2.5 s; its limit is 2 s")
        progress.crashed.append("tile 1, killed by SIGSEGV")
        progress.retried += progress.tiles[:2]

    assert finished_plan(unlucky)[3:] == [
        "killed    1: tile 2, which held a child for 2.5 s; its limit is 2 s",
        "crashed   1: tile 1, killed by SIGSEGV",
        "retried   2: tile 1 and tile 2, and then drawn",
    ]

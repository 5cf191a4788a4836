"""How much is to be drawn, by how many, and where it goes: the demo's options, and how fast this machine is.

Starts nothing and writes nothing. Without `--size` the picture is as large as the CPUs can draw in RENDERING_S, so that
the demo takes about as long on a slow machine as on a fast one.
"""

from __future__ import annotations

import importlib.util
import math
import re
import time
from dataclasses import dataclass
from pathlib import Path

from spooled_supervisor.config import OptionParser, cpus_available
from spooled_supervisor.demo.mandelbrot import rows
from spooled_supervisor.demo.picture import Tile, cut, output_problem, payload
from spooled_supervisor.errors import EX_CONFIG, EX_USAGE, ConfigError

RENDERING_S = 10.0
"""How long all CPUs shall draw."""
SAMPLE = (120, 80)
SMALLEST, LARGEST = (480, 320), (3840, 2560)
SIZE_STEP = (60, 40)
MIN_SIDE, MAX_SIDE = 16, 8192
TILES = 96
TILES_PER_CHILD = 6
MIN_TILES, MAX_TILES = 4, 5000
MAX_TILE_PIXELS = 250_000
"""Four characters of base64 for three bytes: a larger tile's result would be over the service's 1 MiB."""
ENDLESS_LIMIT_S = 2
"""Of the tile that loops for ever; more where its second run would not be done in a quarter of it."""

# --- options ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Options:
    procs: int
    output: Path
    size: tuple[int, int] | None
    tiles: int | None


def parse(argv: list[str]) -> Options:
    """The command line. Raises ConfigError with every problem at once; `--help` prints and raises SystemExit."""
    parser = OptionParser(
        prog="spooled-supervisor demo",
        description="Draw a Mandelbrot picture with CPU-bound jobs on all cores: an embedded server, a supervisor and "
        "its children, all of them gone at the end. One tile loops for ever and one crashes, so that you see what "
        "becomes of such jobs.",
    )
    parser.add_argument("--procs", metavar="N|auto", default="auto", help="children (default: auto, one for each CPU)")
    parser.add_argument("--output", metavar="PATH", default="mandelbrot.png", help="the picture (default: %(default)s)")
    parser.add_argument(
        "--size",
        metavar="WIDTHxHEIGHT",
        help=f"in pixels (default: as many as the CPUs draw in about {RENDERING_S:g} s)",
    )
    parser.add_argument(
        "--tiles",
        metavar="N",
        help=f"about so many jobs (default: {TILES}, more for many children or a large picture)",
    )
    given = parser.parse_args(argv)
    problems: list[str] = []
    procs = _whole("--procs", given.procs, 1, 1000, problems) if given.procs != "auto" else cpus_available()
    size = None if given.size is None else _size(given.size, problems)
    tiles = None if given.tiles is None else _whole("--tiles", given.tiles, MIN_TILES, MAX_TILES, problems)
    if size and tiles and size[0] * size[1] > tiles * MAX_TILE_PIXELS // 2:
        least = math.ceil(2 * size[0] * size[1] / MAX_TILE_PIXELS)
        problems.append(f"--tiles {tiles}: for a picture of {size[0]}x{size[1]} pixels at least {least} are needed")
    if problems:
        raise ConfigError(problems, exit_code=EX_USAGE)
    try:
        output = Path(given.output).resolve()  # the file and not a link to it: it is replaced by renaming
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, a NUL
        raise ConfigError(f"--output {given.output!r}: {error}", exit_code=EX_USAGE) from error
    if problem := output_problem(output):
        raise ConfigError(f"--output {given.output}: {problem}; give another --output PATH")
    return Options(procs, output, size, tiles)


def _whole(flag: str, text: str, low: int, high: int, problems: list[str]) -> int:
    if re.fullmatch(r"[0-9]{1,9}", text) and low <= int(text) <= high:
        return int(text)
    other = "auto or " if flag == "--procs" else ""
    problems.append(f"{flag} {text!r}: must be {other}a whole number from {low} to {high}")
    return low


def _size(text: str, problems: list[str]) -> tuple[int, int] | None:
    found = re.fullmatch(r"([0-9]{1,6})x([0-9]{1,6})", text)
    if found is not None:
        width, height = int(found[1]), int(found[2])
        if all(MIN_SIDE <= side <= MAX_SIDE for side in (width, height)):
            return width, height
    problems.append(f"--size {text!r}: must be WIDTHxHEIGHT, each a whole number from {MIN_SIDE} to {MAX_SIDE}")
    return None


def check_installed() -> None:
    """The embedded server needs packages of an extra. Raises ConfigError that names it."""
    missing = [name for name in ("starlette", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"the demo starts the embedded server, which needs {' and '.join(missing)}: "
            "pip install 'spooled-supervisor[dev-server]'",
            exit_code=EX_CONFIG,
        )


# --- how much there is to do ------------------------------------------------------------------------------------------


def seconds_per_pixel() -> float:
    """How fast this machine is now: a coarse version of the picture, timed by the wall clock, as that is waited for."""
    width, height = SAMPLE
    whole = Tile(1, 0, 0, width, height)
    began = time.perf_counter()
    for _ in rows(payload(whole, width, height)):
        pass
    return (time.perf_counter() - began) / (width * height)


def affordable_size(pixel_s: float, procs: int) -> tuple[int, int]:
    """The size that so many children draw in about RENDERING_S."""
    steps = math.sqrt(RENDERING_S * procs / pixel_s / (SIZE_STEP[0] * SIZE_STEP[1]))
    low, high = SMALLEST[0] // SIZE_STEP[0], LARGEST[0] // SIZE_STEP[0]
    chosen = max(low, min(high, int(steps)))
    return chosen * SIZE_STEP[0], chosen * SIZE_STEP[1]


@dataclass(frozen=True, slots=True)
class Plan:
    """What will be drawn, by whom, and where it goes."""

    procs: int
    output: Path
    width: int
    height: int
    tiles: tuple[Tile, ...]
    endless_limit_s: int

    @classmethod
    def of(cls, options: Options, pixel_s: float) -> Plan:
        cpus = min(options.procs, cpus_available())
        width, height = options.size or affordable_size(pixel_s, cpus)
        pixels = width * height
        count = options.tiles or max(TILES, TILES_PER_CHILD * options.procs)
        # Tiles are not all of one size, so half of what fits is planned for.
        count = min(pixels, MAX_TILES, max(count, math.ceil(2 * pixels / MAX_TILE_PIXELS)))
        tiles = tuple(cut(width, height, count))
        crowd = options.procs / cpus  # children that share a CPU are slower by so much
        limit_s = max(ENDLESS_LIMIT_S, math.ceil(4 * crowd * pixel_s * pixels / len(tiles)))
        return cls(options.procs, options.output, width, height, tiles, limit_s)

    @property
    def children(self) -> str:
        return "1 child" if self.procs == 1 else f"{self.procs} children"

    @property
    def title(self) -> str:
        size = f"{self.width} x {self.height} pixels"
        return f"Mandelbrot set: {size} in {len(self.tiles)} tiles, drawn by {self.children}"

"""The Mandelbrot set, one tile for each job: pure Python, all of it CPU time.

This is a complete app. `spooled-supervisor demo` runs it, and so would any supervisor:

    spooled-supervisor --app spooled_supervisor.demo.mandelbrot --procs 4

A job's payload says which rectangle of the complex plane to draw, `ctx` is how its handler talks to the supervisor, and
what the handler returns is the job's result. Everything at module level happens once, before children are forked: they
all share the colour table that the import of `picture` makes.
"""

from __future__ import annotations

import base64
import math
import os
import resource
import signal
import time
from collections.abc import Iterator
from typing import Any

from spooled_supervisor import App, JobContext
from spooled_supervisor.demo.picture import INSIDE, colour

QUEUE = "mandelbrot"
ESCAPED = 16.0
"""A point this far out never comes back. 2 would do, but the later it is noticed, the smoother are the colours."""
ROWS_PER_REPORT = 16

app = App()


@app.handler(QUEUE)
def draw_tile(ctx: JobContext) -> dict[str, Any]:
    """Draw one tile; the result holds its pixels (three bytes each, top row first) and the CPU time they took."""
    tile = ctx.payload
    if ctx.retry_count == 0:  # only the first run: the service brings the job back, and then it goes well
        have_mishap(tile.get("mishap"))

    cpu_s = time.process_time()
    pixels = bytearray()
    for row, colours in enumerate(rows(tile)):
        ctx.signal.raise_if_aborted()  # told to stop, because the supervisor stops or the time is up: leave at once
        if row % ROWS_PER_REPORT == 0:
            ctx.progress(100 * row / tile["height"])
        pixels += colours
    cpu_s = time.process_time() - cpu_s
    return {"pixels": base64.b64encode(pixels).decode("ascii"), "cpu_s": round(cpu_s, 4)}


def rows(tile: dict[str, Any]) -> Iterator[bytes]:
    """The tile's rows of pixels, from the top. `left` and `top` are its corner in the plane, `step` a pixel's side."""
    step, limit = tile["step"], tile["limit"]
    for row in range(tile["height"]):
        imag = tile["top"] - (row + 0.5) * step
        points = (complex(tile["left"] + (column + 0.5) * step, imag) for column in range(tile["width"]))
        yield b"".join([colour_of(point, limit) for point in points])


def colour_of(point: complex, limit: int) -> bytes:
    """Points whose orbit stays near zero for `limit` turns are black, the others coloured by how soon they escape."""
    z = 0j
    for turn in range(limit):
        z = z * z + point
        if abs(z) > ESCAPED:
            # A whole number of turns would show as bands; how far it has gone beyond the border is the fraction.
            return colour(turn + 1 - math.log2(math.log(abs(z)) / math.log(ESCAPED)))
    return INSIDE


# --- what goes wrong on purpose ---------------------------------------------------------------------------------------


def have_mishap(kind: str | None) -> None:
    """The two things that no `try` can catch, and for which a supervisor keeps jobs in processes of their own."""
    if kind == "crash":
        crash()
    elif kind == "hang":
        loop_for_ever()


def crash() -> None:
    """What a bug in a native library does to its process."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # nobody wants to find a core file after a demo
    os.kill(os.getpid(), signal.SIGSEGV)


def loop_for_ever() -> None:
    """What the limit on turns is there for: zero never escapes."""
    z = 0j
    while abs(z) <= ESCAPED:
        z = z * z

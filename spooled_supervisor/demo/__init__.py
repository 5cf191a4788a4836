"""The demo: a Mandelbrot picture, drawn by CPU-bound jobs on all cores.

`mandelbrot` is the app, and the first example of one; `picture` knows pixels, tiles and colours; `progress` what has
become of tiles and children; `display` shows that; `programs` starts and ends the two programs; `show` is the command.
"""

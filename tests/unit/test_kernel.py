"""What the standard library has no words for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

SLEEPER = """
import faulthandler, signal, sys
from spooled_supervisor import kernel
numbers = [int(word) for word in sys.argv[1:]]
seen = []
for number in numbers:
    signal.signal(number, lambda number, _: seen.append(number))
faulthandler.register(signal.SIGRTMAX)
kernel.widen_signal_stack()
print("ready", flush=True)
while len(seen) < len(numbers):
    signal.pause()
print(sorted(seen) == sorted(numbers), flush=True)
"""


def test_a_process_survives_all_signals_at_once() -> None:
    """Python's handlers run on the alternate stack, which faulthandler makes with room for a few frames only."""
    numbers = [signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGTERM, signal.SIGWINCH, signal.SIGALRM]
    numbers += [signal.SIGURG, signal.SIGIO, signal.SIGPROF, *range(signal.SIGRTMIN, signal.SIGRTMIN + 20)]
    line = [sys.executable, "-c", SLEEPER, *(str(int(number)) for number in numbers)]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as sleeper:
        assert sleeper.stdout is not None
        assert sleeper.stdout.readline() == "ready\n"
        os.kill(sleeper.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, sleeper.pid, os.WSTOPPED)
        for number in numbers:
            os.kill(sleeper.pid, number)
        os.kill(sleeper.pid, signal.SIGCONT)
        assert sleeper.stdout.readline() == "True\n"
        assert sleeper.wait() == 0

"""The control socket: who may speak, what is answered, and whose file it is."""

# ruff: noqa: ASYNC110, ASYNC222, ASYNC240 # short looks at small files; nobody else is on this loop

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import resource
import select
import socket
import stat
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from spooled_supervisor import control, timing
from spooled_supervisor.control import MAX_LINE, MAX_PATH, Answer, ControlSocket, Refused, ask, descends_from, reachable
from spooled_supervisor.errors import ConfigError
from spooled_supervisor.processes import Stat, parse_stat

LIMIT_S = 10.0
PING = b'{"command": "ping"}\n'
PONG = {"ok": True, "text": "pong"}


async def ping(_request: Mapping[str, Any]) -> Answer:
    return Answer("pong")


async def refuse(request: Mapping[str, Any]) -> Answer:
    raise Refused(f"not {request['what']}")


async def tell(_request: Mapping[str, Any]) -> Answer:
    return Answer("", more={"status": {"children": [1, 2]}})


COMMANDS = {"ping": ping, "refuse": refuse, "tell": tell}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "control.sock"


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """On the loop of production; a hanging test is a failed one."""

    async def limited() -> None:
        async with asyncio.timeout(LIMIT_S):
            await main()

    with asyncio.Runner(loop_factory=timing.new_event_loop, debug=True) as runner:
        runner.run(limited())


class Peer:
    """A connection, as any program could make it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def say(self, data: bytes) -> dict[str, Any]:
        """These bytes, and the answer to them."""
        self.writer.write(data)
        return dict(json.loads(await self.reader.readline()))

    async def is_cut(self) -> bool:
        """Nothing more comes."""
        with contextlib.suppress(ConnectionError):
            return await self.reader.read() == b""
        return True


@contextlib.asynccontextmanager
async def peer(path: Path) -> AsyncIterator[Peer]:
    with reachable(path) as name:
        reader, writer = await asyncio.open_unix_connection(name)
    try:
        yield Peer(reader, writer)
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


def listening(path: Path) -> ControlSocket:
    return ControlSocket(path, COMMANDS)


# --- answers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        (PING, PONG),
        (b'{"command":"ping","more":[1,{}]}\n', PONG),
        (b'{"command": "refuse", "what": "now"}\n', {"ok": False, "text": "not now"}),
        (b'{"command": "tell"}\n', {"ok": True, "text": "", "status": {"children": [1, 2]}}),
    ],
)
def test_a_command_is_answered_with_what_it_did_or_why_not(path: Path, line: bytes, answer: dict[str, Any]) -> None:
    async def main() -> None:
        async with listening(path), peer(path) as one:
            assert await one.say(line) == answer

    run(main)


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (b"\n", "not a JSON object"),
        (b"quiet\n", "not a JSON object"),
        (b"GET /status HTTP/1.1\r\n", "not a JSON object"),
        (b"\xff\xfe\x00\n", "not a JSON object"),
        (b"[" * 30_000 + b"\n", "not a JSON object"),
        (b"[]\n", "unknown command; the commands are: ping, refuse, tell"),
        (b"null\n", "unknown command; the commands are: ping, refuse, tell"),
        (b"{}\n", "unknown command; the commands are: ping, refuse, tell"),
        (b'{"command": ["ping"]}\n', "unknown command; the commands are: ping, refuse, tell"),
        (b'{"command": null}\n', "unknown command; the commands are: ping, refuse, tell"),
        (b'{"command": "PING"}\n', "unknown command; the commands are: ping, refuse, tell"),
        (b'{"command": "\\ud800"}\n', "unknown command; the commands are: ping, refuse, tell"),
    ],
)
def test_a_garbage_line_is_refused_and_the_connection_goes_on(path: Path, line: bytes, text: str) -> None:
    async def main() -> None:
        async with listening(path), peer(path) as one:
            assert await one.say(line) == {"ok": False, "text": text}
            assert await one.say(PING) == PONG

    run(main)


def test_a_request_in_pieces_and_many_at_once_are_answered_in_order(path: Path) -> None:
    async def main() -> None:
        async with listening(path), peer(path) as one:
            for n in range(len(PING) - 1):
                one.writer.write(PING[n : n + 1])
                await one.writer.drain()
            assert await one.say(PING[-1:]) == PONG
            one.writer.write(PING + b"x\n" + PING)
            answers = [json.loads(await one.reader.readline())["ok"] for _ in range(3)]
            assert answers == [True, False, True]

    run(main)


def test_an_answer_with_anything_in_it_stays_one_line() -> None:
    line = Answer("two\nlines \ud800 \u2028").line()
    assert line.count(b"\n") == 1
    assert json.loads(line)["text"] == "two\nlines \ud800 \u2028"


# --- peers that do not behave -----------------------------------------------------------------------------------------


def test_a_huge_line_ends_its_connection_only(path: Path) -> None:
    async def main() -> None:
        async with listening(path), peer(path) as good, peer(path) as bad:
            bad.writer.write(b"x" * (4 * MAX_LINE))
            assert await bad.is_cut()
            assert await good.say(PING) == PONG

    run(main)


def test_a_peer_that_says_nothing_is_dropped_after_the_limit(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "READ_TIMEOUT_S", 0.05)

    async def main() -> None:
        async with listening(path), peer(path) as silent, peer(path) as half:
            half.writer.write(PING[:-1])
            assert await silent.is_cut()
            assert await half.is_cut()
            async with peer(path) as good:
                assert await good.say(PING) == PONG

    run(main)


def test_a_peer_that_never_reads_is_dropped_after_the_limit(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropped at once: what it has not read would else be kept for as long as it likes."""
    monkeypatch.setattr(control, "READ_TIMEOUT_S", 0.05)

    async def much(_request: Mapping[str, Any]) -> Answer:
        return Answer("y" * (4 << 20))

    async def main() -> None:
        async with ControlSocket(path, {"much": much, "ping": ping}):
            with socket.socket(socket.AF_UNIX) as deaf:
                deaf.connect(str(path))
                deaf.setblocking(False)
                deaf.sendall(b'{"command": "much"}\n')
                async with peer(path) as good:
                    assert await good.say(PING) == PONG
                hung_up = select.poll()
                hung_up.register(deaf, 0)
                while not hung_up.poll(0):
                    await asyncio.sleep(0.005)

    run(main)


def test_a_peer_that_leaves_without_its_answer_disturbs_nobody(path: Path) -> None:
    async def main() -> None:
        async with listening(path):
            for _ in range(20):
                async with peer(path) as rude:
                    rude.writer.write(PING)
                    rude.writer.transport.abort()
            async with peer(path) as good:
                assert await good.say(PING) == PONG

    run(main)


def test_many_connections_are_all_answered(path: Path) -> None:
    async def main() -> None:
        async def one() -> dict[str, Any]:
            async with peer(path) as it:
                return await it.say(PING)

        async with listening(path):
            assert await asyncio.gather(*[one() for _ in range(100)]) == [PONG] * 100

    run(main)


def test_a_slow_command_does_not_hold_up_the_others(path: Path) -> None:
    async def main() -> None:
        gate = asyncio.Event()

        async def wait(_request: Mapping[str, Any]) -> Answer:
            await gate.wait()
            return Answer("at last")

        async with ControlSocket(path, {"wait": wait, "ping": ping}), peer(path) as slow, peer(path) as quick:
            slow.writer.write(b'{"command": "wait"}\n')
            assert await quick.say(PING) == PONG
            gate.set()
            assert json.loads(await slow.reader.readline()) == {"ok": True, "text": "at last"}

    run(main)


# --- who may speak ----------------------------------------------------------------------------------------------------

INIT, SHELL, SUPERVISOR, CHILD, PROGRAM = 1, 100, 200, 300, 400
PARENTS = {INIT: 0, SHELL: INIT, SUPERVISOR: INIT, CHILD: SUPERVISOR, PROGRAM: CHILD}


@pytest.fixture
def parents(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """Who is whose child; a test may change it."""
    table = dict(PARENTS)

    def read(pid: int) -> Stat | None:
        return _stat(table[pid]) if pid in table else None

    monkeypatch.setattr(control, "read_stat", read)
    return table


def _stat(ppid: int) -> Stat:
    return parse_stat(b"1 (sh) S %d 1 1 0 -1 4194560 0 0 0 0 0 0 0 0 20 0 1 0 5 0 0 0 " % ppid + b"0 " * 40)


@pytest.mark.parametrize(
    ("pid", "descends"), [(INIT, False), (SHELL, False), (SUPERVISOR, False), (CHILD, True), (PROGRAM, True)]
)
def test_who_descends_from_the_supervisor(parents: dict[int, int], pid: int, descends: bool) -> None:
    assert descends_from(pid, SUPERVISOR) is descends


def test_a_peer_of_another_pid_namespace_does_not_descend(parents: dict[int, int]) -> None:
    assert descends_from(0, SUPERVISOR) is False


@pytest.mark.parametrize("hidden", [PROGRAM, CHILD], ids=["itself", "its parent"])
@pytest.mark.parametrize(("refusal", "descends"), [(PermissionError, False), (None, True)])
def test_who_is_hidden_from_us_is_another_users_unless_it_may_be_signalled(
    parents: dict[int, int],
    monkeypatch: pytest.MonkeyPatch,
    hidden: int,
    refusal: type[OSError] | None,
    descends: bool,
) -> None:
    """With hidepid a job of ours can hide, too: PR_SET_DUMPABLE."""
    asked = signals(monkeypatch, refusal)
    del parents[hidden]
    assert descends_from(PROGRAM, SUPERVISOR) is descends
    assert asked == [(hidden, 0)]


def test_a_peer_that_has_ended_may_have_been_anybodys(parents: dict[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    signals(monkeypatch, ProcessLookupError)
    del parents[SHELL]
    assert descends_from(SHELL, SUPERVISOR) is True


def signals(monkeypatch: pytest.MonkeyPatch, refusal: type[OSError] | None) -> list[tuple[int, int]]:
    """What is sent from now on, which the kernel answers like this."""
    sent = []

    def kill(pid: int, number: int) -> None:
        sent.append((pid, number))
        if refusal is not None:
            raise refusal(errno.EPERM if refusal is PermissionError else errno.ESRCH, "no")

    monkeypatch.setattr(os, "kill", kill)
    return sent


@pytest.mark.parametrize(("heir", "descends"), [(INIT, False), (SUPERVISOR, True)])
def test_a_parent_that_ends_meanwhile_does_not_hide_the_next_one(
    parents: dict[int, int], monkeypatch: pytest.MonkeyPatch, heir: int, descends: bool
) -> None:
    def kill(pid: int, number: int) -> None:
        parents[PROGRAM] = heir
        raise ProcessLookupError(errno.ESRCH, "no such process")

    monkeypatch.setattr(os, "kill", kill)
    del parents[CHILD]
    assert descends_from(PROGRAM, SUPERVISOR) is descends


def test_an_endless_line_of_parents_is_not_trusted(parents: dict[int, int]) -> None:
    parents[SHELL] = SHELL
    assert descends_from(SHELL, SUPERVISOR) is True


def test_a_peer_that_descends_from_a_job_is_refused_whatever_it_asks(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "descends_from", lambda pid, ancestor: (pid, ancestor) == (os.getpid(), os.getpid()))

    async def main() -> None:
        async with listening(path), peer(path) as job:
            for line in (PING, b'{"command": "tell"}\n', b"garbage\n"):
                answer = await job.say(line)
                assert answer == {"ok": False, "text": "refused: a job may not control its supervisor"}

    run(main)


def test_a_peer_is_refused_with_the_true_reason_while_no_descriptor_is_free(path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)

    async def main() -> None:
        async with listening(path), peer(path) as one:
            assert await one.say(PING) == PONG
            resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
            try:
                answer = await one.say(PING)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            assert answer["ok"] is False
            assert answer["text"].endswith("as no file can be opened: Too many open files")
            assert await one.say(PING) == PONG

    run(main)


def test_a_peer_that_has_ended_before_it_was_looked_at_is_refused(path: Path) -> None:
    """It sends and ends at once: nobody can tell any more whose child it was, so it is not obeyed."""
    obeyed = []

    async def stop(_request: Mapping[str, Any]) -> Answer:
        obeyed.append("stop")
        return Answer("stopping")

    async def main() -> None:
        async with ControlSocket(path, {"stop": stop}):
            pid = os.fork()
            if pid == 0:
                with contextlib.suppress(BaseException), socket.socket(socket.AF_UNIX) as sock:
                    sock.connect(str(path))
                    sock.sendall(b'{"command": "stop"}\n')
                    sock.shutdown(socket.SHUT_WR)
                os._exit(0)
            os.waitpid(pid, 0)
            async with peer(path) as one:  # served after it
                await one.say(b'{"command": "none"}\n')

    run(main)
    assert obeyed == []


# --- the file ---------------------------------------------------------------------------------------------------------


def test_the_file_is_its_owners_only_and_goes_with_the_supervisor(tmp_path: Path) -> None:
    path = tmp_path / "made" / "for it" / "c.sock"

    async def main() -> None:
        before = os.umask(0)
        try:
            async with listening(path):
                found = path.lstat().st_mode
                assert stat.S_ISSOCK(found)
                assert stat.S_IMODE(found) == 0o600
                assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
            assert not path.exists()
            assert os.umask(0) == 0, "the mask is put back"
        finally:
            os.umask(before)

    run(main)


def test_the_file_of_a_dead_supervisor_is_replaced(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
        dead.listen()

    async def main() -> None:
        async with listening(path), peer(path) as one:
            assert await one.say(PING) == PONG
        assert not path.exists()

    run(main)


def test_a_living_supervisor_refuses_the_second_one_and_keeps_its_file(path: Path) -> None:
    async def main() -> None:
        async with listening(path):
            with pytest.raises(ConfigError, match=r"another supervisor listens on control.sock"):
                await listening(path).__aenter__()
            async with peer(path) as one:
                assert await one.say(PING) == PONG

    run(main)


def test_a_supervisor_that_is_stopped_and_has_no_room_for_a_connection_counts_as_living(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "PROBE_LIMIT_S", 0.05)
    with contextlib.ExitStack() as stack:
        halted = stack.enter_context(socket.socket(socket.AF_UNIX))
        halted.bind(str(path))
        halted.listen(0)
        with contextlib.suppress(BlockingIOError):
            for _ in range(10):
                one = stack.enter_context(socket.socket(socket.AF_UNIX))
                one.setblocking(False)
                one.connect(str(path))

        async def main() -> None:
            with pytest.raises(ConfigError, match=r"control socket .*give --control-socket"):
                await listening(path).__aenter__()

        run(main)
        assert path.exists()


@pytest.mark.parametrize("make", [Path.touch, Path.mkdir, lambda path: path.symlink_to("nowhere")])
def test_what_is_no_socket_is_never_removed(path: Path, make: Callable[[Path], None]) -> None:
    make(path)

    async def main() -> None:
        with pytest.raises(ConfigError, match=r"is there and is no socket \(give --control-socket\)"):
            await listening(path).__aenter__()

    run(main)
    assert path.exists() or path.is_symlink()


def test_a_directory_that_cannot_be_made_is_a_complaint_with_a_way_out(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    async def main() -> None:
        with pytest.raises(ConfigError, match=r"control socket .*/file/c.sock: .* \(give --control-socket\)"):
            await listening(tmp_path / "file" / "c.sock").__aenter__()

    run(main)


def test_a_file_that_is_another_ones_by_now_is_left(path: Path) -> None:
    async def main() -> None:
        async with listening(path):
            path.unlink()
            path.write_text("somebody else's")
        assert path.read_text() == "somebody else's"

    run(main)


@pytest.mark.parametrize("length", [MAX_PATH, MAX_PATH + 1, 300])
def test_a_path_of_any_length_is_bound_reached_and_removed(length: int) -> None:
    with tempfile.TemporaryDirectory() as short:
        room = length - len(os.fsencode(short)) - len("/c.sock")
        names = ["", *("d" * (min(50, room - start) - 1) for start in range(0, room - 1, 50))]
        path = Path(short + "/".join(names), "c.sock")
        assert len(os.fsencode(path)) == length
        _bind_and_reach(path)


def _bind_and_reach(path: Path) -> None:

    async def main() -> None:
        async with listening(path), peer(path) as one:
            with pytest.raises(ConfigError):
                await listening(path).__aenter__()
            assert await one.say(PING) == PONG
            assert stat.S_IMODE(path.lstat().st_mode) == 0o600
        assert not path.exists()

    run(main)


# --- the command line's end -------------------------------------------------------------------------------------------


@contextlib.contextmanager
def served(path: Path, answer: bytes | None) -> Iterator[list[bytes]]:
    """Somebody who takes one request and says this; None: nothing, until the peer leaves."""
    got: list[bytes] = []
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        listener.settimeout(LIMIT_S)

        def serve() -> None:
            sock, _ = listener.accept()
            with sock, sock.makefile("rb") as file:
                got.append(file.readline())
                if answer is None:
                    file.read()
                else:
                    sock.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield got
        finally:
            thread.join()


def test_a_question_is_one_line_and_so_is_its_answer(path: Path) -> None:
    with served(path, b'{"ok": true, "text": "done"}\nmore') as got:
        assert ask(path, {"command": "scale", "n": 3}, timeout_s=LIMIT_S) == {"ok": True, "text": "done"}
    assert [json.loads(line) for line in got] == [{"command": "scale", "n": 3}]


def test_nobody_there_is_an_os_error(path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        ask(path, {"command": "ping"}, timeout_s=LIMIT_S)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with pytest.raises(ConnectionRefusedError):
        ask(path, {"command": "ping"}, timeout_s=LIMIT_S)


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n", b"[]\n", b"null\n", b'{"ok": tr'])
def test_an_answer_without_sense_is_a_value_error(path: Path, answer: bytes) -> None:
    with served(path, answer), pytest.raises(ValueError, match=r".+"):
        ask(path, {"command": "ping"}, timeout_s=LIMIT_S)


def test_a_supervisor_that_does_not_answer_is_a_timeout(path: Path) -> None:
    with served(path, None), pytest.raises(TimeoutError):
        ask(path, {"command": "ping"}, timeout_s=0.05)

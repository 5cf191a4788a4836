"""What is published: sdist and wheel hold what they should, and the wheel alone gives a working daemon.

The sdist is made from this tree and the wheel from the sdist, as whoever packages it would. The wheel is installed into
an environment of its own, far from the source tree, first without extras. Needs an index to install from.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.daemon import PATIENCE_S
from tests.support.devserver import Producer

REPOSITORY = Path(__file__).resolve().parents[2]
SHARED = {
    "alert-rules": "alert-rules.yml",
    "grafana-dashboard": "grafana-dashboard.json",
    "systemd-child-cgroups": "child-cgroups.conf",
    "systemd-unit": "spooled-supervisor.service",
    "config": "spooled-supervisor.toml",
}
"""What `export` prints, by name."""
DATA = {"py.typed", "telemetry/page.html", "proto/spooled.proto", "proto/spooled_pb2.pyi"}
CORE = {"httpx", "msgspec", "prometheus-client", "psutil", "setproctitle"}
KEY = "sp_test_packaging_0123456789"
PIP_LIMIT_S = 150.0

pytestmark = pytest.mark.timeout(240)

APP = """
from spooled_supervisor import App

app = App()


@app.handler("sums")
def add(ctx):
    return sum(ctx.payload)
"""

INSTALLED = """
import importlib.metadata, json, re, sys
sys.path.insert(0, sys.argv[1])  # pip's own copy of what parses requirements
from pip._vendor.packaging.requirements import Requirement
sys.path.pop(0)

def name_of(text):
    return re.sub(r"[-_.]+", "-", text).lower()

def closure(name, seen):
    if name not in seen:
        seen.add(name)
        for text in importlib.metadata.requires(name) or ():
            wanted = Requirement(text)
            if wanted.marker is None or wanted.marker.evaluate({"extra": ""}):
                closure(name_of(wanted.name), seen)
    return seen

print(json.dumps({
    "installed": sorted(name_of(dist.metadata["Name"]) for dist in importlib.metadata.distributions()),
    "direct": sorted(name_of(Requirement(text).name) for text in importlib.metadata.requires("spooled-supervisor")
                     if "extra ==" not in text),
    "needed": sorted(closure("spooled-supervisor", set())),
}))
"""


class Venv:
    """An environment without pip of its own; ours installs into it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.python = path / "bin" / "python"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", path], check=True)

    def install(self, *what: str) -> None:
        """Skips the test if there is no index to install from."""
        line = [sys.executable, "-m", "pip", "--python", str(self.python), "install", "--quiet"]
        line += ["--disable-pip-version-check", "--no-input", *what]
        env = {**os.environ, "PYTHONWARNINGS": ""}  # pip's warnings are pip's
        done = subprocess.run(line, env=env, capture_output=True, text=True, check=False, timeout=PIP_LIMIT_S)
        if done.returncode != 0 and re.search(
            r"No matching distribution|ConnectionError|No module named pip", done.stderr
        ):
            pytest.skip(f"cannot install {' '.join(what)}: {done.stderr.strip().splitlines()[-1]}")
        assert done.returncode == 0, done.stderr

    def run(self, *words: str | Path, cwd: Path, code: int = 0) -> str:
        """Standard output of a program of the environment, of both streams if it must fail."""
        program, *rest = words
        done = subprocess.run(
            [self.path / "bin" / program, *rest],
            cwd=cwd,
            env=clean_environment(),
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE_S,
        )
        assert done.returncode == code, f"{words}: exit code {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout if code == 0 else done.stdout + done.stderr


def clean_environment() -> dict[str, str]:
    """Nothing that could lead to the source tree; warnings are errors."""
    return {"PATH": "/usr/bin:/bin", "HOME": "/nonexistent", "LANG": "C.UTF-8", "PYTHONWARNINGS": "error"}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The sdist, and the wheel that is made from it."""
    place = tmp_path_factory.mktemp("built")
    builder = Venv(place / "builder")
    builder.install("hatchling")
    hatchling = [str(builder.python), "-m", "hatchling", "build"]
    subprocess.run([*hatchling, "-t", "sdist", "-d", str(place)], cwd=REPOSITORY, check=True, capture_output=True)
    (sdist,) = place.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(place, filter="data")
    source = place / sdist.name.removesuffix(".tar.gz")
    subprocess.run([*hatchling, "-t", "wheel", "-d", str(place)], cwd=source, check=True, capture_output=True)
    (wheel,) = place.glob("*.whl")
    return sdist, wheel


@pytest.fixture(scope="module")
def core(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Venv:
    """An environment with the wheel and no extra."""
    venv = Venv(tmp_path_factory.mktemp("core") / "venv")
    venv.install(str(built[1]))
    return venv


@pytest.fixture(scope="module")
def full(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Venv:
    """An environment with the wheel and the embedded server's extra."""
    venv = Venv(tmp_path_factory.mktemp("full") / "venv")
    venv.install(f"{built[1]}[dev-server]")
    return venv


def package_files() -> set[str]:
    root = REPOSITORY / "spooled_supervisor"
    names = {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}
    return {name for name in names if "__pycache__" not in name and not name.startswith(".")}  # tools' caches


# --- what is in it -------------------------------------------------------------------------------------------------


def test_package_holds_code_and_only_the_data_that_it_needs() -> None:
    assert {name for name in package_files() if not name.endswith(".py")} == DATA


def test_wheel_holds_the_package_the_shared_files_and_nothing_else(built: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(built[1]) as wheel:
        names = set(wheel.namelist())
        for name in SHARED.values():
            original = (REPOSITORY / "systemd" / name).read_bytes()
            assert wheel.read(f"spooled_supervisor/share/{name}") == original
    (info,) = {name.split("/")[0] for name in names if ".dist-info/" in name}
    meta = {f"{info}/{name}" for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE")}
    code = {f"spooled_supervisor/{name}" for name in package_files()}
    share = {f"spooled_supervisor/share/{name}" for name in SHARED.values()}
    assert names == code | share | meta


def test_sdist_holds_the_source_the_tests_and_the_papers(built: tuple[Path, Path]) -> None:
    with tarfile.open(built[0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    tops = {name.split("/")[0] for name in names}
    papers = {"README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "Makefile", "pyproject.toml", "PKG-INFO"}
    assert tops == papers | {"spooled_supervisor", "systemd", "tests", ".gitignore"}
    assert {name for name in names if name.startswith("systemd/")} == {f"systemd/{name}" for name in SHARED.values()}
    assert {name for name in names if name.startswith("spooled_supervisor/")} == {
        f"spooled_supervisor/{name}" for name in package_files()
    }
    assert not [name for name in names if "__pycache__" in name or name.endswith((".pyc", ".png", ".db", ".log"))]


def test_core_install_brings_the_five_dependencies_and_what_they_need(core: Venv, tmp_path: Path) -> None:
    pip = importlib.util.find_spec("pip")
    assert pip is not None
    assert pip.origin is not None
    place = Path(pip.origin).parents[1]
    found = json.loads(core.run("python", "-c", INSTALLED, place, cwd=tmp_path))
    assert set(found["direct"]) == CORE
    assert found["installed"] == found["needed"]


# --- what it does --------------------------------------------------------------------------------------------------


def test_program_explains_itself(core: Venv, tmp_path: Path) -> None:
    where = core.run("python", "-c", "import spooled_supervisor as s; print(s.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(core.path)
    assert "ctl COMMAND" in core.run("spooled-supervisor", "--help", cwd=tmp_path)
    assert "--shutdown-timeout" in core.run("spooled-supervisor", "run", "--help", cwd=tmp_path)
    assert re.fullmatch(r"spooled-supervisor \d+\.\d+\S*\n", core.run("spooled-supervisor", "--version", cwd=tmp_path))
    assert core.run("python", "-m", "spooled_supervisor", "--version", cwd=tmp_path).startswith("spooled-supervisor ")


@pytest.mark.parametrize(("what", "name"), SHARED.items())
def test_export_prints_each_file_to_the_byte(core: Venv, tmp_path: Path, what: str, name: str) -> None:
    assert core.run("spooled-supervisor", "export", what, cwd=tmp_path) == (REPOSITORY / "systemd" / name).read_text()


def write_app(place: Path) -> None:
    (place / "jobs.py").write_text(APP)
    (place / "key").write_text(KEY)
    (place / "key").chmod(0o600)


def test_what_needs_an_extra_says_which(core: Venv, tmp_path: Path) -> None:
    assert "spooled-supervisor[dev-server]" in core.run("spooled-supervisor", "dev-server", cwd=tmp_path, code=78)
    write_app(tmp_path)
    options = ("--app", "jobs", "--api-key-file", "key", "--transport", "grpc-stream", "--state-dir", "state")
    assert "spooled-supervisor[grpc]" in core.run("spooled-supervisor", "run", *options, cwd=tmp_path, code=64)


def test_every_module_of_the_core_can_be_imported_without_extras(core: Venv, tmp_path: Path) -> None:
    names = [
        "spooled_supervisor." + name.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        for name in sorted(package_files())
        if name.endswith(".py")
        and name not in ("__init__.py", "__main__.py")
        and not re.search(r"devserver/|proto/|grpc|demo/|testing/", name)
    ]
    core.run(
        "python", "-W", "error", "-c", f"import importlib\nfor n in {names!r}: importlib.import_module(n)", cwd=tmp_path
    )


def test_daemon_and_embedded_server_run_with_no_source_tree_around(full: Venv, tmp_path: Path) -> None:
    write_app(tmp_path)
    checked = full.run("spooled-supervisor", "check", "--app", "jobs", "--api-key-file", "key", cwd=tmp_path)
    assert checked.startswith("ok: jobs")
    with running(full, tmp_path, "dev-server", "--port", "0", "--api-key", KEY) as server:
        assert server.stdout is not None
        line = server.stdout.readline()
        url = re.search(r"http://\S+", line)
        assert url is not None, line
        options = ["--app", "jobs", "--api-key-file", "key", "--api-url", url[0], "--procs", "2"]
        options += ["--state-dir", "state", "--http-listen", "127.0.0.1:0", "--poll-interval", "0.1"]
        with running(full, tmp_path, "run", *options), Producer(url[0], KEY) as client:
            jobs = client.bulk("sums", [[n, n] for n in range(20)])
            for n, job_id in enumerate(jobs):
                assert client.wait_for(job_id, "completed", timeout_s=PATIENCE_S)["result"] == 2 * n
            status = full.run("spooled-supervisor", "status", "--state-dir", "state", cwd=tmp_path)
            assert "jobs" in status or "sums" in status


@contextlib.contextmanager
def running(venv: Venv, cwd: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    """The program until the block ends; then it must drain and exit with 0."""
    log = cwd / f"{words[0]}.log"
    with log.open("w") as errors:
        process = subprocess.Popen(
            ["/usr/bin/setpriv", "--pdeathsig", "KILL", venv.path / "bin" / "spooled-supervisor", *words],
            cwd=cwd,
            env=clean_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
    assert process.stdout is not None
    try:
        yield process
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0, log.read_text()
        assert "Traceback" not in log.read_text()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()

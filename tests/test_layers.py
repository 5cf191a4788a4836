"""The order of the modules: each imports only from those above it, so that there is no cycle and no short cut.

Imports inside functions count, and those for type checkers too. Beside it: which foreign libraries come in through
which door, what a handler author or a child must not have to load, and the examples in docstrings.
"""

from __future__ import annotations

import ast
import doctest
import functools
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import spooled_supervisor

PACKAGE = "spooled_supervisor"
ROOT = Path(spooled_supervisor.__file__).parent

LAYERS = (
    "errors timing highfd kernel job events app __init__",
    "options config",
    "results frames lifecycle leases",
    "exits processes cgroups hunt family resources tidy",
    "outbox poison",
    "rates wording output childmetrics childloop child forkserver forkclient copies",
    "childcgroups childlink plan descriptors graveyard pool",
    "troubles proto.*",
    "api.__init__ api.gate api.answers api.values api.messages api.claims api.service api.wire api.httpx_wire",
    "api.exchange api.rest api.grpc_answers api.grpc_wire api.grpc_library api.grpc api.grpc_process",
    "api.transports api.events",
    "breaker keys statedir pressure",
    "claiming streaming progress settling holding registration",
    "telemetry.__init__ telemetry.texts telemetry.stream telemetry.lines telemetry.logs telemetry.systemd",
    "telemetry.snapshot telemetry.series telemetry.foreign telemetry.gauges telemetry.metrics telemetry.exchange",
    "telemetry.history telemetry.page telemetry.endpoints",
    "observer control commands checking supervisor",
    "client workerevents telling hosting worker",
    "devserver.* demo.* testing.*",
    "statusview operating exporting cli __main__",
)
"""From the bottom up. `name.*` is a sub-package whose modules are free among themselves."""
ORDER = " ".join(LAYERS).split()

DOORS = {
    "httpx": ["api.httpx_wire", "client", "demo.*", "testing.*"],
    "httpcore": ["api.httpx_wire"],
    "pytest": ["testing.pytest_plugin"],
    "prometheus_client": ["childmetrics", "telemetry.*"],
    "psutil": ["processes", "resources", "observer"],
    "setproctitle": ["kernel"],
    "starlette": ["devserver.*"],
    "grpc": ["api.grpc", "api.grpc_library", "devserver.*", "proto.*"],
    "hpack": ["api.grpc_wire"],
    "grpc_tools": ["proto.*"],
    "google": ["devserver.*", "proto.*"],
    "uvicorn": ["devserver.*"],
    "sqlite3": ["outbox", "devserver.*"],
    "ctypes": ["kernel"],
    "multiprocessing": [],
}
"""Where a library that is not everybody's may be imported."""
FACE = ("app", "errors", "client", "worker")
"""What the package itself hands out."""
EVERYWHERE = {PACKAGE, "msgspec", *sys.stdlib_module_names}


def name_of(path: Path) -> str:
    """`api.rest` for `.../api/rest.py`."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


MODULES = {name_of(path): path for path in sorted(ROOT.rglob("*.py"))}


def place_of(module: str) -> int:
    """Where a module stands, counted from the bottom."""
    group = module.split(".")[0] + ".*"
    return ORDER.index(group if group in ORDER else module)


@functools.cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text("utf-8"))


def imports_of(module: str) -> Iterator[tuple[str, int]]:
    """All that a module imports, by full dotted name, and the line. `from a import b` is `a.b`."""
    for node in ast.walk(tree_of(module)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno}: a relative import"
            for alias in node.names:
                yield f"{node.module}.{alias.name}", node.lineno


def own(name: str) -> str | None:
    """The module of the package that an imported name is or lies in; None for what is not ours."""
    if name.split(".")[0] != PACKAGE:
        return None
    path = name.split(".")[1:]
    for length in range(len(path), -1, -1):
        for candidate in (".".join(path[:length]), ".".join([*path[:length], "__init__"])):
            if candidate in MODULES:
                return candidate
    raise AssertionError(f"{name} is nowhere")


def test_every_module_has_its_place_in_the_order_and_every_place_its_module() -> None:
    groups = [entry.removesuffix("*") for entry in ORDER if entry.endswith("*")]
    alone = [module for module in MODULES if not module.startswith(tuple(groups))]
    assert sorted(alone) == sorted(entry for entry in ORDER if not entry.endswith("*"))
    for group in groups:
        assert any(module.startswith(group) for module in MODULES), group


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_only_from_those_above_it(module: str) -> None:
    place = place_of(module)
    for name, line in imports_of(module):
        imported = own(name)
        if imported is None or imported == module:
            continue
        is_neighbour = ORDER[place].endswith("*") and place_of(imported) == place
        is_ours = module == "__init__" and imported in FACE  # loaded when they are asked for
        assert place_of(imported) < place or is_neighbour or is_ours, f"{module}:{line} imports {name}"


@pytest.mark.parametrize("module", [module for module in MODULES if module.startswith("devserver.")])
def test_the_embedded_server_knows_nothing_of_the_supervisor(module: str) -> None:
    known = {own(name) for name, _ in imports_of(module)} - {None}
    strange = {name for name in known if name and not name.startswith(("devserver.", "proto."))}
    assert strange <= {"errors", "__init__"}


@pytest.mark.parametrize("module", MODULES)
def test_foreign_libraries_come_in_through_their_own_doors(module: str) -> None:
    group = module.split(".")[0] + ".*"
    for name, line in imports_of(module):
        root = name.split(".")[0]
        if root in DOORS:
            assert module in DOORS[root] or group in DOORS[root], f"{module}:{line} imports {name}"
        else:
            assert root in EVERYWHERE, f"{module}:{line} imports {name}"


# --- what is loaded ---------------------------------------------------------------------------------------------------


def loaded_by(statement: str) -> set[str]:
    """The modules that a fresh interpreter has after this statement."""
    code = f"{statement}\nimport sys\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_the_package_itself_loads_nothing_of_it() -> None:
    loaded = loaded_by(f"import {PACKAGE}")
    assert {name for name in loaded if name.startswith(PACKAGE)} == {PACKAGE}


@pytest.mark.parametrize(
    "statement", [f"import {PACKAGE}.app", f"from {PACKAGE} import App, JobContext, JobAborted, NonRetryableError"]
)
def test_a_handler_author_loads_neither_msgspec_nor_asyncio_nor_logging(statement: str) -> None:
    loaded = loaded_by(statement)
    assert f"{PACKAGE}.app" in loaded
    assert not loaded & {"msgspec", "asyncio", "logging", "ctypes", "subprocess"}


@pytest.mark.parametrize("module", ["child", "forkserver"])
def test_a_child_loads_no_http_client_no_event_loop_and_nothing_that_speaks_to_the_service(module: str) -> None:
    loaded = loaded_by(f"import {PACKAGE}.{module}")
    assert not loaded & {"httpx", "grpc", "asyncio", "ssl", "prometheus_client", "psutil", "multiprocessing"}
    ours = {name.removeprefix(f"{PACKAGE}.") for name in loaded if name.startswith(f"{PACKAGE}.")}
    assert not {name for name in ours if name.startswith(("api", "telemetry", "config", "keys", "devserver"))}


def test_a_supervisor_loads_the_http_client_no_sooner_than_its_fork_server_is_spawned() -> None:
    loaded = loaded_by(f"import {PACKAGE}.supervisor, {PACKAGE}.api.transports")
    assert not loaded & {"httpx", "httpcore", "grpc"}


def test_the_http_client_is_loaded_as_a_whole() -> None:
    """Not with the first client: that is made when the first job is due."""
    assert {"httpx", "httpcore"} <= loaded_by(f"import {PACKAGE}.api.httpx_wire")


def test_the_command_line_loads_nothing_slow_before_it_knows_the_command() -> None:
    assert not loaded_by(f"import {PACKAGE}.cli") & {"asyncio", "httpx", "msgspec", "prometheus_client", "logging"}


# --- the package's face -----------------------------------------------------------------------------------------------


def test_all_that_is_promised_can_be_imported_and_nothing_else() -> None:
    for name in spooled_supervisor.__all__:
        assert getattr(spooled_supervisor, name) is not None
    assert dir(spooled_supervisor) == sorted(spooled_supervisor.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'Supervisor'"):
        _ = spooled_supervisor.Supervisor


@pytest.mark.parametrize("module", MODULES)
def test_every_module_says_what_it_is_for(module: str) -> None:
    assert ast.get_docstring(tree_of(module)), module


@pytest.mark.parametrize("module", [module for module, path in MODULES.items() if ">>> " in path.read_text("utf-8")])
def test_the_examples_in_docstrings_are_true(module: str) -> None:
    loaded = importlib.import_module(f"{PACKAGE}.{module}".removesuffix(".__init__"))
    found = doctest.testmod(loaded, verbose=False)
    assert found.attempted > 0
    assert found.failed == 0

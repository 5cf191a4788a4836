"""One frozen configuration, made of flags, environment and a TOML file; flags win over environment over file.

Owns what settings mean together: which source wins, where the API key comes from, the paths that follow from others,
how many CPUs there are. What a single option accepts is in `options.py`. Pure: reads its arguments and files and
starts nothing. `load` either returns a configuration that can be used or raises ConfigError with every problem at once.
"""

from __future__ import annotations

import argparse
import ipaddress
import json
import math
import os
import re
import socket
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from glob import glob
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from spooled_supervisor import __version__
from spooled_supervisor.errors import ConfigError
from spooled_supervisor.options import (
    OPTIONS,
    QUEUE_KEYS,
    FileSettings,
    Problems,
    Setting,
    Settings,
    default_of,
    flags_given,
    parse,
    parse_option,
    read_env,
    read_file,
    read_flags,
)
from spooled_supervisor.options import OptionParser as OptionParser
from spooled_supervisor.options import add_options as add_options

CREDENTIAL = "spooled-api-key"
"""The name of the systemd credential (systemd.exec(5), LoadCredential=) that holds the API key."""

METADATA_LIMIT_BYTES = 32 * 1024
"""Half of what the service takes, as the figures of a heartbeat go into the same object."""

UNIT_STOP_S = 90
STOP_MARGIN_S = 10
SMALLEST_PLAN_RATE = 5
MIN_CHILD_BYTES = 32 * 2**20
"""Less than a child with a small app holds; whoever asks for it will have forgotten a unit."""

KEY_LIMIT_BYTES = 4096
"""More does not fit into the header that carries it, with any common server."""

ARGUMENTS = {"procs": "concurrency", "worker_version": "version", "queues": "queue_name", "api_url": "base_url"}
"""What a program calls an option, where that is not the option's key."""


class Secret:
    """A text that shows itself only to who asks for it by name."""

    __slots__ = ("_value",)

    def __init__(self, value: str) -> None:
        self._value = value

    def reveal(self) -> str:
        return self._value

    def __repr__(self) -> str:
        return "Secret(***)"

    __str__ = __repr__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and other._value == self._value

    def __hash__(self) -> int:
        return hash(self._value)


@dataclass(frozen=True, slots=True)
class QueueConfig:
    name: str
    weight: float = 1.0
    max_procs: int | None = None
    timeout_s: float | None = None


@dataclass(frozen=True, slots=True)
class ApiConfig:
    url: str  # without a slash at its end
    key: Secret
    key_file: Path | None = None  # where the key was read; None when a variable held it
    transport: str = default_of("transport")
    grpc_address: str = default_of("grpc_address")
    ca_file: Path | None = None
    uses_grpc: bool = False  # the transport is gRPC, or an address was given, for final failures


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    worker_id: str | None  # None: the one kept in the state directory
    hostname: str
    worker_type: str
    version: str
    metadata: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class ClaimConfig:
    poll_interval_s: float = default_of("poll_interval")
    lease_duration_s: int = default_of("lease_duration")
    heartbeat_fraction: float = default_of("heartbeat_fraction")
    prefetch: int = default_of("prefetch")  # for each child
    listens_to_events: bool = True
    max_load: float | None = None
    max_memory_pressure: float | None = None  # percent


@dataclass(frozen=True, slots=True)
class PoolConfig:
    procs: int
    job_timeout_s: float | None = None
    abort_grace_s: float = default_of("abort_grace")
    boot_timeout_s: float = default_of("boot_timeout")
    max_jobs_per_child: int | None = None
    max_child_memory_bytes: int | None = None
    child_nice: int = default_of("child_nice")
    strict_preload: bool = default_of("strict_preload")
    leftovers: str = default_of("leftovers")  # kill, keep
    child_memory_limit_bytes: int | None = None
    pin_cpus: bool = default_of("pin_cpus")


@dataclass(frozen=True, slots=True)
class LogConfig:
    level: str = default_of("log_level")  # debug, info, warning, error
    format: str = "json"  # text, json


@dataclass(frozen=True, slots=True)
class Config:
    app: str
    queues: tuple[QueueConfig, ...]  # empty: the queues that the app has handlers for
    api: ApiConfig
    worker: WorkerConfig
    claims: ClaimConfig
    pool: PoolConfig
    shutdown_timeout_s: float
    state_dir: Path
    http_listen: tuple[str, int] | None  # port 0: any that is free
    control_socket: Path
    log: LogConfig
    config_file: Path | None


# --- loading --------------------------------------------------------------------------------------------------------


def load(
    argv: Sequence[str],
    env: Mapping[str, str],
    *,
    is_tty: bool = False,
    parser: argparse.ArgumentParser | None = None,
) -> Config:
    """The configuration that arguments, environment and file say together.

    `parser` is one that `add_options` was applied to, for a command with a help text or arguments of its own.
    `--help` and `--version` print and raise SystemExit(0).

    Raises:
        ConfigError: with every problem; its exit code is 64 if any is of the command line, else 78.
    """
    config, problems = examine(argv, env, is_tty=is_tty, parser=parser)
    problems.raise_if_any()
    return config


def examine(
    argv: Sequence[str],
    env: Mapping[str, str],
    *,
    is_tty: bool = False,
    parser: argparse.ArgumentParser | None = None,
) -> tuple[Config, Problems]:
    """As `load`, but the problems are handed over: what they are about is None, empty, or what it is by default."""
    problems = Problems(env.get("SPOOLED_API_KEY", ""))
    sources = _Sources.read(read_flags(argv, parser or make_parser(), problems), env, problems)
    return _Draft(sources, env, problems).config(is_tty), problems


def of_values(values: Mapping[str, Any], *, api_key: str) -> Config:
    """The configuration that a program asks for: values by key as in the file, and nothing from anywhere else.

    Raises ConfigError with every problem, each beginning with the name of the argument that the program has written.
    """
    problems = Problems(api_key)
    settings = {key: Setting(value, ARGUMENTS.get(key, key)) for key, value in values.items()}
    config = _Draft(_Sources(settings, {}, None), {"SPOOLED_API_KEY": api_key}, problems).config(False)
    problems.raise_if_any()
    return config


def make_parser(
    *, prog: str = "spooled-supervisor", usage: str = "%(prog)s [run] [options]"
) -> argparse.ArgumentParser:
    """Of all options, for a command that may have more of its own."""
    parser = OptionParser(prog=prog, usage=usage)
    parser.add_argument("--version", action="version", version=f"spooled-supervisor {__version__}")
    add_options(parser)
    return parser


@dataclass(frozen=True, slots=True)
class _Sources:
    """The winning setting of every option that somebody mentioned, and the file's tables of queues."""

    settings: Settings
    queues: dict[str, Settings]
    config_file: Path | None

    @classmethod
    def read(cls, flags: Settings, env: Mapping[str, str], problems: Problems) -> _Sources:
        said = read_env(env) | flags
        named = said.get("config")
        path = parse_option(OPTIONS["config"], named, problems)
        config_file = _absolute(path, env) if path else None
        is_flag = named is not None and named.is_flag
        file = read_file(config_file, problems, is_flag=is_flag) if config_file else FileSettings({}, {})
        return cls(file.settings | said, file.queues, config_file)


class _Draft:
    """A configuration in the making: a value that was rejected is None, and then `Problems` says why."""

    def __init__(self, sources: _Sources, env: Mapping[str, str], problems: Problems) -> None:
        self._sources = sources
        self._settings = sources.settings
        self._env = env
        self._problems = problems
        rows = (row for row in OPTIONS.values() if row.is_in_file)  # the others said which file
        self._values = {row.key: parse_option(row, self._settings.get(row.key), problems) for row in rows}

    def config(self, is_tty: bool) -> Config:
        value = self._values
        if "app" not in self._settings:
            self._problems.add("app: is required; give --app pkg.module, SPOOLED_APP, or app in the file")
        self._check_renewal()
        state_dir, control_socket = self._paths()
        return Config(
            app=value["app"],
            queues=self._queues(),
            api=self._api(),
            worker=self._worker(),
            claims=ClaimConfig(
                value["poll_interval"],
                value["lease_duration"],
                value["heartbeat_fraction"],
                value["prefetch"],
                not value["no_events"],
                value["max_load"],
                value["max_memory_pressure"],
            ),
            pool=self._pool(),
            shutdown_timeout_s=value["shutdown_timeout"],
            state_dir=state_dir,
            http_listen=value["http_listen"],
            control_socket=control_socket,
            log=LogConfig(self._sound("log_level"), value["log_format"] or ("text" if is_tty else "json")),
            config_file=self._sources.config_file,
        )

    def _sound(self, key: str) -> Any:
        """The value, or the default where it was rejected: the app is imported all the same, to see what it is like."""
        return default_of(key) if self._values[key] is None else self._values[key]

    def _queues(self) -> tuple[QueueConfig, ...]:
        """A table of the file tunes its queue also where flags or environment say which queues are served."""
        tuned = {name: self._queue(name, table) for name, table in self._sources.queues.items()}
        return tuple(tuned.get(name, QueueConfig(name)) for name in dict.fromkeys(self._values["queues"]) if name)

    def _queue(self, name: str, table: Settings) -> QueueConfig:
        said = {key: parse(QUEUE_KEYS[key], found, found.value, self._problems) for key, found in table.items()}
        return QueueConfig(name, said.get("weight", 1.0), said.get("max_procs"), said.get("timeout"))

    def _api(self) -> ApiConfig:
        value = self._values
        key_setting = self._settings.get("api_key_file")
        key, key_file = _find_api_key(value["api_key_file"], key_setting, self._env, self._problems)
        ca_file = _absolute(value["ca_file"], self._env) if value["ca_file"] else None
        if ca_file:
            _check_certificates(ca_file, self._settings["ca_file"], self._problems)
        wanted = [self._settings[name] for name in ("transport", "grpc_address") if name in self._settings]
        if value["transport"] == "rest":
            wanted = [setting for setting in wanted if setting is self._settings.get("grpc_address")]
        _check_grpc(wanted, self._problems)
        return ApiConfig(
            value["api_url"], key, key_file, value["transport"], value["grpc_address"], ca_file, bool(wanted)
        )

    def _worker(self) -> WorkerConfig:
        value = self._values
        metadata = dict(pair for pair in value["metadata"] if pair)
        if len(json.dumps(metadata)) > METADATA_LIMIT_BYTES:
            found = self._settings["metadata"]
            limit = f"must be at most {METADATA_LIMIT_BYTES} bytes as JSON"
            self._problems.add(f"{found.where}: {limit}", is_usage=found.is_flag)
        hostname = value["hostname"] or default_hostname()
        return WorkerConfig(value["worker_id"], hostname, value["worker_type"], value["worker_version"], metadata)

    def _pool(self) -> PoolConfig:
        value = self._values
        return PoolConfig(
            procs=value["procs"] or min(cpus_available(), 1000),
            job_timeout_s=value["job_timeout"],
            abort_grace_s=value["abort_grace"],
            boot_timeout_s=self._sound("boot_timeout"),
            max_jobs_per_child=value["max_jobs_per_child"],
            max_child_memory_bytes=value["max_child_memory"],
            child_nice=self._sound("child_nice"),
            strict_preload=self._sound("strict_preload"),
            leftovers=self._sound("leftovers"),
            child_memory_limit_bytes=value["child_memory_limit"],
            pin_cpus=self._sound("pin_cpus"),
        )

    def _check_renewal(self) -> None:
        """The first renewal must come before the instant at which a job without one is aborted."""
        keys = ("heartbeat_fraction", "lease_duration", "abort_grace")
        fraction, lease_s, grace_s = (self._values[key] for key in keys)
        if None in (fraction, lease_s, grace_s) or fraction * lease_s < (abort_s := abort_after_s(lease_s, grace_s)):
            return
        # Some fraction was set, as the default fits every lease; but the lease or the grace may be what is wrong.
        involved = [self._settings[key] for key in keys if key in self._settings]
        self._problems.add(
            f"{involved[0].where}: {fraction:g} puts the first renewal {fraction * lease_s:g} s into a lease of "
            f"{lease_s} s, whose job is aborted after {abort_s:g} s; it must be below "
            f"{math.floor(100 * abort_s / lease_s) / 100:g}",
            is_usage=any(setting.is_flag for setting in involved),
        )

    def _paths(self) -> tuple[Path, Path]:
        if self._values["app"] is None:
            return Path(), Path()
        try:
            return _state_dir(self._values, self._env), _control_socket(self._values, self._env)
        except ConfigError as error:
            self._problems.add(str(error))
            return Path(), Path()


def abort_after_s(lease_duration_s: float, abort_grace_s: float) -> float:
    """Seconds from the start of a lease until its job is aborted, if no renewal succeeds."""
    return kill_after_s(lease_duration_s) - min(abort_grace_s, lease_duration_s / 4)


def kill_after_s(lease_duration_s: float) -> float:
    """Seconds from the start of a lease until its job's family is killed: so early that it is dead at the end."""
    return lease_duration_s - max(0.5, 0.05 * lease_duration_s)


# --- credentials ----------------------------------------------------------------------------------------------------


def _find_api_key(
    named: str | None, setting: Setting | None, env: Mapping[str, str], problems: Problems
) -> tuple[Secret, Path | None]:
    """The first that is not blank of: a file named by flag, SPOOLED_API_KEY, a file named elsewhere, the credential."""
    places: list[tuple[str, Path | None]] = [("SPOOLED_API_KEY", None)]
    if named and setting:
        places.insert(0 if setting.is_flag else 1, (setting.where, _absolute(named, env)))
    credential = Path(env.get("CREDENTIALS_DIRECTORY", ""), CREDENTIAL)
    if env.get("CREDENTIALS_DIRECTORY") and os.path.exists(credential):
        places.append(("CREDENTIALS_DIRECTORY", credential))
    for where, path in places:
        try:
            text = read_key(path) if path else env.get("SPOOLED_API_KEY", "")
        except OSError as error:
            is_usage = setting is not None and setting.is_flag and where == setting.where
            problems.add(f"{where}: {path} cannot be read: {error.strerror}", is_usage=is_usage)
            return Secret(""), path
        if key := text.strip():
            if not can_be_key(key):
                problems.add(
                    f"{where}: what is there cannot be an API key: it holds a blank, a control character or one beyond "
                    f"ASCII, or more than {KEY_LIMIT_BYTES} characters"
                )
            return Secret(key), path
    blank = "".join(f"; {path} is blank" for _, path in places if path)
    problems.add(
        "API key: is required; set SPOOLED_API_KEY, or name a file that holds it (--api-key-file, "
        f"SPOOLED_API_KEY_FILE, api_key_file), or pass the systemd credential {CREDENTIAL}{blank}"
    )
    return Secret(""), None


def can_be_key(text: str) -> bool:
    """Whether it fits into a header of HTTP, and nothing else of the file is in it (a second line, say)."""
    return 0 < len(text) <= KEY_LIMIT_BYTES and all("!" <= character <= "~" for character in text)


def read_key(path: Path) -> str:
    """What a key file holds, as far as a key could reach. Raises OSError."""
    with open(path, "rb") as file:
        return file.read(2 * KEY_LIMIT_BYTES).decode("ascii", errors="replace")


def _check_grpc(wanted: Sequence[Setting], problems: Problems) -> None:
    """Whether what gRPC needs is installed, where one of these settings asks for it."""
    if wanted and not all(map(_is_installed, ("grpc", "google.protobuf", "hpack"))):
        problems.add(
            f"{wanted[0].where}: gRPC is not installed; pip install 'spooled-supervisor[grpc]'",
            is_usage=wanted[0].is_flag,
        )


def _is_installed(module: str) -> bool:
    with suppress(ModuleNotFoundError):  # so is not even its parent
        return find_spec(module) is not None
    return False


def _check_certificates(path: Path, setting: Setting, problems: Problems) -> None:
    import ssl  # here, because few name such a file, and `status` and `ctl` must stay quick

    try:
        ssl.create_default_context(cafile=path)
    except OSError as error:  # SSLError is one
        because = f"cannot be used as PEM certificates: {error.strerror or error}"
        problems.add(f"{setting.where}: {path} {because}", is_usage=setting.is_flag)


# --- what follows from other options, or from the machine -----------------------------------------------------------


def default_hostname(name: str | None = None) -> str:
    """This machine's name in the characters that the service takes.

    >>> default_hostname("-büro 7.local.")
    'b-ro-7.local'
    """
    name = socket.gethostname() if name is None else name
    return re.sub(r"[^A-Za-z0-9._-]", "-", name).strip(".-")[:255].rstrip(".-") or "host"


def default_state_dir(app: str, env: Mapping[str, str]) -> Path:
    """`$XDG_STATE_HOME/spooled-supervisor/<app>`, or below `~/.local/state`. Raises ConfigError where neither is."""
    home = _state_home(env)
    if home is None:
        raise ConfigError("state_dir: neither XDG_STATE_HOME nor HOME says where it could be; give --state-dir")
    return home / "spooled-supervisor" / _file_name(app)


def default_control_socket(app: str, env: Mapping[str, str], state_dir: Path) -> Path:
    """`$RUNTIME_DIRECTORY/control.sock`, else below `$XDG_RUNTIME_DIR`, else in the state directory."""
    if chosen := read_env(env).get("control_socket"):
        return Path(chosen.value)
    home = _directory(env, "XDG_RUNTIME_DIR", "spooled-supervisor")
    return home / f"{_file_name(app)}.sock" if home else state_dir / "control.sock"


def control_sockets(flags: argparse.Namespace, env: Mapping[str, str], *, root: Path = Path("/")) -> list[Path]:
    """Where `status` and `ctl` find the supervisor that these options are of: one path, which need not exist.

    Options that tell neither socket nor state directory nor app give every socket in the usual places, perhaps none.
    `flags` come from a parser with `add_options`. Raises ConfigError.
    """
    problems = Problems(env.get("SPOOLED_API_KEY", ""))
    sources = _Sources.read(flags_given(flags, problems), env, problems)
    keys = ("app", "state_dir", "control_socket")
    values = {key: parse_option(OPTIONS[key], sources.settings.get(key), problems) for key in keys}
    problems.raise_if_any()
    return [_control_socket(values, env)] if any(values.values()) else usual_sockets(env, root=root)


def usual_sockets(env: Mapping[str, str], *, root: Path = Path("/")) -> list[Path]:
    """What is there in the usual places of this user and of units, whose directories may be called
    `spooled-supervisor-2`. Somebody need not listen."""
    homes = (_directory(env, "XDG_RUNTIME_DIR"), _state_home(env), root / "run", root / "var/lib")
    shapes = ("spooled-supervisor*/*.sock", "spooled-supervisor*/*/control.sock")
    # Not Path.glob: what lies behind one directory that may not be entered is lost to it.
    return sorted({home / name for home in homes if home for shape in shapes for name in glob(shape, root_dir=home)})


def _state_dir(values: Mapping[str, Any], env: Mapping[str, str]) -> Path:
    chosen = values["state_dir"]
    return _absolute(chosen, env) if chosen else default_state_dir(values["app"], env)


def _control_socket(values: Mapping[str, Any], env: Mapping[str, str]) -> Path:
    """A state directory of one's own brings a socket of its own: the second supervisor of an app, which was told to
    give --state-dir, must not meet the first one at the socket that is named after the app."""
    if values["control_socket"]:
        return _absolute(values["control_socket"], env)
    if values["state_dir"]:
        return _state_dir(values, env) / "control.sock"
    return default_control_socket(values["app"], env, _state_dir(values, env))


def _absolute(path: str, env: Mapping[str, str]) -> Path:
    """A path as it was written, with `~/` and the current directory filled in."""
    home = env.get("HOME", "")
    return Path(home + path[1:] if home and (path == "~" or path.startswith("~/")) else path).absolute()


def _directory(env: Mapping[str, str], name: str, below: str = "") -> Path | None:
    """The directory that a variable names; a relative one counts as unset (XDG Base Directory Specification)."""
    path = env.get(name, "")
    return Path(path, below) if path.startswith("/") else None


def _state_home(env: Mapping[str, str]) -> Path | None:
    return _directory(env, "XDG_STATE_HOME") or _directory(env, "HOME", ".local/state")


def _file_name(app: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "-", app)


def cpus_available(root: Path = Path("/"), *, affinity: int | None = None) -> int:
    """How many CPUs we may use: those of our affinity mask, capped by the CPU quota of every cgroup above us.

    A quota of one and a half counts as two: half of a CPU is better shared than left. `root` is where /proc and /sys
    are looked for.
    """
    cpus = affinity or len(os.sched_getaffinity(0))
    return max(1, min([cpus, *(math.ceil(quota) for quota in _cpu_quotas(root))]))


def _cpu_quotas(root: Path) -> Iterator[float]:
    """The quotas of our cgroup and its ancestors as far as they are mounted, in CPUs; see cgroups(7), proc(5)."""
    groups: dict[str, str] = {}
    for line in _read(root / "proc/self/cgroup").splitlines():  # hierarchy:controllers:path
        _, controllers, path = line.split(":", 2)
        if not controllers or "cpu" in controllers.split(","):
            groups["cgroup" if controllers else "cgroup2"] = path
    for line in _read(root / "proc/self/mountinfo").splitlines():  # id parent dev ROOT POINT ... - TYPE source OPTIONS
        left, _, right = line.partition(" - ")
        filesystem, _, options = right.split(" ", 2)
        if filesystem == "cgroup2" or (filesystem == "cgroup" and "cpu" in options.split(",")):
            mounted, point = left.split(" ")[3:5]
            below = os.path.relpath(groups.get(filesystem, "/"), mounted)
            top = root / point.lstrip("/")
            folder = top if below.startswith("..") else top / below
            yield from filter(None, map(_cpu_quota, (folder, *folder.parents[: len(folder.parts) - len(top.parts)])))


def _cpu_quota(folder: Path) -> float | None:
    v2 = _read(folder / "cpu.max").split()  # "150000 100000" or "max 100000"
    v1 = [_read(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]  # a quota of -1: none
    quota, period = v2 if len(v2) == 2 else v1
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() and int(period) else None


def _read(path: Path) -> str:
    with suppress(OSError):  # no such file: nothing is limited there
        return path.read_text(errors="replace")
    return ""


# --- advice ---------------------------------------------------------------------------------------------------------


def warnings(config: Config, *, cpus: int | None = None) -> list[str]:
    """What is legal but unwise, one line each, each beginning with the option's key."""
    return [*_exposures(config), *_misfits(config, cpus or cpus_available())]


def _exposures(config: Config) -> Iterator[str]:
    url = urlsplit(config.api.url)
    if url.scheme == "http" and not _is_loopback(url.hostname or ""):
        yield f"api_url: {config.api.url} sends the API key unencrypted; use https"
    if config.api.key_file and _is_open_to_others(config.api.key_file):
        yield f"api_key_file: {config.api.key_file} can be read by others; take that right away (chmod o-r)"
    if config.http_listen and not _is_loopback(config.http_listen[0]):
        yield f"http_listen: whoever reaches {config.http_listen[0]} can read metrics and the status page"


def _misfits(config: Config, cpus: int) -> Iterator[str]:
    claims, pool = config.claims, config.pool
    if urlsplit(config.api.url).path.endswith("/api/v1"):
        yield f"api_url: {config.api.url} ends with /api/v1, which every request adds by itself"
    if pool.procs > cpus:
        yield f"procs: {pool.procs} children share the {cpus} CPUs that may be used"
    if pool.max_child_memory_bytes and pool.max_child_memory_bytes < MIN_CHILD_BYTES:
        yield f"max_child_memory: {pool.max_child_memory_bytes} bytes are less than a child needs; was a unit left out?"
    lease_s = claims.lease_duration_s
    room_s = abort_after_s(lease_s, pool.abort_grace_s) - claims.heartbeat_fraction * lease_s
    if room_s < 1:
        yield f"heartbeat_fraction: {claims.heartbeat_fraction:g} leaves {room_s:.2g} s to repeat a renewal that failed"
    if config.shutdown_timeout_s > UNIT_STOP_S - STOP_MARGIN_S:
        yield (
            f"shutdown_timeout: {config.shutdown_timeout_s:g} s and the time to settle do not fit into "
            f"TimeoutStopSec={UNIT_STOP_S} of the unit file; raise that too"
        )
    polls = max(1, len(config.queues)) / claims.poll_interval_s
    if polls > SMALLEST_PLAN_RATE / 2:
        yield (
            f"poll_interval: {polls:.3g} polls a second of empty queues; the smallest plan allows "
            f"{SMALLEST_PLAN_RATE} requests a second, reports and renewals included"
        )
    for queue in config.queues:
        if queue.max_procs and queue.max_procs > pool.procs:
            yield f"queues.{queue.name}.max_procs: {queue.max_procs} is more than all {pool.procs} children"


def _is_loopback(host: str) -> bool:
    with suppress(ValueError):  # a name
        return ipaddress.ip_address(host).is_loopback
    return host.lower() == "localhost" or host.lower().endswith(".localhost")


def _is_open_to_others(path: Path) -> bool:
    with suppress(OSError):  # gone since it was read
        return bool(path.stat().st_mode & stat.S_IROTH)
    return False

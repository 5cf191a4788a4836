"""The options: one table from which flags, variables, TOML keys and the help come, and the reading of those sources.

Knows each value and where it was written, never what several of them mean together: that is `config.py`. Reading
raises nothing: every bad value becomes a line in `Problems` that names the option as its user wrote it, the value and
the rule. Nothing here reads a clock, the process's own environment or its own arguments.
"""

from __future__ import annotations

import argparse
import difflib
import ipaddress
import keyword
import math
import os
import re
import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

from spooled_supervisor import __version__
from spooled_supervisor.errors import EX_CONFIG, EX_USAGE, ConfigError

YEAR_S = 365 * 86400.0
"""The longest duration taken: beyond it stands a slip of the pen, and no timer that overflows."""

# --- kinds of values: text in, value out ----------------------------------------------------------------------------


class Refused(ValueError):
    """A value with a reason of its own; any other ValueError of a parser means that the kind's rule is broken."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What an option accepts. `rule` completes "must be ..."; `types` are what a TOML file may give besides text."""

    parse: Callable[[str], Any]
    rule: str
    metavar: str = "TEXT"
    types: tuple[type, ...] = (str,)


def _match(pattern: str, text: str) -> re.Match[str]:
    found = re.fullmatch(pattern, text, re.ASCII)
    if found is None:
        raise ValueError
    return found


def _demand(is_fine: object) -> None:
    if not is_fine:
        raise ValueError


def pattern(regex: str, rule: str, metavar: str = "TEXT") -> Kind:
    return Kind(lambda text: _match(regex, text)[0], rule, metavar)


def whole(low: int, high: int) -> Kind:
    def parse(text: str) -> int:
        value = int(_match(r"[+-]?\d{1,18}", text)[0])
        _demand(low <= value <= high)
        return value

    return Kind(parse, f"a whole number from {low} to {high}", "N", (str, int))


def number(low: float, high: float) -> Kind:
    """Both limits are excluded."""

    def parse(text: str) -> float:
        value = float(_match(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?", text)[0])
        _demand(low < value < high)
        return value

    limits = f"between {low:g} and {high:g}" if high < math.inf else f"above {low:g}"
    return Kind(parse, f"a number {limits}", "X", (str, int, float))


def seconds(text: str) -> float:
    """A duration in seconds.

    >>> [seconds(text) for text in ("30", "30s", "5m", "1h", "500ms")]
    [30.0, 30.0, 300.0, 3600.0, 0.5]
    """
    amount, unit = _match(r"(\d{1,18}(?:\.\d{1,18})?) ?(ms|s|m|h)?", text).groups()
    return float(amount) * {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}[unit or "s"]


def duration(low_s: float, *, is_above: bool = False) -> Kind:
    def parse(text: str) -> float:
        value = seconds(text)
        _demand((value > low_s if is_above else value >= low_s) and value <= YEAR_S)
        return value

    limit = f"above {low_s:g} s" if is_above else f"of {low_s:g} s or more"
    return Kind(parse, f"a duration {limit} and at most a year, such as 30, 5m or 500ms", "TIME", (str, int, float))


def _lease(text: str) -> int:
    value = seconds(text)
    _demand(value.is_integer() and 5 <= value <= 3600)
    return int(value)


def _size(text: str) -> int:
    amount, unit = _match(r"(\d{1,18}(?:\.\d{1,18})?) ?([KMGTkmgt]?)(?:i?[bB])?", text).groups()
    value = int(float(amount) * 1024 ** " KMGT".index(unit.upper() or " "))
    _demand(0 < value <= 2**60)
    return value


def _procs(text: str) -> int | None:
    return None if text == "auto" else int(whole(1, 1000).parse(text))


def _is_yes(text: str) -> bool:
    return _match("(yes|true|on|1)|no|false|off|0", text.lower())[1] is not None


def _app(text: str) -> str:
    module, colon, name = text.partition(":")
    names = [*module.split("."), *([name] if colon else [])]
    _demand(all(part.isidentifier() and not keyword.iskeyword(part) for part in names))
    return text


def _queue_name(text: str) -> str:
    _demand(1 <= len(text) <= 100 and text[0] not in ".-" and all(c.isalnum() or c in "-_." for c in text))
    return text


def _short_text(text: str) -> str:
    _demand(1 <= len(text) <= 50 and text.isprintable())
    return text


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    _demand(equals and key.strip() and text.isprintable())
    return key.strip(), value.strip()


def _path(text: str) -> str:
    _demand(text and "\0" not in text)
    return text


def _api_url(text: str) -> str:
    url = urlsplit(text)
    _demand(text.isprintable() and " " not in text)
    _demand(url.scheme in ("http", "https") and url.hostname and url.port != 0)
    if "@" in url.netloc:
        raise Refused("must not carry a user name or password; the API key has options of its own")
    if "?" in text or "#" in text:
        raise Refused("must end with its path, without ? or #")
    return f"{url.scheme}://{url.netloc}{url.path.rstrip('/')}"


def _address(text: str) -> tuple[str, int]:
    address, name, port = _match(r"(?:\[([^\]]+)\]|([A-Za-z0-9][A-Za-z0-9._-]*)):(\d{1,5})", text).groups()
    _demand(int(port) <= 65535)
    return (str(ipaddress.IPv6Address(address)) if address else name), int(port)


def _listen(text: str) -> tuple[str, int] | None:
    return None if text.lower() == "off" else _address(text)


def _grpc_address(text: str) -> str:
    _demand(_address(text)[1] > 0)
    return text


def _level(text: str) -> str:
    word = _match("debug|info|warn|warning|error", text.lower())[0]
    return "warning" if word == "warn" else word


QUEUE = Kind(_queue_name, "a name of 1 to 100 letters, digits, - _ and ., which does not begin with . or -", "NAME")
PATH = Kind(_path, "a path", "PATH")
LIMIT = duration(0, is_above=True)
SHORT_TEXT = Kind(_short_text, "1 to 50 printable characters")
APP = Kind(_app, "pkg.module or pkg.module:name", "MODULE[:NAME]")
PROCS = Kind(_procs, "auto or a whole number from 1 to 1000", "N|auto", (str, int))
URL = Kind(_api_url, "http:// or https:// with a host", "URL")
TRANSPORT = pattern("rest|grpc-stream|grpc-process", "rest, grpc-stream or grpc-process", "WORD")
LISTEN = Kind(_listen, "HOST:PORT, [ADDRESS]:PORT or off", "HOST:PORT|off")
WORKER_ID = pattern(r"[A-Za-z0-9._-]{1,128}", "1 to 128 of A-Z a-z 0-9 . _ -", "ID")
HOSTNAME = pattern(r"(?![.-])[A-Za-z0-9._-]{1,255}(?<![.-])",
                   "1 to 255 of A-Z a-z 0-9 . _ -, with neither . nor - at its ends", "NAME")  # fmt: skip
LEASE = Kind(_lease, "whole seconds from 5 to 3600", "TIME", (str, int, float))
SIZE = Kind(_size, "a size above 0, such as 512M, 1.5GiB or a number of bytes", "SIZE", (str, int))
SWITCH = Kind(_is_yes, "yes or no", "yes|no", (str, bool))

# --- the table ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Option:
    """One row: how each source calls the option, what it accepts, and what holds when nobody says anything.

    `default` is text, read like any other value. Without one, `otherwise` tells the reader of the help what happens.
    """

    flag: str
    env: tuple[str, ...]  # the first that is set counts
    key: str  # of the TOML file; also the name of the option inside this package
    kind: Kind
    default: str | None
    help: str
    otherwise: str = "none"
    is_repeatable: bool = False
    is_in_file: bool = True


# fmt: off
GROUPS: dict[str, tuple[Option, ...]] = {
    "what runs": (
        Option("--app", ("SPOOLED_APP",), "app", APP, None,
               "the module with your App (its attribute app, or the one named)", "required"),
        Option("--queue", ("SPOOLED_QUEUES",), "queues", QUEUE, None,
               "a queue to serve; repeatable", "the app's handlers", is_repeatable=True),
        Option("--procs", ("SPOOLED_PROCS",), "procs", PROCS, "auto",
               "child processes; auto is the CPUs that affinity and cgroup quota leave us"),
        Option("--config", ("SPOOLED_CONFIG",), "config", PATH, None,
               "a TOML file with the same options", is_in_file=False),
    ),
    "the service": (
        Option("--api-url", ("SPOOLED_API_URL", "SPOOLED_BASE_URL"), "api_url", URL, "https://api.spooled.cloud",
               "where the service is"),
        Option("--api-key-file", ("SPOOLED_API_KEY_FILE",), "api_key_file", PATH, None,
               "a file that holds the API key; there is no flag for the key itself",
               "SPOOLED_API_KEY, else the systemd credential spooled-api-key"),
        Option("--ca-file", ("SPOOLED_CA_FILE",), "ca_file", PATH, None,
               "PEM certificates to trust instead of the usual ones", "the usual ones"),
        Option("--transport", ("SPOOLED_TRANSPORT",), "transport", TRANSPORT, "rest",
               "how to talk to the service"),
        Option("--grpc-address", ("SPOOLED_GRPC_ADDRESS",), "grpc_address",
               Kind(_grpc_address, "HOST:PORT", "HOST:PORT"), "grpc.spooled.cloud:443",
               "the service's gRPC address; with rest only final failures go there, and only if it is given"),
    ),
    "the worker as the service sees it": (
        Option("--worker-id", ("SPOOLED_WORKER_ID",), "worker_id", WORKER_ID, None,
               "the worker's name at the service", "made once and kept in the state directory"),
        Option("--hostname", ("SPOOLED_HOSTNAME",), "hostname", HOSTNAME, None,
               "the machine's name at the service", "this machine's"),
        Option("--worker-type", ("SPOOLED_WORKER_TYPE",), "worker_type", SHORT_TEXT, "python",
               "the kind of worker"),
        Option("--worker-version", ("SPOOLED_WORKER_VERSION",), "worker_version", SHORT_TEXT, __version__,
               "the version of your worker"),
        Option("--metadata", ("SPOOLED_METADATA",), "metadata", Kind(_pair, "K=V", "K=V"), None,
               "what else to tell the service; repeatable", is_repeatable=True),
    ),
    "claims and leases": (
        Option("--poll-interval", ("SPOOLED_POLL_INTERVAL",), "poll_interval", duration(0.05), "1s",
               "how often to ask for jobs while there are none"),
        Option("--lease-duration", ("SPOOLED_LEASE_DURATION",), "lease_duration", LEASE, "30s",
               "for how long a job is ours without a renewal"),
        Option("--heartbeat-fraction", (), "heartbeat_fraction", number(0, 1), "0.5",
               "the part of a lease after which it is renewed"),
        Option("--prefetch", ("SPOOLED_PREFETCH",), "prefetch", whole(0, 100), "0",
               "jobs claimed ahead for each child"),
        Option("--no-events", ("SPOOLED_NO_EVENTS",), "no_events", SWITCH, "no",
               "do not listen to the service's event stream, which wakes us when a job arrives"),
        Option("--max-load", ("SPOOLED_MAX_LOAD",), "max_load", number(0, math.inf), None,
               "claim nothing while the machine's load (1 minute) is higher", "no limit"),
        Option("--max-memory-pressure", ("SPOOLED_MAX_MEMORY_PRESSURE",), "max_memory_pressure", number(0, 100), None,
               "claim nothing while more than this share of time (percent) is lost waiting for memory", "no limit"),
    ),
    "jobs and children": (
        Option("--job-timeout", ("SPOOLED_JOB_TIMEOUT",), "job_timeout", LIMIT, None,
               "the longest any job may run; caps the job's own timeout", "the job's own"),
        Option("--abort-grace", (), "abort_grace", duration(0), "5s",
               "time between telling a job to stop and killing it"),
        Option("--boot-timeout", (), "boot_timeout", LIMIT, "60s",
               "time for a child to become ready"),
        Option("--max-jobs-per-child", (), "max_jobs_per_child", whole(1, 10**9), None,
               "replace a child after about so many jobs", "never"),
        Option("--max-child-memory", (), "max_child_memory", SIZE, None,
               "replace a child that holds more memory after its job", "never"),
        Option("--child-memory-limit", ("SPOOLED_CHILD_MEMORY_LIMIT",), "child_memory_limit", SIZE, None,
               "kill a child whose job grows it beyond this, and fail the job", "none"),
        Option("--pin-cpus", (), "pin_cpus", SWITCH, "no",
               "keep each child on one CPU of those that we may use"),
        Option("--child-nice", (), "child_nice", whole(0, 19), "5",
               "how far children stand back for the supervisor"),
        Option("--leftovers", (), "leftovers", pattern("kill|keep", "kill or keep", "kill|keep"), "kill",
               "what becomes of processes that a job has started and left behind"),
        Option("--strict-preload", (), "strict_preload", SWITCH, "no",
               "refuse an app that starts threads when it is imported"),
        Option("--shutdown-timeout", ("SPOOLED_SHUTDOWN_TIMEOUT",), "shutdown_timeout", duration(0), "30s",
               "time for running jobs to finish when we are told to stop"),
    ),
    "this machine": (
        Option("--state-dir", ("STATE_DIRECTORY", "SPOOLED_STATE_DIR"), "state_dir", PATH, None,
               "where unsent outcomes are kept; on a local disk, one for each supervisor",
               "$XDG_STATE_HOME/spooled-supervisor/<app>"),
        Option("--http-listen", ("SPOOLED_HTTP_LISTEN",), "http_listen", LISTEN, "127.0.0.1:9464",
               "where metrics, health and the status page are served"),
        Option("--control-socket", ("RUNTIME_DIRECTORY",), "control_socket", PATH, None,
               "the Unix socket of status and ctl",
               "$XDG_RUNTIME_DIR/spooled-supervisor/<app>.sock, else in the state directory"),
        Option("--log-level", ("SPOOLED_LOG_LEVEL",), "log_level",
               Kind(_level, "debug, info, warning or error", "LEVEL"), "info", "the least that is logged"),
        Option("--log-format", ("SPOOLED_LOG_FORMAT",), "log_format",
               pattern("text|json", "text or json", "text|json"), None,
               "how it is written", "text on a terminal, else json"),
    ),
}
# fmt: on

OPTIONS: dict[str, Option] = {option.key: option for group in GROUPS.values() for option in group}

QUEUE_KEYS: dict[str, Kind] = {"weight": number(0, math.inf), "max_procs": whole(1, 1000), "timeout": LIMIT}
"""The keys of a `[queues.NAME]` table."""


def default_of(key: str) -> Any:
    """The value an option has when nobody says anything; None where that depends on more than the table."""
    option = OPTIONS[key]
    return None if option.default is None else option.kind.parse(option.default)


# --- what was found, and what is wrong with it ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Setting:
    """One value as it was written: `where` is the flag, the variable, or file, line and key."""

    value: Any  # text; what TOML gave; a list of these for a repeatable option
    where: str
    is_flag: bool = False


Settings = dict[str, Setting]

_SECRETS = [
    (re.compile(r"\b(s[pk]_(?:live|test)_)[^\s'\"]*"), r"\1***"),
    (re.compile(r"//[^/\s'\"]*@"), "//***@"),
    (re.compile(r"(https?://[^\s?#'\"]*[?#])[^\s'\"]*"), r"\1***"),
]
"""What may be a key in the wrong place, the credentials of a URL, and its query."""


def _without_secrets(text: str) -> str:
    for pattern, substitute in _SECRETS:
        text = pattern.sub(substitute, text)
    return text


class Problems:
    """Collects what is wrong, one line each, without ever repeating a secret."""

    def __init__(self, secret: str = "") -> None:
        self._secret = secret.strip()
        self._lines: list[str] = []
        self._is_usage = False

    def __bool__(self) -> bool:
        return bool(self._lines)

    def add(self, line: str, *, is_usage: bool = False) -> None:
        """`is_usage`: the command line is at fault, which decides the exit code."""
        self._lines.append(self._redacted(line))
        self._is_usage |= is_usage

    def reject(self, setting: Setting, value: object, because: str) -> None:
        shown = self._redacted(repr(value))
        shown = shown if len(shown) <= 100 else f"{shown[:99]}…"
        self.add(f"{setting.where}: {shown} {because}", is_usage=setting.is_flag)

    def raise_if_any(self) -> None:
        if self._lines:
            raise ConfigError(self._lines, exit_code=EX_USAGE if self._is_usage else EX_CONFIG)

    def _redacted(self, text: str) -> str:
        return _without_secrets(text.replace(self._secret, "***") if len(self._secret) >= 8 else text)


def parse(kind: Kind, setting: Setting, value: Any, problems: Problems) -> Any:
    """`value`, which is the setting's or one of its list, as what it means; None when it was rejected."""
    is_right_type = isinstance(value, kind.types) and (bool in kind.types or not isinstance(value, bool))
    text = str(value).lower() if isinstance(value, bool) else str(value).strip()
    try:
        _demand(is_right_type)
        return kind.parse(text)
    except Refused as refusal:
        problems.reject(setting, value, str(refusal))
    except ValueError:
        problems.reject(setting, value, f"must be {kind.rule}")
    return None


def parse_option(option: Option, setting: Setting | None, problems: Problems) -> Any:
    """The option's value by `setting`, or its default; a tuple for a repeatable one."""
    if setting is None:
        return () if option.is_repeatable else default_of(option.key)
    if not option.is_repeatable:
        return parse(option.kind, setting, setting.value, problems)
    if not isinstance(setting.value, list):
        problems.reject(setting, setting.value, f"must be a list, each of it {option.kind.rule}")
        return ()
    return tuple(parse(option.kind, setting, value, problems) for value in setting.value)


_ELSEWHERE = {"concurrency": "procs", "workers": "procs", "processes": "procs", "max-concurrency": "procs"}
"""What other workers, the service's own SDKs among them, call an option of ours."""


def did_you_mean(word: str, words: Iterable[str]) -> str:
    """A hint to the nearest of `words`, or nothing.

    >>> did_you_mean("--proc", ["--procs", "--app"])
    '; did you mean --procs?'
    """
    known = list(words)
    plain = word.strip("-").replace("_", "-")
    near = [w for w in known if w.lstrip("-") == _ELSEWHERE.get(plain) or (len(plain) > 1 and w.startswith(word))]
    near = near if len(near) == 1 else difflib.get_close_matches(word, known, n=1, cutoff=0.7)
    return f"; did you mean {near[0]}?" if near else ""


# --- flags ----------------------------------------------------------------------------------------------------------


_KEY_FLAG = "--api-key"
_NO_KEY_FLAG = (
    f"{_KEY_FLAG}: no such flag, since anyone on the machine can read a command line; "
    "use SPOOLED_API_KEY or --api-key-file"
)


class OptionParser(argparse.ArgumentParser):
    """An ArgumentParser that knows no abbreviations and raises ConfigError (exit 64) instead of ending the process.

    A message never repeats a key: neither one that looks like it nor the word after `--api-key`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        is_given = any(word.partition("=")[0] == _KEY_FLAG for word in args or ())
        if is_given and _KEY_FLAG not in self._option_string_actions:  # the embedded server has one
            self.error(_NO_KEY_FLAG)
        return super().parse_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(_without_secrets(message), exit_code=EX_USAGE)


class OptionHelp(argparse.RawDescriptionHelpFormatter):
    """Shows that a flag needs its value. To the parser every value may be absent, so that one forgotten value is a
    problem among others and not the end of the parse."""

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        if action.nargs == argparse.OPTIONAL and action.option_strings and action.const is None:
            return str(action.metavar or default_metavar)
        return super()._format_args(action, default_metavar)


def add_options(parser: argparse.ArgumentParser, keys: Collection[str] = ()) -> None:
    """Give a parser the options of these keys, or all. Each collects its texts, with None for a missing value."""
    parser.formatter_class = OptionHelp
    for title, options in GROUPS.items():
        chosen = [option for option in options if not keys or option.key in keys]
        group = parser.add_argument_group(title) if chosen else parser
        for option in chosen:
            group.add_argument(
                option.flag,
                dest=option.key,
                action="append",
                nargs="?",
                const="yes" if option.kind is SWITCH else None,
                metavar=option.kind.metavar,
                help=_help(option),
            )


def _help(option: Option) -> str:
    names = f" [{', '.join(option.env)}]" if option.env else ""
    return f"{option.help}{names} (default: {option.default or option.otherwise})".replace("%", "%%")


def read_flags(argv: Sequence[str], parser: argparse.ArgumentParser, problems: Problems) -> Settings:
    """What the command line says. `--help` and `--version` print and end the process; nothing else does."""
    try:
        known, unknown = parser.parse_known_args(list(argv))
    except ConfigError as error:
        problems.add(str(error), is_usage=True)
        return {}
    _report_unknown(unknown, problems)
    return flags_given(known, problems)


def flags_given(flags: argparse.Namespace, problems: Problems) -> Settings:
    """The settings in a namespace that a parser with our options made; of a flag given twice the last one counts."""
    settings = {}
    for option in OPTIONS.values():
        texts = getattr(flags, option.key, None) or []
        if None in texts:
            problems.add(f"{option.flag}: needs a value, {option.kind.rule}", is_usage=True)
        elif texts:
            settings[option.key] = Setting(texts if option.is_repeatable else texts[-1], option.flag, is_flag=True)
    return settings


def _report_unknown(words: Sequence[str], problems: Problems) -> None:
    """A word after an unknown flag counts as its value, and values are never shown: one may be the API key."""
    flags = [option.flag for option in OPTIONS.values()]
    is_value_due = False
    for word in words:
        name, equals, _ = word.partition("=")
        if name == _KEY_FLAG:
            problems.add(_NO_KEY_FLAG, is_usage=True)
        elif word.startswith("-") and word != "--":
            problems.add(f"{name}: no such flag{did_you_mean(name, flags)}", is_usage=True)
        elif word != "--" and not is_value_due:
            problems.add(f"{word!r}: no argument is expected here", is_usage=True)
        is_value_due = word.startswith("-") and not equals


# --- environment ----------------------------------------------------------------------------------------------------

_SYSTEMD_FILES = {"STATE_DIRECTORY": "", "RUNTIME_DIRECTORY": "control.sock"}
"""Variables of systemd.exec(5): colon-separated directories, of which the first is ours; and our file in it."""


def read_env(env: Mapping[str, str]) -> Settings:
    """What the environment says. An empty variable counts as unset; repeatable options are split at commas."""
    settings: Settings = {}
    for option in OPTIONS.values():
        for name in option.env:
            text = env.get(name, "").strip()
            if name in _SYSTEMD_FILES and text:
                text = os.path.join(text.split(":")[0], _SYSTEMD_FILES[name]).rstrip("/")
            if text:
                parts = [part.strip() for part in text.split(",") if part.strip()] or [text]
                settings.setdefault(option.key, Setting(parts if option.is_repeatable else text, name))
    return settings


# --- the file -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FileSettings:
    settings: Settings
    queues: dict[str, Settings]  # by queue: what its [queues.NAME] table says


def read_file(path: Path, problems: Problems, *, is_flag: bool = False) -> FileSettings:
    """What a TOML file says. A relative path in it is taken from the file's own directory. `is_flag` named it."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
        document = tomllib.loads(text)
    except OSError as error:
        problems.add(f"{path}: cannot be read: {error.strerror}", is_usage=is_flag)
    except UnicodeDecodeError:
        problems.add(f"{path}: is not UTF-8 text")
    except (ValueError, RecursionError) as error:
        problems.add(f"{path}: is not TOML: {error}")
    else:
        return _Document(path, _key_lines(text), problems).read(document)
    return FileSettings({}, {})


class _Document:
    def __init__(self, path: Path, lines: dict[tuple[str, ...], int], problems: Problems) -> None:
        self._path = path
        self._lines = lines
        self._problems = problems

    def read(self, document: dict[str, Any]) -> FileSettings:
        settings = {key: self._setting(key, value) for key, value in document.items() if self._is_known(key)}
        tables = document.get("queues")
        queues = {name: self._queue(name, table) for name, table in tables.items()} if isinstance(tables, dict) else {}
        return FileSettings(settings, queues)

    def _setting(self, key: str, value: Any) -> Setting:
        where = self._where(key)
        if key == "queues" and isinstance(value, dict):
            return Setting(list(value), where)
        if key == "metadata" and isinstance(value, dict):
            return Setting([_as_pair(name, text) for name, text in value.items()], where)
        if OPTIONS[key].kind is PATH and isinstance(value, str) and value and not value.startswith("~"):
            return Setting(os.path.join(self._path.parent, value), where)
        return Setting(value, where)

    def _queue(self, name: str, table: Any) -> Settings:
        where = self._where("queues", name)
        if not isinstance(table, dict):
            self._problems.add(f"{where}: must be a table with {', '.join(QUEUE_KEYS)}")
            return {}
        for key, value in table.items():
            if isinstance(value, dict):
                self._problems.add(f'{where}: a queue name with dots needs quotes, such as [queues."{name}.{key}"]')
            elif key not in QUEUE_KEYS:
                hint = did_you_mean(key, QUEUE_KEYS)
                self._problems.add(f"{self._where('queues', name, key)}: no such key{hint}")
        known = {key: value for key, value in table.items() if key in QUEUE_KEYS and not isinstance(value, dict)}
        return {key: Setting(value, self._where("queues", name, key)) for key, value in known.items()}

    def _is_known(self, key: str) -> bool:
        keys = [option.key for option in OPTIONS.values() if option.is_in_file]
        if key == "api_key":
            self._problems.add(f"{self._where(key)}: the key itself does not belong in this file, which others read; "
                               "name a file of its own with api_key_file, or set SPOOLED_API_KEY")  # fmt: skip
        elif key not in keys:
            self._problems.add(f"{self._where(key)}: no such key{did_you_mean(key, keys)}")
        return key in keys

    def _where(self, *keys: str) -> str:
        known = (keys[:length] for length in range(len(keys), 0, -1))
        line = next((f":{self._lines[part]}" for part in known if part in self._lines), "")
        return f"{self._path}{line}: {'.'.join(keys)}"


def _as_pair(name: str, value: Any) -> Any:
    """`name=value`; what cannot be said so stays a table, to be rejected like any value of the wrong type."""
    return f"{name}={value}" if isinstance(value, str) and "=" not in name else {name: value}


def _key_lines(text: str) -> dict[tuple[str, ...], int]:
    """The line on which each key or table first stands: tomllib does not tell.

    Good for messages only: a line inside a multi-line string that looks like a key is taken for one.
    """
    lines: dict[tuple[str, ...], int] = {}
    table: tuple[str, ...] = ()
    for count, line in enumerate(text.split("\n"), start=1):
        if header := re.match(r"\s*\[\[?(.+?)\]\]?\s*(?:#.*)?$", line):
            path = table = _key_parts(header[1])
        elif key := re.match(r"""\s*((?:[\w.-]|"[^"]*"|'[^']*')+)\s*=""", line):
            path = table + _key_parts(key[1])
        else:
            continue
        for length in range(1, len(path) + 1):
            lines.setdefault(path[:length], count)
    return lines


def _key_parts(dotted: str) -> tuple[str, ...]:
    found = re.findall(r"""(?:"([^"]*)"|'([^']*)'|([\w-]+))""", dotted)
    return tuple(double or single or bare for double, single, bare in found)

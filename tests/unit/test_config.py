"""The configuration: every option from each of its sources, every problem named once, and no secret ever shown."""

from __future__ import annotations

import argparse
import doctest
import errno
import os
import re
import socket
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spooled_supervisor import __version__, config, options
from spooled_supervisor.config import (
    ApiConfig,
    Config,
    OptionParser,
    QueueConfig,
    Secret,
    add_options,
    control_sockets,
    cpus_available,
    default_control_socket,
    default_hostname,
    default_state_dir,
    load,
    warnings,
)
from spooled_supervisor.errors import EX_CONFIG, EX_USAGE, ConfigError

KEY = "sp_test_0123456789abcdef"
ENV = {"SPOOLED_APP": "jobs", "SPOOLED_API_KEY": KEY, "HOME": "/home/nobody"}
EXAMPLE = Path(__file__).parents[2] / "systemd" / "spooled-supervisor.toml"


def loaded(*argv: str, env: dict[str, str] | None = None, **kwargs: Any) -> Config:
    return load(argv, ENV | (env or {}), **kwargs)


def refused(*argv: str, env: dict[str, str] | None = None) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        loaded(*argv, env=env)
    return caught.value


def problem(*argv: str, env: dict[str, str] | None = None) -> str:
    """The only thing that is wrong."""
    (line,) = refused(*argv, env=env).problems
    return line


@pytest.fixture
def toml(tmp_path: Path) -> Any:
    """Writes a TOML file and gives the arguments that make us read it."""

    def write(text: str) -> tuple[str, str]:
        path = tmp_path / "s.toml"
        path.write_text(text)
        return "--config", str(path)

    return write


@pytest.fixture
def certificates() -> str:
    import ssl

    path = ssl.get_default_verify_paths().openssl_cafile
    if not os.path.exists(path):
        pytest.skip("this machine has no bundle of certificates")
    return path


# --- each option, from each source ----------------------------------------------------------------------------------

GIVEN: list[tuple[str, str, str, str, Any]] = [
    # flag, its text, its TOML, attribute, value
    ("--app", "a.b:c", 'app = "a.b:c"', "app", "a.b:c"),
    ("--procs", "7", "procs = 7", "pool.procs", 7),
    ("--procs", "auto", 'procs = "auto"', "pool.procs", min(cpus_available(), 1000)),
    ("--api-url", "http://[::1]:80/x//", 'api_url = "http://[::1]:80/x//"', "api.url", "http://[::1]:80/x"),
    ("--transport", "rest", 'transport = "rest"', "api.transport", "rest"),
    ("--transport", "grpc-stream", 'transport = "grpc-stream"', "api.transport", "grpc-stream"),
    ("--transport", "grpc-process", 'transport = "grpc-process"', "api.transport", "grpc-process"),
    ("--grpc-address", "localhost:50051", 'grpc_address = "localhost:50051"', "api.grpc_address", "localhost:50051"),
    ("--worker-id", "W.1-x_", 'worker_id = "W.1-x_"', "worker.worker_id", "W.1-x_"),
    ("--hostname", "box-1.lan", 'hostname = "box-1.lan"', "worker.hostname", "box-1.lan"),
    ("--worker-type", "gpu", 'worker_type = "gpu"', "worker.worker_type", "gpu"),
    ("--worker-version", "9.9", 'worker_version = "9.9"', "worker.version", "9.9"),
    ("--metadata", "k=v=w", 'metadata = ["k=v=w"]', "worker.metadata", {"k": "v=w"}),
    ("--poll-interval", "500ms", "poll_interval = 0.5", "claims.poll_interval_s", 0.5),
    ("--lease-duration", "2m", "lease_duration = 120", "claims.lease_duration_s", 120),
    ("--heartbeat-fraction", "0.3", "heartbeat_fraction = 0.3", "claims.heartbeat_fraction", 0.3),
    ("--prefetch", "2", "prefetch = 2", "claims.prefetch", 2),
    ("--job-timeout", "1h", 'job_timeout = "1h"', "pool.job_timeout_s", 3600.0),
    ("--abort-grace", "0", "abort_grace = 0", "pool.abort_grace_s", 0.0),
    ("--boot-timeout", "1.5m", "boot_timeout = 90", "pool.boot_timeout_s", 90.0),
    ("--max-jobs-per-child", "1000", "max_jobs_per_child = 1000", "pool.max_jobs_per_child", 1000),
    ("--max-child-memory", "1.5GiB", 'max_child_memory = "1.5GiB"', "pool.max_child_memory_bytes", 3 * 2**29),
    ("--child-nice", "0", "child_nice = 0", "pool.child_nice", 0),
    ("--strict-preload", "yes", "strict_preload = true", "pool.strict_preload", True),
    ("--leftovers", "keep", 'leftovers = "keep"', "pool.leftovers", "keep"),
    ("--child-memory-limit", "2G", 'child_memory_limit = "2G"', "pool.child_memory_limit_bytes", 2**31),
    ("--pin-cpus", "yes", "pin_cpus = true", "pool.pin_cpus", True),
    ("--no-events", "yes", "no_events = true", "claims.listens_to_events", False),
    ("--max-load", "3.5", "max_load = 3.5", "claims.max_load", 3.5),
    ("--max-memory-pressure", "20", "max_memory_pressure = 20", "claims.max_memory_pressure", 20.0),
    ("--shutdown-timeout", "0", "shutdown_timeout = 0", "shutdown_timeout_s", 0.0),
    ("--state-dir", "/s", 'state_dir = "/s"', "state_dir", Path("/s")),
    ("--http-listen", "[::1]:0", 'http_listen = "[::1]:0"', "http_listen", ("::1", 0)),
    ("--http-listen", "off", 'http_listen = "off"', "http_listen", None),
    ("--control-socket", "/c.sock", 'control_socket = "/c.sock"', "control_socket", Path("/c.sock")),
    ("--log-level", "WARN", 'log_level = "warn"', "log.level", "warning"),
    ("--log-format", "text", 'log_format = "text"', "log.format", "text"),
    ("--queue", "b", 'queues = ["b"]', "queues", (QueueConfig("b"),)),
]

VARIABLES = [  # variable, flag; STATE_DIRECTORY and RUNTIME_DIRECTORY have tests of their own
    (variable, option.flag)
    for option in options.OPTIONS.values()
    for variable in option.env
    if not variable.endswith("_DIRECTORY")
]


def at(found: object, attribute: str) -> Any:
    for name in attribute.split("."):
        found = getattr(found, name)
    return found


@pytest.mark.parametrize(("flag", "text", "_toml", "attribute", "value"), GIVEN)
def test_flag_is_read(flag: str, text: str, _toml: str, attribute: str, value: Any) -> None:
    assert at(loaded(flag, text), attribute) == value
    assert at(loaded(f"{flag}={text}"), attribute) == value


@pytest.mark.parametrize(
    ("variable", "text", "attribute", "value"),
    [(name, text, where, value) for name, of in VARIABLES for flag, text, _, where, value in GIVEN if flag == of],
)
def test_variable_is_read(variable: str, text: str, attribute: str, value: Any) -> None:
    assert at(loaded(env={variable: text}), attribute) == value


@pytest.mark.parametrize(("_flag", "_text", "line", "attribute", "value"), GIVEN)
def test_key_of_the_file_is_read(toml: Any, _flag: str, _text: str, line: str, attribute: str, value: Any) -> None:
    env = {name: text for name, text in ENV.items() if name != "SPOOLED_APP"}
    argv = toml(line if line.startswith("app") else f'app = "x"\n{line}')
    assert at(load(argv, env), attribute) == value


def test_every_row_of_the_table_is_tested_here() -> None:
    tested_elsewhere = {"--config", "--api-key-file", "--ca-file"}
    assert {flag for flag, *_ in GIVEN} | tested_elsewhere == {option.flag for option in options.OPTIONS.values()}


def test_defaults() -> None:
    found = loaded()
    assert found.app == "jobs"
    assert found.queues == ()
    assert found.api == ApiConfig(
        "https://api.spooled.cloud", Secret(KEY), None, "rest", "grpc.spooled.cloud:443", None
    )
    assert found.worker == config.WorkerConfig(None, default_hostname(), "python", __version__, {})
    assert found.claims == config.ClaimConfig(1.0, 30, 0.5, 0)
    assert found.pool == config.PoolConfig(min(cpus_available(), 1000), None, 5.0, 60.0, None, None, 5, False)
    assert found.shutdown_timeout_s == 30.0
    assert found.state_dir == Path("/home/nobody/.local/state/spooled-supervisor/jobs")
    assert found.http_listen == ("127.0.0.1", 9464)
    assert found.control_socket == found.state_dir / "control.sock"
    assert found.log == config.LogConfig("info", "json")
    assert found.config_file is None


@pytest.mark.parametrize(
    ("argv", "is_used"),
    [
        ((), False),
        (("--transport", "rest"), False),
        (("--transport", "rest", "--grpc-address", "h:1"), True),
        (("--grpc-address", "h:1"), True),
        (("--transport", "grpc-stream"), True),
        (("--transport", "grpc-process"), True),
    ],
)
def test_grpc_is_used_where_it_is_the_transport_or_has_an_address(argv: tuple[str, ...], is_used: bool) -> None:
    assert loaded(*argv).api.uses_grpc is is_used


def test_grpc_without_its_packages_is_refused_with_the_way_to_get_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "find_spec", lambda name: None)
    assert problem("--transport", "grpc-stream") == (
        "--transport: gRPC is not installed; pip install 'spooled-supervisor[grpc]'"
    )
    assert "pip install" in problem("--grpc-address", "h:1")
    assert not loaded("--transport", "rest").api.uses_grpc


def test_strict_preload_is_a_flag_that_needs_no_value_and_takes_one() -> None:
    assert loaded("--strict-preload").pool.strict_preload is True
    assert loaded("--strict-preload", "--procs", "1").pool.strict_preload is True
    assert loaded("--strict-preload=no").pool.strict_preload is False


def test_logs_are_text_on_a_terminal() -> None:
    assert loaded(is_tty=True).log.format == "text"
    assert loaded("--log-format=json", is_tty=True).log.format == "json"


def test_configuration_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        loaded().pool.procs = 3  # type: ignore[misc]


# --- precedence -----------------------------------------------------------------------------------------------------


def test_flag_wins_over_environment_wins_over_file(toml: Any) -> None:
    file = toml("prefetch = 1")
    assert loaded(*file).claims.prefetch == 1
    assert loaded(*file, env={"SPOOLED_PREFETCH": "2"}).claims.prefetch == 2
    assert loaded(*file, "--prefetch", "3", env={"SPOOLED_PREFETCH": "2"}).claims.prefetch == 3


def test_last_of_a_repeated_flag_wins() -> None:
    assert loaded("--procs", "2", "--procs", "3").pool.procs == 3


def test_empty_variable_counts_as_unset(toml: Any) -> None:
    env = {"SPOOLED_PREFETCH": "", "SPOOLED_QUEUES": " ", "SPOOLED_CONFIG": "", "SPOOLED_HTTP_LISTEN": ""}
    found = loaded(*toml("prefetch = 1"), env=env)
    assert (found.claims.prefetch, found.queues, found.http_listen) == (1, (), ("127.0.0.1", 9464))


def test_first_name_of_a_variable_wins() -> None:
    env = {"SPOOLED_API_URL": "https://a", "SPOOLED_BASE_URL": "https://b"}
    assert loaded(env=env).api.url == "https://a"
    assert loaded(env=env | {"SPOOLED_API_URL": ""}).api.url == "https://b"


def test_value_that_is_overridden_is_not_judged() -> None:
    assert loaded("--procs", "2", env={"SPOOLED_PROCS": "many"}).pool.procs == 2


def test_unknown_variable_is_no_error() -> None:
    assert loaded(env={"SPOOLED_SHOE_SIZE": "43"}).app == "jobs"


def test_file_is_named_by_flag_or_variable(toml: Any, tmp_path: Path) -> None:
    _, path = toml("prefetch = 1")
    assert loaded(env={"SPOOLED_CONFIG": path}).config_file == Path(path)
    other = tmp_path / "other.toml"
    other.write_text("prefetch = 9")
    found = loaded("--config", str(other), env={"SPOOLED_CONFIG": path})
    assert (found.config_file, found.claims.prefetch) == (other, 9)


# --- values and rules -----------------------------------------------------------------------------------------------

BAD: list[tuple[str, list[str], str]] = [
    ("--app", ["", "a-b", "a..b", "a:", ":b", "a:b:c", "a/b.py", "class.x", "1a", "a:b.c"], "pkg.module"),
    ("--queue", ["", ".a", "-a", "a b", "a,b", "a/b", "a\nb", "x" * 101], "1 to 100"),
    ("--procs", ["0", "1001", "-1", "2.0", "all", "", "\u0663", "9" * 5000], "from 1 to 1000"),
    ("--config", [""], "a path"),
    (
        "--api-url",
        ["api.spooled.cloud", "ftp://h", "https://", "https://h:99999", "https://h:x", "https://h:0", "http://a b", ""],
        "http:// or https://",
    ),
    ("--api-url", ["https://u:p@h", "https://u@h"], "must not carry a user name"),
    ("--api-url", ["https://h?x=1", "https://h/#f", "https://h/?"], "without ? or #"),
    ("--api-key-file", [""], "a path"),
    ("--ca-file", [""], "a path"),
    ("--transport", ["http", "REST", ""], "rest, grpc-stream or grpc-process"),
    ("--grpc-address", ["h", "h:0", "h:65536", ":1", "::1:50051", "http://h:1", ""], "HOST:PORT"),
    ("--worker-id", ["", "a b", "x" * 129, "é"], "1 to 128"),
    ("--hostname", ["", ".a", "a.", "a-", "a b", "x" * 256, "ü"], "1 to 255"),
    ("--worker-type", ["", "x" * 51, "a\tb"], "1 to 50"),
    ("--worker-version", ["", "x" * 51], "1 to 50"),
    ("--metadata", ["k", "=v", "k=\x07"], "K=V"),
    ("--poll-interval", ["0", "49ms", "x", "1d", "nan", "inf", "1e3", "", "2 years", "9999h"], "0.05 s or more"),
    ("--lease-duration", ["4", "3601", "5.5", "5500ms", "2h", ""], "whole seconds from 5 to 3600"),
    ("--heartbeat-fraction", ["0", "1", "1.5", "nan", "inf", "1_0", "1e-999", ""], "between 0 and 1"),
    ("--prefetch", ["-1", "101", "x"], "from 0 to 100"),
    ("--job-timeout", ["0", "0s"], "above 0 s"),
    ("--abort-grace", ["-1", "x"], "0 s or more"),
    ("--boot-timeout", ["0"], "above 0 s"),
    ("--max-jobs-per-child", ["0", "x"], "from 1 to"),
    ("--max-child-memory", ["0", "x", "1P", "1.2.3M", "0.1", "9" * 18 + "T", ""], "a size above 0"),
    ("--child-nice", ["-1", "20"], "from 0 to 19"),
    ("--strict-preload", ["maybe", ""], "yes or no"),
    ("--shutdown-timeout", ["-1"], "0 s or more"),
    ("--state-dir", [""], "a path"),
    ("--http-listen", ["9464", ":9464", "::1:9464", "h:65536", "[h]:1", "[::1]", "*:1", "http://h:1", ""], "HOST:PORT"),
    ("--control-socket", [""], "a path"),
    ("--log-level", ["loud", ""], "debug, info, warning or error"),
    ("--log-format", ["xml", ""], "text or json"),
]


@pytest.mark.parametrize(
    ("flag", "text", "rule"), [(flag, text, rule) for flag, texts, rule in BAD for text in texts if text != ""]
)
def test_bad_flag_is_a_usage_error_that_names_flag_value_and_rule(flag: str, text: str, rule: str) -> None:
    error = refused(f"{flag}={text}")
    (line,) = error.problems
    assert line.startswith(f"{flag}: ")
    assert rule in line
    if "api-url" not in flag and len(text) < 90:
        assert repr(text) in line
    assert len(line) < 400
    assert error.exit_code == EX_USAGE


@pytest.mark.parametrize("flag", sorted({flag for flag, texts, _ in BAD if "" in texts}))
def test_empty_text_is_no_value(flag: str) -> None:
    assert problem(f"{flag}=").startswith(f"{flag}: '' must be ")


@pytest.mark.parametrize(
    ("variable", "text", "rule"),
    [
        (name, text, rule)
        for name, of in VARIABLES
        for flag, texts, rule in BAD
        for text in texts
        if flag == of and text and "," not in text
    ],
)
def test_bad_variable_is_a_configuration_error_that_names_it(variable: str, text: str, rule: str) -> None:
    error = refused(env={variable: text})
    (line,) = error.problems
    assert line.startswith(f"{variable}: ")
    assert rule in line
    assert error.exit_code == EX_CONFIG


BAD_LINES = [
    ("procs = 0", "procs: 0 must be auto or a whole number from 1 to 1000"),
    ("procs = 2.0", "procs: 2.0 must be auto"),
    ("procs = true", "procs: True must be auto"),
    ("poll_interval = -1", "poll_interval: -1 must be a duration of 0.05 s or more"),
    ("poll_interval = nan", "poll_interval: nan must be a duration"),
    ("poll_interval = 1e300", "poll_interval: 1e+300 must be a duration"),
    ("poll_interval = true", "poll_interval: True must be a duration"),
    ("lease_duration = 7.5", "lease_duration: 7.5 must be whole seconds"),
    ("hostname = 7", "hostname: 7 must be 1 to 255"),
    ("worker_version = 1.2", "worker_version: 1.2 must be 1 to 50"),
    ("strict_preload = 1", "strict_preload: 1 must be yes or no"),
    ("transport = 'grpc'", "transport: 'grpc' must be rest, grpc-stream or grpc-process"),
    ("state_dir = ''", "state_dir: '' must be a path"),
    ('state_dir = "a\\u0000"', "must be a path"),
    ("state_dir = 7", "state_dir: 7 must be a path"),
    ("http_listen = 9464", "http_listen: 9464 must be HOST:PORT"),
    ("app = ['a']", "app: ['a'] must be pkg.module"),
    ("job_timeout = 2020-01-01", "must be a duration above 0 s"),
    ("queues = 'a'", "queues: 'a' must be a list, each of it a name"),
    ("queues = ['a', 3]", "queues: 3 must be a name"),
    ("queues = ['a', '.b']", "queues: '.b' must be a name"),
    ("queues.'b c'.weight = 1", "queues: 'b c' must be a name"),
    ("queues.a = 3", "queues.a: must be a table with weight, max_procs, timeout"),
    ("queues.a.weight = 0", "queues.a.weight: 0 must be a number above 0"),
    ("queues.a.weight = inf", "queues.a.weight: inf must be a number above 0"),
    ("queues.a.max_procs = 0", "queues.a.max_procs: 0 must be a whole number from 1 to 1000"),
    ("queues.a.timeout = '0s'", "queues.a.timeout: '0s' must be a duration above 0 s"),
    ("queues.a.wieght = 2", "queues.a.wieght: no such key; did you mean weight?"),
    ("queues.a.b.weight = 2", 'queues.a: a queue name with dots needs quotes, such as [queues."a.b"]'),
    ("metadata = 'k=v'", "metadata: 'k=v' must be a list, each of it K=V"),
    ("metadata = {k = 1}", "metadata: {'k': 1} must be K=V"),
    ("metadata = {'k=x' = 'v'}", "metadata: {'k=x': 'v'} must be K=V"),
    ("poll-interval = 1", "poll-interval: no such key; did you mean poll_interval?"),
    ("lease_duraton = 1", "lease_duraton: no such key; did you mean lease_duration?"),
    ("concurrency = 4", "concurrency: no such key; did you mean procs?"),
    ("config = 'x'", "config: no such key"),
    ("zebra = 1", "zebra: no such key"),
]


@pytest.mark.parametrize(("line", "expected"), BAD_LINES)
def test_bad_line_of_the_file_is_a_configuration_error_that_names_file_line_and_key(
    toml: Any, line: str, expected: str
) -> None:
    argv = toml(f"# first\n\n{line}\n")
    env = {name: text for name, text in ENV.items() if name != "SPOOLED_APP" or not line.startswith("app")}
    with pytest.raises(ConfigError) as caught:
        load(argv, env)
    (found,) = caught.value.problems
    assert found.startswith(f"{argv[1]}:3: ")
    assert expected in found
    assert caught.value.exit_code == EX_CONFIG


def test_line_is_found_in_tables_and_below_quoted_names(toml: Any) -> None:
    argv = toml(
        "prefetch = 1 # [x]\n"
        "[ queues . emails ] # their table\n"
        "weight = 1\n"
        "timeout = 0\n"
        "\n"
        '[queues."daily.reports"]\n'
        '  "max_procs" = 0\n'
        "[metadata]\n"
        "a = 1\n"
    )
    path = argv[1]
    assert [line.split(" must")[0] for line in refused(*argv).problems] == [
        f"{path}:8: metadata: {{'a': 1}}",
        f"{path}:4: queues.emails.timeout: 0",
        f"{path}:7: queues.daily.reports.max_procs: 0",
    ]


def test_inline_table_is_found_by_its_own_line(toml: Any) -> None:
    argv = toml("\nqueues = { a = { weight = 0 } }")
    assert problem(*argv).startswith(f"{argv[1]}:2: queues.a.weight: 0 must")


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1", 1),
        ("512M", 512 * 2**20),
        ("512 MB", 512 * 2**20),
        ("1G", 2**30),
        ("1.5GiB", 3 * 2**29),
        ("64k", 65536),
        ("1TiB", 2**40),
        ("7B", 7),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert loaded("--max-child-memory", text).pool.max_child_memory_bytes == size


@pytest.mark.parametrize("name", ["a", "ü.Ж-1_", "Grüße", "x" * 100, "_a", "7", "日本"])
def test_queue_names_that_the_service_takes(name: str) -> None:
    assert loaded("--queue", name).queues == (QueueConfig(name),)


@pytest.mark.parametrize(
    ("fraction", "lease", "grace", "is_fine"),
    [
        # a lease of 30 s: killed at 28.5 s, aborted min(grace, 7.5) earlier
        ("0.78", "30", "5", True),
        ("0.79", "30", "5", False),
        ("0.949", "30", "0", True),
        ("0.95", "30", "0", False),
        ("0.699", "30", "60", True),
        ("0.7", "30", "60", False),
        # a lease of 5 s: killed at 4.5 s, aborted 1.25 s earlier; the instant itself is too late
        ("0.64", "5", "5", True),
        ("0.65", "5", "5", False),
    ],
)
def test_first_renewal_comes_before_the_abort(fraction: str, lease: str, grace: str, is_fine: bool) -> None:
    argv = ("--heartbeat-fraction", fraction, "--lease-duration", lease, "--abort-grace", grace)
    if is_fine:
        assert loaded(*argv).claims.heartbeat_fraction == float(fraction)
    else:
        assert problem(*argv).startswith(f"--heartbeat-fraction: {fraction} puts the first renewal")


@pytest.mark.parametrize("grace", ["0", "5", "1h"])
@pytest.mark.parametrize("lease", [5, 6, 10, 11, 60, 3600])
def test_default_fraction_fits_every_lease(lease: int, grace: str) -> None:
    assert loaded("--lease-duration", str(lease), "--abort-grace", grace).claims.lease_duration_s == lease


def test_late_renewal_is_a_usage_error_if_a_flag_is_involved(toml: Any) -> None:
    argv = toml("heartbeat_fraction = 0.68")
    assert loaded(*argv).claims.heartbeat_fraction == 0.68
    error = refused(*argv, "--lease-duration=5")
    assert error.problems[0].startswith(f"{argv[1]}:1: heartbeat_fraction: 0.68 puts the first renewal 3.4 s into")
    assert error.problems[0].endswith("it must be below 0.65")
    assert error.exit_code == EX_USAGE
    assert refused(*argv, env={"SPOOLED_LEASE_DURATION": "5"}).exit_code == EX_CONFIG


# --- queues and metadata --------------------------------------------------------------------------------------------


def test_queues_are_repeated_flags_a_list_of_names_or_tables(toml: Any) -> None:
    assert [q.name for q in loaded("--queue", "b", "--queue", "a", "--queue", "b").queues] == ["b", "a"]
    assert [q.name for q in loaded(env={"SPOOLED_QUEUES": " b, a,,"}).queues] == ["b", "a"]
    assert loaded(*toml("queues = []")).queues == ()
    tables = toml('[queues.b]\nweight = 2\nmax_procs = 3\ntimeout = "5m"\n[queues."a.c"]\n')
    assert loaded(*tables).queues == (QueueConfig("b", 2.0, 3, 300.0), QueueConfig("a.c"))


def test_table_tunes_its_queue_where_a_flag_says_which_queues_are_served(toml: Any) -> None:
    tables = toml("[queues.a]\nweight = 2\n[queues.b]\nweight = 3\n")
    assert loaded(*tables, "--queue", "b", "--queue", "c").queues == (QueueConfig("b", 3.0), QueueConfig("c"))


def test_only_commas_are_no_queue() -> None:
    assert problem(env={"SPOOLED_QUEUES": ","}).startswith("SPOOLED_QUEUES: ',' must be a name")


def test_metadata_is_repeated_flags_a_list_or_a_table(toml: Any) -> None:
    expected = {"rack": "b 7", "zone": ""}
    assert loaded("--metadata", "rack=b 7", "--metadata", "zone=").worker.metadata == expected
    assert loaded(env={"SPOOLED_METADATA": "rack = b 7,zone="}).worker.metadata == expected
    assert loaded(*toml('[metadata]\nrack = "b 7"\nzone = ""')).worker.metadata == expected


def test_metadata_has_a_size_that_the_service_takes() -> None:
    big = [argument for n in range(40) for argument in ("--metadata", f"{n}={'x' * 1000}")]
    assert problem(*big) == "--metadata: must be at most 32768 bytes as JSON"


# --- problems -------------------------------------------------------------------------------------------------------


def test_every_problem_is_told_at_once(toml: Any) -> None:
    argv = toml("lease_duration = 1\nsurprise = 2\n")
    env = {"SPOOLED_APP": "", "SPOOLED_API_KEY": "", "SPOOLED_PREFETCH": "x", "HOME": ""}
    error = refused(*argv, "--procs", "0", "--bogus", "--child-nice", env=env)
    assert [line.split(": ")[0] for line in error.problems] == [
        "--bogus",
        "--child-nice",
        f"{argv[1]}:2",
        "--procs",
        f"{argv[1]}:1",
        "SPOOLED_PREFETCH",
        "app",
        "API key",
    ]
    assert str(error).count("\n") == len(error.problems) - 1
    assert error.exit_code == EX_USAGE


def test_without_a_problem_of_the_command_line_the_exit_code_is_78() -> None:
    error = refused("--procs", "2", env={"SPOOLED_PREFETCH": "x", "SPOOLED_APP": ""})
    assert (len(error.problems), error.exit_code) == (2, EX_CONFIG)


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("--proc", "--procs"),
        ("--pocs", "--procs"),
        ("--queues", "--queue"),
        ("--pol", "--poll-interval"),
        ("--log-lvl", "--log-level"),
        ("--concurrency", "--procs"),
        ("--api-key-fle", "--api-key-file"),
    ],
)
def test_unknown_flag_is_told_with_a_near_one(word: str, hint: str) -> None:
    expected = f"{word}: no such flag; did you mean {hint}?"
    assert problem(word, "7") == expected
    assert problem(f"{word}=7") == expected


@pytest.mark.parametrize("word", ["--xyzzy", "-x", "-5s", "--insecure"])
def test_unknown_flag_without_a_near_one(word: str) -> None:
    error = refused(word)
    assert error.problems == [f"{word}: no such flag"]
    assert error.exit_code == EX_USAGE


def test_flag_without_its_value_is_one_problem_among_others() -> None:
    assert refused("--procs", "--app", "--prefetch", "x").problems == [
        "--app: needs a value, pkg.module or pkg.module:name",
        "--procs: needs a value, auto or a whole number from 1 to 1000",
        "--prefetch: 'x' must be a whole number from 0 to 100",
    ]


def test_stray_argument() -> None:
    error = refused("stray")
    assert (error.problems, error.exit_code) == (["'stray': no argument is expected here"], EX_USAGE)


@pytest.mark.parametrize("argv", [["--help"], ["-h"], ["--bogus", "--help"], ["--version"]])
def test_help_and_version_print_and_exit_0(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        load(argv, {})
    assert caught.value.code == 0
    printed = capsys.readouterr().out
    assert (__version__ if "--version" in argv else "--lease-duration TIME") in printed


def test_help_tells_every_flag_variable_and_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load(["--help"], {})
    printed = re.sub(r"\s+", "", capsys.readouterr().out)
    for option in options.OPTIONS.values():
        names = f"[{', '.join(option.env)}]" if option.env else ""
        shown = f"{option.help}{names}(default: {option.default or option.otherwise})"
        assert re.sub(r"\s+", "", shown) in printed
        assert f"{option.flag}{option.kind.metavar}" in printed or option.kind is options.SWITCH


def test_long_values_are_cut() -> None:
    assert len(problem("--worker-id", "x" * 5000)) < 200


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"a = 1\nb = = 2", "is not TOML: Invalid value (at line 2, column 5)"),
        (b"a = 1\na = 2", "is not TOML: Cannot overwrite a value"),
        (b"\xff", "is not UTF-8 text"),
        (b"a = " + b"[" * 5000, "is not TOML: "),
        (b"a = " + b"9" * 5000, "is not TOML: "),
    ],
)
def test_file_that_is_no_toml_is_named(tmp_path: Path, content: bytes, expected: str) -> None:
    path = tmp_path / "s.toml"
    path.write_bytes(content)
    error = refused("--config", str(path))
    assert error.problems[0].startswith(f"{path}: {expected}")
    assert error.exit_code == EX_CONFIG


def test_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    assert problem("--config", f"{tmp_path}/none") == f"{tmp_path}/none: cannot be read: {os.strerror(errno.ENOENT)}"
    assert problem("--config", f"{tmp_path}") == f"{tmp_path}: cannot be read: {os.strerror(errno.EISDIR)}"
    assert refused("--config", f"{tmp_path}/none").exit_code == EX_USAGE
    assert refused(env={"SPOOLED_CONFIG": f"{tmp_path}/none"}).exit_code == EX_CONFIG


def test_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "s.toml"
    path.write_bytes(b"\xef\xbb\xbfprefetch = 1\r\n")
    assert loaded("--config", str(path)).claims.prefetch == 1


# --- the API key ----------------------------------------------------------------------------------------------------

NO_KEY = {"SPOOLED_API_KEY": ""}


@pytest.fixture
def key_files(tmp_path: Path) -> dict[str, str]:
    """A key file for every way to name one; each holds the way's name as its key."""
    for name in ("flag", "variable", "toml", "spooled-api-key"):
        (tmp_path / name).write_text(f"  {name}-{KEY}\n")
    return {name: str(tmp_path / name) for name in ("flag", "variable", "toml")} | {"directory": str(tmp_path)}


@pytest.mark.parametrize(
    ("present", "winner"),
    [
        ({"flag", "key", "variable", "toml", "credential"}, "flag"),
        ({"key", "variable", "toml", "credential"}, "key"),
        ({"variable", "toml", "credential"}, "variable"),
        ({"toml", "credential"}, "toml"),
        ({"credential"}, "spooled-api-key"),
    ],
)
def test_key_comes_from_the_first_of_its_places(
    key_files: dict[str, str], toml: Any, present: set[str], winner: str
) -> None:
    env = {
        "SPOOLED_API_KEY": f" key-{KEY} \n" if "key" in present else "",
        "SPOOLED_API_KEY_FILE": key_files["variable"] if "variable" in present else "",
        "CREDENTIALS_DIRECTORY": key_files["directory"] if "credential" in present else "",
    }
    argv = toml(f"api_key_file = '{key_files['toml']}'" if "toml" in present else "")
    flags = ["--api-key-file", key_files["flag"]] if "flag" in present else []
    found = loaded(*argv, *flags, env=env).api
    assert found.key.reveal() == f"{winner}-{KEY}"
    assert found.key_file == (None if winner == "key" else Path(key_files["directory"], winner))


def test_blank_file_counts_as_unset(tmp_path: Path, key_files: dict[str, str]) -> None:
    blank = tmp_path / "blank"
    blank.write_text(" \n")
    argv = ("--api-key-file", str(blank))
    assert loaded(*argv).api.key.reveal() == KEY
    found = loaded(*argv, env=NO_KEY | {"CREDENTIALS_DIRECTORY": key_files["directory"]})
    assert found.api.key.reveal() == f"spooled-api-key-{KEY}"
    assert problem(*argv, env=NO_KEY).endswith(f"; {blank} is blank")


def test_missing_key_is_told_with_its_three_ways(tmp_path: Path) -> None:
    error = refused(env=NO_KEY | {"CREDENTIALS_DIRECTORY": str(tmp_path)})
    (line,) = error.problems
    for way in ("SPOOLED_API_KEY,", "--api-key-file", "systemd credential spooled-api-key"):
        assert way in line
    assert error.exit_code == EX_CONFIG


def test_key_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    error = refused("--api-key-file", f"{tmp_path}/none")
    assert error.problems == [f"--api-key-file: {tmp_path}/none cannot be read: {os.strerror(errno.ENOENT)}"]
    assert error.exit_code == EX_USAGE
    env = NO_KEY | {"SPOOLED_API_KEY_FILE": str(tmp_path)}
    assert problem(env=env) == f"SPOOLED_API_KEY_FILE: {tmp_path} cannot be read: {os.strerror(errno.EISDIR)}"
    assert refused(env=env).exit_code == EX_CONFIG


@pytest.mark.parametrize("middle", ["\n", "\t", " ", "\x00", "\x7f", "é", "\udcff", "x" * 5000])
def test_key_that_no_header_can_carry_is_refused_and_not_shown(tmp_path: Path, middle: str) -> None:
    path = tmp_path / "key"
    path.write_bytes(f"abcdef{middle}ghijkl".encode("utf-8", "surrogateescape"))
    for env in ({"SPOOLED_API_KEY": f"abcdef{middle}ghijkl"}, NO_KEY | {"SPOOLED_API_KEY_FILE": str(path)}):
        line = problem(env=env)
        assert "cannot be an API key" in line
        assert "abcdef" not in line
        assert "ghijkl" not in line


def test_relative_key_file_starts_from_the_file_that_names_it(tmp_path: Path, toml: Any) -> None:
    (tmp_path / "k").write_text(KEY + "x")
    assert loaded(*toml("api_key_file = 'k'"), env=NO_KEY).api.key.reveal() == KEY + "x"


def test_key_is_refused_as_a_flag_and_in_the_file(toml: Any) -> None:
    argv = toml(f"api_key = '{KEY}'")
    for line in (problem("--api-key", KEY), problem(f"--api-key={KEY}"), problem(*argv)):
        assert "SPOOLED_API_KEY" in line
        assert KEY not in line
    assert refused("--api-key", KEY).exit_code == EX_USAGE


@pytest.mark.parametrize(
    ("argv", "env"),
    [
        ([KEY], {}),
        (["--api_key", KEY], {}),
        (["--apikey", KEY], {}),
        (["--apikey=" + KEY], {}),
        (["--api-key-file", KEY], {}),
        (["--worker-id", f"{KEY} {KEY}"], {}),
        ([], {"SPOOLED_API_KEY_FILE": KEY, "SPOOLED_API_KEY": ""}),
        ([], {"SPOOLED_PROCS": KEY}),
        ([], {"SPOOLED_API_URL": f"https://{KEY}@host"}),
        (["--api-url", f"https://host/?api_key={KEY}"], {}),
        (["--api-url", "https://user:0123456789abcdef@host"], {}),
        (["--api-url", "https://host?token=0123456789abcdef"], {}),
        ([], {"SPOOLED_API_KEY": "0123456789abcdef", "SPOOLED_PROCS": "0123456789abcdef"}),
    ],
)
def test_key_in_the_wrong_place_is_not_shown(argv: list[str], env: dict[str, str]) -> None:
    error = refused(*argv, env=env)
    assert "0123456789abcdef" not in f"{error} {error!r} {error.problems}"


def test_secret_shows_itself_only_when_asked() -> None:
    found = loaded()
    for text in (repr(found), str(found), str(found.api.key), f"{found.api.key}", f"{found.api.key!r}"):
        assert KEY not in text
    assert found.api.key.reveal() == KEY
    assert found.api.key == Secret(KEY)
    assert found.api.key != Secret("other")
    assert found.api.key != KEY
    assert len({Secret(KEY), Secret(KEY)}) == 1


# --- certificates ---------------------------------------------------------------------------------------------------


def test_ca_file_is_taken_from_each_source(certificates: str, toml: Any) -> None:
    file = toml(f"ca_file = '{certificates}'")
    for found in (loaded("--ca-file", certificates), loaded(env={"SPOOLED_CA_FILE": certificates}), loaded(*file)):
        assert found.api.ca_file == Path(certificates)


def test_ca_file_that_is_none_is_named(tmp_path: Path) -> None:
    path = tmp_path / "ca.pem"
    assert problem("--ca-file", str(path)).startswith(f"--ca-file: {path} cannot be used as PEM certificates: No such")
    assert refused("--ca-file", str(path)).exit_code == EX_USAGE
    path.write_text("no certificate")
    assert problem(env={"SPOOLED_CA_FILE": str(path)}).startswith(f"SPOOLED_CA_FILE: {path} cannot be used as PEM")
    assert refused(env={"SPOOLED_CA_FILE": str(path)}).exit_code == EX_CONFIG


# --- paths ----------------------------------------------------------------------------------------------------------


def test_state_directory_comes_from_systemd_before_our_own_variable() -> None:
    env = {"STATE_DIRECTORY": "/var/lib/a:/var/lib/b", "SPOOLED_STATE_DIR": "/c"}
    assert loaded(env=env).state_dir == Path("/var/lib/a")
    assert loaded(env={"SPOOLED_STATE_DIR": "/c:d"}).state_dir == Path("/c:d")
    assert loaded("--state-dir", "/e", env=env).state_dir == Path("/e")


def test_default_state_directory_is_named_after_the_app() -> None:
    assert default_state_dir("a.b:c", {"HOME": "/h"}) == Path("/h/.local/state/spooled-supervisor/a.b-c")
    assert default_state_dir("a", {"HOME": "/h", "XDG_STATE_HOME": "/x"}) == Path("/x/spooled-supervisor/a")
    assert default_state_dir("é", {"HOME": "/h", "XDG_STATE_HOME": "x"}) == Path("/h/.local/state/spooled-supervisor/-")


def test_without_a_home_the_state_directory_must_be_given() -> None:
    assert problem(env={"HOME": ""}).startswith("state_dir: neither XDG_STATE_HOME nor HOME")
    assert loaded("--state-dir", "/s", env={"HOME": ""}).state_dir == Path("/s")


RUNTIME = {"XDG_RUNTIME_DIR": "/run/user/1"}


@pytest.mark.parametrize(
    ("argv", "env", "path"),
    [
        (["--control-socket", "/x"], RUNTIME | {"RUNTIME_DIRECTORY": "/run/a"}, "/x"),
        ([], RUNTIME | {"RUNTIME_DIRECTORY": "/run/a:/run/b"}, "/run/a/control.sock"),
        (["--state-dir", "/s"], {"RUNTIME_DIRECTORY": "/run/a"}, "/run/a/control.sock"),
        ([], RUNTIME, "/run/user/1/spooled-supervisor/jobs.sock"),
        (["--app", "a.b:c"], RUNTIME, "/run/user/1/spooled-supervisor/a.b-c.sock"),
        ([], {"XDG_RUNTIME_DIR": "relative"}, "/home/nobody/.local/state/spooled-supervisor/jobs/control.sock"),
        ([], {}, "/home/nobody/.local/state/spooled-supervisor/jobs/control.sock"),
        (["--state-dir", "/s"], RUNTIME, "/s/control.sock"),
        ([], RUNTIME | {"STATE_DIRECTORY": "/s"}, "/s/control.sock"),
    ],
)
def test_control_socket(argv: list[str], env: dict[str, str], path: str) -> None:
    assert loaded(*argv, env=env).control_socket == Path(path)
    parser = OptionParser()
    add_options(parser)
    assert control_sockets(parser.parse_args(argv), ENV | env) == [Path(path)]


def test_default_control_socket() -> None:
    assert default_control_socket("a:b", {}, Path("/s")) == Path("/s/control.sock")
    assert default_control_socket("a:b", RUNTIME, Path("/s")) == Path("/run/user/1/spooled-supervisor/a-b.sock")
    env = RUNTIME | {"RUNTIME_DIRECTORY": "/run/a:/run/b"}
    assert default_control_socket("a:b", env, Path("/s")) == Path("/run/a/control.sock")


def test_sockets_in_the_usual_places_are_found_when_no_option_says_which(tmp_path: Path) -> None:
    names = [
        "run/spooled-supervisor/control.sock",
        "run/spooled-supervisor/blue/control.sock",
        "run/spooled-supervisor-2/control.sock",
        "var/lib/spooled-supervisor-3/control.sock",
        "user/spooled-supervisor/a.sock",
        "state/spooled-supervisor/b/control.sock",
        "var/lib/spooled-supervisor/c/control.sock",
    ]
    for name in [*names, "state/spooled-supervisor/b/other", "run/control.sock"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    env = {"XDG_RUNTIME_DIR": f"{tmp_path}/user", "XDG_STATE_HOME": f"{tmp_path}/state"}
    assert control_sockets(argparse.Namespace(), env, root=tmp_path) == sorted(tmp_path / name for name in names)
    assert control_sockets(argparse.Namespace(), {}, root=tmp_path / "none") == []


def test_control_socket_is_found_by_the_file_alone_and_without_a_key(toml: Any) -> None:
    _, path = toml('app = "x"\ncontrol_socket = "c.sock"')
    assert control_sockets(argparse.Namespace(), {"SPOOLED_CONFIG": path}) == [Path(path).parent / "c.sock"]


def test_control_socket_of_bad_options() -> None:
    with pytest.raises(ConfigError) as caught:
        control_sockets(argparse.Namespace(app=["a-b"], state_dir=[None]), {})
    assert [line.split(":")[0] for line in caught.value.problems] == ["--state-dir", "--app"]
    assert caught.value.exit_code == EX_USAGE


def test_paths_are_absolute(toml: Any, tmp_path: Path) -> None:
    assert loaded("--state-dir", "s").state_dir == Path.cwd() / "s"
    assert loaded("--state-dir", "~/s").state_dir == Path("/home/nobody/s")
    file = toml("state_dir = 's'\ncontrol_socket = '~/c'")
    found = loaded(*file)
    assert (found.state_dir, found.control_socket) == (tmp_path / "s", Path("/home/nobody/c"))


@pytest.mark.parametrize(
    ("name", "clean"),
    [
        ("box", "box"),
        ("-büro 7.local.", "b-ro-7.local"),
        ("...", "host"),
        ("", "host"),
        ("é", "host"),
        ("x" * 300, "x" * 255),
        ("x" * 254 + "." + "y", "x" * 254),
    ],
)
def test_hostname_is_cleaned(name: str, clean: str) -> None:
    assert default_hostname(name) == clean


def test_hostname_is_the_machines() -> None:
    assert default_hostname() == default_hostname(socket.gethostname())


# --- for other parsers ----------------------------------------------------------------------------------------------


def test_parser_raises_instead_of_exiting() -> None:
    parser = OptionParser(prog="x")
    parser.add_argument("needed")
    with pytest.raises(ConfigError) as caught:
        parser.parse_args([])
    assert caught.value.exit_code == EX_USAGE
    with pytest.raises(ConfigError):
        load([], ENV, parser=parser)


def test_parser_of_a_command_may_have_only_some_options(capsys: pytest.CaptureFixture[str]) -> None:
    parser = OptionParser(prog="x ctl")
    add_options(parser, ["app", "config", "control_socket"])
    parser.add_argument("verb")
    found = parser.parse_args(["--app", "a", "stop"])
    assert (found.app, found.verb) == (["a"], "stop")
    parser.print_help()
    printed = capsys.readouterr().out
    assert "--control-socket PATH" in printed
    assert "--procs" not in printed


def test_given_parser_is_used() -> None:
    parser = OptionParser(prog="x run")
    add_options(parser)
    assert load(["--procs", "3"], ENV, parser=parser).pool.procs == 3


# --- CPUs -----------------------------------------------------------------------------------------------------------

V2 = "30 23 0:26 {root} /sys/fs/cgroup rw shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = "33 31 0:30 {root} /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
CPUSET = "35 31 0:32 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset\n"


def machine(root: Path, groups: str, mounts: str, files: dict[str, str]) -> Path:
    proc = {"proc/self/cgroup": groups, "proc/self/mountinfo": mounts}
    for name, text in (proc | {f"sys/fs/cgroup/{name}": text for name, text in files.items()}).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def v1(folder: str, quota: str, period: str = "100000") -> dict[str, str]:
    return {f"cpu,cpuacct/{folder}cpu.cfs_quota_us": quota, f"cpu,cpuacct/{folder}cpu.cfs_period_us": period}


@pytest.mark.parametrize(
    ("groups", "mounts", "files", "cpus"),
    [
        pytest.param("", "", {}, 8, id="no cgroups"),
        pytest.param("0::/\n", V2.format(root="/"), {}, 8, id="root of v2 has no cpu.max"),
        pytest.param("0::/\n", V2.format(root="/"), {"cpu.max": "max 100000\n"}, 8, id="v2 without a quota"),
        pytest.param("0::/\n", V2.format(root="/"), {"cpu.max": "200000 100000\n"}, 2, id="v2 in a namespace"),
        pytest.param("0::/\n", V2.format(root="/"), {"cpu.max": "150000 100000\n"}, 2, id="quotas are rounded up"),
        pytest.param("0::/\n", V2.format(root="/"), {"cpu.max": "1000 100000\n"}, 1, id="at least one"),
        pytest.param("0::/\n", V2.format(root="/"), {"cpu.max": "9900000 100000\n"}, 8, id="no more than the mask"),
        pytest.param("0::/\n", V2.format(root="/"), {"cpu.max": "100000 0\n"}, 8, id="nonsense period"),
        pytest.param("0::/\n", V2.format(root="/"), {"cpu.max": "nonsense\n"}, 8, id="nonsense"),
        pytest.param(
            "0::/a/b/c\n",
            V2.format(root="/"),
            {"a/cpu.max": "300000 100000", "a/b/cpu.max": "max 100000", "a/b/c/cpu.max": "500000 100000"},
            3,
            id="an ancestor is narrower",
        ),
        pytest.param(
            "0::/docker/x\n", V2.format(root="/docker/x"), {"cpu.max": "200000 100000"}, 2, id="bound into a container"
        ),
        pytest.param("0::/../y\n", V2.format(root="/"), {"cpu.max": "200000 100000"}, 2, id="outside of the namespace"),
        pytest.param("3:cpu,cpuacct:/\n", V1.format(root="/"), v1("", "-1"), 8, id="v1 without a quota"),
        pytest.param("3:cpu,cpuacct:/a\n", V1.format(root="/"), v1("a/", "50000", "20000"), 3, id="v1"),
        pytest.param(
            "3:cpu,cpuacct:/a/b\n",
            V1.format(root="/"),
            v1("a/", "200000") | v1("a/b/", "400000"),
            2,
            id="v1, an ancestor is narrower",
        ),
        pytest.param(
            "4:cpuset:/a\n3:cpu,cpuacct:/b\n1:name=systemd:/c\n0::/d\n",
            CPUSET + V1.format(root="/") + V2.format(root="/").replace("cgroup rw", "cgroup/unified rw", 1),
            v1("b/", "400000") | v1("a/", "100000") | {"unified/d/cgroup.procs": ""},
            4,
            id="hybrid",
        ),
    ],
)
def test_cpus_available(tmp_path: Path, groups: str, mounts: str, files: dict[str, str], cpus: int) -> None:
    assert cpus_available(machine(tmp_path, groups, mounts, files), affinity=8) == cpus


def test_cpus_available_here() -> None:
    assert 1 <= cpus_available() <= len(os.sched_getaffinity(0))


# --- advice ---------------------------------------------------------------------------------------------------------


def advice(*argv: str, cpus: int = 1000) -> list[str]:
    return [line.split(":")[0] for line in warnings(loaded(*argv), cpus=cpus)]


def test_defaults_are_wise() -> None:
    assert warnings(loaded()) == []


@pytest.mark.parametrize(
    ("argv", "keys"),
    [
        (["--api-url", "http://spooled.lan"], ["api_url"]),
        (["--api-url", "http://127.1.2.3:8080"], []),
        (["--api-url", "http://[::1]:8080"], []),
        (["--api-url", "http://localhost:8080"], []),
        (["--api-url", "http://api.localhost"], []),
        (["--api-url", "https://h/api/v1/"], ["api_url"]),
        (["--http-listen", "0.0.0.0:9464"], ["http_listen"]),
        (["--http-listen", "[::]:9464"], ["http_listen"]),
        (["--http-listen", "localhost:9464"], []),
        (["--http-listen", "off"], []),
        (["--procs", "1000"], []),
        (["--max-child-memory", "512"], ["max_child_memory"]),
        (["--max-child-memory", "512M"], []),
        (["--heartbeat-fraction", "0.77"], ["heartbeat_fraction"]),
        (["--lease-duration", "5"], ["heartbeat_fraction"]),
        (["--lease-duration", "10"], []),
    ],
)
def test_unwise_options(argv: list[str], keys: list[str]) -> None:
    assert advice(*argv) == keys


def test_more_children_than_cpus_are_unwise() -> None:
    assert advice("--procs", "3", cpus=2) == ["procs"]


def test_queue_with_more_children_than_there_are_is_unwise(toml: Any) -> None:
    argv = toml("procs = 2\n[queues.a]\nmax_procs = 3\n[queues.b]\nmax_procs = 2\n")
    assert advice(*argv) == ["queues.a.max_procs"]


def test_key_file_that_others_can_read_is_unwise(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text(KEY)
    found = loaded("--api-key-file", str(path))
    for mode, lines in ((0o600, 0), (0o440, 0), (0o644, 1), (0o604, 1)):
        path.chmod(mode)
        assert len(warnings(found, cpus=1000)) == lines
    path.unlink()
    assert warnings(found, cpus=1000) == []
    assert warnings(replace(found, api=replace(found.api, key_file=None)), cpus=1000) == []


# --- the example file -----------------------------------------------------------------------------------------------


def uncommented() -> str:
    """The example with every line that is a setting, and not prose, switched on; the tables of queues, not the list."""
    text = re.sub(r"(?m)^#(?=\S)", "", EXAMPLE.read_text())
    return re.sub(r"(?m)^queues = .*$", "", text)


def test_example_as_it_is_only_needs_an_app(tmp_path: Path) -> None:
    found = load(["--config", str(EXAMPLE)], ENV | {"SPOOLED_APP": ""})
    assert replace(found, app="jobs", config_file=None, state_dir=Path(), control_socket=Path()) == replace(
        loaded(), state_dir=Path(), control_socket=Path()
    )


def test_example_shows_every_key_and_the_true_defaults() -> None:
    shown = tomllib.loads(uncommented())
    assert set(shown) == {option.key for option in options.OPTIONS.values() if option.is_in_file}
    assert set(shown["queues"]["thumbnails"]) == set(options.QUEUE_KEYS)
    for key, value in shown.items():
        default = options.OPTIONS[key].default
        if default is not None and key != "worker_version":
            text = str(value).lower() if isinstance(value, bool) else str(value)
            assert options.OPTIONS[key].kind.parse(text) == options.default_of(key), key


def test_example_with_everything_switched_on_loads(tmp_path: Path) -> None:
    path = tmp_path / "s.toml"
    text = re.sub(r"(?m)^(api_key_file|ca_file) = .*$", "", uncommented())
    path.write_text(text)
    found = loaded("--config", str(path))
    assert found.queues == (QueueConfig("thumbnails", 1.0, 4, 120.0),)
    assert found.worker.metadata == {"rack": "b7", "zone": "eu-1"}


# --- the words of the code ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", [config, options])
def test_examples_in_docstrings(module: Any) -> None:
    assert doctest.testmod(module).failed == 0

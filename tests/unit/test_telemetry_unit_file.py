"""The unit file that is shipped: systemd understands all of it, and what the daemon relies on is in it."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

UNIT = Path(__file__).parents[2] / "systemd" / "spooled-supervisor.service"
MAX_EXPOSURE = 15
"""systemd-analyze's figure times ten; what is left is the network, which the daemon is for."""

needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")


@pytest.fixture
def unit(tmp_path: Path) -> Path:
    """The unit with a program that exists here, as `verify` looks for it."""
    copy = tmp_path / UNIT.name
    copy.write_text(re.sub(r"(?m)^ExecStart=\S+", "ExecStart=/bin/true", UNIT.read_text()))
    return copy


def settings() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in UNIT.read_text().splitlines():
        if line and line[0] not in "#[":
            key, _, value = line.partition("=")
            found.setdefault(key, []).append(value)
    return found


@needs_systemd
def test_systemd_has_nothing_to_say_about_it(unit: Path) -> None:
    checked = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


@needs_systemd
def test_its_exposure_is_low(unit: Path) -> None:
    rated = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", f"--threshold={MAX_EXPOSURE}", "--no-pager", unit],
        capture_output=True,
        text=True,
        check=False,
    )
    assert rated.returncode == 0, rated.stdout


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("Type", "notify"),
        ("NotifyAccess", "main"),
        ("ExecReload", "/bin/kill -HUP $MAINPID"),
        ("KillMode", "mixed"),
        ("OOMPolicy", "continue"),
        ("Restart", "on-failure"),
        ("RestartPreventExitStatus", "64 77 78"),
        ("StateDirectory", "spooled-supervisor"),
        ("RuntimeDirectory", "spooled-supervisor"),
        ("LoadCredential", "spooled-api-key:/etc/spooled/api-key"),
    ],
)
def test_what_the_daemon_relies_on_is_set(key: str, value: str) -> None:
    assert settings()[key] == [value]


def test_no_address_is_closed_by_default() -> None:
    assert "IPAddressDeny" not in settings()


def test_the_stop_timeout_leaves_room_after_the_default_shutdown_timeout() -> None:
    assert int(settings()["TimeoutStopSec"][0].removesuffix("s")) >= 60


def test_every_setting_stands_below_a_comment() -> None:
    """Directly, or below others that the same comment explains."""
    lines = UNIT.read_text().splitlines()
    explained = False
    for line in lines:
        if line.startswith("#"):
            explained = not line.startswith("# ---")
        elif not line or line.startswith("["):
            explained = line == "[Install]"
        else:
            assert explained, line

"""Certificates for servers on this machine, signed by themselves."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

COMMAND = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=service"


def certificate(place: Path, *names: str) -> tuple[Path, Path]:
    """The certificate for these names (`DNS:localhost`, `IP:127.0.0.1`), and its key: files in `place`."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl(1) to make a certificate")
    cert, key = place / "cert.pem", place / "key.pem"
    options = ["-addext", f"subjectAltName={','.join(names)}", "-out", str(cert), "-keyout", str(key)]
    subprocess.run([*COMMAND.split(), *options], check=True, capture_output=True)
    return cert, key

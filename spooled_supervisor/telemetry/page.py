"""The status page: one file, whose own style and script are all that a browser may load or run for it.

The Content-Security-Policy names the two by their hashes (W3C CSP 3, 6.7.3), so that nothing a job writes can ever run,
even if it got into the page. The page is the same for everybody and for ever; what it shows, it fetches from
/status.json.
"""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from pathlib import Path

from spooled_supervisor.telemetry.exchange import Response

PAGE = Path(__file__).with_name("page.html")


@cache
def status_page() -> Response:
    """The page and its policy; read from the disk once."""
    body = PAGE.read_text(encoding="utf-8")
    policy = {
        "default-src": "'none'",
        "script-src": _hashes(body, "script"),
        "style-src": _hashes(body, "style"),
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
    }
    headers = {
        "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "Referrer-Policy": "no-referrer",
        "X-Frame-Options": "DENY",
    }
    return Response(200, body.encode(), "text/html; charset=utf-8", headers)


def _hashes(body: str, tag: str) -> str:
    """Of the contents of all such elements: every character between the tags counts."""
    contents = re.findall(rf"<{tag}>(.*?)</{tag}>", body, re.DOTALL)
    digests = [hashlib.sha256(content.encode()).digest() for content in contents]
    return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)

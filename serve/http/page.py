"""The page: one file that may run its own script and style only, and ask this server only."""

import hashlib
import re
from base64 import b64encode
from functools import cache
from pathlib import Path

from starlette.responses import HTMLResponse

PAGE = Path(__file__).with_name("pages") / "index.html"
POLICY = "default-src 'none'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
POLICY += "frame-ancestors 'none'"


@cache
def _read() -> tuple[str, str]:
    """Return the page, and its policy with the digests of what it may run."""
    text, allowed = PAGE.read_text(encoding="utf-8"), [POLICY]
    for kind in ("script", "style"):
        [own] = re.findall(f"<{kind}>(.*?)</{kind}>", text, re.DOTALL)
        digest = b64encode(hashlib.sha256(own.encode()).digest()).decode()
        allowed.append(f"{kind}-src 'sha256-{digest}'")
    return text, "; ".join(allowed)


def page() -> HTMLResponse:
    """Return the page."""
    text, policy = _read()
    return HTMLResponse(text, headers={"content-security-policy": policy})

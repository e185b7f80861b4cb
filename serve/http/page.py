"""The page: one answer that may run its own scripts and style only, and ask this server only."""

import hashlib
import re
from base64 import b64encode
from functools import cache
from pathlib import Path

from starlette.responses import HTMLResponse

PAGES = Path(__file__).with_name("pages")
LINKED = re.compile(r'<(?:link rel="stylesheet" href|(script) src)="([\w.-]+)">(?:</script>)?')
POLICY = "default-src 'none'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
POLICY += "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"


@cache
def _read() -> tuple[str, str]:
    """Return the page with the files that it links, and its policy with their digests."""
    digests: dict[str, list[str]] = {"script": [], "style": []}

    def content(linked: re.Match[str]) -> str:
        kind, own = linked[1] or "style", (PAGES / linked[2]).read_text(encoding="utf-8")
        digests[kind].append(b64encode(hashlib.sha256(own.encode()).digest()).decode())
        return f"<{kind}>{own}</{kind}>"

    text = LINKED.sub(content, (PAGES / "index.html").read_text(encoding="utf-8"))
    lists = [
        f"{kind}-src " + " ".join(f"'sha256-{digest}'" for digest in found)
        for kind, found in digests.items()
    ]
    return text, "; ".join([POLICY, *lists])


def page() -> HTMLResponse:
    """Return the page."""
    text, policy = _read()
    headers = {"content-security-policy": policy, "referrer-policy": "no-referrer"}
    return HTMLResponse(text, headers=headers)

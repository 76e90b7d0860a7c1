"""The terminal in a browser: one document with everything inlined, which loads nothing from anywhere.

Our own part is here. What it is made of besides (xterm.js) is fetched from npm when Skerry is built, by
``hatch_build.py``, into ``assets``.
"""

from __future__ import annotations

import base64
import html
from functools import cache
from hashlib import sha256
from pathlib import Path

from fastapi import Response

HERE = Path(__file__).parent
ASSETS = HERE / "assets"
SCRIPTS = ("xterm.js", "addon-fit.js", "addon-unicode11.js")
STYLES = ("xterm.css",)

_HEADERS = {
    "Cache-Control": "no-store",  # there is a ticket in it
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Opener-Policy": "same-origin",
}
_MISSING = """<!doctype html><meta charset="utf-8"><title>No terminal page</title>
<h1>This server has no terminal page</h1>
<p>Skerry was installed where npm could not be reached, so the page's parts are missing.</p>
<p>Install it again with a network: <code>pip install --force-reinstall --no-deps skerry</code>,
or <code>pip install -e .</code> in a source tree. Until then, <code>skerry shell {sandbox}</code> opens a terminal.</p>
"""


def answer(sandbox: str, ticket: str) -> Response:
    """The page for a sandbox, with a ticket that its script connects with."""
    name = html.escape(sandbox)
    try:
        document, policy = _document(ASSETS)
    except FileNotFoundError:
        return Response(_MISSING.format(sandbox=name), 501, _HEADERS, "text/html")
    filled = document.replace("{{sandbox}}", name, 2).replace("{{ticket}}", html.escape(ticket), 1)
    return Response(filled, 200, _HEADERS | {"Content-Security-Policy": policy}, "text/html")


@cache
def _document(assets: Path) -> tuple[str, str]:
    scripts = [(assets / name).read_text() for name in SCRIPTS] + [(HERE / "terminal.js").read_text()]
    styles = [(assets / name).read_text() for name in STYLES] + [(HERE / "terminal.css").read_text()]
    # Only the names of source maps would be fetched, by developer tools; and nothing may end its element early.
    scripts = [_unmapped(text).replace("</script", "<\\/script") for text in scripts]
    document = (
        (HERE / "terminal.html")
        .read_text()
        .replace("{{styles}}", "\n".join(f"<style>{text}</style>" for text in styles))
        .replace("{{scripts}}", "\n".join(f"<script>{text}</script>" for text in scripts))
    )
    hashes = " ".join(f"'sha256-{base64.b64encode(sha256(text.encode()).digest()).decode()}'" for text in scripts)
    policy = (
        # xterm.js writes its colours and sizes into style elements of its own.
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return document, policy


def _unmapped(script: str) -> str:
    return "\n".join(line for line in script.split("\n") if not line.startswith("//# sourceMappingURL="))

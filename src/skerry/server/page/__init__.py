"""What people see in a browser: documents with everything inlined, which load nothing from anywhere.

Our own part is here. What the terminal is made of besides (xterm.js) is fetched from npm when Skerry is built, by
``hatch_build.py``, into ``assets``.
"""

from __future__ import annotations

import base64
import html
from collections.abc import Iterable
from functools import cache
from hashlib import sha256
from pathlib import Path

from fastapi import Response

HERE = Path(__file__).parent
ASSETS = HERE / "assets"
SCRIPTS = ("xterm.js", "addon-fit.js", "addon-unicode11.js")
STYLES = ("xterm.css",)

_HEADERS = {
    "Cache-Control": "no-store",  # there may be a ticket in it
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


def terminal(sandbox: str, ticket: str) -> Response:
    """The terminal of a sandbox, with a ticket that its script connects with."""
    name = html.escape(sandbox)
    try:
        document, policy = _terminal(ASSETS)
    except FileNotFoundError:
        return Response(_MISSING.format(sandbox=name), 501, _HEADERS, "text/html")
    filled = document.replace("{{sandbox}}", name, 2).replace("{{ticket}}", html.escape(ticket), 1)
    return _answer(filled, policy)


def tasks(agents: Iterable[str]) -> Response:
    """Tasks, to ask for them and to see what became of them. What it shows it asks the API for."""
    document, policy = _tasks()
    options = "".join(f"<option>{html.escape(name)}</option>" for name in agents)
    return _answer(document.replace("{{agents}}", options, 1), policy)


def _answer(document: str, policy: str) -> Response:
    return Response(document, 200, _HEADERS | {"Content-Security-Policy": policy}, "text/html")


@cache
def _terminal(assets: Path) -> tuple[str, str]:
    scripts = [_unmapped((assets / name).read_text()) for name in SCRIPTS]
    # xterm.js writes its colours and sizes into style elements of its own.
    return _document("terminal", scripts, [(assets / name).read_text() for name in STYLES], "'unsafe-inline'")


@cache
def _tasks() -> tuple[str, str]:
    return _document("tasks", [], [])


def _document(name: str, scripts: list[str], styles: list[str], styling: str | None = None) -> tuple[str, str]:
    """A page of ours, after scripts and styles of others, and what it may do. ``styling``: whose styles it takes, if
    not only those."""
    scripts = [*scripts, (HERE / f"{name}.js").read_text()]
    styles = [*styles, (HERE / f"{name}.css").read_text()]
    scripts = [text.replace("</script", "<\\/script") for text in scripts]  # nothing may end its element early
    document = (
        (HERE / f"{name}.html")
        .read_text()
        .replace("{{styles}}", "\n".join(f"<style>{text}</style>" for text in styles))
        .replace("{{scripts}}", "\n".join(f"<script>{text}</script>" for text in scripts))
    )
    policy = (
        f"default-src 'none'; script-src {_digests(scripts)}; style-src {styling or _digests(styles)}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return document, policy


def _digests(texts: Iterable[str]) -> str:
    return " ".join(f"'sha256-{base64.b64encode(sha256(text.encode()).digest()).decode()}'" for text in texts)


def _unmapped(script: str) -> str:
    """Without the name of its source map, which developer tools would fetch."""
    return "\n".join(line for line in script.split("\n") if not line.startswith("//# sourceMappingURL="))

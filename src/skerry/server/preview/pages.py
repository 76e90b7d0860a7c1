"""What a visitor gets instead of a preview: a short page in a browser, the one JSON error shape for programs."""

from __future__ import annotations

from html import escape

from fastapi import Response
from starlette.responses import JSONResponse

from skerry.errors import SkerryError
from skerry.server.errors import error_response

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="robots" content="noindex">{refresh}
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 34rem; margin: 18vh auto 0; padding: 0 1.5rem; }}
h1 {{ font-size: 1.4rem; }}
p {{ opacity: .8; }}
</style>
</head>
<body>
<h1>{title}</h1>
<p>{message}</p>
<p>{hint}</p>{note}
</body>
</html>
"""
_TITLES = {
    "preview_not_found": "No preview here",
    "preview_asleep": "This sandbox sleeps",
    "port_not_listening": "Nothing is listening yet",
    "preview_failed": "The server inside did not answer properly",
    "unauthorized": "This preview is private",
}
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors *",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


_SAID = {
    "preview_not_found": ("INVALID_TOKEN", "Access denied: Invalid token or port not exposed"),
    "preview_asleep": ("STALE_PREVIEW_URL", "Preview URL is stale because the sandbox runtime is not active"),
}
"""What programs are told at addresses of the form ``{port}-{id}-{token}.{host}``, as they know it from elsewhere."""


def refusal(error: SkerryError, *, page: bool, by_host: bool = False) -> Response:
    """The answer for an error; a page whose error says when to try again does so by itself."""
    plain = error_response(error, {"Cache-Control": "no-store"})
    if not page and by_host and error.code in _SAID:
        code, said = _SAID[error.code]
        return JSONResponse({"error": said, "code": code}, error.status, {"Cache-Control": "no-store"})
    if not page:
        return plain
    again = error.retry_after
    text = _PAGE.format(
        title=escape(_TITLES.get(error.code, "This preview cannot be shown")),
        message=escape(error.message),
        hint=escape(error.hint or ""),
        refresh=f'\n<meta http-equiv="refresh" content="{again:g}">' if again else "",
        note="\n<p>This page tries again by itself.</p>" if again else "",
    )
    kept = {name: plain.headers[name] for name in ("retry-after", "www-authenticate") if name in plain.headers}
    return Response(text, error.status, {**_HEADERS, **kept}, "text/html; charset=utf-8")

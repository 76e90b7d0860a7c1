"""Secrets taken out of text before it is written anywhere: those this process knows, and what looks like one.

The last step of every log line. Nothing should depend on it: code that writes a secret is wrong. It is there for the
day on which some is.
"""

from __future__ import annotations

import json
import re

SHORTEST = 8
"""A shorter secret would be found in the middle of ordinary words."""
MASK = "[secret]"

_SHAPES = re.compile(
    r"(?P<userinfo>(?<=://)[^\s/@'\"]+(?=@))"
    r"|(?P<bearer>(?i:\b(?:bearer|basic)\s+)[A-Za-z0-9._~+/=-]{8,})"
    r"|(?P<query>(?i:\b(?:token|ticket|skerry_link|api_?key|access_?key|secret|password|signature|x-amz-\w+)=)[^\s&'\"]+)"
    r"|(?P<ours>\b(?:sk|whsec)_[A-Za-z0-9_-]{8,})"
    r"|(?P<forge>\b(?:gh[pousr]_|github_pat_|glpat-|xox[a-z]-|AKIA)[A-Za-z0-9_-]{8,})"
)

_PREVIEW = re.compile(r"\b[1-9][0-9]{0,4}-[a-z0-9][a-z0-9_-]*-[a-z0-9_]{8,}(?=\.)")
# One of these is in whatever has one of the shapes. Looking for them costs a tenth of looking for the shapes.
_HINTS = (
    *("://", "bearer", "basic", "sk_", "whsec_", "ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_", "glpat-"),
    *("xox", "akia", "token=", "ticket=", "link=", "key=", "secret=", "password=", "signature=", "x-amz-"),
)


class Secrets:
    """The secrets of this process, and text without them."""

    def __init__(self) -> None:
        self._known: set[str] = set()
        self._pattern: re.Pattern[str] | None = None

    def keep(self, *values: str | None) -> None:
        """Never write these out."""
        wanted = {value for value in values if value is not None and len(value) >= SHORTEST}
        # As it looks in a line of JSON, too.
        new = (wanted | {json.dumps(value, ensure_ascii=False)[1:-1] for value in wanted}) - self._known
        if new:
            self._known |= new
            longest_first = sorted(self._known, key=len, reverse=True)
            self._pattern = re.compile("|".join(re.escape(value) for value in longest_first))

    def redact(self, text: str) -> str:
        if self._pattern is not None:
            text = self._pattern.sub(MASK, text)
        lower = text.lower()
        if any(hint in lower for hint in _HINTS):
            text = _SHAPES.sub(_masked, text)
        return _PREVIEW.sub(MASK, text)


def _masked(match: re.Match[str]) -> str:
    text = match[0]
    if match.lastgroup == "bearer":
        return f"{text.split()[0]} {MASK}"
    if match.lastgroup == "query":
        return f"{text.partition('=')[0]}={MASK}"
    return MASK


secrets = Secrets()
keep, redact = secrets.keep, secrets.redact

"""The languages code can be written in, and the names they go by."""

from __future__ import annotations

from typing import get_args

from skerry.errors import UnknownLanguageError
from skerry.models import Language

LANGUAGES: tuple[Language, ...] = get_args(Language)
ALIASES: dict[str, Language] = {
    **{language: language for language in LANGUAGES},
    "python3": "python",
    "py": "python",
    "js": "javascript",
    "node": "javascript",
    "ts": "typescript",
}


def known(name: str) -> Language:
    language = ALIASES.get(name.strip().lower())
    if language is None:
        raise UnknownLanguageError(
            f"{name[:100]!r} is not a language Skerry runs.",
            hint=f"Use one of {', '.join(LANGUAGES)} (or {', '.join(sorted(set(ALIASES) - set(LANGUAGES)))}).",
            details={"languages": list(LANGUAGES)},
        )
    return language

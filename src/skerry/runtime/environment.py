"""The environment variables of commands, and the rules for their names."""

from __future__ import annotations

import re
from collections.abc import Mapping

from skerry.errors import InvalidPathError, InvalidRequestError

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/run/skerry/bin:/run/skerry/node/bin"
DEFAULTS = {
    "PATH": PATH,
    "HOME": "/root",
    "USER": "root",
    "LOGNAME": "root",
    "SHELL": "/bin/bash",
    "LANG": "C.UTF-8",
}
WORKSPACE = "/workspace"
LONGEST = (128 << 10) - 1
"""Bytes of a variable and its name that Linux passes to a program."""

_ID = re.compile(r"[A-Za-z0-9._:@-]{1,128}\Z")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")


def check_env(env: Mapping[str, str | None]) -> None:
    for name, value in env.items():
        if not _NAME.match(name):
            raise InvalidRequestError(
                f"{name!r} is not a name an environment variable can have.",
                hint="Use letters, digits and underscores, not beginning with a digit.",
            )
        check_text(value or "", f"The value of {name}")
        if len(f"{name}={value or ''}".encode()) > LONGEST:
            raise InvalidRequestError(
                f"The value of {name} is longer than the 128 KiB that a program can be given.",
                hint="Write it to a file inside.",
            )


def check_id(id: str, what: str) -> None:
    if not _ID.match(id):
        raise InvalidRequestError(
            f"{id[:200]!r} is not an id {what} can have.", hint="Use 1 to 128 letters, digits and . _ : @ -."
        )


def check_text(text: str, what: str) -> None:
    """A NUL cannot be passed to a program, and a lone surrogate is no text."""
    if "\0" in text:
        raise InvalidRequestError(f"{what} contains a NUL character.")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidRequestError(f"{what} is not valid Unicode text.") from None


def check_cwd(cwd: str | None) -> None:
    if cwd is not None and not cwd.startswith("/"):
        raise InvalidPathError("cwd must be an absolute path starting with /", details={"cwd": cwd})
    check_text(cwd or "", "cwd")


def merged(*layers: Mapping[str, str | None]) -> dict[str, str]:
    """Later layers win; ``None`` unsets."""
    env: dict[str, str] = {}
    for layer in layers:
        for name, value in layer.items():
            if value is None:
                env.pop(name, None)
            else:
                env[name] = value
    return env

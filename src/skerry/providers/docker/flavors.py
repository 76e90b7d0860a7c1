"""Images for one kind of work, by name: what a distribution calls the tools of it.

Each is built once by ``skerry image build-docker --flavor NAME`` and named beside the image that sandboxes usually
start from: ``skerry:base`` has ``skerry:python``. A sandbox asks for it as for any image.
"""

from __future__ import annotations

from skerry.errors import InvalidRequestError

JS = ("nodejs", "npm")
PYTHON = ("python3", "python3-dev", "python3-pip", "python3-venv")
GO = ("golang-go",)
RUST = ("cargo", "rustc")
BUILDING = ("build-essential", "pkg-config")

FLAVORS: dict[str, tuple[str, ...]] = {
    "js": (*JS, *BUILDING),
    "python": (*PYTHON, *BUILDING),
    "go": (*GO, *BUILDING),
    "rust": (*RUST, *BUILDING),
    "fullstack": (*JS, *PYTHON, *BUILDING, "sqlite3"),
    "polyglot": (*JS, *PYTHON, *GO, *RUST, *BUILDING, "sqlite3"),
}


def packages_of(flavor: str) -> tuple[str, ...]:
    if flavor not in FLAVORS:
        raise InvalidRequestError(
            f"There is no flavor {flavor[:40]!r} of images.", hint=f"There are {', '.join(FLAVORS)}."
        )
    return FLAVORS[flavor]


def reference(base: str, flavor: str) -> str:
    """What the engine calls it: ``skerry:python``, or beside an image of another name ``registry/image:1-python``."""
    repository, colon, tag = base.rpartition(":")
    if not colon or "/" in tag:  # a name without a tag, whose last colon is of a port
        return f"{base}:{flavor}"
    return f"{repository}:{flavor}" if tag == "base" else f"{repository}:{tag}-{flavor}"

"""What matplotlib would work out anew in every sandbox: which fonts there are, and its tables of properties.

Both were written down once, when the packages were collected, into a file beside them. Together they are a third of
the time its import takes.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from typing import Any

FILE = "skerry_matplotlib.json"
PLACES = ("/usr/share/fonts", "/usr/local/share/fonts", "/usr/X11R6/lib/X11", "~/.fonts", "~/.local/share/fonts")
NONE = "none"


def take(artist: Any) -> None:
    """Call with the module ``matplotlib.artist``, before the modules that make artists and find fonts are imported."""
    matplotlib = sys.modules["matplotlib"]
    beside = os.path.join(os.path.dirname(os.path.dirname(matplotlib.__file__ or "")), FILE)
    try:
        with open(beside, encoding="utf-8") as file:
            known = json.load(file)
    except OSError:
        return  # another matplotlib than the one it was written for
    written = artist.kwdoc

    def kwdoc(of: Any) -> str:
        text: str | None = known["properties"].get(f"{of.__module__}.{of.__qualname__}")
        return written(of) if text is None else text

    kwdoc.__doc__ = written.__doc__
    artist.kwdoc = kwdoc
    list_fonts(os.path.join(matplotlib.get_cachedir(), known["fonts"]["name"]), known["fonts"]["lists"])


def list_fonts(place: str, lists: dict[str, Any]) -> None:
    """Write matplotlib's cache of fonts, if there is none yet and the fonts here are ones that were listed."""
    if os.path.exists(place):
        return
    known = lists.get(present())
    if known is None:
        return
    try:
        with open(place, "x", encoding="utf-8") as file:
            json.dump(known, file)
    except OSError:
        return  # a full disk, or a context beside this one was quicker


def present() -> str:
    """A digest of the fonts that are installed here, beside matplotlib's own."""
    found = []
    for place in PLACES:
        for directory, _, names in os.walk(os.path.expanduser(place)):
            found += [f"{directory}/{name} {os.stat(f'{directory}/{name}').st_size}" for name in names]
    return hashlib.sha256("\n".join(sorted(found)).encode(errors="replace")).hexdigest() if found else NONE

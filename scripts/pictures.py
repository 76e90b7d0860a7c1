"""Makes the pictures of docs/code-interpreter.md by running the snippets above them in a sandbox.

    python scripts/pictures.py

In the page, a block that begins with ```` ```python inside ```` is code for a context; the picture that follows it is
what it draws. Blocks of plain ```` ```python ```` are for the SDK and, one after the other, make one program.
"""

from __future__ import annotations

import base64
import re
import struct
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Picture:
    path: Path
    code: str

    @property
    def name(self) -> str:
        return self.path.name


class Page:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._text = path.read_text()

    def snippets(self, kind: str) -> list[str]:
        """The blocks of code that begin with these words."""
        return re.findall(rf"^```{re.escape(kind)}\n(.*?)^```$", self._text, re.MULTILINE | re.DOTALL)

    def promises(self) -> list[str]:
        """What the SDK's snippets say they print."""
        return [said for block in self.snippets("python") for said in re.findall(r"# → (.*)$", block, re.MULTILINE)]

    def pictures(self) -> list[Picture]:
        followed = re.compile(
            r"^```python inside\n((?:(?!^```).)*?)^```\n\s*!\[[^]]*\]\(([^)]+)\)", re.MULTILINE | re.DOTALL
        )
        return [Picture(self._path.parent / name, code) for code, name in followed.findall(self._text)]


PAGE = Page(ROOT / "docs" / "code-interpreter.md")


def draw(home: Path | None = None) -> dict[str, bytes]:
    """Every picture of the page by its name, drawn afresh."""
    from skerry import Sandbox

    drawn = {}
    with Sandbox(ephemeral=True, home=home) as sandbox:
        for picture in PAGE.pictures():
            execution = sandbox.run_code(picture.code).raise_for_error()
            (png,) = [result.png for result in execution.results if result.png]
            drawn[picture.name] = base64.b64decode(png)
    return drawn


def size(png: bytes) -> tuple[int, int]:
    """Width and height of a picture."""
    if png[:8] != b"\x89PNG\r\n\x1a\n":
        raise ValueError("This is no PNG.")
    width, height = struct.unpack(">II", png[16:24])
    return width, height


def main() -> int:
    drawn = draw()
    for picture in PAGE.pictures():
        picture.path.parent.mkdir(exist_ok=True)
        picture.path.write_bytes(drawn[picture.name])
        print(picture.path.relative_to(ROOT), *size(drawn[picture.name]))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Pictures in a terminal: by the protocols of kitty and iTerm2, as sixels, or as coloured half blocks."""

from __future__ import annotations

import base64
import io
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image

_KITTY_CHUNK = 4096


class Way(StrEnum):
    KITTY = "kitty"
    ITERM = "iterm"
    SIXEL = "sixel"
    BLOCKS = "blocks"


@dataclass(frozen=True, slots=True)
class Size:
    """A terminal's size in characters, and the width of one character in pixels."""

    columns: int
    rows: int
    cell: int = 8

    @classmethod
    def of(cls, descriptor: int) -> Size:
        import fcntl
        import struct
        import termios

        rows, columns, width, _ = struct.unpack("4H", fcntl.ioctl(descriptor, termios.TIOCGWINSZ, bytes(8)))
        columns, rows = columns or 80, rows or 24
        if width < columns:  # over many connections a terminal does not say
            return cls(columns, rows)
        return cls(columns, rows, width // columns)

    @property
    def width(self) -> int:
        return self.columns * self.cell


def best_way(environ: Mapping[str, str]) -> Way:
    """What the terminal that these variables describe can do; asking the terminal itself could hang."""
    term, program = environ.get("TERM", ""), environ.get("TERM_PROGRAM", "")
    konsole = environ.get("KONSOLE_VERSION", "")
    if "TMUX" in environ or term.startswith(("screen", "tmux")):
        return Way.BLOCKS  # a multiplexer does not pass pictures on
    if term in ("xterm-kitty", "xterm-ghostty") or program == "ghostty":
        return Way.KITTY
    if "KITTY_WINDOW_ID" in environ and not program:  # the variable outlives kitty in terminals started from it
        return Way.KITTY
    if program in ("iTerm.app", "WezTerm", "mintty") or environ.get("LC_TERMINAL") == "iTerm2":
        return Way.ITERM
    if konsole.isdigit() and int(konsole) >= 220400:
        return Way.ITERM
    if term.startswith(("foot", "mlterm", "contour", "yaft")):
        return Way.SIXEL
    return Way.BLOCKS


def draw(data: bytes, way: Way, size: Size, *, true_colour: bool = True) -> str:
    """The characters that draw a picture (PNG, JPEG or what else Pillow reads); raises ``ValueError`` if it is none."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(data)) as picture:
            picture.load()
            if way is Way.KITTY:
                return _kitty(data if picture.format == "PNG" else _png(picture), picture.width, size)
            if way is Way.ITERM:
                return _iterm(data, picture.width, size)
            if way is Way.SIXEL:
                return _sixel(picture, size)
            return _blocks(picture, size, true_colour)
    # SyntaxError is how Pillow speaks of a PNG with broken parts.
    except (UnidentifiedImageError, OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"The picture cannot be drawn: {error}.") from None


def _png(picture: Image) -> bytes:
    file = io.BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()


def _on_white(picture: Image, width: int, height: int) -> Image:
    """Scaled, and on paper: what is transparent was made to be looked at on a white page."""
    from PIL import Image

    shrunk = picture.convert("RGBA").resize((max(1, width), max(1, height)), Image.Resampling.BOX)
    paper = Image.new("RGBA", shrunk.size, "white")
    return Image.alpha_composite(paper, shrunk).convert("RGB")


def _kitty(png: bytes, width: int, size: Size) -> str:
    text = base64.b64encode(png).decode()
    chunks = [text[at : at + _KITTY_CHUNK] for at in range(0, len(text), _KITTY_CHUNK)]
    fit = f",c={size.columns}" if width > size.width else ""
    parts = []
    for number, chunk in enumerate(chunks):
        more = int(number < len(chunks) - 1)
        control = f"a=T,f=100,q=2{fit},m={more}" if number == 0 else f"m={more}"
        parts.append(f"\x1b_G{control};{chunk}\x1b\\")
    return "".join(parts) + "\n"


def _iterm(data: bytes, width: int, size: Size) -> str:
    fit = f"width={size.columns};" if width > size.width else ""
    return (
        f"\x1b]1337;File=inline=1;size={len(data)};{fit}preserveAspectRatio=1:{base64.b64encode(data).decode()}\x07\n"
    )


def _sixel(picture: Image, size: Size) -> str:
    import numpy

    scale = min(1.0, size.width / picture.width)
    small = _on_white(picture, round(picture.width * scale), round(picture.height * scale)).quantize(255)
    pixels = numpy.asarray(small)
    palette = small.getpalette() or []
    parts = [f'\x1bPq"1;1;{small.width};{small.height}']
    for colour in sorted(numpy.unique(pixels).tolist()):
        red, green, blue = (round(part * 100 / 255) for part in palette[3 * colour : 3 * colour + 3])
        parts.append(f"#{colour};2;{red};{green};{blue}")
    for top in range(0, small.height, 6):
        band = pixels[top : top + 6]
        weights = (1 << numpy.arange(len(band)))[:, None]
        rows = []
        for colour in numpy.unique(band).tolist():
            bits = 63 + ((band == colour) * weights).sum(axis=0)
            rows.append(f"#{colour}{_repeated(bits.astype(numpy.uint8).tobytes().decode('ascii'))}")
        parts.append("$".join(rows) + "-")
    return "".join(parts) + "\x1b\\\n"


def _repeated(sixels: str) -> str:
    return re.sub(r"(.)\1{3,}", lambda run: f"!{len(run[0])}{run[1]}", sixels)


def _blocks(picture: Image, size: Size, true_colour: bool) -> str:
    """Two pixels in each character: the upper half is its colour, the lower half what is behind it."""
    scale = min(1.0, size.columns / picture.width, 2 * max(1, size.rows - 2) / picture.height)
    width, height = max(1, math.floor(picture.width * scale)), max(2, math.floor(picture.height * scale))
    height -= height % 2
    small = _on_white(picture, width, height)
    pixels = small.tobytes()
    colour = _true_colour if true_colour else _of_256
    lines = []
    for top in range(0, height, 2):
        line, before = [], ""
        for left in range(width):
            upper, lower = 3 * (top * width + left), 3 * ((top + 1) * width + left)
            style = f"38;{colour(pixels[upper : upper + 3])};48;{colour(pixels[lower : lower + 3])}"
            line.append("▀" if style == before else f"\x1b[{style}m▀")
            before = style
        lines.append("".join(line) + "\x1b[0m\n")
    return "".join(lines)


def _true_colour(pixel: bytes) -> str:
    return "2;{};{};{}".format(*pixel)


def _of_256(pixel: bytes) -> str:
    red, green, blue = pixel
    if max(pixel) - min(pixel) < 10:  # the greys have finer steps than the colours
        level = round((sum(pixel) / 3 - 8) / 10)
        return f"5;{232 + level}" if 0 <= level < 24 else ("5;231" if level > 0 else "5;16")
    cube = [round(part / 51) for part in (red, green, blue)]
    return f"5;{16 + 36 * cube[0] + 6 * cube[1] + cube[2]}"

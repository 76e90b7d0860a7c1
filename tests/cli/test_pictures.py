"""Pictures in terminals. Each way of drawing is read back, as the terminal would, into pixels."""

from __future__ import annotations

import base64
import fcntl
import io
import os
import pty
import re
import struct
import termios

import pytest
from PIL import Image

from skerry.cli.pictures import Size, Way, best_way, draw

RED, GREEN, BLUE, WHITE = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)
SIZE = Size(columns=80, rows=24)

Pixels = dict[tuple[int, int], tuple[int, int, int]]


def quarters(width: int = 40, height: int = 20, format: str = "PNG") -> bytes:
    """A picture of four fields: red and green above, blue and transparent (white in JPEG) below."""
    picture = Image.new("RGBA", (width, height), (0, 0, 0, 0))
    picture.paste(RED, (0, 0, width // 2, height // 2))
    picture.paste(GREEN, (width // 2, 0, width, height // 2))
    picture.paste(BLUE, (0, height // 2, width // 2, height))
    file = io.BytesIO()
    if format == "JPEG":
        paper = Image.new("RGBA", picture.size, "white")
        Image.alpha_composite(paper, picture).convert("RGB").save(file, format, quality=100)
    else:
        picture.save(file, format)
    return file.getvalue()


def corners(pixels: Pixels) -> list[tuple[int, int, int]]:
    right, bottom = max(x for x, _ in pixels), max(y for _, y in pixels)
    return [pixels[0, 0], pixels[right, 0], pixels[0, bottom], pixels[right, bottom]]


def seen_in_blocks(drawn: str) -> Pixels:
    pixels: Pixels = {}
    for row, line in enumerate(drawn.splitlines()):
        column, colours = 0, ((0, 0, 0), (0, 0, 0))
        for styles, block in re.findall(r"\x1b\[([\d;]*)m|(▀)", line):
            if block:
                pixels[column, 2 * row], pixels[column, 2 * row + 1] = colours
                column += 1
            elif styles != "0":
                found = [tuple(map(int, rgb)) for rgb in re.findall(r"[34]8;2;(\d+);(\d+);(\d+)", styles)]
                colours = (found[0], found[1])  # type: ignore[assignment]
    return pixels


def seen_in_sixels(drawn: str) -> Pixels:
    body = re.fullmatch(r'\x1bPq"1;1;\d+;\d+(.*)\x1b\\\n', drawn, re.DOTALL)
    assert body is not None
    pixels: Pixels = {}
    colours: dict[int, tuple[int, int, int]] = {}
    x = y = colour = 0
    for define, red, green, blue, choose, count, sixel, control in re.findall(
        r"#(\d+);2;(\d+);(\d+);(\d+)|#(\d+)|(?:!(\d+))?([?-~])|([$-])", body[1]
    ):
        if define:
            colours[int(define)] = tuple(round(int(part) * 2.55) for part in (red, green, blue))  # type: ignore[assignment]
        elif choose:
            colour = int(choose)
        elif control:
            x, y = 0, y + 6 * (control == "-")
        else:
            end = x + int(count or 1)
            for column in range(x, end):
                for bit in range(6):
                    if (ord(sixel) - 63) >> bit & 1:
                        assert (column, y + bit) not in pixels
                        pixels[column, y + bit] = colours[colour]
            x = end
    return pixels


def seen_by_kitty(drawn: str) -> tuple[dict[str, str], bytes]:
    parts = re.findall(r"\x1b_G([^;]*);([^\x1b]*)\x1b\\", drawn)
    controls = [dict(pair.split("=") for pair in control.split(",")) for control, _ in parts]
    assert [control["m"] for control in controls] == ["1"] * (len(parts) - 1) + ["0"]
    assert all(len(text) <= 4096 for _, text in parts)
    return controls[0], base64.b64decode("".join(text for _, text in parts))


@pytest.mark.parametrize(
    ("environ", "way"),
    [
        ({"TERM": "xterm-kitty"}, Way.KITTY),
        ({"TERM": "xterm-256color", "KITTY_WINDOW_ID": "1"}, Way.KITTY),
        ({"TERM": "xterm-256color", "KITTY_WINDOW_ID": "1", "TERM_PROGRAM": "vscode"}, Way.BLOCKS),
        ({"TERM": "xterm-ghostty"}, Way.KITTY),
        ({"TERM_PROGRAM": "iTerm.app"}, Way.ITERM),
        ({"TERM_PROGRAM": "WezTerm"}, Way.ITERM),
        ({"LC_TERMINAL": "iTerm2"}, Way.ITERM),
        ({"KONSOLE_VERSION": "230801"}, Way.ITERM),
        ({"KONSOLE_VERSION": "210400"}, Way.BLOCKS),
        ({"TERM": "foot"}, Way.SIXEL),
        ({"TERM": "xterm-256color"}, Way.BLOCKS),
        ({"TERM": "tmux-256color", "TMUX": "/tmp/tmux", "TERM_PROGRAM": "iTerm.app"}, Way.BLOCKS),
        ({"TERM": "screen", "KITTY_WINDOW_ID": "1"}, Way.BLOCKS),
        ({}, Way.BLOCKS),
    ],
)
def test_a_terminal_is_known_by_its_variables(environ: dict[str, str], way: Way) -> None:
    assert best_way(environ) is way


def test_kitty_gets_the_picture_itself_in_parts_it_accepts() -> None:
    noise = Image.frombytes("RGB", (100, 100), os.urandom(30_000))
    file = io.BytesIO()
    noise.save(file, "PNG")
    control, sent = seen_by_kitty(draw(file.getvalue(), Way.KITTY, SIZE))
    assert sent == file.getvalue()
    assert (control["a"], control["f"], control["q"]) == ("T", "100", "2")
    assert "c" not in control


def test_kitty_gets_a_jpeg_as_png() -> None:
    _, sent = seen_by_kitty(draw(quarters(format="JPEG"), Way.KITTY, SIZE))
    with Image.open(io.BytesIO(sent)) as picture:
        assert (picture.format, picture.size) == ("PNG", (40, 20))


def test_iterm_gets_the_picture_itself() -> None:
    drawn = draw(quarters(), Way.ITERM, SIZE)
    found = re.fullmatch(r"\x1b\]1337;File=([^:]*):([^\x07]*)\x07\n", drawn)
    assert found is not None
    assert base64.b64decode(found[2]) == quarters()
    assert "inline=1" in found[1].split(";")
    assert "width" not in found[1]


def test_what_is_wider_than_the_terminal_is_made_to_fit() -> None:
    wide = quarters(2000, 1000)
    control, _ = seen_by_kitty(draw(wide, Way.KITTY, SIZE))
    assert control["c"] == "80"
    assert ";width=80;" in draw(wide, Way.ITERM, SIZE)
    assert max(x for x, _ in seen_in_sixels(draw(wide, Way.SIXEL, SIZE))) + 1 == 80 * 8
    blocks = seen_in_blocks(draw(wide, Way.BLOCKS, Size(columns=60, rows=200)))
    assert (max(x for x, _ in blocks) + 1, max(y for _, y in blocks) + 1) == (60, 30)


def test_what_is_higher_than_the_terminal_is_made_to_fit_in_blocks() -> None:
    blocks = seen_in_blocks(draw(quarters(100, 1000), Way.BLOCKS, SIZE))
    assert max(y for _, y in blocks) + 1 == 2 * (24 - 2)


@pytest.mark.parametrize("size", [(40, 20), (41, 23), (7, 5)], ids=str)
@pytest.mark.parametrize("format", ["PNG", "JPEG"])
def test_sixels_show_every_pixel_once_in_its_colour(size: tuple[int, int], format: str) -> None:
    pixels = seen_in_sixels(draw(quarters(*size, format), Way.SIXEL, SIZE))
    assert set(pixels) == {(x, y) for x in range(size[0]) for y in range(size[1])}
    for found, meant in zip(corners(pixels), (RED, GREEN, BLUE, WHITE), strict=True):
        assert max(abs(one - other) for one, other in zip(found, meant, strict=True)) <= 5


def test_blocks_show_two_pixels_in_each_character() -> None:
    drawn = draw(quarters(40, 20), Way.BLOCKS, SIZE)
    pixels = seen_in_blocks(drawn)
    assert set(pixels) == {(x, y) for x in range(40) for y in range(20)}
    assert corners(pixels) == [RED, GREEN, BLUE, WHITE]
    assert all(line.endswith("\x1b[0m") for line in drawn.splitlines())


def test_a_terminal_of_256_colours_gets_its_own() -> None:
    drawn = draw(quarters(40, 20), Way.BLOCKS, SIZE, true_colour=False)
    assert {int(number) for number in re.findall(r"[34]8;5;(\d+)", drawn)} == {196, 46, 21, 231}
    grey = io.BytesIO()
    Image.new("RGB", (2, 2), (128, 128, 128)).save(grey, "PNG")
    assert "38;5;244;" in draw(grey.getvalue(), Way.BLOCKS, SIZE, true_colour=False)


@pytest.mark.parametrize("way", list(Way))
@pytest.mark.parametrize("data", [b"", b"not a picture", quarters()[:60], quarters()[:-30]], ids=range(4))
def test_what_is_no_picture_is_refused(data: bytes, way: Way) -> None:
    with pytest.raises(ValueError, match="cannot be drawn"):
        draw(data, way, SIZE)


def test_the_terminal_is_asked_for_its_size() -> None:
    ours, theirs = pty.openpty()
    try:
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 50, 100, 1000, 1100))
        assert Size.of(theirs) == Size(columns=100, rows=50, cell=10)
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 0, 0, 0, 0))
        assert Size.of(theirs) == Size(columns=80, rows=24)
    finally:
        os.close(ours)
        os.close(theirs)

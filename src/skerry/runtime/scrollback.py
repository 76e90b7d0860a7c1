"""What a terminal showed lately, for those who look at it later."""

from __future__ import annotations

import re

LIMIT = 256 * 1024
# How far after the limit a good place to cut is looked for.
_NEAR = 8192

_SWITCH = re.compile(rb"\x1bc|\x1b\[\?([0-9;]{1,64})([hl])")
_UNFINISHED = re.compile(rb"\x1b(\[(\?[0-9;]{0,64})?)?\Z")
_ON_BY_DEFAULT = frozenset({7, 25})
_ALTERNATE = frozenset({47, 1047, 1049})

# What a program asks of the terminal: its kind, its colours, where the cursor is. A terminal answers as if the answer
# was typed, so a question that is shown again would be answered to whatever program reads now.
_QUESTIONS = re.compile(
    rb"\x1b(?:"
    rb"\[(?:[>=?]?[0-9;]*c|\??[0-9;]*n|\??[0-9;]*\$p|>[0-9]*q|\?u|(?:1[1-9]|2[01])(?:;[0-9]*)*t)"
    rb"|\][0-9;]*\?(?:\x07|\x1b\\)"
    rb"|P[$+]q[^\x1b\x07]{0,512}(?:\x07|\x1b\\)"
    rb"|Z)"
)


def without_questions(data: bytes) -> bytes:
    return _QUESTIONS.sub(b"", data) if b"\x1b" in data else data


class Modes:
    """Which of a terminal's modes (alternate screen, mouse, bracketed paste, cursor …) its output has switched."""

    def __init__(self) -> None:
        self._modes: dict[int, bool] = {}
        self._rest = b""

    def follow(self, data: bytes) -> None:
        if b"\x1b" not in data and not self._rest:
            return
        data = self._rest + data
        for match in _SWITCH.finditer(data):
            if match[1] is None:  # a full reset
                self._modes.clear()
                continue
            for number in match[1].split(b";"):
                if number:
                    self._modes.pop(int(number), None)
                    self._modes[int(number)] = match[2] == b"h"
        unfinished = _UNFINISHED.search(data)
        self._rest = unfinished[0] if unfinished else b""

    def copy(self) -> Modes:
        other = Modes()
        other._modes, other._rest = dict(self._modes), self._rest
        return other

    @property
    def alternate(self) -> bool:
        """Whether a full-screen program has the screen."""
        return any(self._modes.get(mode, False) for mode in _ALTERNATE)

    def repeat(self) -> bytes:
        """What brings a fresh terminal into these modes."""
        return b"".join(_switch(mode, on) for mode, on in self._changed())

    def undo(self) -> bytes:
        """What brings a terminal in these modes back to how a shell expects it."""
        return b"".join(_switch(mode, not on) for mode, on in reversed(self._changed()))

    def _changed(self) -> list[tuple[int, bool]]:
        return [(mode, on) for mode, on in self._modes.items() if on != (mode in _ON_BY_DEFAULT)]


class Scrollback:
    """The last 256 KB, cut where no line, character or escape sequence is torn apart."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._data = bytearray()
        self._before = Modes()
        self.cut = False
        """Whether the beginning has been dropped."""

    def add(self, data: bytes) -> None:
        self._data += data
        if len(self._data) > 2 * self._limit:
            self._trim()

    def show(self) -> bytes:
        """What makes a fresh terminal look as this one does, and asks it nothing."""
        self._trim()
        return self._before.repeat() + without_questions(bytes(self._data))

    @property
    def alternate(self) -> bool:
        modes = self._before.copy()
        modes.follow(bytes(self._data))
        return modes.alternate

    def _trim(self) -> None:
        excess = len(self._data) - self._limit
        if excess <= 0:
            return
        end = self._place(excess)
        self._before.follow(bytes(self._data[:end]))
        del self._data[:end]
        self.cut = True

    def _place(self, start: int) -> int:
        line = self._data.find(b"\n", start, start + _NEAR)
        if line >= 0:
            return line + 1
        sequence = self._data.find(b"\x1b", start, start + _NEAR)
        if sequence >= 0:
            return sequence
        while start < len(self._data) and self._data[start] & 0xC0 == 0x80:  # inside a character
            start += 1
        return start


def _switch(mode: int, on: bool) -> bytes:
    return b"\x1b[?%d%c" % (mode, ord("h" if on else "l"))

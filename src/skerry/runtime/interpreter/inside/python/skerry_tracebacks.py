"""Exceptions as lines of text: where in the user's code, with the lines around it, and nothing of what ran it."""

from __future__ import annotations

import linecache
import os
import re
import traceback
import types
from typing import Any

CONTEXT = 2
FRAMES = 24
"""How many frames are shown of the outermost and of the innermost."""
LONGEST_LINE = 1_000
LONGEST_MESSAGE = 100_000
CAUSED = "The above exception was the direct cause of the following exception:"
DURING = "During handling of the above exception, another exception occurred:"

ours = [os.path.dirname(os.path.abspath(__file__)) + os.sep]
"""Directories whose frames are of no interest to the user."""

_ansi = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_timed = ("<timed exec>", "<timed eval>")


def describe(error: BaseException, cell: str, cells: dict[str, int]) -> dict[str, Any]:
    """name, message, traceback and line; ``cell`` is the file name of the code that ran, ``cells`` numbers them all."""
    trim(error)
    if isinstance(error, SyntaxError) and error.filename == cell:
        # Nothing has run: what is left are frames of the compiler.
        error.__traceback__ = None
    return {
        "name": name(error),
        "message": message(error),
        "traceback": [plain(line) for line in lines(error, cells)],
        "line": line_in(error, cell),
    }


def name(error: BaseException) -> str:
    # Python 3.13 has a private kind of SyntaxError for code that only lacks its end.
    found = type(error).__name__
    return "SyntaxError" if found == "_IncompleteInputError" else found


def message(error: BaseException) -> str:
    if isinstance(error, SyntaxError) and error.msg:
        return cut(str(error.msg), LONGEST_MESSAGE)
    try:
        return cut(str(error), LONGEST_MESSAGE)
    except Exception as failure:  # noqa: BLE001 - __str__ is the user's code
        return f"<unprintable {type(error).__name__}: {type(failure).__name__}>"


def trim(error: BaseException) -> None:
    """Leave the frames of the executor and of IPython out of an exception and what led to it."""
    for each in chain(error):
        kept = [part for part in frames(each.__traceback__) if not internal(part.tb_frame.f_code.co_filename)]
        trimmed: types.TracebackType | None = None
        for part in reversed(kept):
            trimmed = types.TracebackType(trimmed, part.tb_frame, part.tb_lasti, part.tb_lineno)
        each.__traceback__ = trimmed


def internal(filename: str) -> bool:
    return any(filename.startswith(directory) for directory in ours)


def frames(trace: types.TracebackType | None) -> list[types.TracebackType]:
    found = []
    while trace is not None:
        found.append(trace)
        trace = trace.tb_next
    return found


def chain(error: BaseException) -> list[BaseException]:
    """The exception and those behind it, the latest first."""
    found: list[BaseException] = []
    following: BaseException | None = error
    while following is not None and all(following is not known for known in found) and len(found) < 20:
        found.append(following)
        if following.__cause__ is not None:
            following = following.__cause__
        else:
            following = None if following.__suppress_context__ else following.__context__
    return found


def line_in(error: BaseException, cell: str) -> int | None:
    """The line of the cell that was being executed, or that cannot be parsed."""
    if isinstance(error, SyntaxError) and error.filename == cell:
        return error.lineno
    found = None
    for part in frames(error.__traceback__):
        filename = part.tb_frame.f_code.co_filename
        if filename == cell:
            found = part.tb_lineno
        elif filename in _timed:
            # The body of %%time is compiled by itself; the line of the magic comes before it.
            found = (found or 1) + part.tb_lineno
    return found


def lines(error: BaseException, cells: dict[str, int]) -> list[str]:
    exceptions = chain(error)
    if any(hasattr(each, "exceptions") and hasattr(each, "derive") for each in exceptions):
        # A tree of exceptions: Python itself draws it best.
        whole = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        return name_cells(whole, cells).splitlines()
    shown: list[str] = []
    for index, each in enumerate(reversed(exceptions)):
        if index:
            shown += ["", CAUSED if each.__cause__ is not None else DURING, ""]
        parts = frames(each.__traceback__)
        if parts:
            shown.append("Traceback (most recent call last):")
        for position, part in enumerate(parts):
            if FRAMES <= position < len(parts) - FRAMES:
                if position == FRAMES:
                    shown += [f"    … {len(parts) - 2 * FRAMES} frames left out …", ""]
                continue
            shown += [*frame_lines(part, cells), ""]
        shown += only(each, cells)
    return shown


def frame_lines(part: types.TracebackType, cells: dict[str, int]) -> list[str]:
    code = part.tb_frame.f_code
    filename, number = code.co_filename, part.tb_lineno
    place = f"Cell In[{cells[filename]}], line {number}" if filename in cells else f"File {filename}:{number}"
    heading = place if code.co_name == "<module>" else f"{place}, in {code.co_name}"
    shown = [heading]
    for at in range(max(1, number - CONTEXT), number + CONTEXT + 1):
        text = linecache.getline(filename, at, part.tb_frame.f_globals)
        if text:
            mark = "----> " if at == number else "      "
            shown.append(f"{mark}{at:>{len(str(number + CONTEXT))}} {cut(text.rstrip(), LONGEST_LINE)}".rstrip())
    return shown


def only(error: BaseException, cells: dict[str, int]) -> list[str]:
    """The exception itself, without its traceback."""
    if isinstance(error, SyntaxError):
        text = "".join(traceback.format_exception_only(type(error), error))
        return name_cells(text, cells).replace(type(error).__name__, name(error)).splitlines()
    text = message(error)
    shown = (f"{type(error).__name__}: {text}" if text else type(error).__name__).splitlines()
    for note in getattr(error, "__notes__", None) or []:
        shown += str(note).splitlines()
    return shown


def name_cells(text: str, cells: dict[str, int]) -> str:
    return re.sub(
        r'File "(<[^">]+>)"',
        lambda found: f"Cell In[{cells[found[1]]}]" if found[1] in cells else found[0],
        text,
    )


def plain(text: str) -> str:
    return _ansi.sub("", text)


def cut(text: str, longest: int) -> str:
    if len(text) <= longest:
        return text
    return f"{text[:longest]}… ({len(text) - longest} more characters)"

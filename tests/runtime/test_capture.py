"""Pumps: reading what commands write, and going on reading when nobody wants it any more."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from skerry.runtime.capture import Capture, Pump


def fifo(path: Path) -> tuple[Path, int]:
    os.mkfifo(path)
    return path, os.open(path, os.O_RDONLY | os.O_NONBLOCK)


async def test_an_abandoned_fifo_stays_open_for_a_writer_who_has_not_come_yet(tmp_path: Path) -> None:
    path, reader = fifo(tmp_path / "out")
    pump = Pump(reader, lambda data: None)
    pump.abandon()
    await asyncio.sleep(0.05)
    # Without a reader this raises ENXIO, and a writer that is willing to wait would wait for ever.
    writer = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    os.write(writer, b"late")
    os.close(writer)
    async with asyncio.timeout(10):
        await pump.ended


async def test_settling_takes_what_is_there_and_nothing_that_comes_later(tmp_path: Path) -> None:
    path, reader = fifo(tmp_path / "out")
    seen: list[bytes] = []
    pump = Pump(reader, seen.append)
    writer = os.open(path, os.O_WRONLY)
    os.write(writer, b"mine")
    pump.settle()
    os.write(writer, b"a background child's")
    await asyncio.sleep(0.1)
    assert seen == [b"mine"]
    assert not pump.ended.done()
    os.close(writer)
    async with asyncio.timeout(10):
        await pump.ended


async def test_a_paused_pump_leaves_the_bytes_in_the_pipe() -> None:
    reader, writer = os.pipe2(os.O_NONBLOCK)
    seen: list[bytes] = []
    pump = Pump(reader, seen.append)
    pump.pause()
    os.write(writer, b"waiting")
    await asyncio.sleep(0.05)
    assert (seen, pump.pending()) == ([], 7)
    pump.resume()
    await asyncio.sleep(0.05)
    assert seen == [b"waiting"]
    os.close(writer)
    await pump.ended
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(reader)


def test_a_capture_keeps_up_to_its_limit_and_counts_the_rest() -> None:
    capture = Capture(limit=10)
    for _ in range(3):
        capture.add(b"12345678")
    assert (capture.take(), capture.dropped) == (b"1234567812", 14)

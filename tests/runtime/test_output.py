from __future__ import annotations

import asyncio
import os

import pytest

from skerry.runtime.output import pipe, read_some, write_all


@pytest.fixture
def both():
    reader, writer = pipe("both")
    yield reader, writer
    for fd in (reader, writer):
        try:
            os.close(fd)
        except OSError:
            continue


async def test_reading_waits_for_bytes_and_tells_the_end(both):
    reader, writer = both
    reading = asyncio.create_task(read_some(reader))
    await asyncio.sleep(0.01)
    assert not reading.done()
    os.write(writer, b"hello")
    assert await reading == b"hello"
    os.close(writer)
    assert await read_some(reader) == b""


async def test_writing_waits_for_a_reader_and_loses_nothing(both):
    reader, writer = both
    content = os.urandom(5 << 20)
    writing = asyncio.create_task(write_all(writer, content))
    received = b""
    while len(received) < len(content):
        received += await read_some(reader)
    await writing
    assert received == content


async def test_a_cancelled_read_leaves_the_descriptor_usable(both):
    reader, writer = both
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(read_some(reader), 0.01)
    os.write(writer, b"later")
    assert await read_some(reader) == b"later"


async def test_a_second_reader_is_refused_instead_of_silencing_the_first(both):
    reader, writer = both
    first = asyncio.create_task(read_some(reader))
    await asyncio.sleep(0.01)
    with pytest.raises(RuntimeError):
        await read_some(reader)
    os.write(writer, b"x")
    assert await first == b"x"


async def test_a_producer_that_never_pauses_does_not_starve_the_loop():
    reader, writer = pipe("read")
    zero = os.open("/dev/zero", os.O_RDONLY)
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    for _ in range(100):
        await read_some(zero)
    task.cancel()
    for fd in (reader, writer, zero):
        os.close(fd)
    assert turns >= 50


async def test_a_terminal_whose_other_side_is_closed_has_ended():
    master, slave = os.openpty()
    os.set_blocking(master, False)
    os.write(slave, b"bye")
    os.close(slave)
    assert await read_some(master) == b"bye"
    assert await read_some(master) == b""
    os.close(master)


async def test_writing_to_nobody_is_a_broken_pipe(both):
    reader, writer = both
    os.close(reader)
    with pytest.raises(BrokenPipeError):
        await write_all(writer, b"x")

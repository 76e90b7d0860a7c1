from __future__ import annotations

import pytest

from skerry.runtime.interpreter.frames import Frames, Nonsense, encode


def test_messages_come_out_as_they_went_in_whatever_the_pieces() -> None:
    messages = [{"type": "a"}, {"type": "b", "text": "é" * 1000}, {"type": "c", "n": [1, None]}]
    data = b"".join(encode(message) for message in messages)
    for size in (1, 3, 7, len(data)):
        heard: list[tuple[dict[str, object], int]] = []
        frames = Frames(lambda message, size: heard.append((message, size)))  # noqa: B023
        for start in range(0, len(data), size):
            frames.feed(data[start : start + size])
        assert [message for message, _ in heard] == messages
        assert sum(length for _, length in heard) == len(data) - 4 * len(messages)


@pytest.mark.parametrize(
    "data",
    [
        b"\xff\xff\xff\xff",
        b"\0\0\0\2{]",
        b"\0\0\0\2[]",
        b"\0\0\0\2{}",
        b'\0\0\0\x0a{"type":1}',
        b'\0\0\0\x16{"type":"a","b":NaN  }',
        b"\0\0\0\0",
    ],
)
def test_nonsense_is_named(data: bytes) -> None:
    with pytest.raises(Nonsense):
        Frames(lambda message, size: None).feed(data)

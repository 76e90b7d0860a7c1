from __future__ import annotations

import pytest
from starlette.datastructures import Headers

from skerry.errors import RangeNotSatisfiableError
from skerry.server.downloads import attachment, requested_range


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("bytes=0-0", (0, 1)),
        ("bytes=0-9", (0, 10)),
        ("bytes=2-4", (2, 3)),
        ("bytes=5-", (5, 5)),
        ("bytes=5-99", (5, 5)),
        ("bytes=-3", (7, 3)),
        ("bytes=-99", (0, 10)),
        ("Bytes = 1 - 2", (1, 2)),
        ("bytes=0-1,3-4", None),
        ("bytes=4-2", None),
        ("bytes=-", None),
        ("lines=0-1", None),
        ("bytes=a-b", None),
        ("bytes=--1", None),
        ("bytes=\xb2-\xb3", None),
    ],
)
def test_one_range_of_a_file_of_ten_bytes(header: str, expected: tuple[int, int] | None) -> None:
    assert requested_range(Headers({"range": header}), 10) == expected


@pytest.mark.parametrize(
    ("header", "size"), [("bytes=10-", 10), ("bytes=-0", 10), ("bytes=0-", 0), ("bytes=99-100", 10)]
)
def test_a_range_outside_of_the_file_is_an_error_that_knows_the_size(header: str, size: int) -> None:
    with pytest.raises(RangeNotSatisfiableError) as caught:
        requested_range(Headers({"range": header}), size)
    assert caught.value.details == {"size": size}


def test_if_range_never_matches() -> None:
    assert requested_range(Headers({"range": "bytes=0-1", "if-range": '"x"'}), 10) is None


@pytest.mark.parametrize("name", ['a"b', "a;b", "a\r\nX: y", "ä", "%41", "a\\b", "\udcff"])
def test_a_file_name_cannot_break_out_of_its_header(name: str) -> None:
    header = attachment(f"/workspace/{name}")["Content-Disposition"]
    assert header.isascii()
    assert header.isprintable()
    assert header.count('"') == 2
    assert header.count(";") == 2

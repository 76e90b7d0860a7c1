from __future__ import annotations

import re
from pathlib import Path

import pytest

from skerry.control.identity import RESERVED, normalise_id, parse_duration
from skerry.errors import InvalidRequestError, InvalidSandboxIdError


@pytest.mark.parametrize(
    ("raw", "id"),
    [
        ("demo", "demo"),
        ("a", "a"),
        ("7", "7"),
        ("  Demo-1\n", "demo-1"),
        ("A_b-C", "a_b-c"),
        ("a_", "a_"),
        ("a--b", "a--b"),
        ("x" * 63, "x" * 63),
        (" " + "x" * 63 + " ", "x" * 63),
        ("apis", "apis"),
    ],
)
def test_an_id_is_trimmed_and_lower_cased(raw: str, id: str) -> None:
    assert normalise_id(raw) == id
    assert normalise_id(id) == id


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        ("", "INVALID_SANDBOX_ID_LENGTH"),
        (" \t\n", "INVALID_SANDBOX_ID_LENGTH"),
        ("x" * 64, "INVALID_SANDBOX_ID_LENGTH"),
        ("-a", "INVALID_SANDBOX_ID_HYPHENS"),
        ("a-", "INVALID_SANDBOX_ID_HYPHENS"),
        ("-", "INVALID_SANDBOX_ID_HYPHENS"),
        ("_a", "INVALID_SANDBOX_ID_CHARACTERS"),
        ("a b", "INVALID_SANDBOX_ID_CHARACTERS"),
        ("a\nb", "INVALID_SANDBOX_ID_CHARACTERS"),
        ("a\0", "INVALID_SANDBOX_ID_CHARACTERS"),
        ("a.b", "INVALID_SANDBOX_ID_CHARACTERS"),
        ("../a", "INVALID_SANDBOX_ID_CHARACTERS"),
        ("a/b", "INVALID_SANDBOX_ID_CHARACTERS"),
        ("é", "INVALID_SANDBOX_ID_CHARACTERS"),
        ("\u212a", "INVALID_SANDBOX_ID_CHARACTERS"),
        ("٣", "INVALID_SANDBOX_ID_CHARACTERS"),
        (" API ", "RESERVED_SANDBOX_ID"),
        *((name, "RESERVED_SANDBOX_ID") for name in sorted(RESERVED)),
    ],
)
def test_an_id_that_cannot_be_used_is_refused_with_its_reason(raw: str, reason: str) -> None:
    with pytest.raises(InvalidSandboxIdError) as caught:
        normalise_id(raw)
    assert caught.value.details == {"reason": reason}


def test_the_reserved_ids_are_those_of_the_documentation() -> None:
    text = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
    documented = re.search(r"`([a-z ]+)` are reserved", text)
    assert documented is not None
    assert set(documented[1].split()) == RESERVED


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("30s", 30.0),
        ("10m", 600.0),
        ("1h", 3600.0),
        ("2d", 172800.0),
        ("1.5h", 5400.0),
        (" 10 M ", 600.0),
        ("90", 90.0),
        (90, 90.0),
        (0.25, 0.25),
        ("36500d", 36500 * 86400.0),
        ("never", None),
        ("NEVER", None),
        (0, None),
        (0.0, None),
        ("0", None),
        ("0s", None),
        (None, None),
    ],
)
def test_a_duration_is_seconds_or_nothing(value: str | float | None, seconds: float | None) -> None:
    assert parse_duration(value) == seconds


@pytest.mark.parametrize(
    "value",
    [
        "",
        "s",
        "soon",
        "-1s",
        "+1s",
        "1x",
        "1h30",
        "1e9",
        "1_000",
        "٣s",
        "nan",
        "inf",
        "1s\0",
        "9" * 500,
        "36501d",
        -1,
        -0.5,
        float("nan"),
        float("inf"),
        float("-inf"),
        10**400,
        10**5000,
        True,
    ],
    ids=lambda value: repr(value)[:12] if not isinstance(value, int) else f"int{value.bit_length()}",
)
def test_what_is_no_duration_is_refused(value: str | float) -> None:
    with pytest.raises(InvalidRequestError, match="is not a duration") as caught:
        parse_duration(value)
    assert len(caught.value.message) < 100

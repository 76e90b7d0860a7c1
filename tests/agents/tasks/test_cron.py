from __future__ import annotations

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest

from skerry.agents.cron import Cron
from skerry.errors import InvalidRequestError


def times(cron: str, since: str, count: int = 3, zone: str = "UTC") -> list[str]:
    """The next times in the zone's own clock, with its offset from UTC in hours where it has one."""
    moment, found = datetime.fromisoformat(since).replace(tzinfo=ZoneInfo(zone)).astimezone(UTC), []
    schedule = Cron.parse(cron, zone)
    for _ in range(count):
        following = schedule.after(moment)
        assert following is not None
        moment = following
        local = moment.astimezone(ZoneInfo(zone))
        offset = local.utcoffset()
        assert offset is not None
        hours = offset / timedelta(hours=1)
        found.append(f"{local:%m-%d %H:%M}" + (f" {hours:+g}" if hours else ""))
    return found


@pytest.mark.parametrize(
    ("cron", "since", "expected"),
    [
        ("*/15 * * * *", "2026-03-01 12:07", ["03-01 12:15", "03-01 12:30", "03-01 12:45"]),
        ("0 9 * * mon-fri", "2026-03-06 10:00", ["03-09 09:00", "03-10 09:00", "03-11 09:00"]),
        ("0 9 * * 1-5", "2026-03-06 09:00", ["03-09 09:00", "03-10 09:00", "03-11 09:00"]),
        ("5,10 0 1 JAN *", "2026-03-01", ["01-01 00:05", "01-01 00:10", "01-01 00:05"]),
        ("0 0 * * 7", "2026-03-01 00:00", ["03-08 00:00", "03-15 00:00", "03-22 00:00"]),
        ("0 0 * * 0", "2026-03-01 00:00", ["03-08 00:00", "03-15 00:00", "03-22 00:00"]),
        ("0 0 * * fri-Sun", "2026-03-02", ["03-06 00:00", "03-07 00:00", "03-08 00:00"]),
        ("0 0 * * sun-mon", "2026-03-02 12:00", ["03-08 00:00", "03-09 00:00", "03-15 00:00"]),
        ("0 0 13 * fri", "2026-03-01", ["03-06 00:00", "03-13 00:00", "03-20 00:00"]),  # either will do
        ("0 0 */10 * *", "2026-03-01", ["03-11 00:00", "03-21 00:00", "03-31 00:00"]),
        ("0 0 31 * *", "2026-03-31 12:00", ["05-31 00:00", "07-31 00:00", "08-31 00:00"]),
        ("0 0 29 2 *", "2026-03-01", ["02-29 00:00", "02-29 00:00", "02-29 00:00"]),
        ("10/20 5 * * *", "2026-03-01", ["03-01 05:10", "03-01 05:30", "03-01 05:50"]),
        ("0-30/10 5 * * *", "2026-03-01", ["03-01 05:00", "03-01 05:10", "03-01 05:20"]),
        ("@daily", "2026-12-30 12:00", ["12-31 00:00", "01-01 00:00", "01-02 00:00"]),
        ("@hourly", "2026-12-31 22:30", ["12-31 23:00", "01-01 00:00", "01-01 01:00"]),
        ("@weekly", "2026-03-01 01:00", ["03-08 00:00", "03-15 00:00", "03-22 00:00"]),
        ("@monthly", "2026-01-01 00:00", ["02-01 00:00", "03-01 00:00", "04-01 00:00"]),
        ("@yearly", "2026-01-01 00:00", ["01-01 00:00", "01-01 00:00", "01-01 00:00"]),
    ],
)
def test_times_come_as_cron_has_them(cron: str, since: str, expected: list[str]) -> None:
    assert times(cron, since) == expected


def test_a_time_that_clocks_jump_over_comes_at_the_jump() -> None:
    # On 29 March 2026 at 02:00 it is 03:00 in Berlin.
    assert times("30 2 * * *", "2026-03-28 00:00", 3, "Europe/Berlin") == [
        "03-28 02:30 +1",
        "03-29 03:00 +2",
        "03-30 02:30 +2",
    ]


def test_a_time_that_comes_twice_is_taken_once() -> None:
    # On 25 October 2026 at 03:00 it is 02:00 again.
    assert times("30 2 * * *", "2026-10-24 12:00", 2, "Europe/Berlin") == ["10-25 02:30 +2", "10-26 02:30 +1"]
    assert times("0,30 2 * * *", "2026-10-25 00:00", 3, "Europe/Berlin") == [
        "10-25 02:00 +2",
        "10-25 02:30 +2",
        "10-26 02:00 +1",
    ]


def test_intervals_go_on_through_a_change_of_clocks() -> None:
    assert times("*/30 * * * *", "2026-10-25 01:30", 5, "Europe/Berlin") == [
        "10-25 02:00 +2",
        "10-25 02:30 +2",
        "10-25 02:00 +1",
        "10-25 02:30 +1",
        "10-25 03:00 +1",
    ]
    assert times("*/30 * * * *", "2026-03-29 01:30", 2, "Europe/Berlin") == ["03-29 03:00 +2", "03-29 03:30 +2"]


def test_a_zone_with_a_half_hour_change_is_right_too() -> None:
    # Lord Howe Island moves by half an hour: on 4 October 2026 at 02:00 it is 02:30.
    assert times("15 2 * * *", "2026-10-03 12:00", 2, "Australia/Lord_Howe") == ["10-04 02:30 +11", "10-05 02:15 +11"]


def test_a_day_is_one_of_the_zone() -> None:
    assert times("0 1 1 * *", "2026-03-01 12:00", 1, "Pacific/Auckland") == ["04-01 01:00 +13"]


def test_every_time_of_a_year_is_one_that_the_clock_shows() -> None:
    schedule, zone = Cron.parse("17 */3 * * *", "America/New_York"), ZoneInfo("America/New_York")
    start = datetime(2026, 1, 1, tzinfo=UTC)
    found = schedule.latest(start, start + timedelta(days=365), 4000)
    assert found == sorted(set(found))
    assert 365 * 8 - 3 < len(found) < 365 * 8 + 3
    assert all((local := moment.astimezone(zone)).minute == 17 and local.hour % 3 == 0 for moment in found)


def test_the_latest_times_are_found_without_looking_at_all() -> None:
    schedule = Cron.parse("* * * * *", "Europe/Berlin")
    until = datetime(2026, 3, 29, 1, 1, tzinfo=UTC)
    found = schedule.latest(until - timedelta(days=3000), until, 3)
    assert [f"{due:%H:%M}" for due in found] == ["00:59", "01:00", "01:01"]


@pytest.mark.parametrize(
    "cron",
    [
        "",
        "* * * *",
        "* * * * * *",
        "60 * * * *",
        "* 24 * * *",
        "* * 0 * *",
        "* * * 13 *",
        "* * * * 8",
        "5-1 * * * *",
        "* * * * fri-mon",
        "* * * * 5-0",
        "*/0 * * * *",
        "*/61 * * * *",
        "a * * * *",
        "1,,2 * * * *",
        "-1 * * * *",
        "1- * * * *",
        "* * * foo *",
        "* * 30 2 *",
        "@reboot",
        "@never",
        "٣ * * * *",
    ],
)
def test_what_is_no_time_is_refused(cron: str) -> None:
    with pytest.raises(InvalidRequestError):
        Cron.parse(cron)


@pytest.mark.parametrize("zone", ["Mars/Olympus", "", "../../etc/passwd", "/etc/localtime"])
def test_what_is_no_zone_is_refused(zone: str) -> None:
    with pytest.raises(InvalidRequestError):
        Cron.parse("@daily", zone)

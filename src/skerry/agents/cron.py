"""Times in the words of cron: five fields, in a time zone, right when clocks are changed.

    minute hour day-of-month month day-of-week      0 9 * * mon-fri      */15 * * * *      0 0 1,15 * *

Where both days are given, either will do, as in every cron. An expression with an hour of its own (``30 2 * * *``)
means a time of the day: one that a change of clocks leaves out comes at the moment of the change, and one that comes
twice is taken the first time. With ``*`` for the hour it means intervals, which go on through such a change.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from skerry.errors import InvalidRequestError

_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_DAYS = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")
_SHORT = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}
_MINUTE = timedelta(minutes=1)
_FARTHEST = 366 * 9
"""Days to look ahead: from one 29 February to the next are at most eight years."""


@dataclass(frozen=True, slots=True)
class _Field:
    name: str
    first: int
    last: int
    names: tuple[str, ...] = ()
    named_from: int = 0

    def parse(self, text: str) -> frozenset[int]:
        found: set[int] = set()
        for part in text.split(","):
            found.update(self._part(part))
        return frozenset(found)

    def _part(self, part: str) -> range:
        span, slash, step = part.partition("/")
        if slash and not (step.isascii() and step.isdigit() and 1 <= int(step) <= self.last):
            raise self._wrong(part)
        if span == "*":
            first, last = self.first, self.last
        elif "-" in span:
            low, _, high = span.partition("-")
            first, last = self._number(low, part), self._number(high, part)
            if last < first and high.lower() == "sun":
                last = self.last  # a week may end with its Sunday
        else:
            first = self._number(span, part)
            last = self.last if slash else first
        if first > last:
            raise self._wrong(part)
        return range(first, last + 1, int(step) if slash else 1)

    def _number(self, text: str, part: str) -> int:
        if text.lower() in self.names:
            return self.names.index(text.lower()) + self.named_from
        if not (text.isascii() and text.isdigit() and len(text) <= 2 and self.first <= int(text) <= self.last):
            raise self._wrong(part)
        return int(text)

    def _wrong(self, part: str) -> InvalidRequestError:
        also = f", or {self.names[0]} to {self.names[-1]}" if self.names else ""
        return InvalidRequestError(
            f"{part[:60]!r} is not {'an' if self.name == 'hour' else 'a'} {self.name} that a schedule can name.",
            hint=f"Write * or {self.first} to {self.last}{also}, as lists 1,2, ranges 1-5 and steps */2.",
        )


_FIELDS = (
    _Field("minute", 0, 59),
    _Field("hour", 0, 23),
    _Field("day of the month", 1, 31),
    _Field("month", 1, 12, _MONTHS, 1),
    _Field("day of the week", 0, 7, _DAYS),
)


@dataclass(frozen=True, slots=True)
class Cron:
    """When something is due."""

    minutes: tuple[int, ...]
    hours: tuple[int, ...]
    days: frozenset[int]
    months: frozenset[int]
    weekdays: frozenset[int]
    """0 is Sunday."""
    either_day: bool
    intervals: bool
    zone: ZoneInfo

    @classmethod
    def parse(cls, text: str, timezone: str = "UTC") -> Cron:
        """Raises ``InvalidRequestError`` for what means no time at all."""
        words = _SHORT.get(text.strip().lower(), text).split()
        if len(words) != 5:
            raise InvalidRequestError(
                f"{text[:100]!r} is not a time that a schedule can have.",
                hint="Write five fields (minute, hour, day of the month, month, day of the week), such as "
                f"'0 9 * * mon-fri', or one of {', '.join(_SHORT)}.",
            )
        minutes, hours, days, months, weekdays = (field.parse(word) for field, word in zip(_FIELDS, words, strict=True))
        cron = cls(
            minutes=tuple(sorted(minutes)),
            hours=tuple(sorted(hours)),
            days=days,
            months=months,
            weekdays=frozenset(day % 7 for day in weekdays),
            either_day=not words[2].startswith("*") and not words[4].startswith("*"),
            intervals=words[1].startswith("*"),
            zone=_zone(timezone),
        )
        if cron.after(datetime.now(UTC)) is None:
            raise InvalidRequestError(f"{text[:100]!r} never comes.", hint="No month that it names has such a day.")
        return cron

    def after(self, moment: datetime) -> datetime | None:
        """The first time after this one, in UTC; None if there is none in the next years."""
        for found in self._from(moment.astimezone(self.zone).date() - timedelta(days=1)):
            if found > moment:
                return found
        return None

    def latest(self, after: datetime, until: datetime, count: int) -> list[datetime]:
        """The last times after one moment, up to and with another, in their order; at most so many."""
        found: set[datetime] = set()
        first, day = after.astimezone(self.zone).date(), until.astimezone(self.zone).date()
        while day >= first - timedelta(days=1) and len(found) < count:
            found.update(due for due in self._on(day) if after < due <= until)
            day -= timedelta(days=1)
        return sorted(found)[-count:]

    def _from(self, day: date) -> Iterator[datetime]:
        """All times from a day on, in their order."""
        before: datetime | None = None
        for number in range(_FARTHEST):
            for found in self._on(day + timedelta(days=number)):
                if before is None or found > before:
                    yield found
                    before = found

    def _on(self, day: date) -> Iterator[datetime]:
        if day.month not in self.months or not self._falls_on(day):
            return
        times = [datetime.combine(day, time(hour, minute)) for hour in self.hours for minute in self.minutes]
        if not self.intervals:
            yield from (self._moment(wall) for wall in times)
            return
        real = {
            wall.replace(tzinfo=self.zone, fold=fold).astimezone(UTC)
            for wall in times
            for fold in (0, 1)
            if _exists(wall.replace(tzinfo=self.zone, fold=fold))
        }
        yield from sorted(real)

    def _falls_on(self, day: date) -> bool:
        by_month, by_week = day.day in self.days, day.isoweekday() % 7 in self.weekdays
        return by_month or by_week if self.either_day else by_month and by_week

    def _moment(self, wall: datetime) -> datetime:
        local = wall.replace(tzinfo=self.zone)
        moment = local.astimezone(UTC)
        if _exists(local):
            return moment
        # Clocks were put forward over it: it comes when they are.
        while (moment - _MINUTE).astimezone(self.zone).utcoffset() == moment.astimezone(self.zone).utcoffset():
            moment -= _MINUTE
        return moment


def _exists(local: datetime) -> bool:
    return local.astimezone(UTC).astimezone(local.tzinfo).replace(tzinfo=None) == local.replace(tzinfo=None)


def _zone(name: str) -> ZoneInfo:
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise InvalidRequestError(
            f"There is no time zone {name[:60]!r}.", hint="Write it like Europe/Berlin, America/New_York or UTC."
        ) from None

"""How much of what strangers cause is written down: some of it in each period, and how much more there was."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass


@dataclass(slots=True)
class _Count:
    since: float
    taken: int = 0
    withheld: int = 0


class Allowance:
    """``at_once`` in each ``period`` of seconds, for each of the last ``remembered`` keys."""

    def __init__(self, at_once: int, period: float, remembered: int) -> None:
        self._at_once = at_once
        self._period = period
        self._remembered = remembered
        self._counts: OrderedDict[Hashable, _Count] = OrderedDict()

    def __len__(self) -> int:
        return len(self._counts)

    def take(self, key: Hashable) -> int | None:
        """How many were withheld before this one; None if this one is, too."""
        now = time.monotonic()
        count = self._counts.setdefault(key, _Count(now))
        self._counts.move_to_end(key)
        if len(self._counts) > self._remembered:
            self._counts.popitem(last=False)
        if now - count.since > self._period:
            count.since, count.taken = now, 0
        if count.taken >= self._at_once:
            count.withheld += 1
            return None
        count.taken += 1
        withheld, count.withheld = count.withheld, 0
        return withheld

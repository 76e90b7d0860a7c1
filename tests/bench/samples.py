"""What was measured, and how measurements take turns."""

from __future__ import annotations

import math
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

ROUNDS = 5
SETTLE = 0.05


@dataclass(frozen=True)
class Samples:
    values: Sequence[float]

    @property
    def n(self) -> int:
        return len(self.values)

    @property
    def p50(self) -> float:
        return self._rank(0.50)

    @property
    def p95(self) -> float:
        return self._rank(0.95)

    def _rank(self, share: float) -> float:
        return sorted(self.values)[math.ceil(share * self.n) - 1]


@dataclass
class Contestant:
    """Something measured beside others; ``work`` gives one value. One that cannot take part says why."""

    name: str
    work: Callable[[], float] | None = None
    count: int = 0
    failure: str | None = None
    values: list[float] = field(default_factory=list)

    @property
    def samples(self) -> Samples | None:
        return Samples(self.values) if self.values else None


def milliseconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return (time.perf_counter() - start) * 1000


def take_turns(ours: Contestant, *rivals: Contestant, after: Callable[[], None] | None = None) -> Samples:
    """Measure all in rounds, so that whatever else the machine does falls on all alike.

    ``after`` follows each of our rounds, untimed. A rival that fails is out of the race; when we fail, so does this.
    """
    for number in range(ROUNDS):
        for contestant in (ours, *rivals):
            _round(contestant, number, may_fail=contestant is not ours)
            if contestant is ours and after is not None:
                after()
            time.sleep(SETTLE)
    return Samples(ours.values)


def _round(contestant: Contestant, number: int, *, may_fail: bool) -> None:
    share = contestant.count * (number + 1) // ROUNDS - contestant.count * number // ROUNDS
    if contestant.work is None or contestant.failure is not None:
        return
    try:
        for _ in range(share):
            contestant.values.append(contestant.work())
    except (OSError, subprocess.SubprocessError) as error:
        if not may_fail:
            raise
        contestant.failure = reason(error)
        contestant.values.clear()


def reason(error: Exception) -> str:
    """Why something failed, in one line: what the program said, if it was one."""
    said = getattr(error, "stderr", None)
    text = said.decode(errors="replace") if isinstance(said, bytes) else said or str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:120] if lines else type(error).__name__

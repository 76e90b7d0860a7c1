"""What one sandbox uses: samples of the last hour in memory, and totals that outlive sleep and restarts."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from skerry.models import Sample, Usage, now
from skerry.providers.contract import Measure

EVERY = 10.0
"""Seconds between two samples."""
KEPT = 360
SAVE_EVERY = 60.0
"""Seconds between two times the totals of one that runs are written down."""


class Meter:
    def __init__(self, recorded: Mapping[str, Any]) -> None:
        self._usage = Usage.model_validate(recorded)
        self._taken = self.usage()
        self._samples: deque[Sample] = deque(maxlen=KEPT)
        self._cpu = 0.0
        self._at: float | None = None
        self._saved = time.monotonic()

    @property
    def due(self) -> bool:
        return self._at is None or time.monotonic() - self._at >= EVERY

    @property
    def unsaved(self) -> bool:
        return time.monotonic() - self._saved >= SAVE_EVERY

    def begin(self) -> None:
        """A machine has started; its counts begin at nothing."""
        self._cpu, self._at = 0.0, time.monotonic()

    def add(self, measure: Measure, *, keep: bool = True) -> Sample:
        """Account for what was used since the last time. ``keep`` makes it part of the history."""
        moment = time.monotonic()
        passed = 0.0 if self._at is None else moment - self._at
        spent = max(0.0, (measure.cpu_seconds or 0.0) - self._cpu)
        usage = self._usage
        usage.cpu_seconds += spent
        usage.memory_byte_seconds += (measure.memory or 0) * passed
        usage.running_seconds += passed
        self._cpu, self._at = max(self._cpu, measure.cpu_seconds or 0.0), moment
        known = measure.cpu_seconds is not None and passed > 0
        sample = Sample(
            at=now(),
            cpu_seconds=measure.cpu_seconds,
            cpu_percent=round(100 * spent / passed, 1) if known else None,
            memory=measure.memory,
            memory_peak=measure.memory_peak,
            disk=measure.disk,
            processes=measure.processes,
            network_in=usage.network_in,
            network_out=usage.network_out,
        )
        if keep:
            self._samples.append(sample)
        return sample

    def count(self, limit: str, times: int) -> None:
        self._usage.reached[limit] = self._usage.reached.get(limit, 0) + times

    def carried(self, inwards: int, outwards: int) -> None:
        """Bytes that went over its network."""
        self._usage.network_in += inwards
        self._usage.network_out += outwards

    def usage(self) -> Usage:
        return self._usage.model_copy(deep=True)

    def take(self) -> Usage:
        """What was used since this was last asked, for whoever keeps accounts."""
        last, self._taken = self._taken, self.usage()
        names = ("cpu_seconds", "memory_byte_seconds", "running_seconds", "network_in", "network_out")
        return Usage(**{name: getattr(self._taken, name) - getattr(last, name) for name in names})

    def history(self, since: datetime | None = None) -> list[Sample]:
        return [sample for sample in self._samples if since is None or sample.at > since]

    def record(self) -> dict[str, Any]:
        """To be written down now."""
        self._saved = time.monotonic()
        return self._usage.model_dump(mode="json", by_alias=True)

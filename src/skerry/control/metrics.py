"""What a server counts and times, in the words of Prometheus. One set for each registry; docs/metrics.md has them all.

Kept cheap: what happens with every request touches a counter or a histogram that was looked up once, and what can be
counted when somebody asks is counted then.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import Metric

from skerry.models import State

log = structlog.get_logger(__name__)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Operation = Literal[
    "start",
    "freeze",
    "thaw",
    "hibernate",
    "destroy",
    "snapshot",
    "fork",
    "rollback",
    "backup",
    "restore",
    "sync",
]
OPERATIONS: tuple[Operation, ...] = Operation.__args__  # type: ignore[attr-defined]

QUICK = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.08, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
LONG = (0.005, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 60, 180, 600, 1800)


THRESHOLDS = {
    "sandbox.wake_latency": (5.0, "seconds"),
    "sandbox.message_latency": (30.0, "seconds"),
    "r2.sync_duration": (60.0, "seconds"),
    "r2.storage_bytes": (1e9, "bytes"),
}
"""By the names that dashboards elsewhere have for them: beyond what somebody should look."""


class Metrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self.sandboxes = Gauge("skerry_sandboxes", "Sandboxes in each state.", ["state"], registry=self.registry)
        self.created = self._counter("skerry_sandbox_created", "Sandboxes made.")
        self.wake_latency = self._histogram(
            "skerry_sandbox_wake_latency_seconds",
            "From the wish to use a sleeping sandbox until it is there.",
            QUICK,
            "stage",
        )
        self.message_latency = self._histogram(
            "skerry_sandbox_message_latency_seconds",
            "From the arrival of a request to a sandbox until its machine takes it; of a message, until its answer.",
            QUICK,
        )
        self.sync_duration = self._histogram(
            "skerry_r2_sync_duration_seconds", "Syncs of a workspace with a bucket.", LONG
        )
        self.storage_bytes = Gauge(
            "skerry_r2_storage_bytes", "Bytes of synced workspaces kept in buckets.", ["owner"], registry=self.registry
        )
        self.commands = self._counter("skerry_commands", "Commands that were run to their end, by result.", "result")
        self.exec_duration = self._histogram(
            "skerry_exec_duration_seconds", "From asking for a command to its result.", LONG
        )
        self.limits_reached = self._counter("skerry_limits_reached", "Limits that sandboxes ran into.", "limit")
        self.code_runs = self._counter("skerry_code_runs", "Pieces of code that were run.", "language")
        self.operations = self._histogram(
            "skerry_operation_duration_seconds",
            "Changes of a sandbox's life and copies of its files.",
            LONG,
            "operation",
        )
        self.failures = self._counter("skerry_operation_failures", "Those that failed.", "operation")
        self.bytes = self._counter("skerry_transferred_bytes", "Bytes moved to and from buckets.", "direction")
        self.audit_entries = self._counter("skerry_audit_entries", "Entries written to the audit log.")
        self.audit_failures = self._counter("skerry_audit_failures", "Attempts to write the audit log that failed.")
        self.audit_lost = self._counter("skerry_audit_lost", "Entries that were lost, because it could not be written.")
        self.webhooks = self._counter(
            "skerry_webhook_deliveries", "Attempts to deliver a webhook, by result.", "result"
        )
        self.egress_bytes = self._counter(
            "skerry_egress_bytes", "Bytes that sandboxes received from outside and sent there.", "direction", "owner"
        )
        self.egress_refusals = self._counter(
            "skerry_egress_refusals", "Connections and requests to the outside that policy refused.", "owner"
        )
        self.tasks = self._counter("skerry_tasks", "Tasks of agents that ended, by how.", "status")
        self.task_duration = self._histogram(
            "skerry_task_duration_seconds", "From a task's beginning to its end.", LONG
        )
        self.task_first_event = self._histogram(
            "skerry_task_first_event_seconds", "From a task's beginning to the first word of its agent.", LONG
        )
        self.task_tokens = self._counter("skerry_task_tokens", "Tokens that agents used.", "kind", "owner")
        self.task_cost = self._counter("skerry_task_cost", "What they cost, as the agents reckon it.", "owner")
        self.alerts = self._counter("skerry_alerts", "How often something was beyond its threshold.", "metric")
        self.thresholds = Gauge("skerry_alert_threshold", "Beyond what.", ["metric"], registry=self.registry)
        for metric, (most, _) in THRESHOLDS.items():
            self.alerts.labels(metric)
            self.thresholds.labels(metric).set(most)
        for status in ("completed", "failed", "cancelled"):
            self.tasks.labels(status)
        self._ok = self.commands.labels("ok")
        self._failed = self.commands.labels("failed")
        self._timed_out = self.commands.labels("timed_out")
        for operation in OPERATIONS:
            self.failures.labels(operation)
        for limit in ("memory", "pids", "disk"):
            self.limits_reached.labels(limit)
        for direction in ("up", "down"):
            self.bytes.labels(direction)
        for result in ("delivered", "failed", "dead"):
            self.webhooks.labels(result)

    def command(self, seconds: float, exit_code: int, timed_out: bool) -> None:
        """A command has ended."""
        (self._timed_out if timed_out else self._ok if exit_code == 0 else self._failed).inc()
        self.exec_duration.observe(seconds)

    def beyond(self, metric: str, value: float, **about: str) -> str | None:
        """Whether a value is beyond its threshold: it is counted and logged then, and this says so in a sentence."""
        most, unit = THRESHOLDS[metric]
        if value <= most:
            return None
        self.alerts.labels(metric).inc()
        said = f"{metric} is {value:.3g} {unit}, and should be {most:g} at most."
        log.warning("alert", metric=metric, value=value, threshold=most, **about)
        return said

    def first_event(self, seconds: float) -> None:
        """A task's agent has said its first word."""
        self.task_first_event.observe(seconds)

    def task(self, status: str, seconds: float, tokens: Mapping[str, int], cost: float, owner: str) -> None:
        """A task has ended."""
        self.tasks.labels(status).inc()
        self.task_duration.observe(seconds)
        for kind, number in tokens.items():
            if number:
                self.task_tokens.labels(kind, owner).inc(number)
        if cost > 0:
            self.task_cost.labels(owner).inc(cost)

    def code(self, language: str) -> None:
        """A piece of code is run."""
        self.code_runs.labels(language).inc()

    @contextmanager
    def timed(self, operation: Operation, *refusals: type[Exception]) -> Iterator[None]:
        """Time a change of life or a copy: how long it took if it succeeds, and that it failed if not.

        ``refusals`` are no failures: what was asked for made no sense.
        """
        began = time.perf_counter()
        try:
            yield
        except refusals:
            raise
        except BaseException:
            self.failures.labels(operation).inc()
            raise
        self.operations.labels(operation).observe(time.perf_counter() - began)

    def text(self, states: Mapping[State, int]) -> bytes:
        """What Prometheus reads, with the number of sandboxes in each state, which only the store knows."""
        for state in State:
            if state is not State.DESTROYED:
                self.sandboxes.labels(state).set(states.get(state, 0))
        return generate_latest(_Plain(self.registry))

    def _counter(self, name: str, help: str, *labels: str) -> Counter:
        return Counter(name, help, labels, registry=self.registry)

    def _histogram(self, name: str, help: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(name, help, labels, registry=self.registry, buckets=buckets)


class _Plain:
    """Without the time at which each series began, which the library would add as a series of its own."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        for metric in self._registry.collect():
            metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
            yield metric

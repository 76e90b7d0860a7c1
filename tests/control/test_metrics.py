"""What is counted reads as Prometheus wants it, and the shipped alerts fire at their thresholds."""

from __future__ import annotations

import re
import subprocess
import sys
import timeit
from pathlib import Path

import pytest

from skerry.control.metrics import THRESHOLDS, Metrics
from skerry.control.registry import Registry
from skerry.models import State

RULES = Path(__file__).parents[2] / "deploy" / "prometheus"
DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"


def promtool(*arguments: str, stdin: bytes = b"") -> str:
    program = Path(sys.executable).with_name("promtool")
    done = subprocess.run([program, *arguments], input=stdin, capture_output=True, cwd=RULES, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.decode()


@pytest.fixture
def metrics() -> Metrics:
    """Each of them with something in it."""
    metrics = Metrics()
    metrics.created.inc()
    metrics.wake_latency.labels("freeze").observe(0.002)
    metrics.message_latency.observe(0.001)
    metrics.sync_duration.observe(3)
    metrics.storage_bytes.labels("ada").set(7)
    metrics.command(0.1, 0, False)
    metrics.code_runs.labels("python").inc()
    with metrics.timed("snapshot"):
        pass
    metrics.bytes.labels("up").inc(10)
    return metrics


def test_prometheus_reads_them_without_complaint(metrics: Metrics) -> None:
    text = metrics.text({State.ACTIVE: 3})
    promtool("check", "metrics", stdin=text)
    assert b'skerry_sandboxes{state="active"} 3.0' in text
    assert b'skerry_sandboxes{state="frozen"} 0.0' in text


def test_the_shipped_rules_are_rules_and_fire_beyond_their_thresholds() -> None:
    promtool("check", "rules", "skerry.rules.yml")
    promtool("test", "rules", "skerry.tests.yml")


def test_every_series_of_the_rules_is_one_that_there_is(metrics: Metrics) -> None:
    served = set(re.findall(r"^(skerry_\w+)", metrics.text({}).decode(), re.MULTILINE))
    named = set(re.findall(r"\bskerry_\w+\b", (RULES / "skerry.rules.yml").read_text()))
    assert named <= served
    # A threshold that is no bound of its histogram would never be met.
    for series, bound in re.findall(r'(skerry_\w+_bucket){le="([\d.]+)"}', (RULES / "skerry.rules.yml").read_text()):
        assert re.search(rf'^{series}{{.*le="{re.escape(bound)}".*}}', metrics.text({}).decode(), re.MULTILINE), series


def test_every_metric_is_documented_and_every_documented_one_is_there(metrics: Metrics) -> None:
    served = {name for name, _ in re.findall(r"^# TYPE (\w+) (\w+)$", metrics.text({}).decode(), re.MULTILINE)}
    documented = set(re.findall(r"^\| `(skerry_\w+)", DOCS.read_text(), re.MULTILINE))
    assert documented == served


def test_what_fails_is_counted_and_not_timed(metrics: Metrics) -> None:
    with pytest.raises(OSError), metrics.timed("backup"):
        raise OSError
    text = metrics.text({}).decode()
    assert 'skerry_operation_failures_total{operation="backup"} 1.0' in text
    assert 'operation_duration_seconds_count{operation="backup"}' not in text


def test_counting_a_command_costs_next_to_nothing(metrics: Metrics) -> None:
    """A command takes a thousand times as long; an order of magnitude is left for a busy machine."""
    assert min(timeit.repeat(lambda: metrics.command(0.001, 0, False), number=1000, repeat=5)) / 1000 < 20e-6


def test_what_is_beyond_a_threshold_is_counted_and_said(metrics: Metrics) -> None:
    assert metrics.beyond("sandbox.wake_latency", 5.0) is None
    said = metrics.beyond("sandbox.wake_latency", 6.5, sandbox="demo")
    assert said == "sandbox.wake_latency is 6.5 seconds, and should be 5 at most."
    text = metrics.text({}).decode()
    assert 'skerry_alerts_total{metric="sandbox.wake_latency"} 1.0' in text
    assert 'skerry_alerts_total{metric="r2.storage_bytes"} 0.0' in text
    limits = dict(re.findall(r'skerry_alert_threshold\{metric="(.*?)"\} (\S+)', text))
    assert {name: float(limit) for name, limit in limits.items()} == {
        "sandbox.wake_latency": 5,
        "sandbox.message_latency": 30,
        "r2.sync_duration": 60,
        "r2.storage_bytes": 1e9,
    }


async def test_a_slow_wake_is_an_event_of_its_sandbox(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(THRESHOLDS, "sandbox.wake_latency", (0.0, "seconds"))
    async with registry.use("slow"):
        pass
    await registry.stop("slow")
    async with registry.use("slow"):
        pass
    (alert,) = [event for event in await registry.events("slow") if event.kind == "alert"]
    assert alert.details["metric"] == "sandbox.wake_latency"

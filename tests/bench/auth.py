"""What it costs an exec that somebody must be let in: a key of the store, its owner, quotas and a rate."""

from __future__ import annotations

import skerry
from tests.bench.paths import expect
from tests.bench.report import Row
from tests.bench.samples import Contestant, milliseconds, take_turns
from tests.bench.service import service
from tests.bench.stand import Stand

REACH = 0.2
QUOTAS = {"sandboxes": 100, "running": 100, "memory_mb": 10**6, "cpu_seconds_day": 10**6, "disk_mb": 10**6}


def auth(stand: Stand) -> list[Row]:
    with service(stand.scratch, "keyed") as keyed:
        with skerry.Client(keyed.url) as first:
            admin = first.create_key("bench", scope="admin").key
        with skerry.Client(keyed.url, admin) as client:
            client.set_quotas("ada", **QUOTAS)
            key = client.create_key(owner="ada", rate=10**6).key
        with skerry.Client(keyed.url, key) as client:
            guarded = client.sandbox("bench")

            def timed(sandbox: skerry.Sandbox) -> float:
                return milliseconds(lambda: expect(sandbox.exec(":").exit_code == 0, "A command failed."))

            for sandbox in (guarded, stand.sandbox):
                timed(sandbox)
            count = 3 * stand.counts.small
            rival = Contestant("without keys", lambda: timed(stand.sandbox), count)
            samples = take_turns(Contestant("Skerry", lambda: timed(guarded), count), rival)
    met = rival.samples is not None and samples.p50 <= rival.samples.p50 + REACH
    return [
        Row("auth", "exec with a key, owner and quotas", f"p50 ≤ + {REACH:g} ms", samples, rivals=[rival], goals=[met])
    ]


PATHS = {"auth": auth}

"""What it costs that everything is on record: the audit log, names for requests and a log line for each."""

from __future__ import annotations

import skerry
from tests.bench.paths import expect
from tests.bench.report import Row
from tests.bench.samples import Contestant, milliseconds, take_turns
from tests.bench.service import service
from tests.bench.stand import Stand

MORE = 0.1


def audit(stand: Stand) -> list[Row]:
    """The same command on two servers in turn, one with a record and one without."""
    with (
        service(stand.scratch, "recorded") as on,
        service(stand.scratch, "unrecorded", audit=False, access_log=False) as off,
        skerry.Client(on.url) as with_record,
        skerry.Client(off.url) as without,
    ):
        recorded, unrecorded = with_record.sandbox("bench"), without.sandbox("bench")
        for sandbox in (recorded, unrecorded):
            for _ in range(50):
                sandbox.exec("true")

        def once(sandbox: skerry.Sandbox) -> float:
            return milliseconds(lambda: expect(sandbox.exec("echo hi").stdout == "hi\n", "It did not say hi."))

        count = stand.counts.small * 5
        rival = Contestant("without a record", lambda: once(unrecorded), count)
        samples = take_turns(Contestant("Skerry", lambda: once(recorded), count), rival)
        noted = sum(entry.operation == "execute" for entry in with_record.export_audit(sandbox="bench"))
        expect(noted >= count, f"Only {noted} of {count} commands are on record.")
        expect(with_record.verify_audit().ok, "The audit log is not what was written.")
    cost = samples.p50 - rival.samples.p50 if rival.samples else None
    reach = f"p50 at most {MORE:g} ms more than without"
    goals = [None if cost is None else cost <= MORE]
    said = "" if cost is None else f" ({cost:+.3f} ms)"
    return [Row("audit", f"exec on record{said}", reach, samples, rivals=[rival], goals=goals)]


PATHS = {"audit": audit}

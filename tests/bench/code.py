"""The hot paths of the code interpreter, beside a real Jupyter kernel and plain Python."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import skerry
from tests.bench.kernel import kernel
from tests.bench.paths import expect
from tests.bench.report import Row
from tests.bench.samples import Contestant, Samples, milliseconds, reason, take_turns
from tests.bench.service import parent, pid_inside, proportional_megabytes
from tests.bench.stand import Stand

IMPORTS = "import pandas, matplotlib.pyplot as plt\nlen(pandas.DataFrame({'a': [1, 2, 3]}))"

FIGURE = """
rng = np.random.default_rng(7)
x = np.linspace(0, 10, 200)
figure, ((a, b), (c, d)) = plt.subplots(2, 2, figsize=(9, 6))
a.plot(x, np.sin(x), label="sin"); a.plot(x, np.cos(x), label="cos"); a.set_title("Lines"); a.legend()
b.bar(["north", "east", "south", "west"], [4, 7, 2, 5]); b.set_title("Bars")
c.scatter(rng.normal(size=200), rng.normal(size=200), s=9); c.set_title("Points")
d.hist(rng.normal(size=1000), bins=30); d.set_title("Distribution")
figure.tight_layout()
"""
FIGURE_IMPORTS = "import numpy as np, matplotlib.pyplot as plt"

_PLAIN = """
import io, os, sys, time
import matplotlib
matplotlib.use("Agg")
exec(sys.argv[1])
drawing = compile(sys.argv[2], "drawing", "exec")
for _ in sys.stdin:
    start = time.perf_counter()
    exec(drawing)
    for number in plt.get_fignums():
        plt.figure(number).savefig(io.BytesIO(), format="png", bbox_inches="tight")
    plt.close("all")
    print((time.perf_counter() - start) * 1000, flush=True)
"""


def warm_run(language: str, limit: float) -> Callable[[Stand], list[Row]]:
    def measure(stand: Stand) -> list[Row]:
        def ours() -> float:
            return milliseconds(lambda: expect(stand.sandbox.run_code("1+1", warm).text == "2", "1+1 was not 2."))

        warm = stand.sandbox.create_code_context(language)
        stand.sandbox.run_code("1+1", warm)
        rival = _kernel(stand, "1+1", "2", stand.counts.small)
        samples = take_turns(Contestant("Skerry", ours, stand.counts.small), rival)
        stand.sandbox.delete_code_context(warm)
        goals = (samples.p50 <= limit, rival.samples.p50 >= samples.p50 if rival.samples else None)
        path, reach = f"1+1 in a warm {language} context", f"p50 ≤ {limit:g} ms, and a kernel's"
        return [Row(f"code-{language}", path, reach, samples, rivals=[rival], goals=goals)]

    return measure


def context(stand: Stand) -> list[Row]:
    made: list[skerry.CodeContext] = []

    def ours() -> float:
        start = time.perf_counter()
        made.append(stand.sandbox.create_code_context())
        expect(stand.sandbox.run_code("1+1", made[-1]).text == "2", "1+1 was not 2.")
        return (time.perf_counter() - start) * 1000

    def delete() -> None:
        for one in made:
            stand.sandbox.delete_code_context(one)
        made.clear()

    ours()
    delete()
    rival = _new_kernel(stand, "1+1", "2")
    samples = take_turns(Contestant("Skerry", ours, stand.counts.contexts), rival, after=delete)
    path = "a new Python context, to its first result"
    return [Row("code-context", path, "p50 ≤ 30 ms", samples, rivals=[rival], goals=[samples.p50 <= 30])]


def first(stand: Stand) -> list[Row]:
    """From the name of a sandbox that does not exist yet, which costs us its creation as well."""
    made: list[skerry.Sandbox] = []

    def ours() -> float:
        sandbox = stand.client.sandbox(stand.fresh_name())
        made.append(sandbox)
        sandbox.exec("true")
        return milliseconds(lambda: expect(sandbox.run_code(IMPORTS).text == "3", "There were no three rows."))

    def destroy() -> None:
        for sandbox in made:
            sandbox.destroy()
        made.clear()

    ours()
    destroy()
    rival = _new_kernel(stand, IMPORTS, "3")
    samples = take_turns(Contestant("Skerry", ours, stand.counts.kernels), rival, after=destroy)
    ratio = rival.samples.p50 / samples.p50 if rival.samples else None
    goals = (samples.p95 <= 1200, None if ratio is None else ratio >= 2)
    path = "a fresh sandbox's first Python context, with pandas and matplotlib"
    return [Row("code-first", path, "≤ 1.2 s, and half of a kernel", samples, rivals=[rival], goals=goals)]


def figure(stand: Stand) -> list[Row]:
    def ours() -> float:
        start = time.perf_counter()
        results = stand.sandbox.run_code(FIGURE, warm).results
        spent = (time.perf_counter() - start) * 1000
        expect(len(results) == 1 and results[0].png is not None, "There was no one picture.")
        return spent

    with _plain() as draw:
        warm = stand.sandbox.create_code_context()
        stand.sandbox.run_code(FIGURE_IMPORTS, warm)
        ours()
        draw()
        plain = Contestant("plain Python", draw, stand.counts.figures)
        beside = _kernel(stand, f"{FIGURE_IMPORTS}\n{FIGURE}", "iVBOR", stand.counts.figures)
        samples = take_turns(Contestant("Skerry", ours, stand.counts.figures), plain, beside)
        stand.sandbox.delete_code_context(warm)
    goals = [plain.samples.p50 * 1.1 >= samples.p50 if plain.samples else None]
    path, reach = "a matplotlib figure of 4 panels, as PNG", "≤ 1.1 times plain Python"
    return [Row("code-figure", path, reach, samples, rivals=[plain, beside], goals=goals)]


def memory(stand: Stand) -> list[Row]:
    """Each in a sandbox of its own, where it shares pages with nothing but the template it was forked from."""
    alone: list[float] = []
    together: list[float] = []
    for _ in range(stand.counts.kernels):
        before = stand.server.sandbox_processes()
        with stand.client.sandbox(stand.fresh_name(), ephemeral=True) as sandbox:
            sandbox.run_code("1+1")
            (known,) = sandbox.list_code_contexts()
            time.sleep(0.2)
            family = stand.server.sandbox_processes() - before
            pids = [pid for pid in family if pid_inside(pid) == known.pid]
            expect(len(pids) == 1, "The process of the context was not found.")
            alone.append(proportional_megabytes(pids))
            together.append(proportional_megabytes({*pids, parent(pids[0])}))
    beside = Contestant("Jupyter kernel")
    try:
        with kernel(stand.scratch) as fresh:
            fresh.run("1+1")
            time.sleep(0.2)
            beside.values.append(proportional_megabytes([fresh.pid]))
    except OSError as error:
        beside.failure = reason(error)
    samples = Samples(alone)
    rivals = [beside, Contestant("… ours and its template", values=together)]
    path = "memory of an idle Python context (PSS)"
    return [Row("code-memory", path, "≤ 45 MB", samples, "MB", rivals, [samples.p95 <= 45])]


def _kernel(stand: Stand, code: str, answer: str, count: int) -> Contestant:
    """The kernel of the stand, which has run the code before; ``answer`` is how its result begins."""
    try:
        stand.kernel.run(code)
    except OSError as error:
        return Contestant("Jupyter kernel", failure=reason(error))
    return Contestant("Jupyter kernel", lambda: milliseconds(lambda: _same(stand.kernel.run(code), answer)), count)


def _new_kernel(stand: Stand, code: str, answer: str) -> Contestant:
    def work() -> float:
        start = time.perf_counter()
        with kernel(stand.scratch) as fresh:
            _same(fresh.run(code), answer)
            return (time.perf_counter() - start) * 1000

    return Contestant("a new Jupyter kernel", work, stand.counts.kernels)


def _same(found: str, answer: str) -> None:
    if not found.startswith(answer):
        raise OSError(f"The answer was {found[:40]!r}.")


@contextmanager
def _plain() -> Iterator[Callable[[], float]]:
    """A Python of its own that has all imported; the milliseconds it says that it drew."""
    line = [sys.executable, "-c", _PLAIN, FIGURE_IMPORTS, FIGURE]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        asks, says = process.stdin, process.stdout
        assert asks is not None
        assert says is not None

        def draw() -> float:
            print("draw", file=asks, flush=True)
            said = says.readline()
            if not said:
                raise OSError("Plain Python could not draw.")
            return float(said)

        try:
            yield draw
        finally:
            asks.close()


PATHS: dict[str, Callable[[Stand], list[Row]]] = {
    "code-python": warm_run("python", 2),
    "code-javascript": warm_run("javascript", 2),
    "code-context": context,
    "code-first": first,
    "code-figure": figure,
    "code-memory": memory,
}

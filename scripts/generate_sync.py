"""Write the sync client, and its tests, from the async ones.

    python scripts/generate_sync.py           write
    python scripts/generate_sync.py --check   exit with 1 if what is written is not what would be

Works on tokens: `async` and `await` go, names lose their `Async` or `_async`, a handful of names have a counterpart.
What cannot be said that way lives in pairs in `skerry/client/concurrency.py`.
"""

from __future__ import annotations

import argparse
import io
import re
import subprocess
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PLACES = {
    ROOT / "src/skerry/client/_async": ROOT / "src/skerry/client/_sync",
    ROOT / "tests/client/_async": ROOT / "tests/client/_sync",
}

NAMES = {
    "_async": "_sync",
    "aclose": "close",
    "aclosing": "closing",
    "aiter": "iter",
    "aiter_bytes": "iter_bytes",
    "aiter_lines": "iter_lines",
    "anext": "next",
    "aread": "read",
    "asynccontextmanager": "contextmanager",
    "StopAsyncIteration": "StopIteration",
    "__aenter__": "__enter__",
    "__aexit__": "__exit__",
    "__aiter__": "__iter__",
    "__anext__": "__next__",
}

HEADER = "# Generated from {source} by scripts/generate_sync.py; change that file and run it again.\n"


def rename(name: str) -> str:
    if name in NAMES:
        return NAMES[name]
    if re.match(r"_?Async[A-Z]", name):
        return name.replace("Async", "", 1)
    name = re.sub(r"_async(?=_|$)", "", name)
    return name


def retell(text: str) -> str:
    """A docstring about the async client, as it reads for the sync one."""
    text = re.sub(r"\b(async|await) ", "", text)
    text = re.sub(r"\b(aclose|aiter_bytes|aread)\b", lambda found: NAMES[found[0]], text)
    return re.sub(r"\bAsync(?=[A-Z])", "", text)


def synchronise(source: str) -> str:
    lines = source.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))

    def offset(place: tuple[int, int]) -> int:
        return starts[place[0] - 1] + place[1]

    tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    edits: list[tuple[int, int, str]] = []
    for index, token in enumerate(tokens):
        if token.type == tokenize.NAME:
            if token.string in ("async", "await"):
                edits.append((offset(token.start), offset(tokens[index + 1].start), ""))
            elif rename(token.string) != token.string:
                edits.append((offset(token.start), offset(token.end), rename(token.string)))
        elif token.type == tokenize.STRING and token.string.startswith('"""'):
            edits.append((offset(token.start), offset(token.end), retell(token.string)))
    for start, end, text in reversed(edits):
        source = source[:start] + text + source[end:]
    return source


def tidy(source: str, path: Path) -> str:
    """As ruff would have it: shorter names join lines and change the order of imports."""
    ours = ["--config", 'lint.isort.known-first-party = ["skerry"]']
    fix = ["check", "--select", "I,UP028", "--fix", "--unsafe-fixes", "--quiet", *ours]
    for command in (fix, ["format", "--quiet"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "--stdin-filename", str(path), "-"],
            input=source,
            capture_output=True,
            text=True,
            check=False,
            cwd=ROOT,
        )
        if done.returncode != 0:
            raise SystemExit(f"ruff {command[0]} failed on {path}:\n{done.stderr}")
        source = done.stdout
    return source


def generate() -> dict[Path, str]:
    written = {}
    for source_directory, target_directory in PLACES.items():
        for source in sorted(source_directory.glob("*.py")):
            target = target_directory / source.name
            text = synchronise(source.read_text())
            header = HEADER.format(source=source.relative_to(ROOT).as_posix())
            written[target] = tidy(header + text, target) if text else header
    return written


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if something is stale")
    check = parser.parse_args().check
    generated = generate()
    present = {path for directory in PLACES.values() for path in directory.glob("*.py")}
    stale = [path for path, text in generated.items() if path not in present or path.read_text() != text]
    orphans = sorted(present - set(generated))
    if check:
        for path in stale + orphans:
            print(f"stale: {path.relative_to(ROOT)}", file=sys.stderr)
        return 1 if stale or orphans else 0
    for path in stale:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(generated[path])
        print(f"wrote {path.relative_to(ROOT)}")
    for path in orphans:
        path.unlink()
        print(f"removed {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

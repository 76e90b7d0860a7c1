"""Random work on a mount and on a plain directory beside it: what can be seen of the two must be the same."""

from __future__ import annotations

import hashlib

import pytest

from skerry.storage.fuse.directories import MARKER
from tests.storage.mounting import Place, mounted, mounting_registry, place

__all__ = ["mounted", "mounting_registry", "place"]

PROGRAM = r"""
import errno, os, random, sys

seed, count = int(sys.argv[1]), int(sys.argv[2])
rng = random.Random(seed)
ROOTS = ("/persist", "/tmp/model")
os.makedirs(ROOTS[1], exist_ok=True)
NAMES = ["a", "b", "c", "dd", "e e", "f.txt"]
WEIGHTS = {
    "new": 6, "append": 3, "patch": 3, "truncate": 2, "unlink": 3, "mkdir": 4, "rmdir": 2, "rename": 5,
    "read": 4, "stat": 3, "list": 3, "open": 2, "use": 5, "drop": 2,
}
handles = []

def path():
    return "/".join(rng.choice(NAMES) for _ in range(rng.choice((1, 1, 2, 2, 3))))

def both(work):
    answers = []
    for number, root in enumerate(ROOTS):
        try:
            answers.append(("ok", work(root, number)))
        except OSError as error:
            answers.append(("error", errno.errorcode[error.errno]))
    return answers

def write(p, flags, data, offset=None):
    def work(root, _):
        fd = os.open(f"{root}/{p}", flags, 0o755)
        try:
            return os.write(fd, data) if offset is None else os.pwrite(fd, data, offset)
        finally:
            os.close(fd)
    return work

def read(p):
    def work(root, _):
        with open(f"{root}/{p}", "rb") as file:
            return file.read()
    return work

def look(p):
    def work(root, _):
        found = os.stat(f"{root}/{p}")
        return found.st_mode & 0o170000, found.st_size if found.st_mode & 0o100000 else None
    return work

def keep_open(p):
    fds = both(lambda root, _: os.open(f"{root}/{p}", os.O_RDWR))
    if all(kind == "ok" for kind, _ in fds):
        handles.append([fd for _, fd in fds])
        return [("ok", None)] * 2
    return fds

def use_handle():
    if not handles:
        return [("ok", None)] * 2
    pair = rng.choice(handles)
    what, at, data = rng.randrange(4), rng.randrange(6000), rng.randbytes(rng.randrange(1, 3000))
    def work(root, number):
        fd = pair[number]
        if what == 0:
            return os.pwrite(fd, data, at)
        if what == 1:
            return os.pread(fd, 9000, 0)
        if what == 2:
            return os.ftruncate(fd, at)
        return os.fstat(fd).st_size
    return both(work)

def drop_handle():
    if handles:
        for fd in handles.pop(rng.randrange(len(handles))):
            os.close(fd)
    return [("ok", None)] * 2

def listed(p):
    return both(lambda root, _: sorted(os.listdir(f"{root}/{p}")))

def step():
    p, q, data = path(), path(), rng.randbytes(rng.choice((0, 3, 500, 5000)))
    kind = rng.choices(*zip(*WEIGHTS.items()))[0]
    at, size = rng.randrange(6000), rng.randrange(6000)
    said = f"{kind} {p} {q if kind == 'rename' else ''}"
    answers = {
        "new": lambda: both(write(p, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, data)),
        "append": lambda: both(write(p, os.O_WRONLY | os.O_APPEND, data)),
        "patch": lambda: both(write(p, os.O_RDWR, data, at)),
        "truncate": lambda: both(lambda root, _: os.truncate(f"{root}/{p}", size)),
        "unlink": lambda: both(lambda root, _: os.unlink(f"{root}/{p}")),
        "mkdir": lambda: both(lambda root, _: os.mkdir(f"{root}/{p}")),
        "rmdir": lambda: both(lambda root, _: os.rmdir(f"{root}/{p}")),
        "rename": lambda: both(lambda root, _: os.rename(f"{root}/{p}", f"{root}/{q}")),
        "read": lambda: both(read(p)),
        "stat": lambda: both(look(p)),
        "list": lambda: listed(p),
        "open": lambda: keep_open(p),
        "use": use_handle,
        "drop": drop_handle,
    }[kind]()
    if answers[0] != answers[1]:
        sys.exit(f"seed {seed}: {said}: the mount {str(answers[0])[:300]}, the directory {str(answers[1])[:300]}")

for _ in range(count):
    step()
for pair in handles:
    for fd in pair:
        os.close(fd)

def tree(root):
    found = {}
    for here, directories, files in os.walk(root):
        for name in directories:
            found[os.path.relpath(os.path.join(here, name), root)] = None
        for name in files:
            with open(os.path.join(here, name), "rb") as file:
                found[os.path.relpath(os.path.join(here, name), root)] = file.read().hex()
    return found

first, second = map(tree, ROOTS)
if first != second:
    sys.exit(f"seed {seed}: the trees differ: {sorted(set(first.items()) ^ set(second.items()))!s:.500}")
print(sum(content is not None for content in first.values()))
"""


@pytest.mark.parametrize("seed", range(5))
async def test_a_mount_behaves_as_a_directory_does(mounted: Place, seed: int) -> None:
    async with mounted.registry.use(mounted.id) as runtime:
        await runtime.files.write("/tmp/model.py", PROGRAM.encode())
    count = 1500 if mounted.bucket.kind == "directory" else 400
    result = await mounted.sh(f"python3 /tmp/model.py {seed} {count}", timeout=100_000)
    assert result.exit_code == 0, result.stderr[-1000:]
    keys = [key for key in await mounted.keys() if MARKER not in key]
    assert len(keys) == int(result.stdout)
    for key in keys:
        inside = await mounted.out('sha256sum < "/tmp/model/$NAME"', env={"NAME": key})
        assert inside.split()[0] == hashlib.sha256(await mounted.bucket.get(key)).hexdigest()

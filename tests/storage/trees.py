"""Trees that are hard to copy, and a way to tell two of them apart."""

from __future__ import annotations

import json
from typing import Any

from skerry.models import ExecRequest
from skerry.runtime.runtime import Runtime

# Run inside with Skerry's own Python: names of any bytes, links of both kinds, holes, attributes, modes, old times.
NASTY = r"""
import os, socket, sys
top = os.fsencode(sys.argv[1])
os.makedirs(top, exist_ok=True)
os.chdir(top)
os.mkdir(b"by\xfft\nes"); open(b"by\xfft\nes/\xfe\x01 name", "wb").write(b"\x00\xff" * 500)
deep = b"deep/" + b"/".join([b"d" * 50] * 12)
os.makedirs(deep); open(deep + b"/" + b"f" * 255, "w").write("far")
open("plain", "w").write("text\n"); os.link("plain", "hard link"); os.mkdir("sub"); os.link("plain", "sub/third")
os.symlink("/usr/bin/python3", "absolute"); os.symlink("../../etc", "upwards"); os.symlink(b"\xff" * 300, "broken")
os.symlink("loop", "loop")
os.mkfifo("fifo", 0o640)
with open("holes", "wb") as f:
    f.write(b"begin"); f.seek(50 << 20); f.write(b"middle"); f.truncate(200 << 20)
open("all hole", "wb").truncate(1 << 20)
open("empty", "w").close()
os.mkdir("empty directory", 0o700)
open("setuid", "w").write("#!/bin/sh\n"); os.chmod("setuid", 0o6755)
open("forbidden", "w").write("secret"); os.chmod("forbidden", 0)
os.mkdir("sticky"); os.chmod("sticky", 0o1777)
open("attributes", "w").write("x"); os.setxattr("attributes", "user.any", b"\x00=\n\xff")
os.setxattr("sub", "user.of", b"a directory")
open("large", "wb").write(os.urandom(20 << 20))
for name in ("-rf", "--", "a:b", "*", "$(x)", "'", '"', " ", "..."):
    open(name, "w").write(name)
try:
    os.chown("plain", 1000, 1001); os.lchown("broken", 7, 8)
except OSError:
    pass
os.chmod("plain", 0o604)
s = socket.socket(socket.AF_UNIX); s.bind("socket")
os.utime("plain", ns=(1, 1_000_000_000_123_456_789))
os.utime("empty", ns=(0, -1_500_000_000)); os.utime("large", ns=(0, 2 ** 34 * 10 ** 9))
os.utime("broken", ns=(5, 6), follow_symlinks=False); os.utime("sub", ns=(0, 999_999_999)); os.utime(".", ns=(0, 42))
"""

# What a tree is, as one line of JSON: every name with all there is to know of it.
LOOK = r"""
import hashlib, json, os, stat, sys
found = {}
def look(path, name):
    s = os.lstat(path)
    kind = stat.S_IFMT(s.st_mode)
    if kind == stat.S_IFSOCK:
        return
    row = [s.st_mode, s.st_uid, s.st_gid, s.st_mtime_ns]
    if kind == stat.S_IFREG:
        row += [s.st_size, hashlib.sha256(open(path, "rb").read()).hexdigest()]
        row += [s.st_nlink, inodes.setdefault(s.st_ino, name.hex())]
        row += [s.st_blocks * 512 < s.st_size // 2]
        row += [sorted([n, os.getxattr(path, n).hex()] for n in os.listxattr(path))]
    elif kind == stat.S_IFLNK:
        row += [os.readlink(path).hex()]
    elif kind == stat.S_IFDIR:
        row += [sorted([n, os.getxattr(path, n).hex()] for n in os.listxattr(path))]
    found[name.hex()] = row
    if kind == stat.S_IFDIR:
        for one in sorted(os.listdir(path)):
            look(path + b"/" + one, name + b"/" + one)
inodes = {}
look(os.fsencode(sys.argv[1]), b"")
text = json.dumps(found, sort_keys=True)
print(hashlib.sha256(text.encode()).hexdigest() if "--digest" in sys.argv else text)
"""


async def python(runtime: Runtime, program: str, *arguments: str) -> str:
    done = await runtime.exec(
        ExecRequest(command="/run/skerry/bin/python3", args=["-c", program, *arguments], session=None)
    )
    assert done.exit_code == 0, done.stderr
    return done.stdout


async def nasty(runtime: Runtime, path: str) -> None:
    await python(runtime, NASTY, path)


async def look(runtime: Runtime, path: str) -> dict[str, Any]:
    return dict(json.loads(await python(runtime, LOOK, path)))


async def digest(runtime: Runtime, path: str) -> str:
    return (await python(runtime, LOOK, path, "--digest")).strip()


async def sh(runtime: Runtime, command: str) -> str:
    done = await runtime.exec(ExecRequest(command=command))
    assert done.exit_code == 0, done.stderr
    return done.stdout

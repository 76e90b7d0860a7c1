"""What a sandbox, or a bucket, may try with a mount."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from skerry.control.open import open_registry
from skerry.control.registry import Registry
from skerry.models import MountBucket
from skerry.settings import Settings
from skerry.storage.fuse import filesystem, session, tree
from skerry.storage.fuse.directories import MARKER
from tests.s3 import S3
from tests.storage.mounting import Place, mounted, mounting_registry, place

__all__ = ["mounted", "mounting_registry", "place"]


async def test_read_only_holds_against_root_inside(place: Place) -> None:
    await place.bucket.put("d/f", b"as it was")
    await place.mount(readOnly=True)
    assert await place.out("id -u; cat /persist/d/f") == "0\nas it was"
    for command in (
        "echo x > /persist/d/f",
        "echo x >> /persist/d/f",
        "truncate -s 0 /persist/d/f",
        "rm /persist/d/f",
        "mv /persist/d /persist/e",
        "mkdir /persist/n",
        "rmdir /persist/d",
        "touch /persist/n",
        "chmod 777 /persist/d/f",
        "mount -o remount,rw /persist",
        "umount /persist",
        "unshare -m true",
        "unshare -Urm mount -o remount,rw /persist",
        "dd if=/dev/zero of=/persist/d/f conv=notrunc count=1",
        "python3 -c \"import os; os.pwrite(os.open('/persist/d/f', os.O_RDWR), b'x', 0)\"",
        "python3 -c \"import os; os.pwrite(os.open('/proc/self/root/persist/d/f', os.O_RDWR), b'x', 0)\"",
    ):
        assert (await place.sh(command)).exit_code != 0, command
    assert await place.keys() == ["d/f"]
    assert await place.bucket.get("d/f") == b"as it was"


async def test_the_sandbox_sees_its_prefix_and_nothing_else(place: Place, mounting_registry: Registry) -> None:
    whole = mounting_registry.mounts.buckets.open("test")
    await whole.put(f"tests/{place.id}-other/secret", b"secret")
    await whole.put("secret", b"secret")
    await place.mount()
    await place.out("echo mine > /persist/mine")
    assert await place.out("cd /persist && find . ; ls -A /persist/..| grep -c secret; true") == ".\n./mine\n0\n"
    for path in (
        f"../{place.id}-other/secret",
        "..%2fsecret",
        "%2e%2e/secret",
        "..\\\\secret",
        f"{place.id}-other/secret",
    ):
        assert (await place.sh(f"cat '/persist/{path}'")).exit_code != 0
    await place.out("cd /persist; mkdir a; cp mine a/..mine; cp mine '...'; cp mine '%2e%2e'; cp mine 'a/%2fx'")
    keys = sorted([item.key async for item in whole.list("tests") if place.id in item.key and MARKER not in item.key])
    assert keys == sorted(
        [f"tests/{place.id}-other/secret"]
        + [f"tests/{place.id}/{name}" for name in ("mine", "a/..mine", "...", "%2e%2e", "a/%2fx")]
    )
    assert await place.out("cd /persist; ls -A . a") == ".:\n%2e%2e\n...\na\nmine\n\na:\n%2fx\n..mine\n"


async def test_no_credentials_and_no_place_of_the_bucket_are_seen_inside(mounted: Place, s3: S3) -> None:
    seen = await mounted.out(
        "cat /proc/self/mountinfo /proc/mounts; env; cat /proc/1/environ; findmnt 2>/dev/null; true"
    )
    for secret in (s3.secret_key, s3.access_key, s3.endpoint, "objects", "amazonaws"):
        assert secret not in seen
    assert "fuse" in seen


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("$'new\\nline'", "Invalid or incomplete"),
        ("$'bell\\x07'", "Invalid or incomplete"),
        ("'back\\slash'", "Invalid or incomplete"),
        ("$'not-utf8-\\xff'", "Invalid or incomplete"),
        ("still-written#1", "Invalid or incomplete"),
        (MARKER, "Operation not permitted"),
        ("$(printf 'x%.0s' {1..251})", "File name too long"),
        ("$(printf 'x%.0s' {1..256})", "File name too long"),
    ],
)
async def test_names_that_a_bucket_cannot_hold_are_refused(mounted: Place, name: str, error: str) -> None:
    for command in (f"touch /persist/{name}", f"mkdir /persist/{name}", f"mv /persist/there /persist/{name}"):
        await mounted.out("touch /persist/there")
        result = await mounted.sh(command)
        assert result.exit_code != 0
        assert error in result.stderr
    assert await mounted.keys() == ["there"]


async def test_names_that_are_odd_but_possible_are_kept(mounted: Place) -> None:
    names = [
        "with space",
        "ünïcödé 🏝",
        "-dash",
        ".hidden",
        "a%20b",
        "q?*[x]",
        'quo"te',
        "it's",
        "~",
        "#",
        "x" * 250,
    ]
    for name in names:
        await mounted.out('cat > "/persist/$NAME"', stdin=name, env={"NAME": name})
    assert await mounted.keys() == sorted(names)
    await asyncio.sleep(2)
    assert (await mounted.out("LC_ALL=C ls -A1 /persist | wc -l")).strip() == str(len(names))
    for name in names:
        assert await mounted.out('cat "/persist/$NAME"', env={"NAME": name}) == name


async def test_a_path_longer_than_a_key_can_be_is_refused(mounted: Place) -> None:
    result = await mounted.sh(
        "cd /persist; for i in $(seq 20); do mkdir $(printf 'd%.0s' {1..100}) && cd d* || exit 1; done"
    )
    assert "File name too long" in result.stderr
    assert await mounted.out("cd /persist; rm -r d*; ls -A") == ""


async def test_objects_that_have_no_name_inside_harm_only_their_directory(
    tmp_path: Path, mounting_registry: Registry
) -> None:
    """Only a directory can be given such names behind the bucket's back."""
    registry = mounting_registry
    directory = registry.settings.home / "buckets" / "default" / "odd-ones"
    (directory / "odd").mkdir(parents=True)
    (directory / "good").write_text("good")
    for name in (b"new\nline", b"\xff\xfe", b"half#1"):
        Path(os.fsdecode(os.fsencode(directory / "odd") + b"/" + name)).write_bytes(b"odd")
    place = Place(registry, "odd-ones", registry.mounts.buckets.open())
    await registry.mounts.mount(place.id, MountBucket(local_bucket=True, prefix="odd-ones"))
    assert (await place.sh("ls /persist/odd")).exit_code != 0
    await asyncio.sleep(2)
    assert await place.out("ls /persist; cat /persist/good; echo more > /persist/odd/more") == "good\nodd\ngood"
    assert (directory / "odd" / "more").read_text() == "more\n"
    await registry.destroy(place.id)


async def test_of_a_directory_and_an_object_of_the_same_name_the_directory_is_seen(
    s3: S3, place: Place, tmp_path: Path
) -> None:
    if place.bucket.kind == "s3":  # a directory cannot hold both
        await place.bucket.put("both", b"file")
        await place.bucket.put("both/inner", b"inner")
        await place.mount()
        assert await place.out("ls /persist; cat /persist/both/inner") == "both\ninner"
    else:
        await place.mount()


@pytest_asyncio.fixture
async def cramped(tmp_path: Path) -> AsyncIterator[Place]:
    """A mount with room for 4 MiB of files that are being written."""
    registry = await open_registry(Settings(home=tmp_path / "home", mount_spool=4 << 20))
    place = Place(registry, "cramped", registry.mounts.buckets.open())
    await registry.mounts.mount(place.id, MountBucket(local_bucket=True, prefix="/"))
    yield place
    await registry.close()


async def test_files_that_are_too_large_for_the_servers_disk_are_refused(cramped: Place) -> None:
    for command in ("head -c 5M /dev/zero > /persist/f", "truncate -s 1T /persist/f", "truncate -s 5M /persist/f"):
        result = await cramped.sh(command)
        assert "No space left" in result.stderr or "File too large" in result.stderr
    # Room is given back.
    for _ in range(3):
        await cramped.out("head -c 4M /dev/zero > /persist/f; rm /persist/f")
    await cramped.out(
        "exec 3>/persist/a; head -c 3M /dev/zero >&3; rm /persist/a; exec 3>&-; head -c 4M /dev/zero > /persist/b"
    )
    # One that is in the bucket can be read whatever its size.
    await cramped.bucket.put("large", bytes(9 << 20))
    await asyncio.sleep(2)
    assert await cramped.out("wc -c < /persist/large") == f"{9 << 20}\n"
    assert "No space left" in (await cramped.sh("echo x >> /persist/large")).stderr
    assert (await cramped.bucket.head("large")).size == 9 << 20


async def test_many_at_once_get_what_is_theirs(mounted: Place) -> None:
    script = (
        "import os, sys, hashlib\n"
        "def work(n):\n"
        "    data = hashlib.sha256(str(n).encode()).digest() * 3000\n"
        "    for round in range(4):\n"
        "        path = f'/persist/w{n % 7}/f{n}'\n"
        "        os.makedirs(os.path.dirname(path), exist_ok=True)\n"
        "        with open(path, 'wb') as f: f.write(data)\n"
        "        with open(path, 'rb') as f: assert f.read() == data\n"
        "        os.rename(path, path + 'r')\n"
        "        with open(path + 'r', 'rb') as f: assert f.read() == data\n"
        "    assert f'f{n}r' in os.listdir(os.path.dirname(path))\n"
        "kids = []\n"
        "for n in range(40):\n"
        "    pid = os.fork()\n"
        "    if pid == 0:\n"
        "        try: work(n)\n"
        "        except BaseException as e: print(n, repr(e), flush=True); os._exit(1)\n"
        "        os._exit(0)\n"
        "    kids.append(pid)\n"
        "sys.exit(sum(os.waitpid(pid, 0)[1] != 0 for pid in kids))\n"
    )
    result = await mounted.sh("python3 -", stdin=script, timeout=100_000)
    assert result.exit_code == 0, result.stdout + result.stderr
    assert len([key for key in await mounted.keys() if MARKER not in key]) == 40


async def test_a_busy_mount_does_not_hold_up_the_server(mounted: Place) -> None:
    await mounted.out(
        "(for i in 1 2 3; do while :; do cat /bin/true > /persist/b$i; ls -l /persist; done & done) >/dev/null 2>&1"
    )
    delays = []
    for _ in range(200):
        began = time.perf_counter()
        await asyncio.sleep(0.005)
        delays.append(time.perf_counter() - began)
    await mounted.registry.stop(mounted.id)
    assert sorted(delays)[int(len(delays) * 0.9)] < 0.1


async def test_processes_killed_in_the_middle_leave_a_mount_that_works(mounted: Place) -> None:
    await mounted.bucket.put("large", os.urandom(20_000_000))
    for _ in range(15):
        await mounted.sh(
            "(cat /persist/large > /dev/null & cp /persist/large /persist/copy & ls -R /persist & "
            "head -c 20M /dev/zero > /persist/zero & sleep 0.0$((RANDOM % 9)); kill -9 $(jobs -p)) >/dev/null 2>&1"
        )
    assert (
        await mounted.out("rm -f /persist/copy /persist/zero; echo fine > /persist/fine; cat /persist/fine") == "fine\n"
    )
    assert await mounted.bucket.get("fine") == b"fine\n"
    assert sum(thread.name == "skerry-mount" for thread in threading.enumerate()) >= 1


async def test_a_walk_over_more_files_than_are_remembered(mounted: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filesystem, "ENOUGH_NODES", 500)
    monkeypatch.setattr(tree, "MOST_NODES", 3000)
    monkeypatch.setattr(session, "TRIM_EVERY", 0.01)
    turn = asyncio.Semaphore(32)

    async def put(number: int) -> None:
        async with turn:
            await mounted.bucket.put(f"d{number % 20}/f{number}", b"x")

    await asyncio.gather(*(put(number) for number in range(4000)))
    for _ in range(2):
        command = "for d in /persist/*; do stat -c %s $d/* || exit 1; sleep 0.05; done | wc -l"
        assert await mounted.out(command) == "4000\n"
    assert await mounted.out("cat /persist/d7/f7; echo new > /persist/d7/new; cat /persist/d7/new") == "xnew\n"

"""Backups of real sandboxes, in a directory and on S3."""

from __future__ import annotations

import asyncio
import hashlib
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from skerry.errors import (
    BackupCancelledError,
    BackupExpiredError,
    BackupNotFoundError,
    BucketFullError,
    BucketNotFoundError,
    FileNotFoundInSandboxError,
    InvalidRequestError,
    NotDirectoryError,
    SkerryError,
)
from skerry.models import BackupInfo, BackupRequest, RestoreResult
from skerry.runtime.runtime import Runtime
from skerry.storage.backups import Backups, Source
from skerry.storage.buckets import Buckets
from tests.storage.small import small_file_system
from tests.storage.trees import digest, look, nasty, python, sh


def quiet(files: int, size: int) -> None:
    return None


async def make(
    backups: Backups, runtime: Runtime, dir: str = "/workspace", ttl: float | None = None, **options: Any
) -> BackupInfo:
    source = Source(runtime.portal, "demo", dir, ttl=ttl)
    return await backups.create(
        backups.new_id(), source, BackupRequest(**{"bucket": "test", **options}), options.pop("report", quiet)
    )


async def bring(backups: Backups, runtime: Runtime, info: BackupInfo, dir: str | None = None) -> RestoreResult:
    return await backups.restore(runtime.portal, "demo", info, dir, quiet)


async def keys(buckets: Buckets) -> list[str]:
    return [item.key async for item in buckets.open("test").list()]


async def staging(runtime: Runtime) -> str:
    return await sh(runtime, "find / -xdev -name '.skerry-restore-*' 2>/dev/null; true")


# -- the way there and back --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compression", ["zstd", "none"])
async def test_a_nasty_tree_comes_back_byte_for_byte(backups: Backups, runtime: Runtime, compression: str) -> None:
    await nasty(runtime, "/workspace/tree")
    before = await look(runtime, "/workspace/tree")
    info = await make(backups, runtime, "/workspace/tree", compression=compression)
    assert info.left_out == {"sockets": 1}
    assert info.examples == {"sockets": ["socket"]}
    assert info.files == len(before)
    assert info.size < 25 << 20, "holes are not stored"
    await sh(runtime, "rm -rf /workspace/tree; mkdir /workspace/tree; echo new >/workspace/tree/plain")
    done = await bring(backups, runtime, info)
    assert done.files == info.files
    assert await look(runtime, "/workspace/tree") == before
    assert await staging(runtime) == ""


async def test_a_workspace_comes_back_into_another_sandbox(backups: Backups, runtime: Runtime, other: Runtime) -> None:
    await nasty(runtime, "/workspace")
    info = await make(backups, runtime)
    await sh(other, "mkdir -p /workspace/sub; echo old >/workspace/plain; echo old >/workspace/sub/old")
    await bring(backups, other, info)
    assert await look(other, "/workspace") == await look(runtime, "/workspace")
    assert await staging(other) == ""


async def test_twenty_thousand_small_files_come_back(backups: Backups, runtime: Runtime) -> None:
    await python(
        runtime,
        "import os\nfor d in range(200):\n os.mkdir(f'/workspace/{d}')\n"
        " for f in range(100):\n"
        "  fd = os.open(f'/workspace/{d}/{f}', os.O_WRONLY | os.O_CREAT)\n"
        "  os.write(fd, b'%d %d' % (d, f)); os.close(fd)",
    )
    before = await digest(runtime, "/workspace")
    info = await make(backups, runtime)
    assert info.files == 20_201
    await sh(runtime, "rm -rf /workspace/*")
    await bring(backups, runtime, info)
    assert await digest(runtime, "/workspace") == before


async def test_a_shell_that_stands_in_the_directory_goes_on_there(backups: Backups, runtime: Runtime) -> None:
    await sh(runtime, "cd /workspace && echo one >file")
    info = await make(backups, runtime)
    await sh(runtime, "echo two >file; echo more >other")
    await bring(backups, runtime, info)
    assert await sh(runtime, "pwd; ls; cat file; echo three >file; cat /workspace/file") == (
        "/workspace\nfile\none\nthree\n"
    )


async def test_a_directory_that_is_not_there_is_made_and_one_may_choose_another(
    backups: Backups, runtime: Runtime
) -> None:
    await sh(runtime, "mkdir -p /srv/a; echo 1 >/srv/a/f")
    info = await make(backups, runtime, "/srv/a")
    await bring(backups, runtime, info, "/opt/deep/er/b")
    assert await sh(runtime, "cat /opt/deep/er/b/f") == "1\n"
    assert await look(runtime, "/opt/deep/er/b") == await look(runtime, "/srv/a")


async def test_directories_of_the_image_are_replaced_too(backups: Backups, runtime: Runtime, other: Runtime) -> None:
    """They cannot be renamed in an overlay."""
    await sh(runtime, "echo changed >/etc/motd; mkdir /etc/mine; rm -rf /etc/ssl")
    info = await make(backups, runtime, "/etc")
    await bring(backups, other, info)
    assert await look(other, "/etc") == await look(runtime, "/etc")
    assert await staging(other) == ""


async def test_a_whole_machine_moves_into_another(
    backups: Backups, runtime: Runtime, other: Runtime, tmp_path: Path
) -> None:
    await nasty(runtime, "/workspace")
    await sh(
        runtime, "echo tool >/usr/local/bin/tool; chmod +x /usr/local/bin/tool; echo set >/etc/setting; mkdir /new"
    )
    await sh(runtime, "echo rc >/root/.rc; mkdir -p /var/lib/db; echo rows >/var/lib/db/rows; echo tmp >/tmp/scratch")
    since = os.stat(tmp_path).st_mtime_ns
    request = BackupRequest(bucket="test")
    info = await backups.create(backups.new_id(), Source(runtime.portal, "demo", "/", since), request, quiet)
    assert info.bytes < 100 << 20, "the image itself is not shipped"
    await sh(other, "echo old >/workspace/old; echo kept >/var/lib/kept")
    await bring(backups, other, info)
    assert await look(other, "/workspace") == await look(runtime, "/workspace")
    shown = (
        "cat /usr/local/bin/tool /etc/setting /root/.rc /var/lib/db/rows /var/lib/kept; ls -d /new; ls /tmp/scratch ||:"
    )
    assert await sh(other, f"({shown}) 2>/dev/null") == "tool\nset\nrc\nrows\nkept\n/new\n"
    assert await staging(other) == ""
    with pytest.raises(InvalidRequestError, match="of a whole machine"):
        await bring(backups, other, info, "/workspace")


async def test_what_is_ignored_or_excluded_is_left_out(backups: Backups, runtime: Runtime) -> None:
    await sh(
        runtime,
        """cd /workspace; git init -q .; mkdir -p node_modules/x build/keep src/gen docs 'odd[1]'
        printf '%s\\n' '# comment' 'node_modules/' '*.log' '!important.log' '/build/*' '!/build/keep' '**/gen/' \
            'docs/**/*.tmp' 'trailing\\ ' '\\#hash' 'file?.bin' '[ab].c' >.gitignore
        printf '%s\\n' '!debug.log' 'inner' >src/.gitignore
        echo local >>.git/info/exclude
        touch node_modules/x/y a.log important.log src/debug.log src/other.log build/out build/keep/me src/gen/code \
            src/inner inner docs/a.tmp docs/b.txt 'trailing ' '#hash' file1.bin file22.bin a.c c.c local tracked.log
        git add -f tracked.log""",
    )
    listed = "git -c core.excludesFile=/dev/null ls-files -co --exclude-standard | sort"
    expected = (await sh(runtime, f"cd /workspace; {listed}")).splitlines()
    info = await make(backups, runtime, gitignore=True)
    await bring(backups, runtime, info, "/tmp/kept")
    kept = await sh(runtime, "cd /tmp/kept; find . -type f -not -path './.git/*' | cut -c3- | LC_ALL=C sort")
    assert kept.splitlines() == sorted(expected)
    assert "tracked.log" in expected
    info = await make(backups, runtime, excludes=["*.log", ".git", "/src/", "node_modules"])
    await bring(backups, runtime, info, "/tmp/kept")
    assert info.left_out["excluded"] > 3
    kept = await sh(runtime, "cd /tmp/kept; find . -name '*.log' -o -name src -o -name .git -o -name node_modules")
    assert kept == ""
    assert await sh(runtime, "cat /tmp/kept/build/out && ls -d /tmp/kept/docs") == "/tmp/kept/docs\n"


async def test_it_works_while_files_change(backups: Backups, runtime: Runtime) -> None:
    """Files grow, shrink and vanish while they are read, which is noted where it is known, and no more."""
    await sh(runtime, "cd /workspace; head -c 60000000 /dev/urandom >steady; sha256sum steady >/tmp/sum")
    await sh(
        runtime,
        """cd /workspace; (while :; do head -c 9000000 /dev/zero >shrinking; : >shrinking; mkdir -p come/and
            echo x >come/and/go; rm -rf come; echo more >>growing; done) >/dev/null 2>&1 &
            echo $! >/tmp/pid; sleep 0.2""",
    )
    for _ in range(3):
        info = await make(backups, runtime)
        assert set(info.left_out) <= {"vanished", "shrunk", "changed"}
        await bring(backups, runtime, info, "/opt/copy")
        assert await sh(runtime, "cd /opt/copy; sha256sum -c /tmp/sum >/dev/null && ls steady") == "steady\n"
    await sh(runtime, "kill $(cat /tmp/pid)")


async def test_the_parts_are_an_archive_that_other_programs_read(
    backups: Backups, buckets: Buckets, runtime: Runtime, tmp_path: Path
) -> None:
    await sh(
        runtime, "cd /workspace; mkdir d; head -c 40000000 /dev/urandom >d/large; echo text >d/small; ln d/small hard"
    )
    info = await make(backups, runtime)
    bucket = buckets.open("test")
    keys = sorted([item.key async for item in bucket.list(f"backups/{info.id}") if item.key.endswith(".tar")])
    assert len(keys) == 3
    archive = b"".join([await bucket.get(key) for key in keys])
    subprocess.run(["sh", "-c", "zstd -d | tar x"], input=archive, cwd=tmp_path, check=True)
    assert (tmp_path / "d/small").read_text() == (tmp_path / "hard").read_text() == "text\n"
    found = hashlib.sha256((tmp_path / "d/large").read_bytes()).hexdigest()
    assert await sh(runtime, "sha256sum </workspace/d/large") == f"{found}  -\n"


# -- what there is -----------------------------------------------------------------------------------------------------


async def test_backups_are_listed_found_and_deleted(backups: Backups, buckets: Buckets, runtime: Runtime) -> None:
    await sh(runtime, "echo 1 >/workspace/f")
    first = await make(backups, runtime, name="nightly")
    second = await make(backups, runtime, "/workspace", name="other", ttl=3600)
    assert (first.dir, first.name, first.sandbox_id, first.bucket) == ("/workspace", "nightly", "demo", "test")
    assert second.expires_at is not None
    assert (second.expires_at - second.created_at).total_seconds() == 3600
    listed = await backups.list()
    assert listed.backups == [first, second]
    assert (await backups.list(name="nightly")).backups == [first]
    assert (await backups.list(sandbox="demo", bucket="test")).backups == [first, second]
    assert (await backups.list(sandbox="nobody")).backups == []
    assert await backups.get(first.id) == first
    await backups.delete(first.id)
    assert (await backups.list()).backups == [second]
    with pytest.raises(BackupNotFoundError):
        await backups.get(first.id)
    with pytest.raises(BackupNotFoundError):
        await bring(backups, runtime, first)
    with pytest.raises(BackupNotFoundError):
        await backups.delete(first.id)
    await backups.delete(second.id, "test")
    assert await keys(buckets) == []


@pytest.mark.parametrize("id", ["nothing", "../../etc", "a/b", "", "x" * 300, "\n"])
async def test_an_id_that_is_none_is_not_found(backups: Backups, id: str) -> None:
    with pytest.raises(BackupNotFoundError):
        await backups.get(id)


async def test_an_expired_backup_is_refused_and_swept(backups: Backups, buckets: Buckets, runtime: Runtime) -> None:
    kept = await make(backups, runtime)
    info = await make(backups, runtime, ttl=0.3)
    await asyncio.sleep(0.4)
    with pytest.raises(BackupExpiredError, match="expired at"):
        await bring(backups, runtime, info)
    assert await backups.sweep() == [info.id]
    assert (await backups.list()).backups == [kept]
    assert not any(info.id in key for key in await keys(buckets))


async def test_what_is_asked_for_wrongly_changes_nothing(backups: Backups, buckets: Buckets, runtime: Runtime) -> None:
    await sh(runtime, "echo 1 >/workspace/file")
    with pytest.raises(FileNotFoundInSandboxError):
        await make(backups, runtime, "/nothing/here")
    with pytest.raises(NotDirectoryError):
        await make(backups, runtime, "/workspace/file")
    with pytest.raises(BucketNotFoundError, match="no bucket 'sea'"):
        await make(backups, runtime, bucket="sea")
    assert await keys(buckets) == []
    info = await make(backups, runtime)
    with pytest.raises(NotDirectoryError):
        await bring(backups, runtime, info, "/workspace/file")
    with pytest.raises(InvalidRequestError, match="of a directory"):
        await bring(backups, runtime, info, "/")
    await sh(runtime, "ln -s / /tmp/root")
    with pytest.raises(SkerryError, match="over the whole machine"):
        await bring(backups, runtime, info, "/tmp/root")
    assert await sh(runtime, "cat /workspace/file") == "1\n"


async def test_a_restore_does_not_touch_what_is_mounted_below(backups: Backups, runtime: Runtime) -> None:
    await sh(runtime, "mkdir -p /run/x; echo kept >/run/x/f")
    info = await make(backups, runtime)
    with pytest.raises(SkerryError, match="is a mount below '/run'"):
        await bring(backups, runtime, info, "/run")
    assert await sh(runtime, "cat /run/x/f") == "kept\n"


# -- cancelling, and full disks ----------------------------------------------------------------------------------------


async def test_a_cancelled_backup_leaves_nothing_behind(
    backups: Backups, buckets: Buckets, runtime: Runtime, tmp_path: Path
) -> None:
    await sh(runtime, "head -c 150000000 /dev/urandom >/workspace/large")
    work = asyncio.ensure_future(make(backups, runtime))
    while not await keys(buckets):
        await asyncio.sleep(0.01)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    assert await keys(buckets) == []
    assert list((tmp_path / "home/backups").iterdir()) == []
    assert await sh(runtime, "pgrep -fc '[p]acking' || true") == "0\n"


async def test_deleting_a_backup_that_is_being_made_cancels_it(
    backups: Backups, buckets: Buckets, runtime: Runtime
) -> None:
    await sh(runtime, "head -c 150000000 /dev/urandom >/workspace/large")
    id = backups.new_id()
    source = Source(runtime.portal, "demo", "/workspace")
    work = asyncio.ensure_future(backups.create(id, source, BackupRequest(bucket="test"), quiet))
    while not await keys(buckets):
        await asyncio.sleep(0.01)
    assert (await backups.list()).backups == []
    await backups.delete(id)
    with pytest.raises(BackupCancelledError):
        await work
    assert await keys(buckets) == []


async def test_a_cancelled_restore_leaves_the_old_content(backups: Backups, runtime: Runtime, tmp_path: Path) -> None:
    await sh(runtime, "head -c 150000000 /dev/urandom >/workspace/large")
    info = await make(backups, runtime)
    await sh(runtime, "rm /workspace/large; echo old >/workspace/file")
    begun = asyncio.Event()
    work = asyncio.ensure_future(backups.restore(runtime.portal, "demo", info, None, lambda files, size: begun.set()))
    await begun.wait()
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    assert await sh(runtime, "ls /workspace; cat /workspace/file") == "file\nold\n"
    assert await staging(runtime) == ""
    assert list((tmp_path / "home/restores").iterdir()) == []


async def test_a_full_disk_inside_fails_that_restore_only(backups: Backups, runtime: Runtime) -> None:
    await sh(runtime, "head -c 90000000 /dev/urandom >/workspace/large")
    info = await make(backups, runtime)
    await sh(runtime, "echo old >/dev/shm/file")
    with pytest.raises(SkerryError) as caught:  # /dev/shm holds 64 MB
        await bring(backups, runtime, info, "/dev/shm")
    assert caught.value.code == "no_space"
    assert await sh(runtime, "ls -A /dev/shm; cat /dev/shm/file") == "file\nold\n"
    small = await make(backups, runtime, excludes=["large"])
    await bring(backups, runtime, small, "/dev/shm")
    assert await sh(runtime, "ls -A /dev/shm") == ""


async def test_a_disk_that_fills_up_on_the_way_fails_that_restore_only(backups: Backups, runtime: Runtime) -> None:
    """A thousand files of one byte take a thousand pages."""
    await sh(runtime, "cd /workspace; for f in $(seq 1000); do printf x >$f; done")
    info = await make(backups, runtime)
    await sh(runtime, "echo old >/dev/shm/file; head -c 65000000 /dev/zero >/dev/shm/filler")
    with pytest.raises(SkerryError) as caught:
        await bring(backups, runtime, info, "/dev/shm")
    assert caught.value.code == "no_space"
    assert await sh(runtime, "ls -A /dev/shm; cat /dev/shm/file") == "file\nfiller\nold\n"


async def test_a_full_bucket_fails_that_backup_only(runtime: Runtime, tmp_path: Path) -> None:
    with small_file_system(tmp_path / "small", megabytes=40) as place:
        path = tmp_path / "buckets.toml"
        path.write_text(f'[test]\nurl = "{place.as_uri()}"\n')
        buckets = Buckets(tmp_path / "home", path)
        backups = Backups(buckets, None, tmp_path / "home")
        await sh(runtime, "echo 1 >/workspace/small")
        first = await make(backups, runtime)
        await sh(runtime, "head -c 90000000 /dev/urandom >/workspace/large")
        with pytest.raises(BucketFullError, match="No space is left in bucket 'test'"):
            await make(backups, runtime)
        assert (await backups.list()).backups == [first]
        assert {key.split("/")[1] for key in await keys(buckets)} == {first.id}
        await sh(runtime, "rm /workspace/*")
        await bring(backups, runtime, first)
        assert await sh(runtime, "cat /workspace/small") == "1\n"

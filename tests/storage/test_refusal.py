"""Backups that were damaged or forged in the bucket: refused, and nothing changed."""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard

from skerry.errors import BackupDamagedError, BackupError, BackupKeyError, BackupRefusedError, BucketSettingsError
from skerry.models import BackupInfo, BackupRequest, now
from skerry.runtime.runtime import Runtime
from skerry.storage.backups import Backups, Source
from skerry.storage.buckets import Bucket, Buckets
from skerry.storage.encryption import Key, Seal, read_key
from skerry.storage.manifest import PART, Manifest, Part, manifest_key, part_key, written
from skerry.storage.parts import Upload, whole
from tests.storage.trees import digest, sh


def quiet(files: int, size: int) -> None:
    return None


async def forge(bucket: Bucket, archive: bytes, files: int = 100, size: int = 100 << 20, **facts: Any) -> BackupInfo:
    """A backup with whatever archive, whose checksums are right."""
    upload = Upload(bucket, "forged", "zstd", 1, None)
    await upload.write(archive)
    await upload.finish()
    manifest = Manifest(
        id="forged",
        dir="/workspace",
        name=None,
        sandbox="demo",
        created_at=now(),
        expires_at=None,
        compression="zstd",
        encryption=None,
        files=files,
        bytes=size,
        archive=upload.size,
        sha256=upload.sha256,
        parts=upload.parts,
        left_out={},
        examples={},
    ).model_copy(update=facts)
    await bucket.put(manifest_key("forged"), written(manifest, None))
    return manifest.info(bucket.name)


def tar(*members: tuple[str, dict[str, Any], bytes]) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, facts, data in members:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            for key, value in facts.items():
                setattr(member, key, value)
            archive.addfile(member, io.BytesIO(data))
    return file.getvalue()


LINK = {"type": tarfile.SYMTYPE}
HARD = {"type": tarfile.LNKTYPE}

ESCAPES = {
    "climbs": tar(("../evil", {}, b"x")),
    "climbs later": tar(("a/../../evil", {}, b"x")),
    "absolute": tar(("/tmp/evil", {}, b"x")),
    "through a link": tar(("out", {**LINK, "linkname": "/tmp"}, b""), ("out/evil", {}, b"x")),
    "through a relative link": tar(("out", {**LINK, "linkname": "../.."}, b""), ("out/tmp/evil", {}, b"x")),
    "over a link": tar(("out", {**LINK, "linkname": "/tmp/evil"}, b""), ("out", {}, b"x")),
    "a directory over a link": tar(
        ("out", {**LINK, "linkname": "/tmp"}, b""), ("out", {"type": tarfile.DIRTYPE}, b""), ("out/evil", {}, b"x")
    ),
    "hard link out": tar(("shadow", {**HARD, "linkname": "/etc/passwd"}, b"")),
    "hard link up": tar(("shadow", {**HARD, "linkname": "../etc/passwd"}, b"")),
    "hard link through a link": tar(
        ("out", {**LINK, "linkname": "/etc"}, b""), ("shadow", {**HARD, "linkname": "out/passwd"}, b"")
    ),
    "hard link to nothing": tar(("shadow", {**HARD, "linkname": "nothing"}, b"")),
    "character device": tar(("dev", {"type": tarfile.CHRTYPE, "devmajor": 1, "devminor": 3}, b"")),
    "block device": tar(("dev", {"type": tarfile.BLKTYPE, "devmajor": 8, "devminor": 0}, b"")),
    "unknown type": tar(("odd", {"type": b"Z"}, b"")),
    "file named .": tar((".", {}, b"x")),
    "negative size": tar(("n", {"pax_headers": {"size": "-5"}}, b"")),
    "sparse with nonsense": tar(
        (
            "s",
            {"pax_headers": {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": "s"}},
            b"x" * 512,
        )
    ),
    "sparse that overlaps": tar(
        (
            "s",
            {
                "pax_headers": {
                    "GNU.sparse.major": "1",
                    "GNU.sparse.minor": "0",
                    "GNU.sparse.name": "s",
                    "GNU.sparse.realsize": "10",
                }
            },
            b"2\n5\n5\n0\n5\n".ljust(512, b"\0") + b"y" * 10,
        )
    ),
    "sparse that climbs": tar(
        (
            "s",
            {
                "pax_headers": {
                    "GNU.sparse.major": "1",
                    "GNU.sparse.minor": "0",
                    "GNU.sparse.name": "../evil",
                    "GNU.sparse.realsize": "0",
                }
            },
            b"0\n".ljust(512, b"\0"),
        )
    ),
    "no archive": b"not a tar archive at all".ljust(5000, b"?"),
    "empty": b"",
    "cut off": tar(("a", {}, b"x" * 5000))[:2048],
    "wrong header": bytes([tar(("a", {}, b"x"))[0] ^ 1]) + tar(("a", {}, b"x"))[1:],
}


@pytest.mark.parametrize("name", list(ESCAPES))
async def test_an_archive_that_leads_out_is_refused(
    backups: Backups, buckets: Buckets, runtime: Runtime, tmp_path: Path, name: str
) -> None:
    info = await forge(buckets.open("test"), ESCAPES[name])
    await refused(backups, runtime, info, BackupRefusedError, tmp_path)
    assert await sh(runtime, "ls /tmp/evil /evil 2>/dev/null; true") == ""


async def refused(
    backups: Backups, runtime: Runtime, info: BackupInfo, kind: type[BackupError], tmp_path: Path
) -> BackupError:
    await sh(runtime, "echo old >/workspace/file")
    with pytest.raises(kind) as caught:
        await backups.restore(runtime.portal, "demo", info, None, quiet)
    assert await sh(runtime, "ls -A /workspace; cat /workspace/file") == "file\nold\n"
    assert await sh(runtime, "find / -xdev -name '.skerry-restore-*' 2>/dev/null; true") == ""
    assert list((tmp_path / "home").glob("restores/*")) == []
    return caught.value


async def test_an_archive_larger_than_declared_is_stopped(
    backups: Backups, buckets: Buckets, runtime: Runtime, tmp_path: Path
) -> None:
    bomb = tar(("bomb", {}, bytes(40 << 20)))
    info = await forge(buckets.open("test"), bomb, size=1 << 20)
    error = await refused(backups, runtime, info, BackupRefusedError, tmp_path)
    assert "more than its manifest says" in error.message
    many = tar(*((f"f{number}", {}, b"") for number in range(50)))
    await refused(backups, runtime, await forge(buckets.open("test"), many, files=10), BackupRefusedError, tmp_path)


async def test_a_part_that_unpacks_to_more_than_it_says_is_refused(
    backups: Backups, buckets: Buckets, runtime: Runtime, tmp_path: Path
) -> None:
    """A few kilobytes of zstd are gigabytes of zeros."""
    bucket = buckets.open("test")
    info = await forge(bucket, tar(("a", {}, b"x")))
    manifest = json.loads(json.loads(await bucket.get(manifest_key("forged")))["manifest"])
    compressor = zstandard.ZstdCompressor(level=1)
    for bomb in (compressor.compress(bytes(PART * 8)), _without_size(bytes(PART * 4))):
        part = {"size": len(bomb), "content": manifest["archive"], "sha256": hashlib.sha256(bomb).hexdigest()}
        changed = {**manifest, "parts": [part], "sha256": whole([Part(**part)])}
        await bucket.put(part_key("forged", 0), bomb)
        await bucket.put(manifest_key("forged"), json.dumps({"manifest": json.dumps(changed), "mac": None}).encode())
        await refused(backups, runtime, info, BackupDamagedError, tmp_path)


def _without_size(data: bytes) -> bytes:
    stream = zstandard.ZstdCompressor(level=1, write_content_size=False).compressobj()
    return stream.compress(data) + stream.flush()


Damage = Callable[[bytes], bytes | None]


@pytest.mark.parametrize("keyed", [False, True], ids=["plain", "encrypted"])
@pytest.mark.parametrize(
    ("which", "damage"),
    [
        ("part", lambda data: data[: len(data) // 2]),
        ("part", lambda data: data + b"x"),
        ("part", lambda data: data[:1000] + bytes([data[1000] ^ 1]) + data[1001:]),
        ("part", lambda data: None),
        ("last", lambda data: None),
        ("last", lambda data: b""),
        ("manifest", lambda data: data[:100]),
        ("manifest", lambda data: b"{}"),
        ("manifest", lambda data: b"[" * 100_000),
        ("manifest", lambda data: data.replace(b'version\\":1', b'version\\":2')),
        ("manifest", lambda data: data.replace(b'\\"files\\":', b'\\"files\\":1')),
        ("manifest", lambda data: data.replace(b'\\"archive\\":', b'\\"archive\\":1')),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_a_damaged_backup_is_refused(
    buckets: Buckets, runtime: Runtime, tmp_path: Path, which: str, damage: Damage, keyed: bool
) -> None:
    backups = Backups(buckets, Key(b"k" * 32) if keyed else None, tmp_path / "home")
    await sh(runtime, "head -c 40000000 /dev/urandom >/workspace/large")
    source = Source(runtime.portal, "demo", "/workspace")
    info = await backups.create("x", source, BackupRequest(bucket="test", compression="none"), quiet)
    await sh(runtime, "rm /workspace/large")
    bucket = buckets.open("test")
    key = {"part": part_key("x", 0), "last": part_key("x", 2), "manifest": manifest_key("x")}[which]
    data = damage(await bucket.get(key))
    await (bucket.delete(key) if data is None else bucket.put(key, data))
    await refused(backups, runtime, info, BackupDamagedError, tmp_path)
    await backups.delete("x", "test")
    assert [item.key async for item in bucket.list()] == []


# -- encryption --------------------------------------------------------------------------------------------------------


async def test_an_encrypted_backup_shows_nothing_and_comes_back(
    buckets: Buckets, runtime: Runtime, tmp_path: Path
) -> None:
    backups = Backups(buckets, Key(b"k" * 32), tmp_path / "home")
    await sh(runtime, "for i in $(seq 2000); do echo 'the tide is high'; done >/workspace/file")
    before = await digest(runtime, "/workspace")
    source = Source(runtime.portal, "demo", "/workspace")
    info = await backups.create("x", source, BackupRequest(bucket="test", compression="none"), quiet)
    assert info.encrypted
    stored = b"".join([await buckets.open("test").get(item.key) async for item in buckets.open("test").list()])
    assert b"tide" not in stored
    await sh(runtime, "rm /workspace/file")
    await backups.restore(runtime.portal, "demo", info, None, quiet)
    assert await digest(runtime, "/workspace") == before


async def test_without_the_right_key_nothing_is_restored(buckets: Buckets, runtime: Runtime, tmp_path: Path) -> None:
    source = Source(runtime.portal, "demo", "/workspace")
    keyed = Backups(buckets, Key(b"k" * 32), tmp_path / "home")
    other = Backups(buckets, Key(b"o" * 32), tmp_path / "home")
    plain = Backups(buckets, None, tmp_path / "home")
    info = await keyed.create("x", source, BackupRequest(bucket="test"), quiet)
    assert "another key" in (await refused(other, runtime, info, BackupKeyError, tmp_path)).message
    assert "no key" in (await refused(plain, runtime, info, BackupKeyError, tmp_path)).message
    # One that anybody could have put there is not taken for one's own.
    info = await plain.create("y", source, BackupRequest(bucket="test"), quiet)
    assert "nothing vouches for it" in (await refused(keyed, runtime, info, BackupKeyError, tmp_path)).message


async def test_parts_of_one_encrypted_backup_do_not_fit_into_another(
    buckets: Buckets, runtime: Runtime, tmp_path: Path
) -> None:
    backups = Backups(buckets, Key(b"k" * 32), tmp_path / "home")
    source = Source(runtime.portal, "demo", "/workspace")
    await sh(runtime, "echo one >/workspace/file")
    await backups.create("x", source, BackupRequest(bucket="test", compression="none"), quiet)
    await sh(runtime, "echo two >/workspace/file")
    info = await backups.create("y", source, BackupRequest(bucket="test", compression="none"), quiet)
    await buckets.open("test").copy(part_key("x", 0), part_key("y", 0))
    await refused(backups, runtime, info, BackupDamagedError, tmp_path)


def test_a_part_is_sealed_with_its_place() -> None:
    seal = Seal(Key(b"k" * 32), "x")
    closed = seal.close(b"data", 3, last=False)
    assert seal.open(closed, 3, last=False) == b"data"
    for number, last in ((2, False), (3, True)):
        with pytest.raises(BackupDamagedError):
            seal.open(closed, number, last)
    with pytest.raises(BackupDamagedError):
        Seal(Key(b"k" * 32), "y", seal.salt).open(closed, 3, last=False)


def test_a_key_is_32_bytes_and_never_shown(tmp_path: Path) -> None:
    assert read_key(None, None) is None
    path = tmp_path / "key"
    path.write_text(os.urandom(32).hex() + "\n")
    path.chmod(0o600)
    assert repr(read_key(None, path)) == repr(read_key("ab" * 32, None)) == "<Key>"
    for wrong in ("secret-words", "ab" * 31, "", "zz" * 32):
        with pytest.raises(BucketSettingsError, match="not 32 bytes") as caught:
            read_key(wrong, None)
        assert not wrong or wrong not in str(caught.value)
    path.chmod(0o644)
    with pytest.raises(BucketSettingsError, match="may be read by others"):
        read_key(None, path)
    with pytest.raises(BucketSettingsError, match="both set"):
        read_key("ab" * 32, path)
    with pytest.raises(BucketSettingsError, match="cannot be read"):
        read_key(None, tmp_path / "nothing")

"""Code inside prepares files, names and layers so that whoever touches them from outside is led astray."""

from __future__ import annotations

import io
import secrets
import tarfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from skerry.control.registry import Registry
from skerry.errors import InvalidSandboxIdError, SkerryError
from skerry.models import CreateSnapshot, ExecRequest, ExecResult, RollbackSandbox
from skerry.runtime.runtime import Runtime
from tests.attempts import Sh, python


@pytest.fixture
def marker(tmp_path: Path) -> Iterator[Path]:
    """A file of the host, whose text must neither be read nor changed from inside."""
    place = Path(f"/tmp/skerry-marker-{secrets.token_hex(8)}")
    place.mkdir()
    (place / "file").write_text("the host's")
    yield place
    assert [path.name for path in place.iterdir()] == ["file"]
    assert (place / "file").read_text() == "the host's"
    (place / "file").unlink()
    place.rmdir()


# -- names that change meaning while they are used ---------------------------------------------------------------------


async def test_a_directory_that_is_swapped_for_links_all_the_time_leads_no_call_out(
    runtime: Runtime, sh: Sh, marker: Path
) -> None:
    swap = f"""
import os
os.makedirs("/workspace/real", exist_ok=True)
targets = ["real", "/", "/proc/1/root", "/proc/self/root", "../../../..{marker}", "{marker}", "/etc"]
print("ready", flush=True)
while True:
    for target in targets:
        os.symlink(target, "/workspace/fresh")
        os.replace("/workspace/fresh", "/workspace/d")
"""
    await sh("cat >/tmp/swap.py", stdin=swap, session=None)
    await sh("python3 /tmp/swap.py >/tmp/ready & while ! grep -q ready /tmp/ready; do sleep 0.05; done")
    seen = set()
    for number in range(60):
        for call in (
            runtime.files.write("/workspace/d/file", b"from inside"),
            runtime.files.read("/workspace/d/file"),
            runtime.files.list("/workspace/d"),
            runtime.files.mkdir(f"/workspace/d/made-{number}"),
            runtime.files.delete("/workspace/d/file"),
            runtime.files.move("/workspace/d/file", "/workspace/moved"),
        ):
            try:
                found = await call  # type: ignore[misc]
                seen.add(type(found).__name__)
                assert "the host's" not in repr(found)
            except SkerryError:
                seen.add("refused")
    assert len(seen) > 2
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for number in range(200):
            member = tarfile.TarInfo(f"d/file-{number}")
            tar.addfile(member)

    async def content() -> AsyncIterator[bytes]:
        yield archive.getvalue()

    for _ in range(5):
        try:
            await runtime.files.extract("/workspace", content())
        except SkerryError:
            continue
    assert [path.name for path in marker.iterdir()] == ["file"]


@pytest.mark.parametrize(
    "id",
    [
        "../other",
        "..",
        ".",
        "a/b",
        "/etc",
        "a\0b",
        "a\nb",
        "A" * 64,
        "-a",
        "a-",
        "%2e%2e",
        "a b",
        "ä",
        "a;b",
        "$(id)",
        "",
    ],
)
async def test_an_id_is_never_a_path_an_option_or_a_command(registry: Registry, id: str) -> None:
    with pytest.raises(InvalidSandboxIdError):
        async with registry.use(id):
            pass


async def test_a_file_may_have_any_name_and_is_only_a_file(runtime: Runtime, sh: Sh, marker: Path) -> None:
    names = [
        "-rf", "--help", "$(touch x)", "`id`", "a;b", "a\nb", "a'b\"c", "…", "*", "~", "\x1b[31m", "con", " ", "a\\b",
        "%2e%2e%2f", "{}", "&", "|x", "x" * 255, "\u202egnp",
    ]  # fmt: skip
    await runtime.files.mkdir("/workspace/names")
    for name in names:
        await runtime.files.write(f"/workspace/names/{name}", name.encode())
    listed = {info.name for info in await runtime.files.list("/workspace/names", hidden=True)}
    assert listed == set(names)
    for name in names:
        assert (await runtime.files.read(f"/workspace/names/{name}")).content == name
        await runtime.files.delete(f"/workspace/names/{name}")
    assert await runtime.files.list("/workspace/names", hidden=True) == []


# -- layers that lie ---------------------------------------------------------------------------------------------------


async def test_attributes_by_which_an_overlay_remembers_cannot_be_forged(registry: Registry, marker: Path) -> None:
    async def sh(command: str, **options: Any) -> ExecResult:
        async with registry.use("forger") as runtime:
            return await runtime.exec(ExecRequest(command=command, **options))

    forged = f"""
        os.makedirs("/workspace/a/b", exist_ok=True)
        os.makedirs("/etc/forged", exist_ok=True)
        open("/workspace/f", "w").close()
        values = [("redirect", b"{marker}"), ("redirect", b"../../../../../../..{marker}"), ("metacopy", b""),
                  ("opaque", b"y"), ("opaque", b"x"), ("origin", b"\\x00\\xfb" + bytes(30)), ("whiteout", b""),
                  ("impure", b"y"), ("nlink", b"L+9"), ("upper", bytes(40))]
        out = {{"whiteout": attempt(lambda: os.mknod("/workspace/white", 0o020000, 0))}}
        for space in ("user", "trusted"):
            for name, value in values:
                for path in ("/workspace/a", "/etc/forged", "/workspace/f", "/usr/bin"):
                    attribute = f"{{space}}.overlay.{{name}}"
                    out[f"{{attribute}} {{path}}"] = attempt(lambda: os.setxattr(path, attribute, value))
        print(json.dumps(out))
    """
    answers = await python(sh, forged)
    assert {answer for name, answer in answers.items() if name.startswith("trusted")} <= {"EPERM", "EOPNOTSUPP"}
    assert answers["whiteout"] == "EPERM"
    snapshot = await registry.snapshots.create("forger", CreateSnapshot(name="forged"))
    assert not [path for path in await changed(registry, "forger") if str(marker) in path]
    look = f"cat /workspace/a/* /etc/forged/* {marker}/file; ls /usr/bin | wc -l"
    await registry.stop("forger")
    for _ in range(2):
        seen = (await sh(look)).stdout
        assert "the host's" not in seen
        assert int(seen.split()[-1]) > 100
        await registry.snapshots.rollback("forger", RollbackSandbox(snapshot=snapshot.id))
    await registry.destroy("forger")


async def changed(registry: Registry, id: str) -> list[str]:
    async with registry.snapshots.sandbox_diff(id) as found:
        listed, _ = await found.list_(10_000)
    return [change.path for change in listed]


async def test_a_tree_full_of_traps_is_copied_compared_and_deleted_without_a_step_outside(
    registry: Registry, marker: Path
) -> None:
    traps = f"""
        mkdir -p /workspace/t && cd /workspace/t && ln -s / root && ln -s {marker} dir && ln -s {marker}/file file &&
        ln -s /proc/self/fd fds && ln -s loop loop && mkfifo fifo && mkdir -p $(printf 'deep/%.0s' $(seq 900)) &&
        ln {marker}/file hard; touch -- '-rf' '..evil' $'new\\nline' && chmod 000 . && echo prepared
    """
    async with registry.use("trapper") as runtime:
        assert "prepared" in (await runtime.exec(ExecRequest(command=traps))).stdout
    made = await registry.snapshots.create("trapper", CreateSnapshot())
    listed = await changed(registry, "trapper")
    assert "/workspace/t/root" in listed
    assert not [path for path in listed if path.startswith(("/workspace/t/root/", "/workspace/t/dir/", str(marker)))]
    await registry.snapshots.rollback("trapper", RollbackSandbox(snapshot=made.id))
    async with registry.use("trapper") as runtime:
        assert (await runtime.exec(ExecRequest(command="readlink /workspace/t/dir"))).stdout == f"{marker}\n"
    await registry.destroy("trapper")


async def test_the_file_systems_own_ways_past_an_overlay_are_closed(sh: Sh) -> None:
    got = await python(
        sh,
        """
        import fcntl
        fd = os.open("/workspace", os.O_RDONLY)
        name = bytes(8) + b"sub".ljust(4088, b"\\0")
        out = {}
        requests = {"subvolume": 0x5000940E, "snapshot": 0x50009401, "destroy": 0x5000940F, "search": 0xD0009411,
                    "lookup": 0xD0009412, "send": 0x40489426, "resize": 0x50009403}
        for what, request in requests.items():
            out[what] = attempt(lambda: fcntl.ioctl(fd, request, bytearray(name)) and None)
        print(json.dumps(out))
        """,
    )
    assert set(got.values()) <= {"ENOTTY", "EPERM", "EINVAL"}, got
    assert (await sh("ls /workspace/sub")).exit_code != 0

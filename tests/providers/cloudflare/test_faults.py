"""A bridge that fails in every way there is: what the user is told, and that it works again afterwards."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from skerry import AsyncSandbox, errors
from skerry.providers.cloudflare.bridge import Bridge, Said
from skerry.providers.cloudflare.configured import configured
from skerry.providers.cloudflare.provider import CloudflareProvider
from skerry.settings import Settings
from tests.providers.cloudflare.conftest import TOKEN
from tests.server.conftest import ServerProcess

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"


class Road:
    """The way to the cloud, which can be made to fail: ``answer`` is said in place of what the bridge would say."""

    def __init__(self, url: str) -> None:
        self._far = urlsplit(url)
        self.answer: bytes | None = None
        self.silent = False
        self.texts = False
        """Pass output on as text, as Cloudflare's own bridge does: what is no UTF-8 is lost."""
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server

    async def open(self) -> str:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    async def close(self) -> None:
        self._server.close()
        self.cut()

    def refuse(self, status: str, body: bytes = b"", headers: bytes = b"") -> None:
        self.answer = b"HTTP/1.1 %s\r\n%sContent-Length: %d\r\nConnection: close\r\n\r\n%s" % (
            status.encode(),
            headers,
            len(body),
            body,
        )

    def heal(self) -> None:
        self.answer, self.silent, self.texts = None, False, False

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            first = await reader.readuntil(b"\r\n\r\n")
            if self.silent:
                await reader.read()
            elif self.answer is not None:
                writer.write(self.answer)
                await writer.drain()
            else:
                far_reader, far_writer = await asyncio.open_connection(
                    self._far.hostname, self._far.port, limit=1 << 22
                )
                first = first.replace(b"Connection: keep-alive", b"Connection: close")
                texts = self.texts and b"/exec " in first
                far_writer.write(first)
                await asyncio.gather(_copy(reader, far_writer), (_copy_texts if texts else _copy)(far_reader, writer))
        self._writers.discard(writer)
        writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.close()


async def _copy_texts(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    head = await reader.readuntil(b"\r\n\r\n")
    writer.write(head.replace(b"transfer-encoding: chunked\r\n", b""))
    rest, stream = b"", ""
    while size := int(await reader.readline(), 16):
        *lines, rest = (rest + (await reader.readexactly(size + 2))[:-2]).split(b"\n")
        for line in lines:
            name, _, value = line.decode("latin-1").partition(": ")
            stream = value if name == "event" else stream
            if name == "data" and stream in ("stdout", "stderr"):
                text = base64.b64decode(value).decode(errors="replace")
                line = b"data: " + base64.b64encode(text.encode())
            writer.write(line + b"\n")
        await writer.drain()
    writer.close()


@pytest.fixture(scope="module")
async def road(cloud: ServerProcess) -> AsyncIterator[Road]:
    road = Road(cloud.url)
    yield road
    await road.close()


@pytest.fixture(scope="module")
async def address(road: Road) -> str:
    return await road.open()


@pytest.fixture(scope="module")
async def box(address: str, road: Road, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[AsyncSandbox]:
    home: Path = tmp_path_factory.mktemp("faults")
    process = await asyncio.to_thread(
        lambda: ServerProcess(
            home, provider="cloudflare", cloudflare_url=address, cloudflare_token=TOKEN, cloudflare_timeout=1.5
        )
    )
    async with AsyncSandbox("faults", url=process.url) as sandbox:
        assert (await sandbox.exec("echo kept >file; x=1")).success
        yield sandbox
        road.heal()
        await sandbox.destroy()
    assert await asyncio.to_thread(process.stop) == 0
    shutil.rmtree(home)


@pytest.fixture(autouse=True)
def healed(road: Road) -> AsyncIterator[None]:
    yield
    road.heal()


async def _works(box: AsyncSandbox) -> None:
    assert (await box.exec("cat file; echo $x")).stdout == "kept\n1\n"


async def test_a_refused_token_is_said_to_be_the_servers(box: AsyncSandbox, road: Road) -> None:
    road.refuse("401 Unauthorized", b'{"error":"Unauthorized","code":"unauthorized"}')
    with pytest.raises(errors.ProviderDeniedError, match="SKERRY_CLOUDFLARE_TOKEN") as caught:
        await box.exec("true")
    assert TOKEN not in str(caught.value)
    road.heal()
    await _works(box)


async def test_a_bridge_without_room_says_when_to_come_again(box: AsyncSandbox, road: Road) -> None:
    road.refuse("429 Too Many Requests", b'{"error":"slow down","code":"rate_limited"}', b"Retry-After: 7\r\n")
    with pytest.raises(errors.ProviderBusyError, match="slow down") as caught:
        await box.exec("true")
    assert caught.value.retry_after == 7
    road.refuse("503 Service Unavailable", b'{"error":"full","code":"capacity_exceeded"}')
    with pytest.raises(errors.ProviderBusyError, match="full"):
        await box.write_file("/workspace/x", "1")
    road.heal()
    await _works(box)
    assert not await box.exists("/workspace/x")


async def test_a_bridge_that_fails_is_quoted(box: AsyncSandbox, road: Road) -> None:
    road.refuse("500 Internal Server Error", b"<html>Worker threw exception</html>")
    with pytest.raises(errors.ProviderError, match="Worker threw exception"):
        await box.exec("true", session=None)
    with pytest.raises(errors.ProviderError):
        await box.read_file("/workspace/file")
    road.heal()
    await _works(box)


async def test_a_bridge_that_never_answers_is_not_waited_for_longer_than_was_set(box: AsyncSandbox, road: Road) -> None:
    road.silent = True
    async with asyncio.timeout(15):
        with pytest.raises(errors.ProviderUnreachableError, match=r"1\.5 seconds"):
            await box.exec("true")
    road.heal()
    await _works(box)


async def test_a_bridge_that_is_gone_is_unreachable(address: str) -> None:
    bridge = Bridge("http://127.0.0.1:9", TOKEN, timeout=2)
    with pytest.raises(errors.ProviderUnreachableError, match="cannot be reached"):
        await bridge.create()
    await bridge.close()


async def test_a_connection_that_breaks_loses_the_command_and_not_the_sandbox(box: AsyncSandbox, road: Road) -> None:
    running = asyncio.ensure_future(box.exec("echo begun >begun; sleep 921"))
    while not await box.exists("/workspace/begun"):
        await asyncio.sleep(0.05)
    road.cut()
    with pytest.raises(errors.SandboxLostError):
        await running
    await _works(box)


async def test_a_process_whose_connection_breaks_is_known_to_be_lost(box: AsyncSandbox, road: Road) -> None:
    process = await box.start_process("echo begun; sleep 922")
    await process.wait_for_log("begun")
    road.cut()
    with pytest.raises(errors.ProcessExitedError):
        await process.wait_for_log("never", timeout=10)
    assert (await process.refresh()).status == "killed"
    await _works(box)


async def test_a_command_may_be_silent_for_longer_than_a_bridge(box: AsyncSandbox) -> None:
    assert (await box.exec("sleep 2.5; echo done", session=None)).stdout == "done\n"


@pytest.mark.parametrize(
    "said",
    [
        b"event: stdout\ndata: !!!not base64!!!\n\n",
        b"event: exit\ndata: {}\n\n",
        b'event: exit\ndata: {"exit_code":"0"}\n\n',
        b"event: exit\ndata: [1]\n\n",
        b"event: error\ndata: nonsense\n\n",
        b'event: exit\ndata: {"exit_code":0}\n\n',
        b"\xff\xfe\x00garbage\n\n",
        b'event: stderr\ndata: aGVsbG8K\n\nevent: exit\ndata: {"exit_code":0}\n\n',
        b"",
    ],
)
async def test_what_makes_no_sense_is_an_error_and_never_a_result(box: AsyncSandbox, road: Road, said: bytes) -> None:
    road.answer = HEAD + said
    with pytest.raises((errors.ProviderError, errors.SandboxLostError)):
        await box.exec("true", session=None)
    with pytest.raises((errors.ProviderError, errors.SandboxLostError)):
        await box.exec("true")


@pytest.mark.parametrize(
    "answer",
    [
        b"not http at all\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n[1,2]",
        b'HTTP/1.1 200 OK\r\nContent-Length: 16\r\n\r\n{"id":"../admin"}',
        b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\nConnection: close\r\n\r\ncut off",
        b"HTTP/1.1 200 OK\r\nContent-Length: 11\r\n\r\n" + b'{"id":null}',
        b"HTTP/1.1 302 Found\r\nLocation: http://elsewhere.example/\r\nContent-Length: 0\r\n\r\n",
    ],
)
async def test_an_answer_that_is_no_bridges_makes_no_sandbox(address: str, road: Road, answer: bytes) -> None:
    bridge = Bridge(address, TOKEN, timeout=2)
    road.answer = answer
    with pytest.raises(errors.ProviderError):
        await bridge.create()
    await bridge.close()


async def test_events_are_understood_however_they_are_cut(address: str, road: Road) -> None:
    road.answer = (
        HEAD
        + b': hello\r\nevent: stdout\r\ndata: YQ==\r\n\r\nevent: new\ndata: 1\n\nevent: exit\ndata: {"exit_code":3}\n\n'
    )
    bridge = Bridge(address, TOKEN, timeout=2)
    assert [said async for said in bridge.execute("id", ["true"])] == [Said("stdout", b"a"), Said("exit", code=3)]
    await bridge.close()


async def test_a_sandbox_is_destroyed_though_the_bridge_is_gone_and_deleted_there_later(
    cloud: ServerProcess, road: Road, address: str, tmp_path: Path
) -> None:
    def there() -> int:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        return len(httpx.get(f"{cloud.url}/v1/sandboxes", headers=headers).json()["sandboxes"])

    how = {"provider": "cloudflare", "cloudflare_url": address, "cloudflare_token": TOKEN, "cloudflare_timeout": 2.0}
    before = there()
    process = await asyncio.to_thread(lambda: ServerProcess(tmp_path, **how))
    async with AsyncSandbox("doomed", url=process.url) as sandbox:
        await sandbox.exec("true")
        road.refuse("500 Internal Server Error")
        await sandbox.destroy()
        assert there() == before + 1
    await asyncio.to_thread(process.stop)
    road.heal()
    again = await asyncio.to_thread(lambda: ServerProcess(tmp_path, **how))
    async with asyncio.timeout(20):
        while there() != before:
            await asyncio.sleep(0.05)
    assert await asyncio.to_thread(again.stop) == 0


async def test_files_and_archives_are_whole_where_a_bridge_passes_on_text_only(box: AsyncSandbox, road: Road) -> None:
    road.texts = True
    every = bytes(range(256)) * 900
    await box.write_file("/workspace/raw/every", every)
    assert await box.read_bytes("/workspace/raw/every") == every
    assert (await box.exec("printf 'a\\377b'", session=None)).stdout == "a\N{REPLACEMENT CHARACTER}b"
    assert (await box.exec("sha256sum", stdin=every)).stdout.split()[0] == hashlib.sha256(every).hexdigest()
    backup = await box.backup("/workspace/raw")
    await box.delete_file("/workspace/raw", recursive=True)
    await box.restore(backup)
    assert await box.read_bytes("/workspace/raw/every") == every
    names = [entry.relative_path for entry in await box.list_files("/workspace/raw", recursive=True)]
    assert names == ["every"]


# -- settings ----------------------------------------------------------------------------------------------------------


async def test_what_is_missing_is_said_in_the_words_people_search_for(tmp_path: Path) -> None:
    with pytest.raises(errors.ProviderNotConfiguredError, match=r"^Cloudflare worker URL not configured"):
        await CloudflareProvider(Settings(home=tmp_path, provider="cloudflare")).open()
    off = {
        "SKERRY_PROVIDER": "cloudflare",
        "ENABLE_CLOUDFLARE_SANDBOXES": "false",
        "CLOUDFLARE_WORKER_URL": "https://a.b",
    }
    with pytest.raises(errors.ProviderNotConfiguredError, match=r"^Cloudflare sandboxes not configured"):
        await CloudflareProvider(Settings.from_env(off, home=tmp_path)).open()


async def test_the_token_comes_from_the_environment_or_a_file_and_is_not_shown(tmp_path: Path) -> None:
    settings = Settings.from_env({"CLOUDFLARE_WORKER_URL": "https://a.b/", "CLOUDFLARE_API_TOKEN": "secret-1"})
    assert configured(settings) == ("https://a.b", "secret-1")
    ours = {"SKERRY_CLOUDFLARE_URL": "https://c.d", "SKERRY_CLOUDFLARE_TOKEN": "secret-2", "CLOUDFLARE_API_TOKEN": "no"}
    assert configured(Settings.from_env(ours)) == ("https://c.d", "secret-2")
    file = tmp_path / "token"
    file.write_text("secret-3\n")
    assert configured(Settings.from_env(ours | {"SKERRY_CLOUDFLARE_TOKEN_FILE": str(file)}))[1] == "secret-3"
    assert "secret" not in repr(settings)
    assert "secret" not in repr(Bridge("https://a.b", "secret-1", timeout=1))
    with pytest.raises(errors.ProviderNotConfiguredError) as caught:
        configured(settings.model_copy(update={"cloudflare_token": "secret with spaces"}))
    assert "secret" not in str(caught.value)
    with pytest.raises(errors.ProviderNotConfiguredError, match="No such file"):
        configured(settings.model_copy(update={"cloudflare_token_file": tmp_path / "nope"}))


async def test_descriptors_are_closed(near: ServerProcess) -> None:
    def count() -> int:
        return len(os.listdir(f"/proc/{near.process.pid}/fd"))

    async with AsyncSandbox("descriptors", url=near.url) as sandbox:
        await sandbox.exec("true")
        before = count()
        for _ in range(5):
            await sandbox.exec("true")
            await sandbox.exec("true", session=None)
            await sandbox.write_file("/workspace/x", "1")
            await sandbox.read_file("/workspace/x")
            process = await sandbox.start_process("read x")
            await process.kill()
        assert count() <= before + 6  # connections to the bridge are kept for the next request
        await sandbox.destroy()

"""The genuine OpenAI Agents SDK for Python and its client for the bridge, against Skerry. No model is called."""

from __future__ import annotations

import asyncio
import io
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import httpx
import pytest
from agents.extensions.sandbox import CloudflareSandboxClient, CloudflareSandboxClientOptions
from agents.sandbox import LocalSnapshotSpec, Manifest
from agents.sandbox.entries import File
from agents.sandbox.errors import (
    ConfigurationError,
    ExecTransportError,
    ExposedPortUnavailableError,
    InvalidManifestPathError,
    MountConfigError,
    WorkspaceReadNotFoundError,
)
from agents.sandbox.manifest import Environment
from agents.sandbox.session import SandboxSession

from tests.conformance.cloudflare.conftest import KEY
from tests.server.conftest import ServerProcess

Make = Callable[..., Awaitable[SandboxSession]]
CLIENT = CloudflareSandboxClient(exec_timeout_s=30, request_timeout_s=60)


@pytest.fixture(scope="module", autouse=True)
def key() -> Iterator[None]:
    """A session that is resumed knows its key from nowhere else."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CLOUDFLARE_SANDBOX_API_KEY", KEY)
        yield


@pytest.fixture(scope="module")
async def made(bridge_server: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Make]:
    snapshots = tmp_path_factory.mktemp("snapshots")
    sessions = []

    async def make(**manifest: object) -> SandboxSession:
        session = await CLIENT.create(
            manifest=Manifest(**manifest),
            snapshot=LocalSnapshotSpec(base_path=snapshots),
            options=CloudflareSandboxClientOptions(worker_url=bridge_server.url),
        )
        sessions.append(session)
        await session.start()
        return session

    yield make
    for session in sessions:
        await session.shutdown()


@pytest.fixture(scope="module")
async def session(made: Make) -> SandboxSession:
    return await made(
        entries={"README.md": File(content=b"# hi\n"), "src/a b.txt": File(content="grüße".encode())},
        environment=Environment(value={"GREETING": 'it\'s "quoted"\nand long'}),
    )


async def test_a_command_has_its_output_its_errors_and_its_exit_code(session: SandboxSession) -> None:
    done = await session.exec("echo out; echo err >&2; exit 3")
    assert (done.stdout, done.stderr, done.exit_code) == (b"out\n", b"err\n", 3)


async def test_an_argv_arrives_word_by_word_whatever_is_in_it(session: SandboxSession) -> None:
    words = ["two\nlines", "a  b", "$HOME `id` \\", "'\"", "", "ü\t", "-n"]
    done = await session.exec("printf", "<%s>", *words, shell=False)
    assert done.stdout.decode() == "".join(f"<{word}>" for word in words)


async def test_a_script_of_many_lines_with_a_here_document_runs(session: SandboxSession) -> None:
    done = await session.exec("cat <<'EOF' | tr a-z A-Z\nfirst\n\n  $second\nEOF\nfor i in 1 2; do\n  echo $i\ndone")
    assert done.stdout == b"FIRST\n\n  $SECOND\n1\n2\n"


async def test_output_that_is_no_text_and_large_output_arrive_whole(session: SandboxSession) -> None:
    done = await session.exec("printf '\\377\\0\\n\\200'; head -c 3000000 /dev/zero | tr '\\0' x")
    assert done.stdout[:4] == b"\xff\0\n\x80"
    assert done.stdout[4:] == b"x" * 3_000_000


async def test_the_environment_of_the_manifest_is_there(session: SandboxSession) -> None:
    assert (await session.exec('printf %s "$GREETING"')).stdout == b'it\'s "quoted"\nand long'


async def test_a_command_that_takes_too_long_is_ended(session: SandboxSession) -> None:
    began = time.monotonic()
    done = await session.exec("echo begun; sleep 987", timeout=0.5)
    assert done.exit_code == 124
    assert done.stdout == b"begun\n"
    assert time.monotonic() - began < 15
    assert (await session.exec("pgrep -fx 'sleep 987'")).exit_code == 1


async def test_a_program_that_is_not_there_is_an_exit_code(session: SandboxSession) -> None:
    done = await session.exec("no-such-program", shell=False)
    assert done.exit_code == 127
    assert b"no-such-program" in done.stderr


async def test_commands_run_beside_each_other_and_share_no_state(session: SandboxSession) -> None:
    await session.exec("cd /tmp; export LEFT=behind")
    done = await asyncio.gather(*(session.exec(f"echo $LEFT; pwd; echo {n}") for n in range(8)))
    assert [each.stdout for each in done] == [f"\n/workspace\n{n}\n".encode() for n in range(8)]


async def test_the_files_of_the_manifest_are_there(session: SandboxSession) -> None:
    assert (await session.exec("cat README.md 'src/a b.txt'")).stdout == "# hi\ngrüße".encode()


async def test_files_are_written_and_read_byte_for_byte(session: SandboxSession) -> None:
    every = bytes(range(256)) * 5000
    await session.write(Path("deep/er/ü b.bin"), io.BytesIO(every))
    assert (await session.read(Path("deep/er/ü b.bin"))).read() == every
    await session.write(Path("deep/er/ü b.bin"), io.BytesIO(b""))
    assert (await session.read(Path("deep/er/ü b.bin"))).read() == b""


async def test_a_file_that_is_not_there_is_not_found(session: SandboxSession) -> None:
    with pytest.raises(WorkspaceReadNotFoundError):
        await session.read(Path("nope"))


async def test_nothing_outside_of_the_workspace_is_read(session: SandboxSession) -> None:
    await session.exec("ln -sf /etc/passwd way-out")
    for path in ("/etc/passwd", "../etc/passwd", "way-out"):
        with pytest.raises((InvalidManifestPathError, WorkspaceReadNotFoundError)):
            await session.read(Path(path))


async def test_directories_are_made_listed_and_removed(session: SandboxSession) -> None:
    await session.mkdir(Path("some/tree"), parents=True)
    await session.write(Path("some/tree/leaf"), io.BytesIO(b"1"))
    entries = {Path(entry.path).name for entry in await session.ls(Path("some/tree"))}
    assert "leaf" in entries
    await session.rm(Path("some"), recursive=True)
    assert (await session.exec("test -e some")).exit_code == 1


async def test_a_terminal_takes_input_and_says_when_it_ended(session: SandboxSession) -> None:
    begun = await session.pty_exec_start("exec python3 -iq", tty=True, yield_time_s=1)
    assert begun.process_id is not None
    answer = await session.pty_write_stdin(session_id=begun.process_id, chars="print(6 * 7 * 1000)\n", yield_time_s=1)
    assert b"42000" in answer.output
    assert answer.exit_code is None
    # What was started is a child of the terminal's shell; that is what ends.
    await session.pty_write_stdin(session_id=begun.process_id, chars="exit()\n", yield_time_s=0.3)
    ended = await session.pty_write_stdin(session_id=begun.process_id, chars="exit 7\n", yield_time_s=5)
    assert ended.process_id is None
    assert ended.exit_code == 7


async def test_a_terminal_after_one_that_ended_is_a_new_one(session: SandboxSession) -> None:
    begun = await session.pty_exec_start("tty; stty size", tty=True, yield_time_s=1)
    assert b"/dev/pts/" in begun.output
    assert b"24 80" in begun.output
    await session.pty_terminate_all()


async def test_a_workspace_is_persisted_and_hydrated(session: SandboxSession, made: Make) -> None:
    await session.exec(
        "mkdir -p kept/deep; echo one >kept/deep/one; chmod 755 kept/deep/one; ln -sfn deep kept/link; rm -f way-out"
    )
    archive = (await session.persist_workspace()).read()
    other = await made()
    await other.hydrate_workspace(io.BytesIO(archive))
    done = await other.exec("cat kept/link/one README.md; stat -c %a kept/deep/one; readlink kept/link")
    assert done.stdout == b"one\n# hi\n755\ndeep\n"


async def test_a_sandbox_that_was_stopped_and_deleted_is_resumed_with_its_files(made: Make) -> None:
    first = await made(entries={"README.md": File(content=b"# hi\n")})
    await first.write(Path("a/b.bin"), io.BytesIO(bytes(range(256))))
    assert await first.running()
    await first.stop()
    await CLIENT.delete(first)
    assert not await first.running()
    again = await CLIENT.resume(CLIENT.deserialize_session_state(CLIENT.serialize_session_state(first.state)))
    await again.start()
    done = await again.exec("cat README.md; wc -c <a/b.bin")
    assert done.stdout == b"# hi\n256\n"
    await again.shutdown()


async def test_a_sandbox_that_still_runs_is_resumed_as_it_is(made: Make) -> None:
    first = await made()
    await first.exec("echo outside >/var/tmp/kept; echo inside >kept")
    await first.stop()
    again = await CLIENT.resume(first.state)
    await again.start()
    assert (await again.exec("cat /var/tmp/kept kept")).stdout == b"outside\ninside\n"


async def test_deleting_is_not_an_error_the_second_time(made: Make, bridge_server: ServerProcess) -> None:
    session = await made()
    await CLIENT.delete(session)
    await CLIENT.delete(session)
    async with httpx.AsyncClient(headers={"Authorization": f"Bearer {KEY}"}) as http:
        answer = await http.get(f"{bridge_server.url}/v1/sandboxes/{session.state.sandbox_id}")
    assert answer.status_code == 404


async def test_a_wrong_key_is_refused_in_words(bridge_server: ServerProcess) -> None:
    options = CloudflareSandboxClientOptions(worker_url=bridge_server.url, api_key="another")
    with pytest.raises(ConfigurationError, match="401"):
        await CLIENT.create(manifest=Manifest(), options=options)


async def test_a_command_for_an_id_that_cannot_be_is_a_transport_error(session: SandboxSession) -> None:
    state = session.state.model_copy(update={"sandbox_id": "NOT.AN.ID"})
    lost = await CLIENT.resume(state)
    with pytest.raises(ExecTransportError, match="400"):
        await lost.exec("true")


async def test_credentials_for_a_bucket_are_refused_with_a_reason(session: SandboxSession) -> None:
    options = {"endpoint": "https://example.com", "credentials": {"accessKeyId": "a", "secretAccessKey": "b"}}
    with pytest.raises(MountConfigError):
        await session._inner.mount_bucket(bucket="b", mount_path="/workspace/data", options=options)


async def test_ports_are_what_this_client_cannot_do(session: SandboxSession) -> None:
    with pytest.raises(ExposedPortUnavailableError):
        await session._inner._resolve_exposed_port(8080)

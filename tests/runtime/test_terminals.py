"""Terminals: many viewers, a bounded memory, and a life of their own."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from skerry.control.registry import Registry
from skerry.errors import ConflictError, FileNotFoundInSandboxError, SessionNotFoundError, TerminalNotFoundError
from skerry.models import CreateSandbox, CreateSession, ExecRequest, State
from skerry.portal.contract import Portal
from skerry.providers.local.machine import LocalMachine
from skerry.runtime import terminal as terminal_module
from skerry.runtime import terminals as terminals_module
from skerry.runtime.runtime import Runtime
from skerry.runtime.scrollback import LIMIT, Modes, Scrollback, without_questions
from skerry.runtime.terminal import Terminal
from skerry.runtime.viewer import HELD, End, Screen, Size, Viewer
from tests.machines import nobody
from tests.reused import Reused


async def until(viewer: Viewer, marker: bytes) -> bytes:
    seen = bytearray()
    looked = 0
    async with asyncio.timeout(30):
        while seen.find(marker, looked) < 0:
            looked = max(0, len(seen) - len(marker))
            shown = await viewer.next()
            assert not isinstance(shown, End), f"it ended: {shown} after {seen[-1000:]!r}"
            seen += shown.data if isinstance(shown, Screen) else shown if isinstance(shown, bytes) else b""
    return bytes(seen)


async def end_of(viewer: Viewer) -> End:
    async with asyncio.timeout(30):
        while not isinstance(shown := await viewer.next(), End):
            pass
    return shown


# -- the scrollback ----------------------------------------------------------------------------------------------------


def test_a_scrollback_keeps_the_end_and_begins_with_a_whole_line() -> None:
    scrollback = Scrollback()
    lines = [b"line %06d\r\n" % number for number in range(100_000)]
    for line in lines:
        scrollback.add(line)
    shown = scrollback.show()
    assert LIMIT - 8192 < len(shown) <= LIMIT
    assert shown.split(b"\r\n")[0] + b"\r\n" in lines
    assert shown.endswith(lines[-1])
    assert scrollback.cut


def test_a_scrollback_without_lines_tears_no_character_and_no_sequence_apart() -> None:
    scrollback = Scrollback(1000)
    scrollback.add("ä".encode() * 1000 + b"x")
    scrollback.show().decode()
    scrollback = Scrollback(1000)
    scrollback.add(b"\x1b[31mabc" * 500)
    assert scrollback.show().startswith(b"\x1b[31m")


def test_modes_that_were_switched_before_the_cut_are_switched_again() -> None:
    scrollback = Scrollback(1000)
    scrollback.add(b"\x1b[?1049h\x1b[?25l\x1b[?2004h\x1b[?2004l" + b"x" * 1500 + b"\n" + b"y" * 700)
    assert scrollback.show().startswith(b"\x1b[?1049h\x1b[?25ly")
    assert scrollback.alternate
    scrollback.add(b"\x1b[?1049l")
    assert not scrollback.alternate


def test_modes_are_followed_across_pieces_and_undone_in_the_opposite_order() -> None:
    modes = Modes()
    for piece in (b"a\x1b", b"[?10", b"49;1006hb\x1b[?25l\x1b", b"[31m"):
        modes.follow(piece)
    assert modes.undo() == b"\x1b[?25h\x1b[?1006l\x1b[?1049l"
    modes.follow(b"\x1bc")
    assert modes.undo() == b""


@pytest.mark.parametrize(
    "question",
    [
        b"\x1b[c", b"\x1b[>c", b"\x1b[=0c", b"\x1b[6n", b"\x1b[5n", b"\x1b[?6n", b"\x1b]11;?\x07", b"\x1b]4;1;?\x1b\\",
        b"\x1bP+q544e\x1b\\", b"\x1bP$qm\x1b\\", b"\x1b[?2026$p", b"\x1b[>q", b"\x1b[>0q", b"\x1b[?u",
        b"\x1b[18t", b"\x1bZ",
    ],
)  # fmt: skip
def test_questions_to_the_terminal_are_not_asked_again(question: bytes) -> None:
    assert without_questions(b"before" + question + b"after") == b"beforeafter"


def test_what_is_no_question_stays() -> None:
    shown = b"\x1b[31mred\x1b[0m\x1b]0;title\x07\x1b[2J\x1b[H\x1b[?25h\x1b[8;24;80t\x1b(B\x1b[4 q"
    assert without_questions(shown) == shown


# -- terminals ---------------------------------------------------------------------------------------------------------


async def test_every_viewer_sees_the_same_and_a_late_one_sees_what_was_before(runtime: Runtime) -> None:
    terminal = await runtime.terminals.open(cols=100, rows=30)
    first, second = terminal.attach(), terminal.attach()
    await terminal.write(b"stty size; echo $((6*7))ty\n", first)
    assert b"30 100" in await until(first, b"42ty")
    await until(second, b"42ty")
    late = terminal.attach()
    shown = await late.next()
    assert isinstance(shown, Screen)
    assert b"42ty" in shown.data
    assert terminal.info().viewers == 3
    terminal.detach(first)
    assert terminal.info().viewers == 2


async def test_a_terminal_survives_its_viewers_and_ends_with_its_shell(runtime: Runtime) -> None:
    terminal = await runtime.terminals.of_session()
    viewer = terminal.attach()
    await terminal.write(b"A=kept\n", viewer)
    terminal.detach(viewer)
    assert await runtime.terminals.of_session() is terminal
    again = terminal.attach()
    await terminal.write(b"echo $A-$((1+1)); exit 7\n", again)
    await until(again, b"kept-2")
    assert await end_of(again) == End(7)
    assert runtime.terminals.list() == []
    with pytest.raises(TerminalNotFoundError):
        runtime.terminals.find(terminal.id)
    assert await runtime.terminals.of_session() is not terminal


async def test_a_terminal_begins_where_its_session_is_now(runtime: Runtime) -> None:
    await runtime.sessions.create(CreateSession(id="work", env={"WHO": "me"}))
    await runtime.exec(ExecRequest(command="mkdir -p /tmp/here; cd /tmp/here; export MORE=yes", session="work"))
    terminal = await runtime.terminals.of_session("work")
    viewer = terminal.attach()
    await terminal.write(b"echo $PWD=$WHO=$MORE=$GREETING=$SESSION_ID\n", viewer)
    await until(viewer, b"/tmp/here=me=yes=hello=work")
    assert await runtime.terminals.of_session("default") is not terminal
    with pytest.raises(SessionNotFoundError):
        await runtime.terminals.of_session("nowhere")


async def test_the_terminal_of_an_isolated_session_is_isolated_and_ends_with_it(runtime: Runtime) -> None:
    info = await runtime.sessions.create(CreateSession(id="apart"))
    assert info.isolated
    terminal = await runtime.terminals.of_session("apart")
    viewer = terminal.attach()
    await terminal.write(b"sleep 7531 & echo ready-$((1+1))\n", viewer)
    await until(viewer, b"ready-2")
    assert (await runtime.exec(ExecRequest(command="pgrep -f 'sleep 753[1]'"))).exit_code == 1
    await runtime.sessions.delete("apart")
    await end_of(viewer)


async def test_a_session_whose_directory_is_gone_still_gets_a_terminal(runtime: Runtime) -> None:
    await runtime.exec(ExecRequest(command="mkdir /tmp/gone; cd /tmp/gone; rmdir /tmp/gone", session="default"))
    terminal = await runtime.terminals.open()
    viewer = terminal.attach()
    await terminal.write(b"echo at=$PWD=\n", viewer)
    await until(viewer, b"at=/=")
    with pytest.raises(FileNotFoundInSandboxError):
        await runtime.terminals.open(cwd="/tmp/gone")
    with pytest.raises(FileNotFoundInSandboxError):
        await runtime.terminals.open(shell="nosuchshell")


async def test_two_who_ask_for_a_session_at_once_get_one_terminal(runtime: Runtime) -> None:
    one, other = await asyncio.gather(runtime.terminals.of_session(), runtime.terminals.of_session())
    assert one is other


async def test_the_last_size_wins_and_every_viewer_is_told(runtime: Runtime) -> None:
    terminal = await runtime.terminals.open()
    one, other = terminal.attach(), terminal.attach()
    terminal.resize(90, 20)
    terminal.resize(120, 40)
    for viewer in (one, other):
        sizes = []
        while len(sizes) < 2:
            if isinstance(shown := await viewer.next(), Size):
                sizes.append(shown)
        assert sizes == [Size(90, 20), Size(120, 40)]
    await terminal.write(b"stty size\n", one)
    await until(one, b"40 120")


async def test_a_slow_viewer_falls_behind_and_others_are_not_held_up(runtime: Runtime) -> None:
    terminal = await runtime.terminals.open()
    slow, fast = terminal.attach(), terminal.attach()
    await slow.next()
    await until(fast, b"# ")
    await terminal.write(b"head -c 5000000 /dev/zero | tr '\\0' a; echo; echo all-$((1+1))\n", fast)
    await until(fast, b"all-2")
    assert slow._held <= HELD + 65536
    while not isinstance(shown := await slow.next(), Screen):
        pass
    assert shown.behind
    assert len(shown.data) <= LIMIT
    assert b"all-2" in shown.data


async def test_a_lone_slow_viewer_slows_the_program_and_misses_nothing(runtime: Runtime) -> None:
    terminal = await runtime.terminals.open()
    viewer = terminal.attach()
    await until(viewer, b"# ")
    await terminal.write(b"stty -echo; seq 300000; echo all-$((1+1))\n", viewer)
    await asyncio.sleep(0.5)
    shown = await until(viewer, b"all-2")
    assert b"".join(b"%d\r\n" % number for number in range(1, 300_001)) + b"all-2" in shown


async def test_a_program_does_not_wait_for_ever_for_viewers_that_stopped_reading(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skerry.runtime.terminal.PATIENCE", 0.2)
    terminal = await runtime.terminals.open()
    viewer = terminal.attach()
    await until(viewer, b"# ")
    await terminal.write(b"head -c 3000000 /dev/zero | tr '\\0' a; touch /tmp/through\n", viewer)
    there = ExecRequest(command="until [ -e /tmp/through ]; do sleep 0.05; done", timeout=20_000)
    assert (await runtime.exec(there)).success


async def test_only_the_one_who_typed_last_is_asked(runtime: Runtime) -> None:
    terminal = await runtime.terminals.open()
    one, other = terminal.attach(), terminal.attach()
    await until(one, b"# ")
    await until(other, b"# ")
    await terminal.write(b"printf 'where\\033[6nhere-%d\\n' 2\n", other)
    assert b"where\x1b[6nhere-2" in await until(other, b"here-2")
    assert b"wherehere-2" in await until(one, b"here-2")


async def test_closing_hangs_up_and_gives_a_program_the_time_to_save(runtime: Runtime) -> None:
    terminal = await runtime.terminals.open()
    viewer = terminal.attach()
    # Its shell hears the hangup, too, and passes it on: a second one would end the program that saves.
    saving = b'saving() { trap "" HUP; touch /tmp/saved; exit; }; trap saving HUP'
    await terminal.write(b"bash -c '" + saving + b"; echo up-$((1+1)); while :; do sleep 0.05; done'\n", viewer)
    await until(viewer, b"up-2")
    await terminal.close()
    assert (await end_of(viewer)).code is not None
    assert (await runtime.exec(ExecRequest(command="ls /tmp/saved"))).success
    await terminal.write(b"ignored\n", viewer)
    terminal.resize(10, 10)


async def test_who_types_more_than_a_program_reads_waits_and_is_let_go_at_the_end(runtime: Runtime) -> None:
    terminal = await runtime.terminals.open()
    viewer = terminal.attach()
    await terminal.write(b"stty raw -echo; echo up-$((1+1)); exec sleep 7534\n", viewer)
    await until(viewer, b"up-2")
    typing = asyncio.create_task(terminal.write(b"x" * 1_000_000, viewer))
    await asyncio.sleep(0.3)
    assert not typing.done()
    await terminal.close()
    async with asyncio.timeout(10):
        await typing


async def test_what_is_typed_as_the_shell_ends_reaches_no_other_connection(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    reused = Reused()
    monkeypatch.setattr(terminal_module, "os", SimpleNamespace(close=reused.close))
    try:
        for _ in range(8):
            terminal = await runtime.terminals.open()

            async def type_on(terminal: Terminal = terminal) -> None:
                while not terminal.ended:
                    await terminal.write(b"secret\n")
                    await asyncio.sleep(0)

            typing = [asyncio.create_task(type_on()) for _ in range(3)]
            await terminal.close(at_once=True)
            await asyncio.gather(*typing)
        assert reused.pairs
        assert reused.heard() == b""
    finally:
        reused.end()


async def test_who_leaves_while_typing_leaves_the_terminal_to_others(runtime: Runtime) -> None:
    terminal = await runtime.terminals.open()
    viewer = terminal.attach()
    await terminal.write(b"stty -icanon -echo min 1; echo up-$((1+1)); sleep 0.5\n", viewer)
    await until(viewer, b"up-2")
    typing = asyncio.create_task(terminal.write(b"#" + b"x" * 1_000_000, viewer))
    await asyncio.sleep(0.1)
    typing.cancel()
    await asyncio.gather(typing, return_exceptions=True)
    await terminal.write(b"\x15\necho still-$((1+1))\n", viewer)
    await until(viewer, b"still-2")


async def test_what_ignores_the_hangup_is_killed(runtime: Runtime) -> None:
    terminal = await runtime.terminals.open()
    viewer = terminal.attach()
    await terminal.write(b"trap '' HUP TERM INT; echo up-$((1+1)); while :; do sleep 7533; done\n", viewer)
    await until(viewer, b"up-2")
    await terminal.close()
    await end_of(viewer)
    assert (await runtime.exec(ExecRequest(command="pgrep -f 'sleep 753[3]'"))).exit_code == 1


async def test_terminals_end_with_the_sandbox(machine: LocalMachine) -> None:
    runtime = Runtime(machine.portal, env={}, on_process=nobody)
    viewer = (await runtime.terminals.open()).attach()
    await until(viewer, b"# ")
    await machine.stop()
    end = await end_of(viewer)
    assert end.error is not None
    assert end.error.code == "sandbox_lost"
    await runtime.close()


async def test_terminals_end_when_the_runtime_closes(portal: Portal) -> None:
    runtime = Runtime(portal, env={}, on_process=nobody)
    terminal = await runtime.terminals.open(cwd="/tmp")
    viewer = terminal.attach()
    await terminal.write(b"echo up-$((1+1))\n", viewer)
    await until(viewer, b"up-2")
    await runtime.close()
    assert (await end_of(viewer)).error is not None
    assert terminal.ended


async def test_terminals_count_as_use_only_while_bytes_flow(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    assert runtime.terminals.silent_for() == float("inf")
    monkeypatch.setattr(terminals_module, "QUIET", 0.3)
    terminal = await runtime.terminals.open()
    assert runtime.terminals.silent_for() == 0
    await asyncio.sleep(0.8)
    assert runtime.terminals.silent_for() > 0
    await terminal.write(b"x")
    assert runtime.terminals.silent_for() == 0


async def test_a_sandbox_sleeps_when_its_terminals_are_silent_and_not_before(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminals_module, "QUIET", 0.5)
    for id in ("busy", "silent"):
        await registry.create(CreateSandbox(id=id, sleep_after=0.5))
        async with registry.use(id) as runtime:
            terminal = await runtime.terminals.open()
        viewer = terminal.attach()
        if id == "busy":
            await terminal.write(b"while :; do echo tick; sleep 0.1; done\n", viewer)
            terminal.detach(viewer)
    async with asyncio.timeout(30):
        await end_of(viewer)
        while (await registry.get("silent")).state != State.HIBERNATED:
            await asyncio.sleep(0.05)
    await asyncio.sleep(1.5)
    assert (await registry.get("busy")).state == State.ACTIVE


async def test_there_are_only_so_many(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminals_module, "LIMIT", 2)
    opened: list[Terminal] = [await runtime.terminals.open() for _ in range(2)]
    with pytest.raises(ConflictError, match="2 terminals"):
        await runtime.terminals.open()
    await opened[0].close()
    await runtime.terminals.open()


async def test_a_terminal_is_one(runtime: Runtime) -> None:
    terminal = await runtime.terminals.open(cols=100, rows=30)
    viewer = terminal.attach()
    await terminal.write(b"tty; stty size; echo d''one; exit 5\n")
    shown = await until(viewer, b"done")
    assert b"/dev/pts/" in shown
    assert b"30 100" in shown
    assert (await end_of(viewer)).code == 5

from __future__ import annotations

from pathlib import Path
from secrets import token_hex

import pytest

from skerry import AsyncSandbox, SandboxNotFoundError, State


async def test_how_it_sleeps_is_said_when_it_is_made_and_changed_later(home: Path) -> None:
    name = f"sleeper-{token_hex(4)}"
    options = {"sleep_after": "30m", "keep_alive": True, "on_idle": "freeze", "hibernate_after": "2h"}
    async with AsyncSandbox(name, home=home, **options) as sandbox:  # type: ignore[arg-type]
        await sandbox.exec("true")
        info = await sandbox.info()
        assert (info.sleep_after, info.keep_alive, info.on_idle, info.hibernate_after) == (1800, True, "freeze", 7200)
        assert info.sleeps_in is None
        info = await sandbox.update(keep_alive=False, sleep_after=60, hibernate_after="never")
        assert (info.keep_alive, info.sleep_after, info.hibernate_after) == (False, 60, None)
        assert (await sandbox.touch()).sleeps_in == pytest.approx(60, abs=1)
    async with AsyncSandbox(name, home=home, on_idle="hibernate", keep_alive=True) as again:
        await again.exec("true")
        info = await again.info()
        assert (info.on_idle, info.keep_alive, info.sleep_after) == ("hibernate", True, 60)
        await again.destroy()


async def test_freeze_keeps_processes_and_hibernate_keeps_files(home: Path) -> None:
    async with AsyncSandbox(f"sleeper-{token_hex(4)}", home=home) as sandbox:
        await sandbox.exec("X=kept; echo kept >f")
        assert (await sandbox.sleep("freeze")).state is State.FROZEN
        assert (await sandbox.exec("echo $X")).stdout == "kept\n"
        await sandbox.sleep("freeze")
        assert (await sandbox.wake()).state is State.ACTIVE
        assert (await sandbox.sleep(grace="2s")).state is State.HIBERNATED
        assert (await sandbox.start(fresh=True)).state is State.ACTIVE
        assert (await sandbox.exec("cat f; echo [$X]")).stdout == "kept\n[]\n"
        await sandbox.destroy()


async def test_events_are_read_and_followed_also_of_what_was_destroyed(home: Path) -> None:
    async with AsyncSandbox(f"diary-{token_hex(4)}", home=home) as sandbox:
        await sandbox.exec("true")
        seen = []
        async with sandbox.follow_events() as events:
            async for event in events:
                seen.append(event.kind)
                if event.kind == "started":
                    await sandbox.sleep("freeze")
                elif event.kind == "frozen":
                    await sandbox.destroy()
        assert seen == ["created", "started", "frozen", "destroyed"]
        found = await sandbox.events()
        assert [event.kind for event in found] == seen
        assert (found[2].by, found[2].from_state, found[2].to_state) == ("local client", State.ACTIVE, State.FROZEN)
        assert found[2].took is not None


async def test_looking_after_one_that_is_not_there_makes_none(home: Path) -> None:
    async with AsyncSandbox(f"nobody-{token_hex(4)}", home=home) as sandbox:
        for change in (sandbox.sleep, sandbox.wake, sandbox.touch, sandbox.events):
            with pytest.raises(SandboxNotFoundError):
                await change()
        with pytest.raises(SandboxNotFoundError):
            [event async for event in sandbox.follow_events()]

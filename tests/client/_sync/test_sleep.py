# Generated from tests/client/_async/test_sleep.py by scripts/generate_sync.py; change that file and run it again.
from __future__ import annotations

from pathlib import Path
from secrets import token_hex

import pytest

from skerry import Sandbox, SandboxNotFoundError, State


def test_how_it_sleeps_is_said_when_it_is_made_and_changed_later(home: Path) -> None:
    name = f"sleeper-{token_hex(4)}"
    options = {"sleep_after": "30m", "keep_alive": True, "on_idle": "freeze", "hibernate_after": "2h"}
    with Sandbox(name, home=home, **options) as sandbox:  # type: ignore[arg-type]
        sandbox.exec("true")
        info = sandbox.info()
        assert (info.sleep_after, info.keep_alive, info.on_idle, info.hibernate_after) == (1800, True, "freeze", 7200)
        assert info.sleeps_in is None
        info = sandbox.update(keep_alive=False, sleep_after=60, hibernate_after="never")
        assert (info.keep_alive, info.sleep_after, info.hibernate_after) == (False, 60, None)
        assert (sandbox.touch()).sleeps_in == pytest.approx(60, abs=1)
    with Sandbox(name, home=home, on_idle="hibernate", keep_alive=True) as again:
        again.exec("true")
        info = again.info()
        assert (info.on_idle, info.keep_alive, info.sleep_after) == ("hibernate", True, 60)
        again.destroy()


def test_freeze_keeps_processes_and_hibernate_keeps_files(home: Path) -> None:
    with Sandbox(f"sleeper-{token_hex(4)}", home=home) as sandbox:
        sandbox.exec("X=kept; echo kept >f")
        assert (sandbox.sleep("freeze")).state is State.FROZEN
        assert (sandbox.exec("echo $X")).stdout == "kept\n"
        sandbox.sleep("freeze")
        assert (sandbox.wake()).state is State.ACTIVE
        assert (sandbox.sleep(grace="2s")).state is State.HIBERNATED
        assert (sandbox.start(fresh=True)).state is State.ACTIVE
        assert (sandbox.exec("cat f; echo [$X]")).stdout == "kept\n[]\n"
        sandbox.destroy()


def test_events_are_read_and_followed_also_of_what_was_destroyed(home: Path) -> None:
    with Sandbox(f"diary-{token_hex(4)}", home=home) as sandbox:
        sandbox.exec("true")
        seen = []
        with sandbox.follow_events() as events:
            for event in events:
                seen.append(event.kind)
                if event.kind == "started":
                    sandbox.sleep("freeze")
                elif event.kind == "frozen":
                    sandbox.destroy()
        assert seen == ["created", "started", "frozen", "destroyed"]
        found = sandbox.events()
        assert [event.kind for event in found] == seen
        assert (found[2].by, found[2].from_state, found[2].to_state) == ("local client", State.ACTIVE, State.FROZEN)
        assert found[2].took is not None


def test_looking_after_one_that_is_not_there_makes_none(home: Path) -> None:
    with Sandbox(f"nobody-{token_hex(4)}", home=home) as sandbox:
        for change in (sandbox.sleep, sandbox.wake, sandbox.touch, sandbox.events):
            with pytest.raises(SandboxNotFoundError):
                change()
        with pytest.raises(SandboxNotFoundError):
            [event for event in sandbox.follow_events()]

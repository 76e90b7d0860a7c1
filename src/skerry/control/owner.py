"""The owner of one sandbox: the only one who changes its life.

absent → starting → active → hibernated → active … → destroyed. Changes of life queue on a lock; everything else runs
beside each other on the machine's runtime.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import structlog

from skerry.control.ledger import Ledger
from skerry.control.pool import Pool, Warm
from skerry.control.store import SandboxRow, Store
from skerry.errors import EnvLockedError, SandboxStartError, SkerryError
from skerry.models import ProcessInfo, SandboxInfo, State, now
from skerry.providers.contract import Machine, Provider, Spec
from skerry.runtime.interpreter.context import Remembered
from skerry.runtime.interpreter.pool import Provision
from skerry.runtime.runtime import Runtime

log = structlog.get_logger(__name__)


class Owner:
    def __init__(
        self,
        row: SandboxRow,
        provider: Provider,
        store: Store,
        ledger: Ledger,
        pool: Pool,
        provision: Provision,
    ) -> None:
        self.row = row
        self.gone = False
        """Destroyed, or put away while it slept: whoever still holds this must ask the registry again."""
        self.life = asyncio.Lock()
        self.operations = 0
        self._provider = provider
        self._store = store
        self._ledger = ledger
        self._pool = pool
        self._provision = provision
        self._machine: Machine | None = None
        self._runtime: Runtime | None = None
        self._idle_since = time.monotonic()

    @property
    def id(self) -> str:
        return self.row.id

    @property
    def active(self) -> bool:
        return self._runtime is not None

    @property
    def runtime(self) -> Runtime | None:
        """The runtime, if it is awake; to look at it counts as nothing."""
        return self._runtime

    def info(self) -> SandboxInfo:
        return describe(self.row, self.operations)

    # -- use -----------------------------------------------------------------------------------------------------------

    def enter(self) -> Runtime | None:
        """The runtime, if it is there; counts as activity until ``leave``."""
        if self._runtime is not None:
            self.operations += 1
        return self._runtime

    def leave(self) -> None:
        self.operations -= 1
        self.touch()

    def touch(self) -> None:
        """It is being used right now."""
        self._idle_since = time.monotonic()

    def idle_for(self) -> float:
        if self.operations:
            return 0.0
        idle = time.monotonic() - self._idle_since
        return idle if self._runtime is None else min(idle, self._runtime.terminals.silent_for())

    # -- changes of life, all with ``life`` held -----------------------------------------------------------------------

    async def start(self) -> None:
        if self._runtime is not None:
            return
        row = self.row
        # Before anything is recorded: the record of a machine that another process runs is that process's to keep.
        await self._provider.require_idle(self.id)
        if row.starts and not row.ephemeral and not await self._provider.exists(self.id):
            raise SandboxStartError(
                f"The files of sandbox {self.id!r} are missing, so it was not started over an empty disk.",
                hint="Restore them, or destroy the sandbox to begin again.",
            )
        self.row = replace(row, state=State.STARTING, starts=row.starts + 1)
        warm = self._pool.take(row.image) if not row.starts else None
        # Beside each other: a server that is killed once a command was answered must find that there was a start.
        recording = asyncio.ensure_future(
            self._store.update_sandbox(self.id, state=State.STARTING, starts=self.row.starts)
        )
        try:
            await (self._launch() if warm is None else self._adopt(warm))
            await recording
        except SkerryError as error:
            await asyncio.gather(recording, return_exceptions=True)
            machine, self._machine, self._runtime = self._machine, None, None
            if machine is not None:
                await machine.stop()
            self._save(state=State.FAILED, starts=row.starts, last_stop=error.message)
            self._record("failed", error.message)
            raise
        self._idle_since = time.monotonic()
        self._save(state=State.ACTIVE, started_at=now(), last_active_at=now())
        self._record("started", f"Started for the {_ordinal(self.row.starts)} time.")

    async def _launch(self) -> None:
        again = self.row.starts > 1
        past = await self._store.processes(self.id) if again else []
        contexts = await self._store.contexts(self.id) if again else []
        spec = Spec(id=self.id, image=self.row.image, limits=self.row.limits)
        self._machine = await self._provider.start(spec, partial(self._died, self.row.starts))
        self._runtime = self._build(self._machine, past, contexts)

    async def _adopt(self, warm: Warm) -> None:
        """A machine that was started in advance becomes this one."""
        await self._provider.rename(warm.machine, self.id)
        warm.on_death, warm.on_process = partial(self._died, self.row.starts), self._process
        self._machine = warm.machine
        self._runtime = warm.runtime
        self._runtime.code.records = _Records(self._store, self.id)
        if self.row.env:
            await warm.runtime.close()
            self._runtime = self._build(warm.machine)

    def _build(
        self, machine: Machine, past: Sequence[ProcessInfo] = (), contexts: Sequence[Remembered] = ()
    ) -> Runtime:
        return Runtime(
            machine.portal,
            env=self.row.env,
            on_process=self._process,
            past=past,
            provision=self._provision,
            contexts=_Records(self._store, self.id),
            past_contexts=contexts,
        )

    async def stop(self, reason: str) -> None:
        """End its processes; its files stay, unless it is ephemeral."""
        runtime, self._runtime = self._runtime, None
        machine, self._machine = self._machine, None
        # The machine first: what runs in it is then known to be lost, not taken for having ended by itself.
        if machine is not None:
            await machine.stop()
        if runtime is not None:
            await runtime.close()
        if machine is not None and self.row.state != State.DESTROYED:
            self._put_down(reason)
        if self.row.ephemeral:
            await self._provider.forget(self.id)

    async def destroy(self) -> None:
        # Recorded first: a server that is killed in the middle is followed by one that finishes it.
        await self.update(state=State.DESTROYED)
        await self.stop("It was destroyed.")
        await self._ledger.flush()
        await self._provider.forget(self.id)
        await self._store.delete_sandbox(self.id)
        self.row = replace(self.row, state=State.DESTROYED)
        self.gone = True

    async def set_env(self, env: Mapping[str, str | None]) -> None:
        if self.active:
            raise EnvLockedError(
                f"Sandbox {self.id!r} has started, so its environment variables can no longer change.",
                hint="Give them to a session (create_session(env=…)) or a command (exec(…, env=…)), or stop the "
                "sandbox, set them, and let the next request start it again.",
            )
        merged = {name: value for name, value in {**self.row.env, **env}.items() if value is not None}
        self.row = await self._store.update_sandbox(self.id, env=merged)

    async def update(self, **changes: object) -> None:
        self.row = replace(self.row, **changes)  # type: ignore[arg-type]
        await self._store.update_sandbox(self.id, **changes)

    # -- what the machine reports --------------------------------------------------------------------------------------

    async def _died(self, start: int, reason: str) -> None:
        async with self.life:
            if start != self.row.starts or self._runtime is None:
                return  # it was stopped meanwhile, or lives again
            runtime, self._runtime = self._runtime, None
            self._machine = None
            with contextlib.suppress(SkerryError):
                await runtime.close()
            self._put_down(f"It ended unexpectedly: {reason}.")
            log.warning("sandbox ended unexpectedly", sandbox=self.id, reason=reason)

    async def _process(self, info: ProcessInfo) -> None:
        if not self.gone:
            await self._store.save_process(self.id, info, self.row.starts)

    def _put_down(self, reason: str) -> None:
        self._save(state=State.HIBERNATED, last_stop=reason, last_active_at=now())
        self._record("stopped", reason)

    def _save(self, **changes: object) -> None:
        """Known here at once, in the store soon: after a crash every state there is put right anyway."""
        self.row = replace(self.row, **changes)  # type: ignore[arg-type]
        self._ledger.post(lambda: self._store.update_sandbox(self.id, **changes))

    def _record(self, kind: str, message: str) -> None:
        self._ledger.post(lambda: self._store.add_event(self.id, kind, message))


class Presence:
    """Someone who is connected to a sandbox: counts as its user while something happens, not while all is quiet."""

    def __init__(self, find: Callable[[], Owner | None], quiet: float) -> None:
        self._find = find
        self._quiet = quiet
        self._loop = asyncio.get_running_loop()
        self._last = 0.0
        self._owner: Owner | None = None
        self._timer: asyncio.TimerHandle | None = None

    def stir(self) -> None:
        """Something happens; cheap enough for every piece of data. A sandbox that sleeps is left to sleep."""
        self._last = self._loop.time()
        if self._owner is not None and self._owner.gone:
            self.close()
        if self._owner is None and (owner := self._find()) is not None and owner.active:
            self._owner = owner
            self._owner.operations += 1
            self._timer = self._loop.call_later(self._quiet, self._look)

    def close(self) -> None:
        if self._timer is not None and self._owner is not None:
            self._timer.cancel()
            self._owner.leave()
            self._timer = self._owner = None

    def _look(self) -> None:
        left = self._last + self._quiet - self._loop.time()
        if left > 0:
            self._timer = self._loop.call_later(left, self._look)
        else:
            self.close()


class _Records:
    """The code contexts of one sandbox, in the store."""

    def __init__(self, store: Store, sandbox: str) -> None:
        self._store = store
        self._sandbox = sandbox

    async def save(self, context: Remembered) -> None:
        await self._store.save_context(self._sandbox, context)

    async def delete(self, id: str) -> None:
        await self._store.delete_context(self._sandbox, id)


def describe(row: SandboxRow, operations: int = 0) -> SandboxInfo:
    return SandboxInfo(
        id=row.id,
        state=row.state,
        image=row.image,
        env=row.env,
        labels=row.labels,
        limits={**row.limits, "enforced": []} if row.limits else {},
        sleep_after=row.sleep_after,
        ephemeral=row.ephemeral,
        created_at=row.created_at,
        started_at=row.started_at,
        last_active_at=row.last_active_at,
        starts=row.starts,
        last_stop=row.last_stop,
        active_operations=operations,
    )


def _ordinal(number: int) -> str:
    suffix = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{suffix}"

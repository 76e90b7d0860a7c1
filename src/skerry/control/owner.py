"""The owner of one sandbox: the only one who changes its life.

absent → starting → active → frozen or hibernated → active … → destroyed. Changes of life queue on a lock; everything
else runs beside each other on the machine's runtime.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import partial
from typing import Any

import structlog

from skerry.control.actor import SANDBOX, SERVER
from skerry.control.egress import Displaced, Egress, network
from skerry.control.events import Events
from skerry.control.ledger import Ledger
from skerry.control.limits import SandboxLimits, changed
from skerry.control.meter import Meter
from skerry.control.metrics import Metrics
from skerry.control.mounts import Mounts
from skerry.control.pool import Pool, Warm
from skerry.control.store import SandboxRow, Store
from skerry.egress.door import Door
from skerry.egress.policy import Refusal
from skerry.errors import EnvLockedError, FilesMissingError, LifetimeOverError, SandboxBusyError, SkerryError
from skerry.models import EgressInfo, Limits, ProcessInfo, Sample, SandboxInfo, Secrets, SetEgress, State, Usage, now
from skerry.providers.contract import Machine, Provider, Spec
from skerry.providers.toolboxes import path_of
from skerry.runtime.environment import PATH
from skerry.runtime.faults import Faults, Reached
from skerry.runtime.interpreter.context import Remembered
from skerry.runtime.interpreter.pool import Provision
from skerry.runtime.runtime import Runtime

log = structlog.get_logger(__name__)

REACHED_EVERY = 10.0
"""Seconds between two events that say the same limit was run into; the metric counts all."""


@dataclass(frozen=True, slots=True)
class Attendants:
    """Those who have something to do when a sandbox goes to sleep or wakes."""

    admit: Callable[[Owner], Awaitable[Callable[[], None]]]
    """It is about to be started: what is returned is called at that moment, and may refuse."""
    leaving: Callable[[Owner], Awaitable[None]]
    """It is about to be stopped, whatever the reason, and still runs."""
    claim: Callable[[Owner], Awaitable[None]]
    """It was shipped, and is about to be started."""
    copied: Callable[[SandboxRow], Awaitable[None]]
    """The snapshot that it was made from is about to become its files."""
    woken: Callable[[str, Runtime], Awaitable[None]]
    tired: Callable[[str, Runtime], Awaitable[None]]
    """It is about to hibernate, and still runs."""
    asleep: Callable[[Owner], Awaitable[None]]


class Owner:
    def __init__(
        self,
        row: SandboxRow,
        provider: Provider,
        store: Store,
        ledger: Ledger,
        pool: Pool,
        provision: Provision,
        events: Events,
        metrics: Metrics,
        attendants: Attendants,
        mounts: Mounts,
        limits: SandboxLimits,
        egress: Egress,
    ) -> None:
        self.row = row
        self.meter = Meter(row.usage or {})
        self._limits = limits
        self._started_with: Limits | None = None
        self._reached_at: dict[str, float] = {}
        self.gone = False
        """Destroyed, put away while it slept, or another process's: whoever holds this must ask the registry again."""
        self.filling = False
        """Its files are being brought back, and nobody else may see it until they are there."""
        self.life = asyncio.Lock()
        self.operations = 0
        self.connections = 0
        self.metrics = metrics
        self._provider = provider
        self._store = store
        self._ledger = ledger
        self._pool = pool
        self._provision = provision
        self._events = events
        self._attendants = attendants
        self.mounts = mounts.of(self)
        self._beginning: asyncio.Task[None] | None = None
        """Its first start, if that began at once: under way, or failed and nobody was told yet."""
        self._machine: Machine | None = None
        self._runtime: Runtime | None = None
        self._egress = egress
        self.door: Door | None = None
        self._frozen_since: float | None = None
        self._idle_since = time.monotonic()

    @property
    def id(self) -> str:
        return self.row.id

    @property
    def running(self) -> bool:
        """Whether it has a machine, be it frozen."""
        return self._runtime is not None

    @property
    def frozen(self) -> bool:
        return self._frozen_since is not None

    @property
    def awake(self) -> bool:
        return self._runtime is not None and self._frozen_since is None

    @property
    def runtime(self) -> Runtime | None:
        """The runtime, awake or frozen; to look at it counts as nothing."""
        return self._runtime

    @property
    def machine(self) -> Machine | None:
        return self._machine

    def info(self) -> SandboxInfo:
        return describe(self.row, self._limits, self._provider, self)

    # -- use -----------------------------------------------------------------------------------------------------------

    def enter(self) -> Runtime | None:
        """The runtime, if it is awake; counts as activity until ``leave``."""
        if self._runtime is None or self._frozen_since is not None or self.filling:
            return None
        self.operations += 1
        return self._runtime

    def leave(self) -> None:
        self.operations -= 1
        self.touch()

    def touch(self) -> None:
        """It is being used right now."""
        self._idle_since = time.monotonic()

    @property
    def busy(self) -> bool:
        return self.operations > 0 or self.connections > 0

    def idle_for(self) -> float:
        if self.busy:
            return 0.0
        idle = time.monotonic() - self._idle_since
        return idle if self._runtime is None else min(idle, self._runtime.terminals.silent_for())

    def last_active(self) -> datetime:
        """When it was last used: now, if it is in use."""
        return now() - timedelta(seconds=self.idle_for())

    def sleeps_in(self) -> float | None:
        """Seconds until it goes to sleep if nobody uses it from now on; None if it does not, or sleeps."""
        if not self.awake or self.row.keep_alive or self.row.sleep_after is None:
            return None
        return max(0.0, self.row.sleep_after - self.idle_for())

    def hibernates_in(self) -> float | None:
        """Seconds until one that is frozen hibernates; None if it is not frozen, or stays so."""
        if self._frozen_since is None or self.row.hibernate_after is None:
            return None
        return max(0.0, self.row.hibernate_after - (time.monotonic() - self._frozen_since))

    # -- limits --------------------------------------------------------------------------------------------------------

    @property
    def started_with(self) -> Limits | None:
        """The limits its machine was started with."""
        return self._started_with

    def expires_in(self) -> float | None:
        """Seconds until its lifetime is over, negative when it is; None if it has none."""
        lifetime = self._limits.of(self.row.limits).lifetime
        return None if lifetime is None else lifetime - (now() - self.row.created_at).total_seconds()

    async def limit(self, change: Limits) -> None:
        """Other limits from now on; some of them from the next start."""
        asked = changed(self.row.limits, change)
        limits = self._limits.of(asked)
        if self._machine is not None and self._runtime is not None:
            await self._machine.limit(limits)
            self._runtime.faults.limits = limits
        await self.update(limits=asked)
        self.record("limited", f"Its limits were changed: {_listed(change)}.")

    def sample(self, *, keep: bool = True) -> Sample | None:
        """What it uses now; None of one that sleeps."""
        if self._machine is None or self._runtime is None:
            return None
        self._runtime.faults.look()
        found = self.meter.add(self._machine.measure(), keep=keep)
        if self.meter.unsaved:
            self._save(usage=self.meter.record())
        return found

    def _reached(self, reached: Reached, times: int) -> None:
        self.meter.count(reached.limit, times)
        self.metrics.limits_reached.labels(reached.limit).inc(times)
        moment = time.monotonic()
        if moment - self._reached_at.get(reached.limit, -REACHED_EVERY) >= REACHED_EVERY:
            self._reached_at[reached.limit] = moment
            details = {"limit": reached.limit, "times": self.meter.usage().reached[reached.limit]}
            self.record("limit_reached", reached.message, by=SERVER, details=details)

    # -- changes of life, all with ``life`` held -----------------------------------------------------------------------

    async def begin(self, files: Awaitable[None]) -> None:
        """Start it, which is on record already, as soon as its files are there. If that fails, whoever wants to start
        it is told why. ``life``, which nobody knows yet, is held meanwhile."""

        async def beginning() -> None:
            try:
                await files
            except SkerryError as error:
                self._fail(error.message, starts=0)
                raise
            try:
                await self._start(recorded=True)
            except SkerryError:
                self._save(state=self.row.state, starts=0)  # also of one that was refused before it was begun
                raise

        def ended(task: asyncio.Task[None]) -> None:
            self.life.release()
            if not task.cancelled() and task.exception() is None:
                self._beginning = None

        await self.life.acquire()
        self._beginning = asyncio.get_running_loop().create_task(beginning())
        self._beginning.add_done_callback(ended)

    def begun(self) -> None:
        """Whatever came of its beginning matters no more."""
        self._beginning = None

    async def start(self, *, fresh: bool = False) -> None:
        """Awake, whatever it was before. ``fresh``: should its files be missing, over an empty disk."""
        beginning, self._beginning = self._beginning, None
        if beginning is not None:
            await beginning  # it has failed
        elif self._runtime is not None:
            await self.thaw()
        else:
            await self._start(fresh=fresh)

    async def _start(self, *, fresh: bool = False, recorded: bool = False) -> None:
        """``recorded``: that it is started is in the store already."""
        self._require_time()
        row, began = self.row, time.perf_counter()
        if not recorded:
            # Before anything is: the record of a machine that another process runs is that process's to keep.
            try:
                await self._provider.require_idle(self.id)
            except SandboxBusyError:
                self.gone = True  # what this process knows of it is old
                raise
        if row.shipped is not None:
            await self._attendants.claim(self)
            row = self.row
        filled = await self._provider.exists(self.id)
        if row.ephemeral and row.made_from is not None and not filled:
            await self._attendants.copied(row)
            await self._provider.clone(row.made_from, self.id)
            filled = True
        missing = self._must_have_files() and not filled
        if missing and not fresh:
            raise self._files_missing()
        require_room = await self._attendants.admit(self)
        require_room()
        self.row = replace(row, state=State.STARTING, starts=row.starts + 1)
        self._started_with = limits = self._limits.of(row.limits)
        warm = self._pool.take(row.image, limits, row.toolboxes) if not row.starts and not filled else None
        # Beside each other: a server that is killed once a command was answered must find that there was a start.
        recording = asyncio.ensure_future(_nothing() if recorded else self._store.record_start(self.id))
        try:
            with self.metrics.timed("start"):
                await (self._launch(limits) if warm is None else self._adopt(warm, limits))
                await recording
        except SkerryError as error:
            await asyncio.gather(recording, return_exceptions=True)
            machine, self._machine, self._runtime = self._machine, None, None
            await self._shut()
            if machine is not None:
                await machine.stop()
            await self.mounts.close()
            self._fail(error.message, starts=row.starts)
            raise
        assert self._runtime is not None
        self._runtime.on_command, self._runtime.code.on_run = self.metrics.command, self.metrics.code
        self._runtime.faults.on_reached = self._reached
        self.meter.begin()
        self._idle_since = time.monotonic()
        self._save(state=State.ACTIVE, started_at=now(), last_active_at=now())
        took, how = time.perf_counter() - began, f"for the {_ordinal(self.row.starts)} time"
        if row.starts:
            self.metrics.wake_latency.labels("hibernate").observe(took)
            self.alert("sandbox.wake_latency", took)
            lost = " over an empty disk, as was asked for: its files were missing" if missing else ""
            self.record("woken", f"Started {how}{lost}.", took=took, before=row.state)
        else:
            self.record("started", f"Started {how}.", took=took, before=row.state)

    def _require_time(self) -> None:
        left = self.expires_in()
        if left is not None and left <= 0:
            raise LifetimeOverError(
                f"Sandbox {self.id!r} has lived for the time it was given, {-left:.0f} seconds ago.",
                hint="Its files are kept: give it a longer `lifetime`, fork it, or destroy it.",
                details={"sandboxId": self.id},
            )

    async def require_files(self) -> None:
        """Its files are where they should be, or it never had any."""
        if self._must_have_files() and not await self._provider.exists(self.id):
            raise self._files_missing()

    def _must_have_files(self) -> bool:
        return bool(self.row.starts or self.row.made_from or self.row.forked_from) and not self.row.ephemeral

    def _files_missing(self) -> FilesMissingError:
        error = FilesMissingError(
            f"The files of sandbox {self.id!r} are missing, so it was not started over an empty disk.",
            hint="Restore a backup into it, roll it back to a snapshot, start it with `fresh` to accept an empty disk, "
            "or destroy it.",
            details={"sandboxId": self.id},
        )
        if self.row.state != State.FAILED:
            self._fail(error.message)
        return error

    async def lose(self) -> None:
        """Its files were missing, and could not be brought back: they are missing still."""
        await self.stop("Its files could not be brought back.")
        await self._provider.forget(self.id)
        self._files_missing()

    def _fail(self, reason: str, **changes: object) -> None:
        before = self.row.state
        self._save(state=State.FAILED, last_stop=reason, **changes)
        self.record("failed", reason, before=before)

    async def freeze(self, reason: str) -> None:
        """Stop its processes where they are; what is under way waits, and so does its time."""
        if self._machine is None or self._frozen_since is not None:
            return
        before, began = self.row.state, time.perf_counter()
        # Before the first wait: who comes from now on waits for ``life``, and thaws it.
        self._frozen_since = time.monotonic()
        try:
            with self.metrics.timed("freeze"):
                await self._machine.freeze()
        except BaseException:
            self._frozen_since = None
            raise
        self._save(state=State.FROZEN, last_stop=reason, last_active_at=self.last_active())
        self.record("frozen", reason, took=time.perf_counter() - began, before=before)

    async def thaw(self) -> None:
        if self._machine is None or self._frozen_since is None:
            return
        began, frozen_for = time.perf_counter(), time.monotonic() - self._frozen_since
        with self.metrics.timed("thaw"):
            await self._machine.thaw()
        self._frozen_since = None
        self._idle_since = time.monotonic()
        took = time.perf_counter() - began
        self.metrics.wake_latency.labels("freeze").observe(took)
        self.alert("sandbox.wake_latency", took)
        self._save(state=State.ACTIVE, last_active_at=now())
        self.record("thawed", f"Thawed after {frozen_for:.1f} seconds.", took=took, before=State.FROZEN)

    async def _launch(self, limits: Limits) -> None:
        again = self.row.starts > 1
        past = await self._store.processes(self.id) if again else []
        contexts = await self._store.contexts(self.id) if again else []
        spec = Spec(self.id, self.row.image, limits, tuple(self.row.toolboxes), owner=self.row.owner)
        self._machine = await self._provider.start(spec, partial(self._died, self.row.starts))
        self.door = await self._egress.door(self._machine)
        self._egress.assign(self.door, self.row, self._refused, self._rotated, self.meter.carried)
        if again:
            await self.mounts.restore(self._machine)
        self._runtime = self._build(self._machine, past, contexts)
        await self._attendants.woken(self.id, self._runtime)

    async def _adopt(self, warm: Warm, limits: Limits) -> None:
        """A machine that was started in advance becomes this one."""
        await self._provider.rename(warm.machine, self.id)
        if limits != warm.limits:
            await warm.machine.limit(limits)
        warm.runtime.faults.limits = limits
        warm.on_death, warm.on_process = partial(self._died, self.row.starts), self._process
        self._machine, self.door = warm.machine, warm.door
        self._egress.assign(self.door, self.row, self._refused, self._rotated, self.meter.carried)
        self._runtime = warm.runtime
        self._runtime.code.records = _Records(self._store, self.id)
        if self._egress.variables(self.row) != self._egress.variables():
            await warm.runtime.close()
            self._runtime = self._build(warm.machine)

    def _build(
        self, machine: Machine, past: Sequence[ProcessInfo] = (), contexts: Sequence[Remembered] = ()
    ) -> Runtime:
        return machine.runtime(
            machine.portal,
            env=self._variables(),
            on_process=self._process,
            past=past,
            provision=self._provision,
            contexts=_Records(self._store, self.id),
            past_contexts=contexts,
            faults=Faults(machine.met, self._started_with, self._provider.full),
        )

    def _variables(self) -> dict[str, str]:
        shown = {"PATH": PATH + path_of(self.row.toolboxes)} if self.row.toolboxes else {}
        return {**shown, **self._egress.variables(self.row)}

    async def stop(self, reason: str, grace: float = 0.0, *, asked: bool = False) -> None:
        """End its processes, which have ``grace`` seconds after a SIGTERM; its files stay, unless it is ephemeral.

        ``asked``: somebody wanted it stopped, rather than asleep.
        """
        before, began = self.row.state, time.perf_counter()
        if self._machine is not None:
            await self._attendants.leaving(self)
        runtime, self._runtime = self._runtime, None
        machine, self._machine = self._machine, None
        frozen, self._frozen_since = self._frozen_since is not None, None
        # The machine first: what runs in it is then known to be lost, not taken for having ended by itself.
        if machine is not None:
            if grace and frozen:
                await machine.thaw()
            if grace and runtime is not None:
                if not self.row.ephemeral:
                    await self._attendants.tired(self.id, runtime)
                await runtime.take_leave()
            async with self.mounts.leaving(grace):
                await machine.stop(grace)
            if runtime is not None:
                runtime.faults.look()
            self.meter.add(machine.measure())
        if runtime is not None:
            await runtime.close()
        await self._shut()
        if machine is not None and self.row.state != State.DESTROYED:
            took = time.perf_counter() - began
            self.metrics.operations.labels("hibernate").observe(took)
            self._save(
                state=State.HIBERNATED, last_stop=reason, last_active_at=self.last_active(), usage=self.meter.record()
            )
            details = {} if runtime is None else runtime.processes.last_words()
            if asked:
                details = {**details, "asked": "stop"}
            self.record("hibernated", reason, took=took, before=before, details=details)
            if grace and not self.row.ephemeral:
                await self._attendants.asleep(self)
        if self.row.ephemeral:
            await self.mounts.forget()
            await self._provider.forget(self.id)

    async def destroy(self) -> None:
        before, began = self.row.state, time.perf_counter()
        # Recorded first: a server that is killed in the middle is followed by one that finishes it.
        await self.update(state=State.DESTROYED)
        with self.metrics.timed("destroy"):
            await self.stop("It was destroyed.")
            await self._ledger.flush()
            await self._provider.forget(self.id)
            await self._store.delete_sandbox(self.id)
        self.row = replace(self.row, state=State.DESTROYED)
        self.gone = True
        details = {"usage": self.meter.record()} if self.row.starts else {}
        self.record("destroyed", "It was destroyed.", took=time.perf_counter() - began, before=before, details=details)

    async def set_env(self, env: Mapping[str, str | None]) -> None:
        if self.running:
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

    async def set_egress(self, request: SetEgress) -> None:
        """From now on, in one that runs as well."""
        if changes := self._egress.changed(self.row, request):
            await self._change_egress(changes)

    async def add_secrets(self, secrets: Secrets) -> Displaced:
        """Beside those there are; one for the same host takes its place. What was there is for ``put_back``."""
        before = {host: self.row.secrets.get(host) for host in secrets}
        await self._change_egress(self._egress.added(self.row, secrets))
        return before

    async def put_back(self, secrets: Displaced) -> None:
        kept = {**self.row.secrets, **secrets}
        await self._change_egress({"secrets": {host: each for host, each in kept.items() if each is not None}})

    async def _change_egress(self, changes: dict[str, Any]) -> None:
        await self.update(**changes)
        self.renew_egress()
        policy = self._egress.policy_of(self.row)
        details = {"mode": policy.mode, "allow": len(policy.allow), "secrets": sorted(self.row.secrets)}
        self.record("egress_changed", f"Its egress is {policy.mode!r} now.", details=details)

    def renew_egress(self) -> None:
        """Its policy, or the server's, has changed."""
        if self.door is not None:
            self._egress.apply(self.door, self.row, self._rotated)

    def egress_info(self) -> EgressInfo:
        return self._egress.info(self.row, self.meter.usage(), self.door)

    async def _shut(self) -> None:
        door, self.door = self.door, None
        if door is not None:
            await door.close()

    def _refused(self, refusal: Refusal) -> None:
        details = {"host": refusal.host, "port": refusal.port}
        self.record("egress_refused", refusal.reason, by=SANDBOX, details=details)

    async def _rotated(self, host: str, refresh_token: str) -> None:
        await self.update(secrets=self._egress.rotate(self.row, host, refresh_token))

    # -- what the machine reports --------------------------------------------------------------------------------------

    async def _died(self, start: int, reason: str) -> None:
        async with self.life:
            if start != self.row.starts or self._runtime is None:
                return  # it was stopped meanwhile, or lives again
            before = self.row.state
            runtime, self._runtime = self._runtime, None
            machine, self._machine, self._frozen_since = self._machine, None, None
            runtime.faults.look()
            if machine is not None:
                self.meter.add(machine.measure())
            await self.mounts.close()
            await self._shut()
            with contextlib.suppress(SkerryError):
                await runtime.close()
            said = f"It ended unexpectedly: {reason}."
            self._save(
                state=State.HIBERNATED, last_stop=said, last_active_at=self.last_active(), usage=self.meter.record()
            )
            self.record("died", said, by=SERVER, before=before)
            log.warning("sandbox ended unexpectedly", sandbox=self.id, reason=reason)

    async def _process(self, info: ProcessInfo) -> None:
        if not self.gone:
            await self._store.save_process(self.id, info, self.row.starts)

    def _save(self, **changes: object) -> None:
        """Known here at once, in the store soon: after a crash every state there is put right anyway."""
        self.row = replace(self.row, **changes)  # type: ignore[arg-type]
        self._ledger.post(lambda: self._store.update_sandbox(self.id, **changes))

    def alert(self, metric: str, value: float) -> None:
        """Say so, if that is beyond its threshold."""
        said = self.metrics.beyond(metric, value, sandbox=self.id)
        if said is not None:
            self.record("alert", said, by=SERVER, details={"metric": metric, "value": round(value, 3)})

    def record(
        self,
        kind: str,
        message: str,
        *,
        by: str | None = None,
        took: float | None = None,
        details: Mapping[str, Any] | None = None,
        before: State | None = None,
    ) -> None:
        """Note what happened to it; the one place all of its events go through.

        ``by`` is whoever the request came from unless given, ``took`` is in seconds, and ``before`` is the state that
        this took it out of.
        """
        after = None if before is None else self.row.state
        self._events.record(
            self.id, kind, message, by=by, took=took, details=details, from_state=before, to_state=after
        )


async def _nothing() -> None:
    return None


class _Records:
    """The code contexts of one sandbox, in the store."""

    def __init__(self, store: Store, sandbox: str) -> None:
        self._store = store
        self._sandbox = sandbox

    async def save(self, context: Remembered) -> None:
        await self._store.save_context(self._sandbox, context)

    async def delete(self, id: str) -> None:
        await self._store.delete_context(self._sandbox, id)


def describe(row: SandboxRow, limits: SandboxLimits, provider: Provider, owner: Owner | None = None) -> SandboxInfo:
    started_with = None if owner is None or not owner.running else owner.started_with
    info = SandboxInfo(
        id=row.id,
        owner=row.owner,
        state=row.state,
        image=row.image,
        provider=provider.place_of(row.id),
        env=row.env,
        labels=row.labels,
        limits=limits.info(row.limits, started_with),
        sleep_after=row.sleep_after,
        keep_alive=row.keep_alive,
        on_idle=row.on_idle,
        hibernate_after=row.hibernate_after,
        ephemeral=row.ephemeral,
        created_at=row.created_at,
        started_at=row.started_at,
        last_active_at=row.last_active_at if owner is None or not owner.awake else owner.last_active(),
        starts=row.starts,
        last_stop=row.last_stop,
        made_from=row.made_from,
        forked_from=row.forked_from,
        base=row.base,
        toolboxes=row.toolboxes,
        egress=None if row.egress is None else row.egress["mode"],
        network=network(Usage.model_validate(row.usage or {}), None)
        if owner is None
        else network(owner.meter.usage(), owner.door),
    )
    if owner is not None and owner.runtime is not None:
        info.active_operations = owner.operations
        info.active_connections = owner.connections
        info.active_terminals = owner.runtime.terminals.active()
        info.sleeps_in, info.sleeps_at = _from_now(owner.sleeps_in())
        info.hibernates_in, info.hibernates_at = _from_now(owner.hibernates_in())
    return info


def _from_now(seconds: float | None) -> tuple[float | None, datetime | None]:
    return (None, None) if seconds is None else (round(seconds, 3), now() + timedelta(seconds=seconds))


def _listed(change: Limits) -> str:
    given = change.model_dump(by_alias=True, include=change.model_fields_set)
    return ", ".join(f"{name} {'none' if value is None else value}" for name, value in given.items())


def _ordinal(number: int) -> str:
    suffix = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{suffix}"

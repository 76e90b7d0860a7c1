"""What a server that ended without saying so has left behind."""

from __future__ import annotations

import structlog

from skerry.control.actor import SERVER
from skerry.control.backups import SandboxBackups
from skerry.control.snapshots import Snapshots
from skerry.control.store import Store
from skerry.errors import SandboxBusyError
from skerry.models import State
from skerry.providers.contract import Provider

log = structlog.get_logger(__name__)

UNSETTLED = (State.ACTIVE, State.STARTING, State.FROZEN, State.DESTROYED)
"""States in which only a running server leaves a sandbox."""


async def settle(node: str, *, store: Store, provider: Provider, backups: SandboxBackups, snapshots: Snapshots) -> None:
    """Put it right, and say so."""
    rows = await store.all_sandboxes(node)
    for id, _ in backups.refills.left():
        await provider.forget(id)
        backups.refills.settled(id)
    for row in rows:
        if row.state not in UNSETTLED or not await _idle(provider, row.id):
            continue
        if row.state == State.DESTROYED:
            await provider.forget(row.id)
            await store.delete_sandbox(row.id)
            said = "It was destroyed; the server ended before that was done, and this one did the rest."
            await store.add_event(row.id, "destroyed", said, by=SERVER, to_state=State.DESTROYED)
        else:
            reason = "The server ended unexpectedly; processes that were running ended with it. The files are kept."
            if row.ephemeral:
                await provider.forget(row.id)
                reason = "The server ended unexpectedly; this sandbox is ephemeral, so its files are gone."
            await store.update_sandbox(row.id, state=State.HIBERNATED, last_stop=reason)
            await store.end_processes(row.id, reason)
            states = {"from_state": row.state, "to_state": State.HIBERNATED}
            await store.add_event(row.id, "died", reason, by=SERVER, **states)
    if provider.alone:
        backups.restores.forget_all_but({row.id for row in rows})
    for what in await provider.sweep({row.id for row in rows}, await snapshots.settle()):
        log.info("swept", what=what)


async def _idle(provider: Provider, id: str) -> bool:
    try:
        await provider.require_idle(id)
    except SandboxBusyError:
        return False
    return True

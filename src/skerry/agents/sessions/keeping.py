"""What stays of a session's sandbox: its files, in one snapshot, which each later one takes the place of."""

from __future__ import annotations

import structlog

from skerry.agents.sessions.state import State
from skerry.control.registry import Registry
from skerry.errors import SkerryError
from skerry.models import CreateSnapshot

log = structlog.get_logger(__name__)


class Keeping:
    def __init__(self, state: State, registry: Registry) -> None:
        self._state = state
        self._registry = registry

    @property
    def possible(self) -> bool:
        return self._registry.provider.capabilities().snapshots != "none"

    async def keep(self, reason: str) -> bool:
        """Whether there is nothing in the sandbox that is not kept."""
        state = self._state
        assert state.sandbox is not None
        before = state.row.snapshot
        try:
            made = await self._registry.snapshots.create(
                state.sandbox, CreateSnapshot(labels={"session": state.row.id})
            )
        except SkerryError as error:
            log.warning("session_snapshot_failed", session=state.row.id, code=error.code, message=error.message)
            state.hub.tell({"type": "sandbox_warning", "message": f"No snapshot could be taken: {error.message}"})
            return error.code == "sandbox_not_found"
        await state.set(snapshot=made.id)
        state.hub.tell({"type": "snapshot_saved", "snapshot": made.id, "reason": reason})
        if before is not None:
            await self._delete(before)
        return True

    async def forget(self) -> None:
        if self._state.row.snapshot is not None:
            await self._delete(self._state.row.snapshot)

    async def _delete(self, snapshot: str) -> None:
        try:
            await self._registry.snapshots.delete(snapshot, force=True)
        except SkerryError as error:
            log.info("session_snapshot_left", session=self._state.row.id, snapshot=snapshot, code=error.code)

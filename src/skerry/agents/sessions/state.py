"""How a session stands: in the store first, then in memory, then told to those who watch."""

from __future__ import annotations

from typing import Any

from skerry.agents.sessions.hub import Hub
from skerry.agents.sessions.models import SandboxStatus, SessionStatus
from skerry.control.actor import Caller
from skerry.control.session_rows import SessionRow, SessionRows
from skerry.models import now


class State:
    def __init__(self, row: SessionRow, rows: SessionRows, hub: Hub) -> None:
        self.row = row
        self.hub = hub
        self._rows = rows

    @property
    def sandbox_status(self) -> SandboxStatus:
        return SandboxStatus(self.row.sandbox_status)

    @property
    def sandbox(self) -> str | None:
        """The id of its sandbox within the server."""
        row = self.row
        return None if row.sandbox_id is None else Caller("", owner=row.owner).id(row.sandbox_id)

    async def set(self, **changes: Any) -> None:
        await self._rows.update(self.row.id, **changes)
        for name, value in {**changes, "updated_at": now()}.items():
            setattr(self.row, name, value)

    async def set_status(self, status: SessionStatus) -> None:
        await self.set(status=status.value)
        self.hub.tell({"type": "session_status", "status": status.value})

    async def set_sandbox(self, status: SandboxStatus, **changes: Any) -> None:
        await self.set(sandbox_status=status.value, **changes)
        self.hub.tell({"type": "sandbox_status", "status": status.value})

"""Tunnels: there a program that connects a port to the world, here a preview. Its name says whose run it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from starlette.types import Scope

from skerry.control.exposures import Exposure
from skerry.control.registry import Registry
from skerry.errors import PortNotExposedError, SandboxNotFoundError
from skerry.models import ExposePort
from skerry.server.cloudflare.box import Json
from skerry.server.cloudflare.faults import Fault, invalid, written
from skerry.server.places import Places
from skerry.settings import Settings

QUICK = "quick-"
"""How the ids of tunnels without a name begin, and so the names of the exposures that are such."""
LONGEST = 40


def facts_of(exposure: Exposure, settings: Settings, scope: Scope) -> Json:
    places = Places(exposure, settings, scope)
    url = places.url or places.path_url
    return {
        "port": exposure.port,
        "url": url,
        "hostname": url.split("://", 1)[-1].split("/", 1)[0],
        "createdAt": written(exposure.exposed_at),
    }


@dataclass
class Tunnels:
    """The tunnels of one sandbox, as the RPC transport's clients run them."""

    registry: Registry
    sandbox: str
    settings: Settings
    scope: Scope

    async def call(self, method: str, arguments: list[Any]) -> Any:
        match method, arguments:
            case "runQuickTunnel", [str(id), int(port), *_]:
                return self._info(await self._open(port, _checked(id)))
            case "destroyTunnel", [str(id), *_]:
                await self._close(await self._find(id))
                return {"success": True, "id": id}
            case "listTunnels", _:
                return [self._info(exposure) for exposure in await self._exposures()]
            case "ensureTunnelRun", [{"mode": "quick", "tunnelId": str(id), "runId": str(run), "port": int(port)}, *_]:
                return await self._ensure(_checked(id), _checked(run), port)
            case "stopTunnelRun", [{"tunnelId": str(id), "runId": str(run)}, *_]:
                return await self._stop(id, run)
            case "runNamedTunnel" | "ensureTunnelRun", _:
                raise invalid("Tunnels with a name of their own end at Cloudflare; leave the name out for a preview.")
        raise invalid("The arguments are not those of a tunnel.")

    async def _ensure(self, id: str, run: str, port: int) -> Json:
        known = await self.registry.exposures.find(self.sandbox, port)
        name = f"{id} {run}"
        started = known is None or known.name != name
        if started and known is not None and (known.name or "").startswith(QUICK):
            raise Fault("TUNNEL_RUN_CONFLICT", f"Port {port} has a tunnel already.", {"port": port}, status=409)
        facts = facts_of(await self._open(port, name) if known is None or started else known, self.settings, self.scope)
        snapshot = {"tunnelId": id, "runId": run, "mode": "quick", "port": port, "startedAt": facts["createdAt"]}
        return {"run": snapshot | {"url": facts["url"], "hostname": facts["hostname"]}, "started": started}

    async def _stop(self, id: str, run: str) -> Json:
        found = [exposure for exposure in await self._exposures() if exposure.name == f"{id} {run}"]
        for exposure in found:
            await self._close(exposure)
        return {"stopped": bool(found)}

    async def _open(self, port: int, name: str) -> Exposure:
        return await self.registry.exposures.expose(self.sandbox, ExposePort(port=port, name=name))

    async def _close(self, exposure: Exposure) -> None:
        try:
            await self.registry.exposures.unexpose(self.sandbox, exposure.port)
        except (PortNotExposedError, SandboxNotFoundError):
            return

    async def _find(self, id: str) -> Exposure:
        for exposure in await self._exposures():
            if (exposure.name or "").partition(" ")[0] == id:
                return exposure
        raise Fault("TUNNEL_NOT_FOUND", f"There is no tunnel {id[:100]!r}.", {"id": id[:100]}, status=404)

    async def _exposures(self) -> list[Exposure]:
        try:
            found = await self.registry.exposures.list(self.sandbox)
        except SandboxNotFoundError:
            return []
        return [exposure for exposure in found if (exposure.name or "").startswith(QUICK)]

    def _info(self, exposure: Exposure) -> Json:
        id = (exposure.name or "").partition(" ")[0]
        return {"id": id, **facts_of(exposure, self.settings, self.scope)}


def _checked(id: str) -> str:
    if not 1 <= len(id) <= LONGEST or not id.isprintable() or " " in id:
        raise invalid(f"The id of a tunnel has 1 to {LONGEST} characters.")
    return id

"""Exposed ports, as clients up to 0.10 manage them; later ones build their preview URLs from what they know."""

from __future__ import annotations

from skerry.control.exposures import Exposure
from skerry.errors import PortNotExposedError
from skerry.models import ExposePort
from skerry.server.cloudflare.box import Answer, Box, Json
from skerry.server.cloudflare.faults import Fault, written


def _port(box: Box) -> int:
    given = box.names.get("port") or box.body.get("port")
    if isinstance(given, str) and given.isascii() and given.isdigit():
        given = int(given)
    if not isinstance(given, int) or isinstance(given, bool) or not 1 <= given <= 65535:
        raise Fault("INVALID_PORT_NUMBER", f"Invalid port number: {given}", {"port": given})
    return given


def _facts(exposure: Exposure) -> Json:
    facts: Json = {"port": exposure.port, "status": "active", "exposedAt": written(exposure.exposed_at)}
    return facts | ({} if exposure.name is None else {"name": exposure.name})


async def expose(box: Box) -> Answer:
    port = _port(box)
    if await box.registry.exposures.find(box.id, port) is not None:
        raise Fault("PORT_ALREADY_EXPOSED", f"Port {port} is already exposed", {"port": port})
    return box.done(
        **_facts(await box.registry.exposures.expose(box.id, ExposePort(port=port, name=box.maybe("name"))))
    )


async def unexpose(box: Box) -> Answer:
    port = _port(box)
    try:
        await box.registry.exposures.unexpose(box.id, port)
    except PortNotExposedError:
        raise Fault("PORT_NOT_EXPOSED", f"Port {port} is not exposed", {"port": port}) from None
    return box.done(port=port)


async def list_ports(box: Box) -> Answer:
    found = [_facts(exposure) for exposure in await box.registry.exposures.list(box.id)]
    return box.done(ports=found, count=len(found))

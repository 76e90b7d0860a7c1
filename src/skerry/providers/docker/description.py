"""How a sandbox is described to a Docker Engine."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from skerry.models import Limits, shown_id
from skerry.providers.contract import Spec
from skerry.providers.local.bubblewrap import CAPABILITIES, LEAST_RUN_BYTES, RUN_BYTES, SHM_BYTES
from skerry.providers.local.controls import LEAST_QUOTA, PERIOD
from skerry.providers.local.toolbox import SCRATCH

DOOR = "/run/skerry-door"
"""Where the socket is, inside, that leads to the server; it vanishes when init has used it."""
FILTER = "/run/skerry-filter"
"""The filter of system calls that init puts on."""

HOME, SANDBOX, SNAPSHOT, IMAGE, SETTINGS, MADE = (
    f"skerry.{word}" for word in ("home", "sandbox", "snapshot", "image", "settings", "made")
)
"""Labels: which home's, which sandbox, which snapshot, which image below, how it was made, of what."""


@dataclass(frozen=True, slots=True)
class Mount:
    """Something of the host that is seen inside, and cannot be written to."""

    source: str
    target: str

    def written(self) -> dict[str, Any]:
        return {
            "Type": "bind",
            "Source": self.source,
            "Target": self.target,
            "ReadOnly": True,
            "BindOptions": {"Propagation": "rprivate"},
        }


def settings(
    spec: Spec,
    *,
    home: str,
    image: str,
    init: Sequence[str],
    mounts: Sequence[Mount],
    door: str,
    disk: int | None,
) -> dict[str, Any]:
    """What a container is made with; ``disk`` is how much its files may be, where the engine's disk counts them."""
    limits = spec.limits
    run = RUN_BYTES if limits.tmpfs is None else min(RUN_BYTES, max(LEAST_RUN_BYTES, limits.tmpfs))
    name = shown_id(spec.id)
    hostname = "sandbox" if name.startswith(".") else name[:63].rstrip("-.")
    host: dict[str, Any] = {
        "NetworkMode": "none",
        "IpcMode": "private",
        "CgroupnsMode": "private",
        "Dns": ["127.0.0.1"],
        "ExtraHosts": [f"{hostname}:127.0.0.1"],  # programs look themselves up, and would wait for the door to answer
        "CapDrop": ["ALL"],
        "CapAdd": sorted(CAPABILITIES),
        "SecurityOpt": ["no-new-privileges"],
        "Sysctls": {"net.ipv6.conf.all.disable_ipv6": "0"},  # of which it has the loopback
        "Init": False,
        "AutoRemove": False,
        "RestartPolicy": {"Name": "no"},
        "LogConfig": {"Type": "json-file", "Config": {"max-size": "64k", "max-file": "1"}},
        "Mounts": [mount.written() for mount in (*mounts, Mount(door, DOOR))],
        "Tmpfs": {"/run": f"rw,nosuid,nodev,exec,mode=755,size={run}", SCRATCH: f"rw,nosuid,nodev,mode=700,size={run}"},
        "ShmSize": limits.tmpfs or SHM_BYTES,
        **resources(limits),
    }
    if limits.open_files is not None:
        host["Ulimits"] = [{"Name": "nofile", "Soft": limits.open_files, "Hard": limits.open_files}]
    if disk is not None:
        host["StorageOpt"] = {"size": str(disk)}
    made: dict[str, Any] = {
        "Image": image,
        "Hostname": hostname,
        "User": "0:0",
        "WorkingDir": "/",
        "Entrypoint": [*init, f"{DOOR}/socket", FILTER],
        "Cmd": [],
        "Env": [],
        "Healthcheck": {"Test": ["NONE"]},
        "StopSignal": "SIGKILL",
        "Labels": {
            HOME: home,
            SANDBOX: spec.id,
            IMAGE: spec.image,
            SNAPSHOT: "",  # which it would have from its image
            MADE: "",
            "agentpod.sandbox.id": name,
            "agentpod.sandbox.managed": "true",
            "agentpod.sandbox.user": spec.owner or "",
            "skerry.tier": limits.tier or "",
        },
        "HostConfig": host,
    }
    made["Labels"][SETTINGS] = _digest(made)
    return made


def resources(limits: Limits) -> dict[str, Any]:
    """What can be changed while it runs. A limit that was not given is none."""
    quota = -1 if limits.cpu is None else max(LEAST_QUOTA, round(limits.cpu * PERIOD))
    return {
        "Memory": limits.memory or 0,
        "MemorySwap": limits.memory or -1,
        "CpuPeriod": PERIOD,
        "CpuQuota": quota,
        "PidsLimit": limits.pids or -1,
    }


def _digest(made: Mapping[str, Any]) -> str:
    """Of all that cannot be changed once it is made, but the image: that is where its files came from."""
    host = {name: value for name, value in made["HostConfig"].items() if name not in resources(Limits())}
    rest = {name: value for name, value in made.items() if name not in ("Image", "HostConfig")}
    rest["Labels"] = {name: value for name, value in made["Labels"].items() if name != "skerry.tier"}
    return hashlib.sha256(json.dumps([rest, host], sort_keys=True).encode()).hexdigest()[:16]

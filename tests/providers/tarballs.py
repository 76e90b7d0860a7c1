"""Small archives, honest and otherwise."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Entry = tarfile.TarInfo | tuple[tarfile.TarInfo, bytes]


def entry(name: str, kind: bytes = tarfile.REGTYPE, **fields: Any) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type = kind
    info.mode = 0o755 if kind == tarfile.DIRTYPE else 0o644
    for field, value in fields.items():
        setattr(info, field, value)
    return info


def file(name: str, content: bytes = b"", **fields: Any) -> Entry:
    return entry(name, size=len(content), **fields), content


def directory(name: str, **fields: Any) -> Entry:
    return entry(name, tarfile.DIRTYPE, **fields)


def link(name: str, target: str) -> Entry:
    return entry(name, tarfile.SYMTYPE, linkname=target)


def hard_link(name: str, target: str) -> Entry:
    return entry(name, tarfile.LNKTYPE, linkname=target)


SHELL = file("bin/sh", b"#!/bin/true\n", mode=0o755)


def tarball(path: Path, entries: Iterable[Entry], mode: str = "w") -> Path:
    path.write_bytes(packed(entries, mode))
    return path


def packed(entries: Iterable[Entry], mode: str = "w") -> bytes:
    memory = io.BytesIO()
    with tarfile.open(fileobj=memory, mode=mode) as tar:  # type: ignore[call-overload]
        for one in entries:
            info, content = one if isinstance(one, tuple) else (one, b"")
            tar.addfile(info, io.BytesIO(content))
    return memory.getvalue()


def saved_by_docker(path: Path, layers: list[bytes], mode: str = "w") -> Path:
    names = [f"{hashlib.sha256(layer).hexdigest()}/layer.tar" for layer in layers]
    manifest = json.dumps([{"Config": "c.json", "Layers": names}]).encode()
    # The order of the archive is not the order of the layers.
    files = [file(name, layer) for name, layer in reversed(list(zip(names, layers, strict=True)))]
    return tarball(path, [*files, file("manifest.json", manifest)], mode)


def saved_as_oci(path: Path, layers: list[bytes], platforms: list[dict[str, str]]) -> Path:
    blobs: dict[str, bytes] = {}

    def blob(content: bytes) -> dict[str, Any]:
        digest = hashlib.sha256(content).hexdigest()
        blobs[f"blobs/sha256/{digest}"] = content
        return {"digest": f"sha256:{digest}", "size": len(content)}

    image = blob(json.dumps({"layers": [blob(layer) for layer in layers]}).encode())
    other = blob(json.dumps({"layers": []}).encode())
    manifests = [{**(image if index == 0 else other), "platform": where} for index, where in enumerate(platforms)]
    index = blob(json.dumps({"manifests": list(reversed(manifests))}).encode())
    top = json.dumps({"manifests": [index]}).encode()
    entries = [directory("blobs"), *(file(name, content) for name, content in blobs.items())]
    return tarball(path, [*entries, file("index.json", top), file("oci-layout", b"{}")])

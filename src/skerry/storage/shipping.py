"""Machines that lie in a bucket: ``machines/<id>.json`` says what a machine is and which backup holds its files.

Whoever wakes one first puts a mark beside it that only one can put there, so that no machine is woken twice.
"""

from __future__ import annotations

import base64
import json
from datetime import datetime
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from skerry.errors import BackupDamagedError, BackupKeyError, ObjectNotFoundError
from skerry.storage.bucket import Bucket
from skerry.storage.encryption import Key, Seal, reopened

PREFIX = "machines"


class Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    id: str
    generation: str
    """Another one each time it is shipped."""
    backup: str
    node: str
    shipped_at: datetime
    starts: int
    settings: dict[str, Any]
    """Its image, environment, labels and whatever else it was made with."""


async def save(bucket: Bucket, record: Record, key: Key | None) -> None:
    await bucket.put(_key(record.id), _encode(record, key))


async def find(bucket: Bucket, id: str, key: Key | None) -> Record | None:
    try:
        return _decode(id, await bucket.get(_key(id)), key)
    except ObjectNotFoundError:
        return None


async def claim(bucket: Bucket, id: str, generation: str, node: str) -> str:
    """Whose it is to wake it: ``node``, or whoever came first."""
    mark = f"{PREFIX}/{id}.{generation}.woken"
    if await bucket.create(mark, node.encode()):
        return node
    return (await bucket.get(mark)).decode(errors="replace")


async def unclaim(bucket: Bucket, id: str, generation: str) -> None:
    await bucket.delete(f"{PREFIX}/{id}.{generation}.woken")


async def forget(bucket: Bucket, id: str) -> None:
    await bucket.delete(_key(id))


def _key(id: str) -> str:
    return f"{PREFIX}/{id}.json"


def _encode(record: Record, key: Key | None) -> bytes:
    text = record.model_dump_json()
    if key is None:
        return json.dumps({"machine": text}).encode()
    # It has the environment in it, and with that whatever is secret there.
    seal = Seal(key, _key(record.id))
    sealed = base64.b64encode(seal.close(text.encode(), 0, True)).decode()
    return json.dumps({"sealed": sealed, "salt": seal.salt.hex(), "sign": seal.sign}).encode()


def _decode(id: str, data: bytes, key: Key | None) -> Record:
    try:
        body: Any = json.loads(data)
        if "machine" in body:
            if key is not None:
                raise BackupKeyError(
                    f"Machine {id!r} was shipped unencrypted, but this server has a key, so nothing vouches for it.",
                    hint="Wake it with a server that has no key, if you know where it comes from.",
                )
            text = body["machine"]
        else:
            seal = reopened(key, _key(id), body["salt"], body["sign"])
            text = seal.open(base64.b64decode(body["sealed"]), 0, True)
        record = Record.model_validate_json(text)
    except (ValueError, KeyError, TypeError, RecursionError, ValidationError):
        raise BackupDamagedError(f"What is stored of machine {id!r} cannot be understood.") from None
    if record.id != id:
        raise BackupDamagedError(f"What is stored of machine {id!r} is another one.")
    return record

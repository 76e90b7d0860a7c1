"""What all models have in common."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, PlainSerializer
from pydantic.alias_generators import to_camel


def now() -> datetime:
    return datetime.now(UTC)


MARK = 10


def shown_id(id: str) -> str:
    """The id of a sandbox as its owner knows it.

    Within a server the ids of all owners but the local one end in a mark of the owner (``demo-k3x7q2ab-``). No id that
    a person gives ends in a hyphen.
    """
    return id[:-MARK] if id.endswith("-") else id


SandboxRef = Annotated[str, PlainSerializer(shown_id, return_type=str, when_used="json")]
"""The id of a sandbox, which leaves the server without its owner's mark."""
BackupRef = SandboxRef
"""The id of a backup, which has the mark of its sandbox."""


class Request(BaseModel):
    model_config = ConfigDict(
        alias_generator=to_camel, populate_by_name=True, extra="forbid", allow_inf_nan=False, defer_build=True
    )


class Result(BaseModel):
    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="ignore", defer_build=True)


EnvVars = dict[str, str]
Labels = dict[str, str]


class Done(Result):
    """The answer of operations that have nothing to say but that they happened."""

    ok: bool = True
    sandbox_id: SandboxRef | None = None


Encoding = Literal["utf-8", "base64"]

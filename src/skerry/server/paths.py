"""The path and query parameters that several routes share."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path, Query
from pydantic import AfterValidator

from skerry.control.actor import own_id

LARGEST = 2**63 - 1

SandboxId = Annotated[str, AfterValidator(own_id), Path(description="The sandbox: 1 to 63 of a-z 0-9 - _.")]
FilePath = Annotated[str, Query(min_length=1, description="Absolute, or relative to /workspace.")]
OctalMode = Annotated[str | None, Query(pattern="^[0-7]{3,4}$", description="Permissions in octal: 644, 0755.")]
Force = Annotated[bool, Query(description="Also below /etc, /usr and the like.")]

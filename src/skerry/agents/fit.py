"""Whether a sandbox that is there already is the one that was asked for. It is used as it is, and never silently in
place of another.
"""

from __future__ import annotations

from skerry.errors import ConflictError
from skerry.models import CreateSandbox, EgressInfo, EgressPolicy, SandboxInfo, shown_id


def check_fit(asked: CreateSandbox, info: SandboxInfo, egress: EgressInfo, provider: str | None = None) -> None:
    """``provider`` is the one that was asked for by name. Raises ``ConflictError``."""
    given, odd = asked.model_fields_set, list[str]()
    if provider not in (None, info.provider):
        odd.append("provider")
    if "image" in given and asked.image != info.image:
        odd.append("image")
    if any(info.env.get(name) != value for name, value in asked.env.items()):
        odd.append("env")
    if any(getattr(info.limits, name) != value for name, value in asked.limits.model_dump(exclude_none=True).items()):
        odd.append("limits")
    if asked.egress is not None and not _same(asked.egress, egress):
        odd.append("egress")
    if not set(asked.toolboxes) <= set(info.toolboxes):
        odd.append("toolboxes")
    if odd:
        raise ConflictError(
            f"Sandbox {shown_id(info.id)!r} is there already, and not with this: {', '.join(odd)}.",
            hint="Leave that out to use it as it is, change the sandbox first, or work in another.",
            details={"differs": odd},
        )


def _same(asked: str | EgressPolicy, found: EgressInfo) -> bool:
    if isinstance(asked, str):
        return asked == found.mode
    return (asked.mode, asked.allow, asked.deny) == (found.mode, found.allow, found.deny)

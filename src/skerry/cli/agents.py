"""What all commands that set an agent to work have in common."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from skerry.cli.context import pairs
from skerry.cli.egress import SECRET, parse_secret

if TYPE_CHECKING:
    from skerry import Client

Agent = Annotated[str | None, typer.Option("--agent", help="opencode (the usual one) or claude-code.")]
Provider = Annotated[str | None, typer.Option("--provider", "-p", help="Where: local, docker, cloudflare, modal.")]
Model = Annotated[str | None, typer.Option("--model", "-m", help="PROVIDER/MODEL.")]
Config = Annotated[Path | None, typer.Option("--config", help="The agent's configuration, a JSON file.")]
Secret = Annotated[list[str] | None, typer.Option("--secret", help=SECRET)]
Mode = Annotated[
    Literal["none", "allowlist", "open"] | None, typer.Option("--egress", help="What it may reach at all.")
]
Allow = Annotated[list[str] | None, typer.Option("--allow", "-a", help="Where it may go; may be given again.")]
Variables = Annotated[list[str] | None, typer.Option("--env", "-e", help="NAME=VALUE; may be given again.")]


def surroundings(
    config: Path | None,
    secret: list[str] | None,
    egress: str | None,
    allow: list[str] | None,
    env: list[str] | None,
) -> dict[str, Any]:
    """How the agent is configured, and what its sandbox has and may reach, where that was said."""
    options: dict[str, Any] = {}
    if config is not None:
        options["config"] = _configuration(config)
    if secret:
        options["secrets"] = dict(parse_secret(text) for text in secret)
    if egress is not None or allow:
        options["egress"] = {"mode": egress or "allowlist", "allow": allow or []}
    if env:
        options["env"] = pairs(env, "--env")
    return options


def _configuration(path: Path) -> Any:
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise typer.BadParameter(f"{path} is no JSON: {error}.", param_hint="--config") from None
    if not isinstance(found, dict):
        raise typer.BadParameter(f"{path} holds no settings: {{…}} is wanted.", param_hint="--config")
    return found


def given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def has_server(client: Client) -> bool:
    return client.connection.endpoint().host is None


def need_server(client: Client, what: str) -> None:
    from skerry import InvalidRequestError

    if not has_server(client):
        raise InvalidRequestError(
            f"Without a server there is nobody to leave a {what} to.", hint="Start one with `skerry serve`."
        )

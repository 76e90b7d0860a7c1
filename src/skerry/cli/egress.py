"""What a sandbox may reach outside: egress."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from skerry.cli.context import target_of
from skerry.cli.output import AsJson, print_json

if TYPE_CHECKING:
    from skerry.models import EgressInfo

Name = Annotated[str, typer.Argument(help="The sandbox.")]
SECRET = "HOST=HEADER:SOURCE[:SCHEME], such as api.anthropic.com=x-api-key:env:ANTHROPIC_API_KEY."


def register(app: typer.Typer) -> None:
    app.command()(egress)


def egress(
    context: typer.Context,
    name: Name,
    mode: Annotated[Literal["none", "allowlist", "open"] | None, typer.Option(help="What it may reach at all.")] = None,
    allow: Annotated[
        list[str] | None,
        typer.Option("--allow", "-a", help="pypi.org, *.example.com:443, 10.0.0.0/8, 'GET host/path', registries."),
    ] = None,
    deny: Annotated[
        list[str] | None,
        typer.Option("--deny", "-d", help="Refused all the same: example.com, *.example.com, 10.0.0.0/8."),
    ] = None,
    secret: Annotated[list[str] | None, typer.Option("--secret", help=SECRET)] = None,
    as_json: AsJson = False,
) -> None:
    """Show what a sandbox may reach outside, or change it: given rules and secrets replace those there were."""
    secrets = None if secret is None else dict(parse_secret(text) for text in secret)
    with target_of(context).sandbox(name) as sandbox:
        if mode is None and allow is None and deny is None and secrets is None:
            found = sandbox.egress()
        else:
            found = sandbox.set_egress(mode, allow=allow, deny=deny, secrets=secrets)
    if as_json:
        return print_json(found)
    _print(found)


def parse_secret(text: str) -> tuple[str, dict[str, Any]]:
    host, _, rest = text.partition("=")
    parts = rest.split(":", 3)
    if not host or len(parts) < 3:
        raise typer.BadParameter(f"Write a secret as {SECRET}")
    found: dict[str, Any] = {"header": parts[0], "value_from": f"{parts[1]}:{parts[2]}"}
    return host, found | ({"scheme": parts[3]} if len(parts) == 4 else {})


def _print(found: EgressInfo) -> None:
    print(f"mode    {found.mode}{' (the server’s)' if found.inherited else ''}")
    for rule in found.allow:
        print(f"allow   {rule if isinstance(rule, str) else _rule(rule)}")
    for host in found.deny:
        print(f"deny    {host}")
    for host, secret in found.secrets.items():
        print(f"secret  {host}  {secret.header} from {secret.value_from}")
    network = found.network
    print(f"bytes   {network.bytes_in} in, {network.bytes_out} out; {network.refused} refused")


def _rule(rule: Any) -> str:
    methods = ",".join(rule.methods) + " " if rule.methods else ""
    ports = ":" + ",".join(map(str, rule.ports)) if rule.ports else ""
    return f"{methods}{rule.host}{ports}{rule.path or ''}"

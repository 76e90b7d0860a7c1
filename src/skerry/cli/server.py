"""The server and this machine: serve, doctor, version."""

from __future__ import annotations

import gc
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from skerry.cli.context import target_of
from skerry.cli.output import AsJson, print_json


def register(app: typer.Typer) -> None:
    for command in (serve, doctor, version):
        app.command()(command)


def serve(
    context: typer.Context,
    host: Annotated[str | None, typer.Option(help="The address to listen on [127.0.0.1; env: SKERRY_HOST].")] = None,
    port: Annotated[int | None, typer.Option(help="The port, 0 for any [8787; env: SKERRY_PORT].")] = None,
    home: Annotated[Path | None, typer.Option(help="Where sandboxes are kept [env: SKERRY_HOME].")] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(help="A file of API keys, one a line; whoever asks needs one of them.")
    ] = None,
    database_url: Annotated[str | None, typer.Option(help="The database [SQLite in the home].")] = None,
    warm_pool: Annotated[int | None, typer.Option(help="Machines to keep started in advance.")] = None,
    spares: Annotated[
        int | None, typer.Option(help="Machines to keep half started, for sandboxes of any kind [5].", min=0)
    ] = None,
    sleep_after: Annotated[float | None, typer.Option(help="Idle seconds before a sandbox sleeps [600].")] = None,
) -> None:
    """Serve the HTTP API until told to stop."""
    from pydantic import ValidationError

    from skerry.settings import SPARES, Settings

    try:
        settings = Settings.from_env(
            host=host,
            port=port,
            home=home or target_of(context).home,
            api_keys=_keys(api_key_file),
            database_url=database_url,
            warm_pool=warm_pool,
            spares=SPARES if spares is None and "SKERRY_SPARES" not in os.environ else spares,
            sleep_after=sleep_after,
        )
    except ValidationError as error:
        first = error.errors()[0]
        raise typer.BadParameter(f"{first['loc'][0]}: {first['msg']}.") from None

    gc.disable()  # until it serves: there is much to load, and all of it stays
    from skerry.errors import BucketSettingsError
    from skerry.server.serve import run

    try:
        # The first line of stdout is the URL, for programs that start a server and read it.
        run(settings, on_ready=_announce)
    except BucketSettingsError as error:
        print(f"error: {error.message}", file=sys.stderr)
        if error.hint:
            print(f"hint: {error.hint}", file=sys.stderr)
        raise typer.Exit(2) from None


def _keys(file: Path | None) -> tuple[str, ...] | None:
    if file is None:
        return None
    keys = tuple(line.strip() for line in file.read_text().splitlines() if line.strip())
    if not keys:
        raise typer.BadParameter(f"{file} holds no key.", param_hint="--api-key-file")
    return keys


def _announce(url: str) -> None:
    print(f"Skerry listens on {url}", flush=True)
    print(
        f"For Cloudflare's SandboxClient: baseUrl {url}/v1/sandboxes/NAME/container; for its bridge: {url}", flush=True
    )
    if sys.stdout.isatty():
        print(f"Next: SKERRY_URL={url} skerry exec demo -- uname -a\nThe API is described at {url}/docs", flush=True)


def doctor(context: typer.Context, as_json: AsJson = False) -> None:
    """Check whether sandboxes can be run, on this machine or where its provider is, and say what is missing."""
    from skerry.providers.select import examine
    from skerry.settings import Settings

    settings = Settings.from_env(home=target_of(context).home)
    findings = examine(settings)
    who = {"local": "This machine", "docker": "The Docker Engine", "modal": "Modal"}.get(
        settings.provider, "The bridge"
    )
    unfit = any(finding.fatal and not finding.ok for finding in findings)
    if as_json:
        print_json({"ok": not unfit, "findings": [asdict(finding) for finding in findings]})
        raise typer.Exit(1 if unfit else 0)
    colour = sys.stdout.isatty()
    for finding in findings:
        word, code = ("ok", 32) if finding.ok else ("MISSING", 31) if finding.fatal else ("limited", 33)
        mark = f"\x1b[{code}m{word:<8}\x1b[0m" if colour else f"{word:<8}"
        print(f"{mark} {finding.name}: {finding.detail}")
        if not finding.ok and finding.remedy:
            print(f"{'':<8} → {finding.remedy}")
    print(f"{who} cannot run sandboxes yet." if unfit else f"{who} can run sandboxes.")
    raise typer.Exit(1 if unfit else 0)


def version(as_json: AsJson = False) -> None:
    """Print the version."""
    from skerry import __version__

    print_json({"version": __version__}) if as_json else print(f"skerry {__version__}")

"""Ports: expose, unexpose, ports, open, forward."""

from __future__ import annotations

import os
import sys
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from skerry.cli.context import target_of
from skerry.cli.output import AsJson, print_json, print_table

if TYPE_CHECKING:
    from skerry import AsyncSandbox, ExposedPort

Name = Annotated[str, typer.Argument(help="The sandbox.")]
Port = Annotated[int, typer.Argument(help="The port inside.", min=1, max=65535)]
Pair = tuple[int, int]


def register(app: typer.Typer) -> None:
    app.command()(expose)
    app.command()(unexpose)
    app.command()(ports)
    app.command("open")(open_preview)
    app.command()(forward)


def expose(
    context: typer.Context,
    sandbox: Name,
    port: Port,
    name: Annotated[str | None, typer.Option(help="What to call it.")] = None,
    token: Annotated[str | None, typer.Option(help="Its token; random without.")] = None,
    hostname: Annotated[str | None, typer.Option(help="A domain whose subdomains reach the server.")] = None,
    private: Annotated[bool, typer.Option("--private", help="Only with the API key or a signed link.")] = False,
    wake: Annotated[bool, typer.Option("--wake", help="A visit wakes the sandbox.")] = False,
    as_json: AsJson = False,
) -> None:
    """Give a port of a sandbox an address for browsers, and print it."""
    with target_of(context).sandbox(sandbox) as machine:
        exposed = machine.expose_port(port, name, token=token, hostname=hostname, private=private, wake_on_request=wake)
    print_json(exposed) if as_json else _show(exposed)


def unexpose(context: typer.Context, sandbox: Name, port: Port) -> None:
    """Take the address of a port away again."""
    with target_of(context).existing(sandbox) as machine:
        machine.unexpose_port(port)


def ports(context: typer.Context, sandbox: Name, as_json: AsJson = False) -> None:
    """List the exposed ports of a sandbox."""
    with target_of(context).existing(sandbox) as machine:
        found = machine.get_exposed_ports()
    if as_json:
        return print_json(found)
    rows = [(one.port, one.name, _manner(one), one.exposed_at, one.url or one.path_url) for one in found]
    print_table(("PORT", "NAME", "ACCESS", "EXPOSED", "URL"), rows)


def open_preview(
    context: typer.Context,
    sandbox: Name,
    port: Port,
    print_only: Annotated[bool, typer.Option("--print", help="Only print the address.")] = False,
) -> None:
    """Open a port of a sandbox in the browser; exposes it if needed."""
    with target_of(context).existing(sandbox) as machine:
        exposed = next((one for one in machine.get_exposed_ports() if one.port == port), None)
        if exposed is None:
            exposed = machine.expose_port(port)
        url = exposed.url or exposed.path_url
        if exposed.private:
            link = machine.create_preview_link(port)
            url = link.url or link.path_url
    if exposed.note:
        print(exposed.note, file=sys.stderr)
    print(url)
    if not print_only and sys.stdout.isatty() and _has_browser() and url.startswith("http"):
        import webbrowser

        webbrowser.open(url)


def forward(
    context: typer.Context,
    sandbox: Name,
    pairs: Annotated[
        list[str] | None, typer.Argument(metavar="[LOCAL:INSIDE]...", help="3000:3000, or 3000 where both are equal.")
    ] = None,
    reverse: Annotated[
        list[str] | None,
        typer.Option("--reverse", "-R", metavar="INSIDE:LOCAL", help="A port of this machine appears inside."),
    ] = None,
    address: Annotated[str, typer.Option(help="The address of this machine to listen on.")] = "127.0.0.1",
) -> None:
    """Join ports of this machine and of a sandbox by TCP, until Ctrl-C."""
    import asyncio

    there = [_pair(text, 0) for text in pairs or ()]
    back = [_pair(text, 1) for text in reverse or ()]
    if not there and not back:
        raise typer.BadParameter("Name the ports: LOCAL:INSIDE, or -R INSIDE:LOCAL.")
    target_of(context).existing(sandbox).close()
    asyncio.run(_forward(target_of(context).async_sandbox(sandbox), there, back, address))


async def _forward(sandbox: AsyncSandbox, there: list[Pair], back: list[Pair], address: str) -> None:
    import asyncio

    from skerry.client.forwarding import Forward, reverse

    told: set[str] = set()

    def say(text: str) -> None:
        if text not in told:  # a browser tries again and again
            told.add(text)
            print(text, file=sys.stderr, flush=True)

    async with AsyncExitStack() as stack:
        await stack.enter_async_context(sandbox)
        for local, inside in there:
            way = Forward(sandbox._link, inside, say)
            stack.push_async_callback(way.close)
            port = await way.open(address, local)
            print(f"{address}:{port} here leads to port {inside} in {sandbox.id}.", flush=True)
        tasks = []
        for inside, local in back:
            opened = partial(print, f"Port {inside} in {sandbox.id} leads to 127.0.0.1:{local} here.", flush=True)
            tasks.append(asyncio.create_task(reverse(sandbox._link, inside, "127.0.0.1", local, say, opened)))
        try:
            await (asyncio.gather(*tasks) if tasks else asyncio.Event().wait())
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def _pair(text: str, least: int) -> Pair:
    first, colon, second = text.partition(":")
    numbers = (first, second if colon else first)
    if not all(number.isascii() and number.isdigit() and len(number) <= 5 for number in numbers):
        raise typer.BadParameter(f"{text!r} is not a pair of ports like 3000:3000.")
    one, other = int(numbers[0]), int(numbers[1])
    if not (least <= one <= 65535 and 1 <= other <= 65535):
        raise typer.BadParameter(f"{text!r}: a port is a number from 1 to 65535.")
    return one, other


def _show(exposed: ExposedPort) -> None:
    print(exposed.url or exposed.path_url)
    if exposed.note:
        print(exposed.note, file=sys.stderr)


def _manner(exposed: ExposedPort) -> str:
    return ("private" if exposed.private else "public") + (", wakes" if exposed.wake_on_request else "")


def _has_browser() -> bool:
    """Whether there is one with a window; a text browser would take the terminal over."""
    if sys.platform != "darwin" and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        return bool(os.environ.get("BROWSER"))
    import webbrowser

    try:
        webbrowser.get()
    except webbrowser.Error:
        return False
    return True

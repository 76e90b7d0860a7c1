"""Programs that know no proxy: their connections are led to the door, and names are looked up there."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from skerry.control.registry import Registry
from skerry.control.store import Store
from skerry.models import CreateSandbox, EgressPolicy
from skerry.providers.select import create_provider
from skerry.settings import Settings
from tests.egress.conftest import HERE, THERE, Box, Make, Names, World
from tests.providers.users import needs_root

pytestmark = needs_root

DIRECT = "curl -sS -m 20 --noproxy '*'"
UNAWARE = "env -u HTTP_PROXY -u http_proxy -u HTTPS_PROXY -u https_proxy -u ALL_PROXY -u all_proxy"


async def test_a_program_that_knows_no_proxy_gets_out(make: Make) -> None:
    box = await make("allowlist", ["good.test"])
    assert (await box.registry.egress(box.id)).transparent is False  # it has not started yet
    assert await box.out(f"{DIRECT} http://good.test/hello") == "hello from outside\n"
    assert await box.out(f"{DIRECT} https://good.test/hello") == "hello from outside\n"
    assert (await box.registry.egress(box.id)).transparent is True
    connect = "import socket; s = socket.create_connection(('good.test', 8000)); "
    raw = connect + "s.send(b'GET /hello HTTP/1.0\\r\\n\\r\\n'); print(s.recv(999)[:12])"
    assert await box.out(f'{UNAWARE} python3 -c "{raw}"') == "b'HTTP/1.1 200'\n"
    fetch = "fetch('http://good.test/hello').then(r => r.text()).then(console.log)"
    assert (await box.out(f'{UNAWARE} node -e "{fetch}"')).strip() == "hello from outside"


async def test_what_is_not_allowed_is_refused_at_once(make: Make, names: Names) -> None:
    box = await make("allowlist", ["good.test:80"])
    before, began = len(names.asked), time.monotonic()
    assert (await box.sh(f"{DIRECT} http://evil.test/")).exit_code == 6
    said = json.loads(await box.out(f"{DIRECT} http://{THERE}/hello"))
    assert said["error"]["message"] == f"{THERE}:80 is not on this sandbox's allow-list."
    assert (await box.sh(f"{DIRECT} https://{THERE}/hello")).exit_code == 35
    assert (await box.sh(f"{DIRECT} https://good.test/hello")).exit_code == 35
    assert "evil.test" not in names.asked[before:]
    assert time.monotonic() - began < 10
    hosts = [event["host"] for event in await box.events("egress_refused")]
    assert hosts == ["evil.test", THERE, "good.test"]


@pytest.mark.parametrize("host", ["10.0.0.1", "169.254.169.254", HERE, "224.0.0.1", "metadata2.test"])
async def test_private_places_stay_out_of_reach(make: Make, names: Names, host: str) -> None:
    names.known["metadata2.test"] = ["169.254.169.254"]
    box = await make("open")
    done = await box.sh(f"{DIRECT} http://{host}/latest")
    assert done.exit_code != 0 or "error" in json.loads(done.stdout)


async def test_none_is_none_for_them_too(make: Make, names: Names) -> None:
    box = await make("none")
    before = len(names.asked)
    assert "egress is 'none'" in await box.out(f"{DIRECT} http://{THERE}/hello")
    assert (await box.sh("getent ahosts good.test")).exit_code != 0
    assert len(names.asked) == before


async def test_names_are_looked_up_under_the_policy(make: Make) -> None:
    box = await make("allowlist", ["good.test", "gone.test"])
    assert (await box.out("getent ahostsv4 good.test")).startswith("198.18.0.1 ")
    assert (await box.sh("getent ahosts gone.test")).exit_code == 2
    assert (await box.sh("getent ahosts secret-words.evil.test")).exit_code == 2
    assert [event["host"] for event in await box.events("egress_refused")] == ["secret-words.evil.test"]


async def test_a_stand_in_means_its_name_to_the_proxy_as_well(make: Make) -> None:
    box = await make("allowlist", ["good.test"])
    await box.sh("getent ahosts good.test")
    said = await box.out("curl -sS --socks5 127.0.0.1:61080 http://good.test/hello")
    assert said == "hello from outside\n"
    assert "198.18.0.9:80 is not a public address" in await box.out("curl -sS http://198.18.0.9/")


async def test_other_name_servers_are_this_one(make: Make) -> None:
    box = await make("open")
    await box.sh("echo nameserver 8.8.8.8 > /etc/resolv.conf")
    assert (await box.out("getent ahostsv4 good.test")).startswith("198.18.0.1 ")


TRY = """python3 - <<'PYTHON'
import errno, socket
def attempt(family, kind, *target):
    s = socket.socket(family, kind); s.settimeout(20)
    try:
        s.connect(target)
        if kind == socket.SOCK_DGRAM: s.send(b"x"); s.recv(10)
        return "connected"
    except OSError as error:
        return errno.errorcode.get(error.errno, repr(error))
for words in TARGETS:
    print(attempt(*words))
PYTHON"""
TCP4, UDP4 = "socket.AF_INET, socket.SOCK_STREAM", "socket.AF_INET, socket.SOCK_DGRAM"
TCP6, UDP6 = "socket.AF_INET6, socket.SOCK_STREAM", "socket.AF_INET6, socket.SOCK_DGRAM"


def attempts(*targets: str) -> str:
    return TRY.replace("TARGETS", f"[{', '.join(f'({target})' for target in targets)}]")


async def test_what_is_not_led_to_the_door_fails_at_once(make: Make) -> None:
    box = await make("open")
    began = time.monotonic()
    said = await box.out(
        attempts(f"{UDP4}, '{THERE}', 443", f"{TCP6}, '2606:4700::1111', 443", f"{UDP6}, '2606:4700::1111', 443")
    )
    assert said.split() == ["ECONNREFUSED", "ENETUNREACH", "ENETUNREACH"]
    assert time.monotonic() - began < 10


async def test_without_it_the_network_is_unreachable_at_once_and_the_proxy_works(
    world: World, names: Names, tmp_path: Path
) -> None:
    settings = Settings(home=tmp_path / "home", egress_transparent=False)
    registry = Registry(create_provider(settings), Store(settings.store_url), settings, resolver=names)
    await registry.open()
    try:
        box = Box("around", registry)
        await registry.create(CreateSandbox(id="around", egress=EgressPolicy(mode="allowlist", allow=["good.test"])))
        began = time.monotonic()
        said = await box.out(attempts(f"{TCP4}, '{THERE}', 80", f"{UDP4}, '{THERE}', 443", f"{TCP4}, 'good.test', 80"))
        assert said.split() == ["ENETUNREACH"] * 3
        assert time.monotonic() - began < 10
        assert (await registry.egress("around")).transparent is False
        assert await box.out("curl -sS http://good.test/hello") == "hello from outside\n"
        assert "not on this" in await box.out("curl -sS http://evil.test/hello")
        before = len(names.asked)
        assert (await box.sh("getent ahosts secret-words.evil.test")).exit_code == 2
        assert len(names.asked) == before
    finally:
        await registry.close()


async def test_servers_inside_are_reached_as_ever(make: Make) -> None:
    box = await make("open")
    await box.sh("mkdir -p /tmp/site && echo inside > /tmp/site/index.html")
    await box.sh("cd /tmp/site && (python3 -m http.server 80 >/dev/null 2>&1 &) && sleep 1")
    assert await box.out("curl -sS http://127.0.0.1/ && curl -sS http://localhost/") == "inside\ninside\n"


@pytest.mark.parametrize(
    "query",
    [
        b"",
        b"\x00" * 11,
        b"\x00" * 12,
        b"\xff" * 40,
        b"\x00\x01\x01\x00\x00\x01" + b"\x00" * 6 + b"\xc0\x0c\x00\x01\x00\x01",
    ],
)
async def test_queries_that_are_none_break_nothing(make: Make, query: bytes) -> None:
    box = await make("open")
    code = (
        f"import socket; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.sendto({query!r}, ('127.0.0.1', 53))"
    )
    await box.sh(f'python3 -c "{code}"')
    assert (await box.out("getent ahostsv4 good.test")).startswith("198.18.0.1 ")

"""Tunnels: the name that is said in one is judged as the one it was asked for, and a change of policy ends them."""

from __future__ import annotations

import asyncio
import json
import random as chance
import secrets as random
import ssl

import pytest

from skerry.egress import door, exchange, wire
from skerry.egress.opening import Garbled, read, server_names
from skerry.models import SetEgress
from tests.egress.conftest import SILENT, THERE, Box, Make, Names, World
from tests.providers.users import needs_root

pytestmark = needs_root

PROXY = "127.0.0.1:61080"
CONNECT, SOCKS, CAUGHT = "--proxytunnel", f"--socks5-hostname {PROXY}", "--noproxy '*'"
WAYS = [CONNECT, SOCKS, CAUGHT]
PYTHON = """python3 - <<'PYTHON'
import socket, ssl, time
s = socket.create_connection(("127.0.0.1", 61080)); s.settimeout(20)
s.sendall(b"CONNECT good.test:{port} HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n")
said = b""
while not said.endswith(b"\\r\\n\\r\\n"): said += s.recv(1)
{rest}
PYTHON"""


async def through(box: Box, way: str, name: str, tunnel: str, path: str) -> str:
    """Ask ``name`` for something through a tunnel that was asked for as ``tunnel``."""
    options = f"{way} --connect-to {name}:443:{tunnel}:443"
    return await box.out(f'curl -sSk -m 20 {options} https://{name}{path} 2>&1; echo " exit $?"')


# -- the name that is said ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
async def test_tls_for_another_host_than_the_tunnels_is_refused(make: Make, world: World, way: str) -> None:
    box = await make("allowlist", ["good.test"])
    mark = random.token_hex(6)
    said = await through(box, way, "evil.test", "good.test", f"/hello?{mark}")
    assert said.endswith(" exit 35\n")
    assert "access denied" in said
    assert mark not in json.dumps(world.asked("/hello"))
    (event,) = await box.events("egress_refused")
    assert event["host"] == "evil.test"
    assert event["message"] == "A tunnel to good.test was used for TLS with evil.test."
    assert "hello from outside" in await through(box, way, "good.test", "good.test", "/hello")


async def test_another_host_of_the_list_may_be_named(make: Make) -> None:
    box = await make("allowlist", ["good.test", "*.good.test"])
    assert "hello from outside" in await through(box, CONNECT, "a.good.test", "good.test", "/hello")
    assert "hello from outside" in await through(box, CONNECT, "GOOD.test", "good.test", "/hello")


@pytest.mark.parametrize("way", WAYS)
async def test_a_tunnel_is_no_way_around_rules_about_requests(make: Make, way: str) -> None:
    box = await make("allowlist", ["good.test", "GET api.test/v1/"])
    assert "access denied" in await through(box, way, "api.test", "good.test", "/hello")
    box = await make("allowlist", ["good.test"], secrets={"api.test": {"header": "x-api-key", "value": "worth-much"}})
    assert "access denied" in await through(box, way, "api.test", "good.test", "/hello")


async def test_tls_that_names_nobody_is_refused(make: Make) -> None:
    box = await make("allowlist", ["good.test"])
    rest = "c = ssl._create_unverified_context()\ntry: c.wrap_socket(s)\nexcept ssl.SSLError as e: print(e.reason)"
    assert "ACCESS_DENIED" in await box.out(PYTHON.format(port=443, rest=rest))


async def test_an_open_policy_lets_tunnels_name_what_they_like(make: Make) -> None:
    box = await make("open")
    assert "hello from outside" in await through(box, CONNECT, "evil.test", "good.test", "/hello")


async def test_a_listed_address_may_be_called_anything(make: Make) -> None:
    box = await make("allowlist", [THERE])
    assert "hello from outside" in await through(box, CONNECT, "evil.test", THERE, "/hello")


async def test_a_name_said_in_pieces_is_heard_all_the_same(make: Make) -> None:
    box = await make("allowlist", ["good.test"])
    rest = """
c = ssl._create_unverified_context(); come, go = ssl.MemoryBIO(), ssl.MemoryBIO()
t = c.wrap_bio(come, go, server_hostname="NAME")
try: t.do_handshake()
except ssl.SSLWantReadError: pass
s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
hello = go.read()[5:]
# Every few bytes a record of their own, and each of those in two segments.
for at in range(0, len(hello), 90):
    piece = hello[at:at + 90]
    record = b"\\x16\\x03\\x01" + len(piece).to_bytes(2, "big") + piece
    s.sendall(record[:7]); time.sleep(0.005); s.sendall(record[7:])
print("alert" if s.recv(1)[0] == 21 else "answer")"""
    for name, outcome in (("evil.test", "alert"), ("good.test", "answer")):
        assert await box.out(PYTHON.format(port=443, rest=rest.replace("NAME", name))) == f"{outcome}\n"


@pytest.mark.parametrize("way", WAYS)
async def test_a_request_in_a_tunnel_is_for_the_host_of_the_tunnel(make: Make, way: str) -> None:
    box = await make("allowlist", ["good.test"])
    done = await box.out(f"curl -sS {way} -H 'Host: evil.test' http://good.test/echo http://good.test/echo")
    for said in done.replace("}{", "}\n{").splitlines():
        assert dict(json.loads(said)["headers"])["host"] == "good.test"
    assert done.count('"/echo"') == 2
    big = await box.out(f"curl -sS {way} http://good.test/big?size=30000000 | wc -c")
    assert big == "30000000\n"


async def test_a_request_that_comes_byte_by_byte_is_for_the_host_of_the_tunnel(make: Make) -> None:
    box = await make("allowlist", ["good.test"])
    rest = """
s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
for byte in b"\\r\\nGET /echo HTTP/1.1\\r\\nHost: evil.test\\r\\nConnection: close\\r\\n\\r\\n"[START:]:
    s.sendall(bytes([byte])); time.sleep(0.002)
data = b""
while piece := s.recv(9999): data += piece
print(data.decode())"""
    said = await box.out(PYTHON.format(port=80, rest=rest.replace("START", "2")))
    assert '["host", "good.test"]' in said
    assert "evil.test" not in await box.out(PYTHON.format(port=80, rest=rest.replace("START", "0")))


async def test_where_the_host_speaks_first_it_is_heard_first(make: Make) -> None:
    box = await make("allowlist", ["good.test:25"])
    rest = "print(s.recv(100).decode().strip()); s.sendall(b'HELO HTTP/1.1\\r\\n'); print(s.recv(100).decode().strip())"
    said = await box.out(PYTHON.format(port=25, rest=rest))
    assert said == "220 it is the host that speaks first\n250 you said: HELO HTTP/1.1\n"


async def test_a_tunnel_that_begins_as_nothing_known_is_passed_on(make: Make) -> None:
    box = await make("allowlist", ["good.test"])
    rest = "s.recv(100); s.sendall(b'\\x00\\x01binary'); s.sendall(b'\\n'); print(s.recv(100))"
    assert "you said: \\x00\\x01binary\\n" in await box.out(PYTHON.format(port=25, rest=rest))


async def test_tls_that_is_none_is_refused(make: Make) -> None:
    box = await make("allowlist", ["good.test"])
    rest = "s.sendall(b'\\x16\\x03\\x01\\x00\\x05hello'); print(s.recv(100)[0])"
    assert await box.out(PYTHON.format(port=443, rest=rest)) == "21\n"


def hello(name: str | None) -> bytes:
    context = ssl._create_unverified_context()
    come, go = ssl.MemoryBIO(), ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        context.wrap_bio(come, go, server_hostname=name).do_handshake()
    return go.read()


def test_the_name_is_known_when_the_message_is_whole_and_not_before() -> None:
    whole = hello("api.example.com")
    assert server_names(whole) == ["api.example.com"]
    assert server_names(whole + b"and more") == ["api.example.com"]
    for size in range(1, len(whole)):
        assert read(whole[:size]) is None
    assert server_names(hello(None)) == []


def test_whatever_is_said_first_is_read_or_refused() -> None:
    whole, dice = hello("api.example.com"), chance.Random(6)
    for _ in range(5000):
        changed = bytearray(whole)
        for _ in range(dice.randint(1, 6)):
            changed[dice.randrange(len(changed))] = dice.randrange(256)
        try:
            read(bytes(changed[: dice.randint(1, len(changed))]))
        except Garbled:
            continue
    with pytest.raises(Garbled):
        read(b"GET /" + b"a" * 70_000)


# -- hosts that say nothing --------------------------------------------------------------------------------------------


async def test_a_host_that_never_answers_is_given_up(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "HANDSHAKE_SECONDS", 0.5)
    monkeypatch.setattr(wire, "IDLE_SECONDS", 0.5)
    box = await make("open", secrets={f"good.test:{SILENT}": {"header": "x-api-key", "value": "worth-much"}})
    said = json.loads(await box.out(f"curl -sS -m 20 https://good.test:{SILENT}/"))
    assert said["error"]["message"] == "TLS with good.test failed: the connection broke."


@pytest.mark.parametrize("mode", ["open", "allowlist"])
@pytest.mark.parametrize("first", ["", "s.sendall(b'\\x00 something');"])
async def test_a_tunnel_in_which_nothing_moves_is_let_go(
    make: Make, monkeypatch: pytest.MonkeyPatch, mode: str, first: str
) -> None:
    monkeypatch.setattr(door, "IDLE_SECONDS", 0.5)
    box = await make(mode, ["good.test"] if mode == "allowlist" else [])
    rest = f"{first}print(s.recv(10))"
    assert await box.out(PYTHON.format(port=SILENT, rest=rest)) == "b''\n"


# -- changes while it is open ------------------------------------------------------------------------------------------

STREAM = "'http://good.test/stream?count=200&pause=0.1'"


@pytest.mark.parametrize(
    ("before", "way", "after", "stays"),
    [
        (("open", []), CONNECT, ("none", []), False),
        (("open", []), SOCKS, ("allowlist", ["api.test"]), False),
        (("open", []), CAUGHT, ("allowlist", ["api.test"]), False),
        (("open", []), "", ("allowlist", ["api.test"]), False),
        (("open", []), CONNECT, ("allowlist", ["good.test"]), False),  # nobody knows what it names
        (("open", []), "", ("allowlist", ["good.test"]), True),
        (("open", []), CONNECT, ("allowlist", ["GET good.test/hello"]), False),
        (("allowlist", ["good.test"]), CONNECT, ("allowlist", ["good.test", "api.test"]), True),
        (("allowlist", ["good.test"]), CAUGHT, ("open", []), True),
        (("allowlist", ["good.test"]), CONNECT, ("allowlist", ["GET good.test/hello"]), False),
        (("allowlist", ["GET good.test/stream"]), CONNECT, ("allowlist", ["GET good.test/hello"]), False),
        (("allowlist", ["GET good.test/stream"]), "", ("allowlist", ["good.test:80"]), True),
        (("allowlist", ["good.test:80"]), "", ("allowlist", ["good.test:443"]), False),
    ],
)
async def test_what_is_no_longer_allowed_ends_and_the_rest_goes_on(
    make: Make, before: tuple[str, list[str]], way: str, after: tuple[str, list[str]], stays: bool
) -> None:
    box = await make(*before)
    change = SetEgress.model_validate({"mode": after[0], "allow": after[1]})
    await _change_midway(box, f"curl -sSN {way} {STREAM}", change, stays)


async def test_a_secret_takes_effect_on_tunnels_that_are_open(make: Make) -> None:
    box = await make("allowlist", ["good.test"])
    secret = {"good.test:80": {"header": "x-api-key", "value": "worth-much", "insecure": True}}
    hold = PYTHON.format(port=80, rest="s.sendall(b'\\x00'); print(len(s.recv(1)))")
    await _change_midway(box, hold, SetEgress.model_validate({"secrets": secret}), False, running=1.0)


async def test_a_name_is_cut_off_when_its_network_is_no_longer_listed(make: Make, names: Names) -> None:
    server = await asyncio.start_server(_drip, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    names.known["inner.test"] = ["127.0.0.1"]
    async with server:
        box = await make("allowlist", ["inner.test", f"127.0.0.1:{port}"])
        command = f"curl -sSN --proxytunnel http://inner.test:{port}/"
        await _change_midway(box, command, SetEgress(allow=["inner.test"]), False)


async def _drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        for _ in range(200):
            writer.write(b"drop ")
            await writer.drain()
            await asyncio.sleep(0.1)
    except ConnectionError:
        pass
    finally:
        writer.close()


async def _change_midway(box: Box, command: str, change: SetEgress, stays: bool, running: float = 0) -> None:
    going = asyncio.create_task(box.sh(command))
    for _ in range(200):
        await asyncio.sleep(0.05)
        if (await box.registry.egress(box.id)).network.bytes_in > 150:
            break
        if running and (running := running - 0.05) <= 0:
            break
    await box.registry.set_egress(box.id, change)
    if stays:
        before = (await box.registry.egress(box.id)).network.bytes_in
        await asyncio.sleep(0.7)
        assert not going.done()
        assert (await box.registry.egress(box.id)).network.bytes_in > before
        await box.registry.destroy(box.id)
        await asyncio.gather(going, return_exceptions=True)
    else:
        async with asyncio.timeout(10):
            done = await going
        assert done.exit_code != 0 or done.stdout == "0\n"

"""A real sandbox, the real proxy, and a world that is partly hostile."""

from __future__ import annotations

import asyncio
import json
import re
import time
from typing import Any

import pytest

from skerry.control.registry import Registry
from skerry.egress import door as door_module
from skerry.egress.exchange import Exchange
from skerry.models import RunCode, SetEgress, State
from tests.egress.conftest import HERE, NOBODY, THERE, Make, Names, World
from tests.providers.users import needs_root

pytestmark = needs_root

PROXY = "127.0.0.1:61080"
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
RAW = """python3 - <<'PYTHON'
import socket, sys
s = socket.create_connection(("127.0.0.1", 61080)); s.settimeout(30)
s.sendall({data!r}); s.shutdown(socket.SHUT_WR)
data = b""
try:
    while piece := s.recv(65536): data += piece
except ConnectionResetError: data += b" (reset)"
sys.stdout.write(data.decode("latin1"))
PYTHON"""


# -- the three ways through --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["", "--proxytunnel", f"--socks5-hostname {PROXY}", f"--preproxy socks5h://{PROXY}"])
async def test_curl_gets_out_every_way(make: Make, how: str) -> None:
    box = await make("allowlist", ["good.test"])
    if "preproxy" in how:
        how = f"--proxy '' --socks5-hostname {PROXY}"
    assert await box.out(f"curl -sS {how} http://good.test/hello") == "hello from outside\n"


async def test_tls_is_passed_through_untouched(make: Make) -> None:
    box = await make("open")
    said = await box.out("curl -sSv https://good.test/hello 2>&1")
    assert "hello from outside" in said
    assert "issuer: CN=the world" in said


async def test_a_body_of_many_megabytes_arrives_whole_both_ways(make: Make) -> None:
    box = await make("open")
    down = await box.out("curl -sS http://good.test/big?size=30000000 | sha256sum")
    assert down == await box.out("head -c 30000000 /dev/zero | tr '\\0' x | sha256sum")
    for how in ("", "--proxytunnel", "-H 'Transfer-Encoding: chunked'"):
        await box.sh("head -c 20000000 /dev/urandom > /tmp/body")
        said = json.loads(await box.out(f"curl -sS {how} --data-binary @/tmp/body http://good.test/echo"))
        digest = (await box.out("sha256sum /tmp/body")).split()[0]
        assert (said["size"], said["sha256"]) == (20000000, digest)


async def test_a_stream_arrives_as_it_is_written(make: Make) -> None:
    box = await make("open")
    script = "curl -sSN 'http://good.test/stream?count=3&pause=0.5' | while read -r line; do date +%s.%N; done"
    times = [float(line) for line in (await box.out(script)).split()]
    assert times[-1] - times[0] > 0.9


async def test_connections_are_kept_between_requests(make: Make) -> None:
    box = await make("open")
    said = await box.out("curl -sSv http://good.test/hello http://good.test/hello http://api.test/hello 2>&1")
    assert said.count("hello from outside") == 3
    assert said.count("Re-using existing connection") == 2


async def test_a_connection_is_kept_although_the_answer_was_quicker_than_the_rest_of_the_request(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = Exchange._send_body

    async def late(*arguments: Any) -> None:
        await asyncio.sleep(0.2)
        await send(*arguments)

    monkeypatch.setattr(Exchange, "_send_body", late)
    box = await make("open")
    said = await box.out("curl -sSv http://good.test/hello http://good.test/hello 2>&1")
    assert said.count("hello from outside") == 2
    assert said.count("Re-using existing connection") == 1


# -- policy ------------------------------------------------------------------------------------------------------------


async def test_a_refusal_says_why_and_is_recorded_once(make: Make, names: Names) -> None:
    box = await make("allowlist", ["good.test"])
    for _ in range(5):
        said = json.loads(await box.out("curl -sS http://secret-words.evil.test/"))
    assert said["error"]["code"] == "egress_refused"
    assert said["error"]["message"] == "secret-words.evil.test:80 is not on this sandbox's allow-list."
    assert "set_egress" in said["error"]["hint"]
    assert said["error"]["details"] == {"host": "secret-words.evil.test", "port": 80}
    assert "secret-words.evil.test" not in names.asked
    events = await box.events("egress_refused")
    assert [event["host"] for event in events] == ["secret-words.evil.test"]
    assert (await box.registry.egress(box.id)).network.refused == 5
    assert b'skerry_egress_refusals_total{owner="local"}' in await box.registry.measurements()


async def test_refusals_without_end_are_counted_and_recorded_within_bounds(make: Make) -> None:
    box = await make("allowlist", ["good.test"])
    script = """python3 - <<'PYTHON'
import socket
for number in range(200):
    s = socket.create_connection(("127.0.0.1", 61080)); s.settimeout(20)
    s.sendall(b"CONNECT host-%d.evil.test:443 HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n" % number)
    assert b" 403 " in s.recv(100)
PYTHON"""
    assert await box.out(script) == ""
    assert (await box.registry.egress(box.id)).network.refused == 200
    assert len(await box.events("egress_refused")) == door_module.REPORTED_HOSTS


async def test_a_refused_tunnel_is_a_403_that_can_be_read(make: Make) -> None:
    box = await make("allowlist", ["good.test"])
    said = await box.out("curl -sSv https://evil.test/ 2>&1")
    assert "403 evil.test:443 is not on this sandbox's allow-list." in said
    pip = await box.out("pip download --retries 1 --index-url https://evil.test/simple x 2>&1")
    assert "is not on this sandbox's allow-list" in pip


async def test_socks_says_that_the_rules_forbid_it(make: Make) -> None:
    box = await make("allowlist", ["good.test"])
    assert "(2)" in await box.out(f"curl -sS --socks5-hostname {PROXY} http://evil.test/ 2>&1")


async def test_none_lets_nothing_out(make: Make, names: Names) -> None:
    box = await make("none")
    before = len(names.asked)
    assert "egress is 'none'" in await box.out("curl -sS http://good.test/hello")
    assert "egress is 'none'" in await box.out(f"curl -sS http://{THERE}/hello")
    assert len(names.asked) == before


async def test_a_program_that_goes_around_the_proxy_fails_at_once(make: Make) -> None:
    box = await make("none")
    began = time.monotonic()
    done = await box.sh(f"curl -sS --noproxy '*' http://{THERE}/hello; curl -sS --noproxy '*' http://good.test/")
    assert done.exit_code != 0
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "2130706433", "0x7f.1", "0177.1", "[::1]", "[::ffff:127.0.0.1]", "169.254.169.254",
             "10.0.0.1", "localhost", "0.0.0.0", "LOCALHOST.", "metadata.test", "[64:ff9b::7f00:1]"]
)  # fmt: skip
async def test_the_host_and_its_networks_are_out_of_reach(make: Make, names: Names, host: str) -> None:
    names.known.update({"localhost": ["127.0.0.1"], "metadata.test": ["169.254.169.254"]})
    box = await make("open")
    request = f"GET http://{host}/latest/meta-data HTTP/1.1\r\nHost: x\r\n\r\n"
    assert "403" in (await box.out(RAW.format(data=request.encode()))).splitlines()[0]
    assert (
        await box.out(f"curl -sS --noproxy '' --proxytunnel -o /dev/null -w '%{{http_connect}}' http://{host}/")
    ).startswith("403")
    socks = await box.out(f"curl -sS --noproxy '' --socks5-hostname {PROXY} http://{host}/ 2>&1")
    assert "(2)" in socks


async def test_this_hosts_own_public_address_is_out_of_reach(make: Make) -> None:
    server = await asyncio.start_server(lambda reader, writer: writer.close(), HERE, 8099)
    async with server:
        box = await make("open")
        said = await box.out(f"curl -sS http://{HERE}:8099/")
    assert "is the host this sandbox runs on" in said


async def test_a_name_that_changes_its_mind_is_connected_where_it_was_checked(make: Make, names: Names) -> None:
    box = await make("open")
    names.turns["rebind.test"] = [[THERE], ["127.0.0.1"]]
    assert await box.out("curl -sS http://rebind.test/hello") == "hello from outside\n"
    assert "not a public address" in await box.out("curl -sS http://rebind.test/hello")
    names.turns["both.test"] = [["127.0.0.1", "10.0.0.1", THERE]]
    assert await box.out("curl -sS http://both.test/hello") == "hello from outside\n"


async def test_a_redirect_to_the_metadata_service_leads_nowhere(make: Make) -> None:
    box = await make("open")
    said = await box.out("curl -sSL 'http://good.test/redirect?to=http://169.254.169.254/latest/'")
    assert "169.254.169.254:80 is not a public address." in said


async def test_a_listed_network_is_reached_although_it_is_private(make: Make) -> None:
    server = await asyncio.start_server(_polite, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server:
        box = await make("open", [f"127.0.0.1:{port}"])
        assert await box.out(f"curl -sS --noproxy '' http://127.0.0.1:{port}/") == "polite"
        assert "not a public" in await box.out(f"curl -sS --noproxy '' http://127.0.0.1:{port + 1}/")


async def _polite(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\npolite")
    await writer.drain()
    writer.close()


async def test_methods_and_paths_are_held_to_under_tls_too(make: Make) -> None:
    box = await make("allowlist", ["GET good.test/echo"])
    for scheme in ("http", "https"):
        assert json.loads(await box.out(f"curl -sS {scheme}://good.test/echo"))["target"] == "/echo"
        for request in (f"{scheme}://good.test/hello", f"-X POST -d x {scheme}://good.test/echo"):
            said = json.loads(await box.out(f"curl -sS {request}"))
            assert said["error"]["code"] == "egress_refused"
    assert "not on this" in await box.out("curl -sS --proxytunnel http://good.test/hello")


async def test_the_host_of_a_request_is_the_one_that_was_judged(make: Make) -> None:
    box = await make("allowlist", ["GET good.test", "api.test"])
    said = json.loads(await box.out("curl -sS -H 'Host: evil.test' http://good.test/echo"))
    assert dict(said["headers"])["host"] == "good.test"


async def test_policy_changes_while_it_runs_and_cuts_off_what_is_no_longer_allowed(make: Make) -> None:
    box = await make("open")
    going = asyncio.create_task(
        box.out("curl -sSN --proxytunnel 'http://good.test/stream?count=200&pause=0.1'; echo $?")
    )
    for _ in range(100):
        await asyncio.sleep(0.05)
        if (await box.registry.egress(box.id)).network.bytes_in > 200:
            break
    await box.registry.set_egress(box.id, SetEgress(mode="allowlist", allow=["api.test"]))
    async with asyncio.timeout(10):
        assert (await going).splitlines()[-1] != "0"
    assert "not on this" in await box.out("curl -sS http://good.test/hello")
    assert await box.out("curl -sS http://api.test/hello") == "hello from outside\n"
    assert (await box.events("egress_changed"))[0]["mode"] == "allowlist"


async def test_policy_and_counts_outlive_sleep(make: Make) -> None:
    box = await make("allowlist", ["good.test"])

    async def measured() -> float:
        text = (await box.registry.measurements()).decode()
        said = re.search(r'egress_bytes_total{direction="in",owner="local"} (\S+)', text)
        assert said is not None
        return float(said[1])

    others = await measured()
    await box.sh("curl -sS http://good.test/hello")
    before = (await box.registry.egress(box.id)).network
    assert before.bytes_in > 0
    assert await measured() - others == before.bytes_in
    await box.registry.stop(box.id)
    info = await box.registry.get(box.id)
    assert info.state == State.HIBERNATED
    assert (info.network.bytes_in, info.network.bytes_out) == (before.bytes_in, before.bytes_out)
    assert await box.out("curl -sS http://good.test/hello") == "hello from outside\n"
    assert (await box.registry.egress(box.id)).network.bytes_in == 2 * before.bytes_in
    assert "not on this" in await box.out("curl -sS http://evil.test/hello")


# -- a hostile world, and a hostile sandbox ----------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["huge-headers", "two-lengths", "nonsense"])
async def test_an_answer_that_is_none_becomes_a_502(make: Make, path: str) -> None:
    box = await make("open")
    said = await box.out(f"curl -sS -m 20 -w ' %{{http_code}}' http://good.test/{path}")
    assert said.endswith(" 502")
    assert "broke off or gave no proper answer" in said


async def test_an_answer_that_is_cut_off_is_seen_to_be(make: Make) -> None:
    box = await make("open")
    assert (await box.sh("curl -sS -m 20 http://good.test/cut")).exit_code == 18


async def test_a_slow_answer_is_waited_for(make: Make) -> None:
    box = await make("open")
    assert await box.out("curl -sS http://good.test/drip") == "." * 20


async def test_an_early_answer_to_a_long_upload_is_heard(make: Make) -> None:
    box = await make("open")
    said = await box.out("head -c 50000000 /dev/zero | curl -sS -m 30 -H 'Expect:' -T - -X POST http://good.test/early")
    assert "too much" in said


async def test_what_cannot_be_reached_is_said_at_once(make: Make, names: Names) -> None:
    box = await make("open")
    assert "could not be resolved" in await box.out("curl -sS http://nowhere.test/")
    assert "could not be reached" in await box.out("curl -sS http://good.test:9/")
    names.known["silent.test"] = [NOBODY]
    before = time.monotonic()
    said = await box.out("curl -sS -m 30 http://silent.test/")
    assert "could not be reached" in said or "did not answer in time" in said
    assert time.monotonic() - before < 20


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", "400"),
        (b"GET http://good.test/ HTTP/1.1\r\n\r\n", "400"),
        (b"GET http://good.test/ HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", "400"),
        (b"GET ftp://good.test/ HTTP/1.1\r\nHost: a\r\n\r\n", "400"),
        (b"GET http://user:pw@good.test/ HTTP/1.1\r\nHost: a\r\n\r\n", "400"),
        (b"CONNECT good.test HTTP/1.1\r\nHost: a\r\n\r\n", "400"),
        (b"CONNECT good.test:99999 HTTP/1.1\r\nHost: a\r\n\r\n", "400"),
        (b"POST http://good.test/ HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\n" + CHUNKED, "400"),
        (b"POST http://good.test/ HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nxx", "400"),
        (b"POST http://good.test/ HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip\r\n\r\n", "501"),
        (b"TRACE http://good.test/ HTTP/1.1\r\nHost: a\r\n\r\n", "403"),
        (b"GET http://good.test/ HTTP/1.1\r\nHost: a\r\nX: " + b"y" * 100_000 + b"\r\n\r\n", "431"),
        (b"nonsense\r\n\r\n", "400"),
    ],
)  # fmt: skip
async def test_a_request_that_is_none_gets_a_clear_answer(make: Make, request_: bytes, status: str) -> None:
    box = await make("open")
    said = await box.out(RAW.format(data=request_))
    assert said.split()[1] == status, said[:300]


async def test_what_hides_behind_a_request_is_not_passed_on(make: Make, world: World) -> None:
    """The body says where it ends, and what follows is judged as the request that it is."""
    box = await make("allowlist", ["good.test"])
    first = b"POST http://good.test/echo HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    hidden = b"GET http://evil.test/smuggled HTTP/1.1\r\nHost: good.test\r\n\r\n"
    said = await box.out(RAW.format(data=first + hidden))
    assert said.startswith("HTTP/1.1 200")
    assert "403 evil.test:80" in said
    assert world.asked("/smuggled") == []


async def test_headers_for_the_next_hop_go_no_further(make: Make) -> None:
    box = await make("open")
    headers = "-H 'Connection: X-Gone, close' -H 'X-Gone: 1' -H 'Proxy-Authorization: Basic eDp5' -H 'TE: trailers'"
    said = dict(json.loads(await box.out(f"curl -sS {headers} -H 'X-Kept: 1' http://good.test/echo"))["headers"])
    assert said["x-kept"] == "1"
    assert not {"x-gone", "connection", "proxy-authorization", "proxy-connection", "te"} & set(said)


async def test_many_connections_at_once_are_bounded_and_none_hangs(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door_module, "MOST_CONNECTIONS", 8)
    box = await make("open")
    script = """python3 - <<'PYTHON'
import socket
socks = [socket.create_connection(("127.0.0.1", 61080)) for _ in range(20)]
for s in socks: s.settimeout(10)
full = 0
for s in socks[8:]:
    full += s.recv(100).startswith(b"HTTP/1.1 503")
print(full)
PYTHON"""
    assert await box.out(script) == "12\n"
    assert await box.out("curl -sS http://good.test/hello") == "hello from outside\n"


async def test_a_connection_that_says_nothing_is_let_go(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door_module, "HEAD_SECONDS", 0.5)
    box = await make("open")
    for data in ("b''", "b'GET http://good.test/ HTTP/1.1\\r\\nX: '", "b'\\x05'"):
        script = f"""python3 - <<'PYTHON'
import socket
s = socket.create_connection(("127.0.0.1", 61080)); s.settimeout(10)
s.send({data}) if {data} else None
while s.recv(1000): pass
print("closed")
PYTHON"""
        assert await box.out(script) == "closed\n"


async def test_nothing_is_left_when_a_sandbox_ends_in_the_middle(make: Make, outward: Registry) -> None:
    box = await make("open")
    await box.sh(
        "for n in 1 2 3; do curl -sSN 'http://good.test/stream?count=600&pause=0.1' >/dev/null & done; sleep 0.5"
    )
    owner = outward._owners[box.id]
    assert owner.door is not None
    under_way = owner.door._under_way
    assert len(under_way) == 3
    await outward.destroy(box.id)
    assert under_way == {}


# -- programs ----------------------------------------------------------------------------------------------------------


async def test_programs_use_the_proxy_without_being_told(make: Make) -> None:
    box = await make("open")
    fetch = "fetch('http://good.test/hello').then(r => r.text()).then(console.log)"
    assert (await box.out(f'node -e "{fetch}"')).strip() == "hello from outside"
    urllib = "import urllib.request as u; print(u.urlopen('http://good.test/hello').read().decode())"
    assert (await box.out(f'python3 -c "{urllib}"')).strip() == "hello from outside"
    assert (
        await box.out("wget -qO- http://good.test/hello || curl -sS http://good.test/hello")
    ).strip() == "hello from outside"


async def test_code_contexts_and_processes_get_out_as_well(make: Make) -> None:
    box = await make("open")
    code = "import urllib.request as u; print(u.urlopen('http://good.test/hello').read().decode())"
    async with box.registry.use(box.id) as runtime:
        done = await runtime.code.run(RunCode(code=code))
    assert "hello from outside" in "".join(done.logs.stdout)

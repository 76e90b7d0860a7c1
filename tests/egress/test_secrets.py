"""Values that are added at the door, and never exist inside."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import secrets as random
from pathlib import Path
from urllib.parse import parse_qsl

import pytest
from pydantic import SecretStr

from skerry.control.registry import Registry
from skerry.errors import InvalidEgressError, SecretSourceError
from skerry.models import CreateSandbox, EgressPolicy, Secret, SetEgress
from skerry.settings import Settings
from tests.egress.conftest import EXPIRED, SELF_SIGNED, THERE, WRONG_NAME, Box, Make, World
from tests.providers.users import needs_root

pytestmark = needs_root


@pytest.fixture
def value(monkeypatch: pytest.MonkeyPatch) -> str:
    """A secret that exists nowhere else, in a variable of the server."""
    value = f"planted-{random.token_hex(12)}"
    monkeypatch.setenv("WORLD_API_KEY", value)
    return value


KEY = {"header": "x-api-key", "value_from": "env:WORLD_API_KEY", "placeholder": "WORLD_API_KEY"}


async def received(box: Box, world: World, command: str, path: str = "/echo") -> dict[str, str]:
    """The headers that the host was sent by a command that asks for ``URL``; what it repeats is scrubbed."""
    mark = random.token_hex(6)
    await box.sh(command.replace("URL", f"api.test{path}?{mark}"))
    (said,) = [said for said in world.asked(path) if str(said["target"]).endswith(mark)]
    return dict(said["headers"])  # type: ignore[call-overload,no-any-return]


async def test_the_host_receives_what_the_sandbox_never_had(make: Make, value: str, world: World) -> None:
    box = await make("allowlist", ["good.test"], secrets={"api.test": KEY})
    for options in (
        "",
        "-H \"X-Api-Key: $WORLD_API_KEY\" -H 'x-API-key: another'",
        "--proxytunnel",
        "--socks5-hostname 127.0.0.1:61080",
        "--noproxy '*'",
    ):
        assert (await received(box, world, f"curl -sS {options} https://URL"))["x-api-key"] == value
    assert await box.out("echo $WORLD_API_KEY") == "skerry-placeholder\n"


async def test_schemes_say_how_it_is_written(make: Make, value: str, world: World) -> None:
    box = await make("open", secrets={"api.test": {"value_from": "env:WORLD_API_KEY", "scheme": "Bearer {value}"}})
    assert (await received(box, world, "curl -sS https://URL"))["authorization"] == f"Bearer {value}"
    basic = {"value_from": "env:WORLD_API_KEY", "username": "x-access-token"}
    await box.registry.set_egress(box.id, SetEgress(secrets={"api.test": Secret.model_validate(basic)}))
    written = "Basic " + base64.b64encode(f"x-access-token:{value}".encode()).decode()
    assert (await received(box, world, "curl -sS https://URL"))["authorization"] == written


async def test_no_other_host_receives_it(make: Make, value: str, world: World) -> None:
    box = await make("open", secrets={"api.test": KEY})
    for url in ("https://good.test/echo", "http://api.test/echo", f"http://{THERE}/echo", "http://api.test:8000/echo"):
        assert value not in await box.out(f"curl -sS {url}")
    mark = random.token_hex(4)
    await box.out(f"curl -sSL 'https://api.test/redirect?to=https://good.test/echo?{mark}'")
    await box.out(f"curl -sSL 'https://api.test/redirect?to=http://api.test/echo?{mark}'")
    await box.out(f"curl -sS -H 'Host: good.test' 'https://api.test/hello?{mark}'")
    await box.out(
        f"curl -sSk --resolve api.test:443:{THERE} --connect-to api.test:443:good.test:443 https://api.test/echo?{mark}"
    )
    for said in world.asked("/echo"):
        if mark in str(said["target"]):
            assert value not in json.dumps(said)
    assert value in json.dumps([said for said in world.asked("/hello") if mark in str(said["target"])])


async def test_what_a_program_has_seen_of_it_is_worth_nothing_elsewhere(make: Make, value: str, world: World) -> None:
    """All that is inside, sent again to the same host without the door's help, to another, and by another sandbox."""
    box = await make("open", secrets={"api.test": KEY})
    seen = await box.out("curl -sS --trace-ascii - https://api.test/reflect")
    assert value not in seen
    mark = random.token_hex(6)
    send = f"""
    curl -sS -H "x-api-key: $WORLD_API_KEY" https://good.test/echo?{mark}
    curl -sS -H "x-api-key: {"*" * len(value)}" http://api.test/echo?{mark}
    curl -sS -X POST -H 'Transfer-Encoding: chunked' -H 'Content-Length: 4' -d abcd https://api.test/echo?{mark}smuggled
    """
    await box.out(send)
    other = await make("open")
    await other.out(f"curl -sS -H 'x-api-key: skerry-placeholder' https://api.test/echo?{mark}")
    said = [said for said in world.asked("/echo") if str(said["target"]).endswith(mark)]
    assert len(said) == 3
    assert value not in json.dumps(said)


async def test_without_tls_the_host_itself_does_not_receive_it(make: Make, value: str, world: World) -> None:
    box = await make("open", secrets={"api.test:8000": {**KEY, "header": "x-plain-key"}})
    for way in ("", "--proxytunnel", "--socks5-hostname 127.0.0.1:61080", "--noproxy '*'"):
        assert '"port": 8000' in await box.out(f"curl -sS {way} http://api.test:8000/echo")
    assert value not in json.dumps(world.asked("/echo"))


async def test_an_answer_that_repeats_it_is_scrubbed(make: Make, value: str) -> None:
    bearer = {"header": "x-api-key", "value_from": "env:WORLD_API_KEY", "scheme": "Token {value}"}
    box = await make("open", secrets={"api.test": bearer})
    said = await box.out("curl -sSi --suppress-connect-headers -H 'Accept-Encoding: gzip' https://api.test/reflect")
    assert said.startswith("HTTP/1.1 200")
    assert "X-Saw-x-api-key: ***" in said
    assert said.count("*" * len(value)) >= 2
    assert value not in said
    assert said.endswith("]]")


@pytest.mark.parametrize("port", [WRONG_NAME, EXPIRED, SELF_SIGNED])
async def test_a_host_that_cannot_prove_who_it_is_receives_nothing(
    make: Make, value: str, world: World, port: int
) -> None:
    box = await make("open", secrets={f"good.test:{port}": KEY})
    said = json.loads(await box.out(f"curl -sS https://good.test:{port}/echo"))
    assert said["error"]["code"] == "egress_unreachable"
    assert "certificate" in said["error"]["message"].lower()
    assert value not in json.dumps(said)
    assert value not in json.dumps(world.asked("/echo"))


async def test_trace_and_headers_for_the_next_hop_do_not_bring_it_back(make: Make, value: str, world: World) -> None:
    box = await make("open", secrets={"api.test": KEY})
    said = await box.out("curl -sS -X TRACE https://api.test/echo")
    assert "TRACE is not passed on" in said
    said = await received(box, world, "curl -sS -H 'Connection: x-api-key' https://URL")
    assert said["x-api-key"] == value


async def test_without_tls_it_is_added_only_when_asked_to(make: Make, value: str, world: World) -> None:
    box = await make("open", secrets={"api.test": {**KEY, "insecure": True}})
    assert (await received(box, world, "curl -sS http://URL"))["x-api-key"] == value
    assert (await received(box, world, "curl -sS --proxytunnel http://URL"))["x-api-key"] == value


ASK = """python3 - <<'PYTHON'
import socket, ssl
raw = socket.create_connection(("127.0.0.1", 61080)); raw.settimeout(20)
raw.sendall(b"CONNECT api.test:443 HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n")
while not raw.recv(4096).endswith(b"\\r\\n\\r\\n"): pass
s = ssl.create_default_context().wrap_socket(raw, server_hostname="api.test")
s.sendall({request!r})
print(s.recv(65536).split()[1].decode())
PYTHON"""


@pytest.mark.parametrize("line", ["GET https://good.test/echo?{}", "CONNECT good.test:443/{}", "GET echo?{}"])
async def test_a_request_that_names_another_host_does_not_take_it_along(
    make: Make, value: str, world: World, line: str
) -> None:
    """Whoever shares a front with the host may be the one that a name in the request's target leads to."""
    box, mark = await make("open", secrets={"api.test": KEY}), random.token_hex(6)
    request = f"{line.format(mark)} HTTP/1.1\r\nHost: api.test\r\n\r\n".encode()
    assert await box.out(ASK.format(request=request)) == "400\n"
    assert mark not in json.dumps(world.asked("/echo"))
    request = f"GET /echo?{mark} HTTP/1.1\r\nHost: api.test\r\n\r\n".encode()
    assert await box.out(ASK.format(request=request)) == "200\n"


async def test_an_answer_cannot_be_asked_for_in_pieces_that_hide_it(make: Make, value: str, world: World) -> None:
    box = await make("open", secrets={"api.test": KEY})
    sent = await received(box, world, "curl -sS -r 0-9 -H 'If-Range: x' https://URL")
    assert not {"range", "if-range"} & set(sent)
    free = await received(await make("open"), world, "curl -sS -r 0-9 https://URL")
    assert free["range"] == "bytes=0-9"


async def test_a_value_that_is_missing_is_named_and_nothing_is_sent(make: Make, world: World) -> None:
    box = await make("open", secrets={"api.test": {"value_from": "env:NOT_THERE_AT_ALL"}})
    before = len(world.asked("/hello"))
    said = json.loads(await box.out("curl -sS https://api.test/hello"))
    assert said["error"]["code"] == "secret_unavailable"
    assert "NOT_THERE_AT_ALL" in said["error"]["message"]
    assert len(world.asked("/hello")) == before


async def test_a_file_may_be_replaced_while_the_sandbox_runs(make: Make, world: World, tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("the-first-value\n")
    box = await make("open", secrets={"api.test": {"header": "x-api-key", "value_from": f"file:{file}"}})
    assert (await received(box, world, "curl -sS https://URL"))["x-api-key"] == "the-first-value"
    file.write_text("the-second-value\n")
    assert (await received(box, world, "curl -sS https://URL"))["x-api-key"] == "the-second-value"


async def test_streams_uploads_and_websockets_pass_while_it_is_added(make: Make, value: str) -> None:
    box = await make("open", secrets={"api.test": KEY})
    script = "curl -sSN 'https://api.test/stream?count=3&pause=0.5' | while read -r line; do date +%s.%N; done"
    times = [float(line) for line in (await box.out(script)).split()]
    assert times[-1] - times[0] > 0.9
    await box.sh("head -c 5000000 /dev/urandom > /tmp/body")
    said = json.loads(await box.out("curl -sS --data-binary @/tmp/body https://api.test/echo"))
    assert said["sha256"] == (await box.out("sha256sum /tmp/body")).split()[0]
    assert await box.out("curl -sS https://api.test/big?size=5000000 | wc -c") == "5000000\n"
    program = """python3 - <<'PYTHON'
import socket, ssl
raw = socket.create_connection(("api.test", 443)); raw.settimeout(10)
s = ssl.create_default_context().wrap_socket(raw, server_hostname="api.test")
head = b"GET /websocket HTTP/1.1\\r\\nHost: api.test\\r\\nConnection: Upgrade\\r\\nUpgrade: websocket\\r\\n\\r\\n"
s.sendall(head + b"first ")
data = b""
while b"first" not in data: data += s.recv(4096)
s.sendall(b"second")
while b"second" not in data: data += s.recv(4096)
print(data.split()[1].decode(), data.split(b"\\r\\n\\r\\n")[1].decode())
PYTHON"""
    assert await box.out(program) == "101 first second\n"


async def test_the_certificate_is_one_that_the_sandbox_and_nobody_else_trusts(
    make: Make, value: str, outward: Registry, tmp_path: Path
) -> None:
    box = await make("open", secrets={"api.test": KEY})
    for program in (
        "curl -sS https://api.test/hello",
        "env -i curl -sS https://api.test/hello",  # the system's own list
        "python3 -c \"import urllib.request as u; print(u.urlopen('https://api.test/hello').read().decode())\"",
        "node -e \"require('https').get({host: 'api.test', path: '/hello'}, r => r.pipe(process.stdout))\"",
    ):
        assert "hello from outside" in await box.out(program), program
    key = outward.settings.home / "authority" / "authority.pem"
    assert key.stat().st_mode & 0o777 == 0o600
    assert "PRIVATE" not in await box.out("cat /run/skerry-trust/* /etc/ssl/certs/* 2>/dev/null")


# -- OAuth -------------------------------------------------------------------------------------------------------------


async def test_a_token_is_fetched_outside_and_renewed_when_it_is_refused(
    make: Make, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_REFRESH", "refresh-token-of-the-world")
    grant = {"token_url": "https://oauth.test/token", "client_id": "me", "refresh_token_from": "env:WORLD_REFRESH"}
    secret = {"value_from": "oauth", "scheme": "Bearer {value}", "oauth": grant}
    box = await make("allowlist", secrets={"api.test": secret})
    first = (await received(box, world, "curl -sS https://URL"))["authorization"]
    assert first == (await received(box, world, "curl -sS https://URL"))["authorization"]
    number = int(first.rpartition("-")[2])
    url = f"https://api.test/guarded?token=access-token-number-{number + 1}"
    said = await box.out(f"curl -sSi --suppress-connect-headers -d body-of-mine '{url}'")
    assert said.startswith("HTTP/1.1 200")
    assert '"size": 12' in said
    refused = await box.out("curl -sSi --suppress-connect-headers 'https://api.test/guarded?token=never'")
    assert refused.startswith("HTTP/1.1 401")
    asked = world.asked("/token")[-1]
    assert asked["method"] == "POST"
    inside = await box.out("env; cat /proc/*/environ 2>/dev/null")
    assert "refresh-token-of-the-world" not in inside
    assert "access-token-number" not in inside


async def test_a_token_is_renewed_before_it_ends_and_a_new_refresh_token_is_kept(
    make: Make, world: World, outward: Registry
) -> None:
    """A token that lasts two seconds is replaced after one; the token server changes the refresh token each time."""
    grant = {
        "token_url": "https://oauth.test/token?lasts=2&rotates=1",
        "client_id": "me",
        "refresh_token": "refresh-of-the-beginning",
    }
    secret = {"value_from": "oauth", "scheme": "Bearer {value}", "oauth": grant}
    box = await make("allowlist", secrets={"api.test": secret})
    first = (await received(box, world, "curl -sS https://URL"))["authorization"]
    await asyncio.sleep(1.5)
    second = (await received(box, world, "curl -sS https://URL"))["authorization"]
    assert second != first
    forms = [dict(parse_qsl(str(said["form"]))) for said in world.asked("/token") if "rotates" in str(said["target"])]
    assert forms[-2]["refresh_token"] == "refresh-of-the-beginning"
    given = f"refresh-token-number-{first.rpartition('-')[2]}"
    assert forms[-1]["refresh_token"] == given
    await outward.stop(box.id)  # what is read anew from the store
    await received(box, world, "curl -sS https://URL")
    form = dict(parse_qsl(str(world.asked("/token")[-1]["form"])))
    assert form["refresh_token"] == f"refresh-token-number-{second.rpartition('-')[2]}"
    for path in outward.settings.home.glob("skerry.db*"):
        assert b"refresh-token-number" not in path.read_bytes()


async def test_a_token_server_on_a_private_address_is_not_asked(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_REFRESH", "refresh")
    grant = {"token_url": "https://127.0.0.1/token", "client_id": "me", "refresh_token_from": "env:WORLD_REFRESH"}
    box = await make("open", secrets={"api.test": {"value_from": "oauth", "oauth": grant}})
    said = json.loads(await box.out("curl -sS https://api.test/echo"))
    assert said["error"]["code"] == "secret_unavailable"


# -- what is kept and shown --------------------------------------------------------------------------------------------


async def test_a_value_that_was_sent_is_kept_encrypted_and_never_shown(
    make: Make, world: World, outward: Registry
) -> None:
    value = f"planted-{random.token_hex(12)}"
    box = await make("open", secrets={"api.test": {"header": "x-api-key", "value": value}})
    assert (await received(box, world, "curl -sS https://URL"))["x-api-key"] == value
    await outward.stop(box.id)
    assert (await received(box, world, "curl -sS https://URL"))["x-api-key"] == value
    shown = (await outward.egress(box.id)).model_dump_json() + (await outward.get(box.id)).model_dump_json()
    assert value not in shown
    assert '"value_from":"value"' in shown
    for path in outward.settings.home.glob("skerry.db*"):
        assert value.encode() not in path.read_bytes()
    assert value not in repr(Secret(value=SecretStr(value)))


async def test_a_planted_secret_is_found_nowhere(make: Make, value: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Memory, environment and files of the sandbox; the server's output, events and store."""
    box = await make("open", secrets={"api.test": {**KEY, "scheme": "Bearer {value}"}})
    await box.sh(
        "(python3 -c \"import time, urllib.request as u; d = u.urlopen('https://api.test/reflect').read(); "
        'time.sleep(60)" &)'
    )
    await box.sh("curl -sSv https://api.test/reflect > /tmp/curl.txt 2>&1; sleep 1")
    await box.sh("curl -sS https://api.test/cut; curl -sS https://api.test/nonsense; curl -sS https://api.test/none")
    owner = box.registry._owners[box.id]
    assert owner.door is not None
    assert _in_memory(value) == []
    assert _in_memory("skerry-placeholder") != []  # it looks where it would be
    search = f"a={value[:12]}; grep -rl $a{value[12:]} / --exclude-dir=proc --exclude-dir=sys 2>/dev/null"
    assert (await box.sh(search)).stdout == ""
    assert value not in await box.out("cat /proc/*/environ /proc/*/cmdline 2>/dev/null")
    events = await box.registry.events(box.id, limit=1000)
    assert value not in "".join(event.model_dump_json() for event in events)
    assert value not in (await box.registry.egress(box.id)).model_dump_json()
    assert value.encode() not in await box.registry.measurements()
    said = capfd.readouterr()
    assert value not in said.out + said.err
    home = box.registry.settings.home
    for path in [*home.glob("skerry.db*"), *home.glob("trust/*")]:
        assert value.encode() not in path.read_bytes()
    assert value not in repr(owner.row) + repr(owner.door._secrets)


def _in_memory(value: str) -> list[str]:
    """Processes of the sandbox in whose memory the value is, looked at from outside."""
    needle, found = value.encode(), []
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            status = Path(f"/proc/{entry}/status").read_text()
            if not any(
                line.startswith("Uid:") and int(line.split()[1]) >= 1_900_000_000 for line in status.splitlines()
            ):
                continue
            with open(f"/proc/{entry}/mem", "rb", 0) as memory:
                for line in Path(f"/proc/{entry}/maps").read_text().splitlines():
                    if " r" not in line:
                        continue
                    low, high = (int(part, 16) for part in line.split()[0].split("-"))
                    try:
                        memory.seek(low)
                        if needle in memory.read(min(high - low, 1 << 28)):
                            found.append(entry)
                    except (OSError, OverflowError, ValueError):
                        continue
        except OSError:
            continue
    return found


@pytest.mark.parametrize(
    ("secret", "why"),
    [
        ({}, "either value or value_from"),
        ({"value": "x", "value_from": "env:X"}, "either value or value_from"),
        ({"value_from": "X"}, "is no source"),
        ({"value_from": "file:relative"}, "is no source"),
        ({"value": "with\nnewline"}, "cannot be part of a header"),
        ({"value": "x", "header": "Host"}, "not a header"),
        ({"value": "x", "scheme": "Bearer"}, "where"),
        ({"value": "x", "placeholder": "1BAD"}, "not a name"),
        ({"value_from": "oauth"}, "both"),
    ],
)
async def test_a_secret_that_makes_no_sense_changes_nothing(make: Make, secret: dict[str, str], why: str) -> None:
    box = await make("open")
    before = await box.registry.egress(box.id)
    with pytest.raises(Exception, match=why):
        await box.registry.set_egress(
            box.id, SetEgress.model_validate({"mode": "none", "secrets": {"api.test": secret}})
        )
    assert await box.registry.egress(box.id) == before


async def test_hosts_of_secrets_are_checked(make: Make) -> None:
    for host in ("", "a b", "*.api.test", "https://api.test", "api.test:0"):
        with pytest.raises(InvalidEgressError):
            await make("open", secrets={host: {"value": "x"}})


async def test_where_others_come_the_servers_variables_are_given_only_as_its_operator_says(tmp_path: Path) -> None:
    from skerry.control.egress import Egress
    from skerry.control.metrics import Metrics

    def asks(settings: Settings, host: str = "api.test") -> None:
        egress = Egress(settings, Metrics(), lambda: bool(settings.api_keys))
        (tmp_path / "home").mkdir(exist_ok=True)
        egress.open(tmp_path / "home")
        secrets = {host: Secret(value_from="env:HOME")}
        egress.kept(CreateSandbox(egress=EgressPolicy(mode="open"), secrets=secrets))
        egress.close()

    asks(Settings(home=tmp_path))
    with pytest.raises(SecretSourceError, match="does not give env:HOME to api"):
        asks(Settings(home=tmp_path, api_keys=("k",)))
    allowed = Settings(home=tmp_path, api_keys=("k",), secret_sources=("env:HOME@api.test",))
    asks(allowed)
    with pytest.raises(SecretSourceError):
        asks(allowed, "evil.test")
    with pytest.raises(SecretSourceError):
        asks(Settings(home=tmp_path, secret_sources=()))

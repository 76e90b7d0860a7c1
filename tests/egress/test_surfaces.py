"""The same through the API, the SDK and the command line; the defaults; an ordinary user's server; the warm pool."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

from skerry import AsyncSandbox, InvalidEgressError, InvalidRequestError
from skerry.cli.main import run
from skerry.control import meter
from skerry.control.accounts import Accounts
from skerry.control.egress import default_policy
from skerry.control.open import open_registry
from skerry.control.store import Store
from skerry.errors import SecretSourceError
from skerry.models import CreateKey, CreateSandbox, CreateSnapshot, EgressPolicy, ExecRequest, ForkSandbox
from skerry.settings import Settings
from tests.providers.users import USER, needs_newuidmap, needs_root, place_of, run_as_user
from tests.server.conftest import ServerProcess


class Origin(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        body = json.dumps(dict(self.headers)).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        return None


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """A server on this host's loopback, which is reached only if its address is listed."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Origin)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_port
    server.shutdown()
    thread.join()
    server.server_close()


GET = "curl -sS --noproxy '' -w ' %{{http_code}}' http://127.0.0.1:{port}/"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    process = ServerProcess(tmp_path_factory.mktemp("served"), api_keys=["key"], warm_pool=1)
    yield process
    assert process.stop() == 0


@pytest.fixture
async def http(served: ServerProcess) -> AsyncIterator[httpx.AsyncClient]:
    headers = {"Authorization": "Bearer key"}
    async with httpx.AsyncClient(base_url=served.url, headers=headers, timeout=60) as client:
        yield client


async def test_a_server_with_keys_lets_out_to_registries_only(http: httpx.AsyncClient) -> None:
    await http.post("/v1/sandboxes", json={"id": "registries"})
    found = (await http.get("/v1/sandboxes/registries/egress")).json()
    assert (found["mode"], found["allow"], found["inherited"]) == ("allowlist", ["registries"], True)
    done = (await http.post("/v1/sandboxes/registries/exec", json={"command": "curl -sS http://example.com/"})).json()
    assert json.loads(done["stdout"])["error"]["code"] == "egress_refused"


async def test_the_api_sets_shows_and_checks(http: httpx.AsyncClient, port: int) -> None:
    await http.post("/v1/sandboxes", json={"id": "asked", "egress": "none"})
    assert (await http.get("/v1/sandboxes/asked")).json()["egress"] == "none"
    done = (await http.post("/v1/sandboxes/asked/exec", json={"command": GET.format(port=port)})).json()
    assert done["stdout"].endswith(" 403")
    rules = [f"127.0.0.1:{port}", {"host": "api.example.com", "methods": ["GET"], "path": "/v1/"}]
    put = await http.put("/v1/sandboxes/asked/egress", json={"mode": "allowlist", "allow": rules})
    assert put.status_code == 200, put.text
    assert put.json()["allow"][1]["path"] == "/v1/"
    done = (await http.post("/v1/sandboxes/asked/exec", json={"command": GET.format(port=port)})).json()
    assert done["stdout"].endswith(" 200")
    network = (await http.get("/v1/sandboxes/asked")).json()["network"]
    assert network["bytesIn"] > 100
    assert network["bytesOut"] > 50
    for body, code in (
        ({"allow": ["a b"]}, "invalid_egress"),
        ({"mode": "everything"}, "invalid_request"),
        ({"secrets": {"api.example.com": {"value_from": "env:HOME"}}}, "secret_source_refused"),
        ({"secrets": {"api.example.com": {"header": "x y", "value": "private-words"}}}, "invalid_request"),
    ):
        refused = await http.put("/v1/sandboxes/asked/egress", json=body)
        assert refused.json()["error"]["code"] == code
        assert "private-words" not in refused.text
    assert (await http.get("/v1/sandboxes/asked/egress")).json()["allow"] == put.json()["allow"]
    metrics = (await http.get("/metrics")).text
    assert 'skerry_egress_bytes_total{direction="in",owner="local"}' in metrics


async def test_a_machine_from_the_warm_pool_takes_its_policy_with_it(http: httpx.AsyncClient, port: int) -> None:
    await asyncio.sleep(1)
    await http.post(
        "/v1/sandboxes", json={"id": "warm-open", "egress": {"mode": "open", "allow": [f"127.0.0.1:{port}"]}}
    )
    done = (await http.post("/v1/sandboxes/warm-open/exec", json={"command": GET.format(port=port)})).json()
    assert done["stdout"].endswith(" 200")
    await asyncio.sleep(1)
    body = {
        "id": "warm-none",
        "egress": "none",
        "secrets": {"a.test": {"value": "xxxx", "placeholder": "A_KEY=sk-none"}},
    }
    await http.post("/v1/sandboxes", json=body)
    done = (
        await http.post("/v1/sandboxes/warm-none/exec", json={"command": GET.format(port=port) + "; echo $A_KEY"})
    ).json()
    assert done["stdout"].endswith(" 403sk-none\n")


async def test_the_sdk_speaks_of_it_too(tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SDK_SECRET", "only-at-the-door")
    secrets = {f"127.0.0.1:{port}": {"header": "x-api-key", "value_from": "env:SDK_SECRET", "insecure": True}}
    policy = {"mode": "open", "allow": [f"127.0.0.1:{port}"]}
    async with AsyncSandbox("sdk", home=tmp_path / "home", egress=policy, secrets=secrets) as sandbox:
        said = await sandbox.exec(f"curl -sS --noproxy '' http://127.0.0.1:{port}/")
        assert "x-api-key" in said.stdout
        assert "only-at-the-door" not in said.stdout
        found = await sandbox.egress()
        assert found.mode == "open"
        assert found.secrets[f"127.0.0.1:{port}"].value_from == "env:SDK_SECRET"
        assert (await sandbox.set_egress("none", secrets={})).secrets == {}
        assert "egress is 'none'" in (await sandbox.exec(GET.format(port=port))).stdout
        with pytest.raises(InvalidEgressError):
            await sandbox.set_egress(allow=["a b"])
        with pytest.raises(InvalidRequestError) as refused:
            await sandbox.set_egress(secrets={"a.test": {"value": "private-words", "typo": 1}})
        assert "private-words" not in str(refused.value)
        await sandbox.destroy()


def test_the_command_line_shows_and_changes_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    home = ["--home", str(tmp_path / "home")]
    assert run([*home, "egress", "demo"]) == 1  # looking makes no sandbox
    assert run([*home, "create", "demo"]) == 0
    assert run([*home, "egress", "demo"]) == 0
    assert "mode    open (the server’s)" in capsys.readouterr().out
    monkeypatch.setenv("CLI_SECRET", "x")
    secret = "api.example.com=x-api-key:env:CLI_SECRET"
    assert run([*home, "egress", "demo", "--allow", "pypi.org", "--allow", "GET a.com/v1/", "--secret", secret]) == 0
    said = capsys.readouterr().out
    assert "mode    allowlist\nallow   pypi.org\nallow   GET a.com/v1/\n" in said
    assert "secret  api.example.com  x-api-key from env:CLI_SECRET" in said
    assert run([*home, "egress", "demo", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["mode"] == "allowlist"
    assert run([*home, "egress", "demo", "--allow", "a b"]) == 1
    assert run([*home, "egress", "demo", "--secret", "nonsense"]) == 2


@pytest.mark.parametrize(
    ("words", "keys", "mode", "allow"),
    [
        ((), (), "open", []),
        ((), ("k",), "allowlist", ["registries"]),
        (("none",), (), "none", []),
        (("open",), ("k",), "open", []),
        (("open", "10.0.0.0/8"), (), "open", ["10.0.0.0/8"]),
        (("registries", "api.example.com"), (), "allowlist", ["registries", "api.example.com"]),
        (("allowlist",), (), "allowlist", ["registries"]),
    ],
)
def test_one_setting_says_what_is_allowed_unless_something_else_is(
    tmp_path: Path, words: tuple[str, ...], keys: tuple[str, ...], mode: str, allow: list[str]
) -> None:
    environ = {"SKERRY_EGRESS": ",".join(words), "SKERRY_API_KEYS": ",".join(keys)}
    settings = Settings.from_env(environ, home=tmp_path)
    found = default_policy(settings.egress, keyed=bool(settings.api_keys))
    assert (found.mode, found.allow) == (mode, allow)


AS_USER = """
import asyncio, sys
from pathlib import Path
from skerry.control.open import open_registry
from skerry.control.store import Store
from skerry.models import CreateKey, CreateSandbox, CreateSnapshot, EgressPolicy, ExecRequest, ForkSandbox
from skerry.settings import Settings

async def main():
    registry = await open_registry(Settings(home=Path(sys.argv[1]) / "home"))
    try:
        policy = EgressPolicy(mode="open", allow=[f"127.0.0.1:{sys.argv[2]}"])
        await registry.create(CreateSandbox(id="mine", egress=policy))
        async with registry.use("mine") as runtime:
            for command in (f"curl -sS --noproxy '' -o /dev/null -w '%{{http_code}} ' http://127.0.0.1:{sys.argv[2]}/",
                            "curl -sS -o /dev/null -w '%{http_code} ' http://10.0.0.1/",
                            "curl -sS -m 5 --noproxy '*' -o /dev/null -w '%{http_code} ' http://10.0.0.1/"):
                done = await runtime.exec(ExecRequest(command=command))
                print(done.stdout, end="")
        print(("caught" if (await registry.egress("mine")).transparent else "unreachable"))
    finally:
        await registry.close()

asyncio.run(main())
"""


@needs_root
@needs_newuidmap
@pytest.mark.parametrize("subids", [True, False])
def test_the_door_of_an_ordinary_users_sandbox_is_as_good(port: int, subids: bool) -> None:
    with place_of(USER) as place:
        assert run_as_user(AS_USER, place, port, subids=subids) == "200 403 403 caught"


async def test_what_makes_no_sense_leaves_no_sandbox_behind(tmp_path: Path) -> None:
    registry = await open_registry(Settings(home=tmp_path / "home", secret_sources=()))
    try:
        for request, error in (
            (CreateSandbox(id="bad", egress=EgressPolicy(mode="allowlist", allow=["a b"])), InvalidEgressError),
            (
                CreateSandbox.model_validate({"id": "bad", "secrets": {"a.test": {"value_from": "env:X"}}}),
                SecretSourceError,
            ),
        ):
            with pytest.raises(error):
                await registry.create(request)
        assert (await registry.list()).sandboxes == []
        async with registry.use("good") as runtime:
            assert (await runtime.exec(ExecRequest(command="echo $HTTPS_PROXY"))).stdout == "http://127.0.0.1:61080\n"
    finally:
        await registry.close()


async def test_what_went_through_is_kept_while_it_runs_and_is_part_of_what_it_uses(
    tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meter, "SAVE_EVERY", 0.1)
    monkeypatch.setattr(meter, "EVERY", 0.1)
    settings = Settings(home=tmp_path / "home")
    registry = await open_registry(settings)
    other = Store(settings.store_url)
    await other.open()
    try:
        policy = EgressPolicy(mode="open", allow=[f"127.0.0.1:{port}"])
        await registry.create(CreateSandbox(id="counted", egress=policy))
        async with registry.use("counted") as runtime:
            await runtime.exec(ExecRequest(command=GET.format(port=port)))
        network = (await registry.get("counted")).network
        assert min(network.bytes_in, network.bytes_out) > 50
        used = (await registry.measure("counted")).usage
        assert (used.network_in, used.network_out) == (network.bytes_in, network.bytes_out)
        async with asyncio.timeout(20):
            while not (row := await other.get_sandbox("counted")) or not row.usage or not row.usage["networkIn"]:
                await asyncio.sleep(0.1)
        assert (row.usage["networkIn"], row.usage["networkOut"]) == (network.bytes_in, network.bytes_out)
    finally:
        await other.close()
        await registry.close()


async def test_forks_and_snapshots_keep_to_the_policy_they_were_made_under(tmp_path: Path, port: int) -> None:
    registry = await open_registry(Settings(home=tmp_path / "home"))
    try:
        secrets = {f"127.0.0.1:{port}": {"header": "x-api-key", "value": "worth-much", "insecure": True}}
        policy = EgressPolicy(mode="allowlist", allow=[f"127.0.0.1:{port}"])
        request = CreateSandbox.model_validate({"id": "first", "egress": policy, "secrets": secrets})
        await registry.create(request)
        async with registry.use("first") as runtime:
            await runtime.exec(ExecRequest(command="true"))
        await registry.snapshots.create("first", CreateSnapshot(name="kept"))
        await registry.snapshots.fork("first", ForkSandbox(ids=["second"]))
        await registry.create(CreateSandbox(id="third", snapshot="kept"))
        for id in ("second", "third"):
            assert (await registry.egress(id)).mode == "allowlist"
            assert (await registry.get(id)).network.bytes_in == 0
            async with registry.use(id) as runtime:
                assert "not on this" in (await runtime.exec(ExecRequest(command="curl -sS http://a.test/"))).stdout
                done = await runtime.exec(ExecRequest(command=GET.format(port=port)))
                assert ("x-api-key" in done.stdout) is (id == "second"), "a snapshot holds no secrets"
    finally:
        await registry.close()


async def test_the_first_key_closes_what_was_open_for_want_of_a_policy(tmp_path: Path) -> None:
    registry = await open_registry(Settings(home=tmp_path / "home"))
    try:
        async with registry.use("plain") as runtime:
            await runtime.exec(ExecRequest(command="true"))
        await registry.create(CreateSandbox(id="chosen", egress=EgressPolicy(mode="open")))
        assert (await registry.egress("plain")).mode == "open"
        await Accounts(registry).create_key(CreateKey(owner="ada"))
        assert (await registry.egress("plain")).mode == "allowlist"
        assert (await registry.egress("chosen")).mode == "open"
        async with registry.use("plain") as runtime:
            asked = await runtime.exec(
                ExecRequest(command="curl -s -o /dev/null -w '%{http_code}' http://example.com/")
            )
            assert asked.stdout == "403"
    finally:
        await registry.close()

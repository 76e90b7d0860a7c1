"""A user's configuration: what of it an agent finds inside, and what stays outside."""

from __future__ import annotations

import json
import secrets
from typing import Any

import pytest

from skerry.agents.config import PLACEHOLDER, prepare, server_variables
from skerry.agents.contract import Prompt
from skerry.agents.opencode.agent import OpenCode
from skerry.control.registry import Registry
from skerry.errors import InvalidRequestError
from skerry.models import CreateSandbox
from skerry.settings import Settings
from tests.agents.conftest import HOST, KEY
from tests.agents.model import Model, call, config, say

SECRET = "sk-very-secret"


def settings(preparation: Any) -> dict[str, Any]:
    found = json.loads(preparation.setup.env["OPENCODE_CONFIG_CONTENT"])
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize(
    "given",
    [
        {"provider": {"anthropic": {"options": {"apiKey": SECRET}}}},
        {"auth": {"anthropic": {"type": "api", "key": SECRET}}},
        {"auth": {"anthropic": {"type": "api", "key": SECRET}}, "provider": {"anthropic": {"options": {}}}},
    ],
)
def test_a_key_becomes_a_secret_of_its_host(given: dict[str, Any]) -> None:
    made = prepare("opencode", {**given, "model": "anthropic/claude-x"})
    secret = made.secrets["api.anthropic.com"]
    assert secret.value is not None
    assert (secret.header, secret.scheme, secret.value.get_secret_value()) == ("x-api-key", "{value}", SECRET)
    assert settings(made)["provider"]["anthropic"]["options"]["apiKey"] == PLACEHOLDER
    assert SECRET not in repr(made)
    assert SECRET not in json.dumps(dict(made.setup.env))


def test_a_host_of_ones_own_is_where_the_key_goes() -> None:
    options = {"apiKey": SECRET, "baseUrl": "https://models.example.com:8443/v1"}
    made = prepare("opencode", {"provider": {"mine": {"npm": "@ai-sdk/openai-compatible", "options": options}}})
    assert made.secrets["models.example.com:8443"].scheme == "Bearer {value}"
    assert settings(made)["provider"]["mine"]["options"]["baseURL"] == "https://models.example.com:8443/v1"
    clear = prepare(
        "opencode", {"provider": {"mine": {"options": {"apiKey": SECRET, "baseURL": "http://10.0.0.1/v1"}}}}
    )
    assert clear.secrets["10.0.0.1:80"].insecure


def test_a_key_among_the_headers_is_a_key() -> None:
    options = {"baseURL": "https://models.example.com/v1", "headers": {"api-key": SECRET, "x-team": "tide"}}
    made = prepare("opencode", {"provider": {"mine": {"options": options}}})
    secret = made.secrets["models.example.com"]
    assert secret.value is not None
    assert (secret.header, secret.scheme, secret.value.get_secret_value()) == ("api-key", "{value}", SECRET)
    assert settings(made)["provider"]["mine"]["options"] == {
        "baseURL": "https://models.example.com/v1",
        "headers": {"x-team": "tide"},
    }
    options = {"headers": {"Authorization": f"Bearer {SECRET}", "x-team": "tide"}}
    claude = prepare("claude-code", {"provider": {"anthropic": {"options": options}}})
    assert claude.secrets["api.anthropic.com"].header == "Authorization"
    assert claude.setup.env == {"ANTHROPIC_AUTH_TOKEN": PLACEHOLDER, "ANTHROPIC_CUSTOM_HEADERS": "x-team: tide"}
    given = {"provider": {"anthropic": {"options": {"authToken": SECRET}}}}
    made = prepare("opencode", given)
    secret = made.secrets["api.anthropic.com"]
    assert secret.value is not None
    assert (secret.header, secret.value.get_secret_value()) == ("Authorization", f"Bearer {SECRET}")
    assert settings(made)["provider"]["anthropic"]["options"] == {"headers": {}, "authToken": PLACEHOLDER}
    assert prepare("claude-code", given).setup.env == {"ANTHROPIC_AUTH_TOKEN": PLACEHOLDER}
    shown = {"provider": settings(made)["provider"], "auth": {"anthropic": {"type": "api", "key": SECRET}}}
    assert prepare("opencode", shown).secrets["api.anthropic.com"].header == "x-api-key", "what is shown is no key"


def test_tokens_are_refreshed_outside() -> None:
    grant = {"type": "oauth", "refresh": "r-1", "tokenUrl": "https://auth.example.com/token", "clientId": "agent"}
    made = prepare("opencode", {"auth": {"anthropic": grant}})
    oauth = made.secrets["api.anthropic.com"].oauth
    assert oauth is not None
    assert oauth.token_url == "https://auth.example.com/token"
    access = prepare("opencode", {"auth": {"anthropic": {"type": "oauth", "access": SECRET, "expires": 1}}})
    assert access.secrets["api.anthropic.com"].scheme == "Bearer {value}"
    options = settings(access)["provider"]["anthropic"]["options"]
    assert (options["authToken"], "apiKey" in options) == (PLACEHOLDER, False), "a key that is none is looked at first"
    claude = prepare("claude-code", {"auth": {"anthropic": grant}}).setup.env
    assert claude == {"CLAUDE_CODE_OAUTH_TOKEN": PLACEHOLDER}
    with pytest.raises(InvalidRequestError, match="where to go with it"):
        prepare("opencode", {"auth": {"anthropic": {"type": "oauth", "refresh": "r-1"}}})


def test_an_mcp_server_elsewhere_is_shown_its_key_at_the_door() -> None:
    remote = {"type": "remote", "url": "https://mcp.example.com/sse", "headers": {"Authorization": f"Bearer {SECRET}"}}
    made = prepare("opencode", {"mcp": {"far": remote}})
    value = made.secrets["mcp.example.com"].value
    assert value is not None
    assert value.get_secret_value() == f"Bearer {SECRET}"
    assert SECRET not in json.dumps(dict(made.setup.env))
    with pytest.raises(InvalidRequestError, match="two keys for"):
        prepare("opencode", {"mcp": {"one": remote, "two": remote}})


def test_files_go_below_the_home_directory_and_not_into_the_repository() -> None:
    files = [
        {"type": "agent", "name": "reviewer", "extension": "md", "content": "You review."},
        {"type": "command", "name": "test.md", "extension": ".md", "content": "Run the tests."},
        {"type": "tool", "name": "adder", "extension": "ts", "content": "export default 1", "isSystem": True},
    ]
    made = prepare("opencode", {"files": files, "agents_md": "Be kind."})
    place = "/root/.config/opencode"
    assert made.setup.files == {
        f"{place}/agent/reviewer.md": b"You review.",
        f"{place}/command/test.md": b"Run the tests.",
        f"{place}/tool/adder.ts": b"export default 1",
        f"{place}/AGENTS.md": b"Be kind.",
    }
    assert made.toolboxes == ("opencode", "opencode-plugin")
    claude = prepare("claude-code", {"files": files[:2], "agents_md": "Be kind."})
    assert sorted(claude.setup.files) == [
        "/root/.claude/CLAUDE.md",
        "/root/.claude/agents/reviewer.md",
        "/root/.claude/commands/test.md",
    ]
    with pytest.raises(InvalidRequestError, match="MCP server"):
        prepare("claude-code", {"files": files})


def test_nothing_is_asked_or_shared_unless_the_configuration_says_so() -> None:
    plain = settings(prepare("opencode", {"share": "auto", "autoupdate": True}))
    assert (plain["share"], plain["autoupdate"], plain["permission"]["*"]) == ("disabled", False, "allow")
    assert settings(prepare("opencode", {"permission": {"bash": "ask"}}))["permission"] == {"bash": "ask"}


@pytest.mark.parametrize("wrong", ["yes", ["yes"]])
def test_what_opencode_does_not_take_is_passed_on_for_it_to_say_so(wrong: Any) -> None:
    assert settings(prepare("opencode", {"experimental": wrong}))["experimental"] == wrong


@pytest.mark.parametrize(
    ("permission", "ask", "deny"),
    [
        ({}, [], []),
        ({"task": "allow", "bash": "allow"}, [], []),
        ({"bash": "ask"}, ["Bash"], []),
        ({"bash": {"*": "allow", "rm *": "deny", "git push *": "ask"}}, ["Bash(git push *)"], ["Bash(rm *)"]),
        ({"edit": "deny", "webfetch": "deny"}, [], ["Edit", "Write", "NotebookEdit", "WebFetch"]),
        ({"*": "deny", "read": "allow", "grep": "allow", "edit": "allow"}, [], None),
    ],
)
def test_what_claude_code_may_do_is_told_in_its_own_words(
    permission: dict[str, Any], ask: list[str], deny: list[str] | None
) -> None:
    setup = prepare("claude-code", {"permission": permission}).setup
    written = json.loads(setup.files.get("/root/.claude/permissions.json", b"{}")).get("permissions", {})
    assert (setup.asks, written.get("ask", [])) == (bool(ask), ask)
    if deny is not None:
        assert written.get("deny", []) == deny
    else:
        assert {"Bash", "WebFetch", "Agent"} <= set(written["deny"])
        assert not {"Read", "Grep", "Edit", "Write"} & set(written["deny"])


@pytest.mark.parametrize(
    ("permission", "action", "expected"),
    [
        ({"bash": "ask"}, "allow", {"mcp__times", "mcp__two_words"}),
        ({"*": "ask", "times_*": "allow"}, "allow", {"mcp__times"}),
        ({"*": "ask", "times_*": "allow"}, "ask", {"mcp__two_words"}),
        ({"*": "allow", "times_multiply": "deny", "two words_*": "ask"}, "deny", {"mcp__times__multiply"}),
        ({"*": "allow", "times_multiply": "deny", "two words_*": "ask"}, "ask", {"mcp__two_words"}),
        ({"*": "deny", "read": "allow"}, "deny", {"mcp__times", "mcp__two_words"}),
    ],
)
def test_claude_code_is_told_what_it_may_do_with_mcp_servers_too(
    permission: dict[str, Any], action: str, expected: set[str]
) -> None:
    server = {"command": ["a"]}
    servers = {"times": server, "two words": server, "off": {**server, "enabled": False}}
    setup = prepare("claude-code", {"permission": permission, "mcp": servers}).setup
    told = json.loads(setup.files["/root/.claude/permissions.json"])["permissions"][action]
    assert {rule for rule in told if rule.startswith("mcp__")} == expected


def test_claude_code_is_given_the_mcp_servers_that_are_enabled() -> None:
    servers = {"on": {"type": "local", "command": ["a", "b"]}, "off": {"command": ["c"], "enabled": False}}
    setup = prepare("claude-code", {"mcp": servers}).setup
    assert json.loads(setup.files["/root/.claude/mcp.json"]) == {
        "mcpServers": {"on": {"command": "a", "args": ["b"], "env": {}}}
    }
    for wrong in ({"type": "local"}, {"command": "a b"}, {"type": "remote"}):
        with pytest.raises(InvalidRequestError, match="'odd'"):
            prepare("claude-code", {"mcp": {"odd": wrong}})
    for permission in ("sometimes", {"bash": "sometimes"}, ["bash"]):
        with pytest.raises(InvalidRequestError, match="permission"):
            prepare("claude-code", {"permission": permission})


@pytest.mark.parametrize(
    "given",
    [
        {"files": [{"type": "agent", "name": "../x", "content": ""}]},
        {"files": [{"type": "agent", "name": "a/b", "content": ""}]},
        {"files": [{"type": "secret", "name": "a", "content": ""}]},
        {"provider": {"unheard-of": {"options": {"apiKey": SECRET}}}},
        {"provider": {"mine": {"options": {"apiKey": SECRET, "baseURL": "ftp://x"}}}},
        {"provider": {"mine": {"options": {"apiKey": SECRET, "baseURL": "https://x:99999999"}}}},
        {"provider": {"mine": {"options": "none"}}},
        {"provider": {"mine": {"options": {"baseURL": "https://x", "apiKey": [SECRET]}}}},
        {"provider": {"mine": {"options": {"baseURL": "https://x", "headers": SECRET}}}},
        {"provider": {"mine": {"options": {"baseURL": "https://x", "headers": {"api-key": SECRET, "X-Api-Key": "y"}}}}},
        {"provider": {"mine": {"options": {"baseURL": "https://x", "apiKey": "y", "headers": {"api-key": SECRET}}}}},
        {"provider": {name: {"options": {"baseURL": "https://x", "apiKey": SECRET + name}} for name in ("a", "b")}},
        {"provider": {"mine": {"options": {"baseURL": f"https://me:{SECRET}@models.example.com/v1"}}}},
        {"provider": {"mine": {"options": {"baseURL": "https://x", "authToken": [SECRET]}}}},
        {"provider": {"amazon-bedrock": {"options": {"accessKeyId": "id", "secretAccessKey": SECRET}}}},
        {"provider": {"google-vertex": {"options": {"googleAuthOptions": {"credentials": {"private_key": SECRET}}}}}},
        {"mcp": {"far": {"type": "remote", "url": f"https://{SECRET}@mcp.example.com/"}}},
        {"agent": {"long": {"prompt": SECRET * 10_000}}},
        {"auth": {"anthropic": {"type": "api"}}},
        {"auth": {"anthropic": {"type": "api", "key": SECRET, "kee": SECRET}}},
    ],
)
def test_what_cannot_be_is_said_without_the_secret(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError) as error:
        prepare("opencode", given)
    assert SECRET not in str(error.value)


def test_the_servers_own_key_is_used_where_its_operator_lets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANTHROPIC_API_KEY", SECRET)
    wanted = {"model": "anthropic/claude-x"}

    def made(closed: bool, *sources: str) -> Any:
        allowed = Settings(secret_sources=sources) if sources else Settings()
        return prepare("opencode", wanted, has=server_variables(allowed, closed)).secrets

    assert made(closed=False)["api.anthropic.com"].value_from == "env:ANTHROPIC_API_KEY"
    assert made(closed=True) == {}
    assert made(True, "env:ANTHROPIC_API_KEY@api.anthropic.com")["api.anthropic.com"].value is None
    assert made(True, "env:ANTHROPIC_API_KEY@elsewhere.example.com") == {}


def test_a_variable_in_place_of_a_key_is_the_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDE_KEY", SECRET)
    remote = {"type": "remote", "url": "https://mcp.example.com", "headers": {"Authorization": "Bearer {env:TIDE_KEY}"}}
    given = {"provider": {"openai": {"options": {"apiKey": "{env:TIDE_KEY}"}}}, "mcp": {"far": remote}}
    made = prepare("opencode", given, has=server_variables(Settings(), closed=False))
    for host in ("api.openai.com", "mcp.example.com"):
        assert (made.secrets[host].value_from, made.secrets[host].scheme) == ("env:TIDE_KEY", "Bearer {value}")
    for closed, value in ((True, "{env:TIDE_KEY}"), (False, "{env:NOBODYS}"), (False, "{file:~/.key}")):
        has = server_variables(Settings(), closed)
        with pytest.raises(InvalidRequestError, match=r"The key for api\.openai\.com is to come from"):
            prepare("opencode", {"provider": {"openai": {"options": {"apiKey": value}}}}, has=has)


TOOL = """
import { tool } from "@opencode-ai/plugin"
export default tool({
  description: "Adds two numbers",
  args: { a: tool.schema.number(), b: tool.schema.number() },
  async execute(args) { return String(args.a + args.b) },
})
"""
SERVER = """
import json, sys
for line in sys.stdin:
    asked = json.loads(line)
    if "id" not in asked:
        continue
    answers = {
        "initialize": {"protocolVersion": "2024-11-05", "capabilities": {"tools": {}},
                       "serverInfo": {"name": "times", "version": "1"}},
        "tools/list": {"tools": [{"name": "multiply", "description": "Multiplies",
            "inputSchema": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}}}]},
        "tools/call": {"content": [{"type": "text", "text": "forty-two"}]},
    }
    answer = {"jsonrpc": "2.0", "id": asked["id"], "result": answers.get(asked["method"], {})}
    print(json.dumps(answer), flush=True)
"""


async def test_tools_agents_and_mcp_servers_work_without_a_network(agency: Registry, model: Model) -> None:
    given = config(model, key=KEY)
    given["agents_md"] = "Always be kind."
    given["files"] = [
        {"type": "tool", "name": "adder", "extension": "ts", "content": TOOL},
        {
            "type": "agent",
            "name": "build",
            "extension": "md",
            "content": "---\nmode: primary\n---\nYou count carefully.",
        },
    ]
    given["mcp"] = {"times": {"type": "local", "command": ["python3", "/root/times.py"], "enabled": True}}
    made = prepare("opencode", given)
    allowed = {"mode": "allowlist", "allow": [f"{HOST}:{model.port}"]}
    request = CreateSandbox.model_validate(
        {
            "id": f"config-{secrets.token_hex(3)}",
            "toolboxes": list(made.toolboxes),
            "egress": allowed,
            "secrets": {host: secret.model_dump(mode="json") for host, secret in made.secrets.items()},
        }
    )
    info = await agency.create(request)
    model.when("count", call("adder", a=2, b=3), call("times_multiply", a=6, b=7), say("counted"))
    async with agency.use(info.id) as runtime:
        await runtime.files.write("/root/times.py", SERVER.encode())
        running = await OpenCode().start(runtime, made.setup)
        session = await running.create_session("counting")
        events = [event async for event in running.prompt(session, Prompt("count", "prompt-1"))]
    done = [(event.tool, event.output) for event in events if event.type == "tool_call" and event.status == "completed"]
    assert done == [("adder", "5"), ("times_multiply", "forty-two")]
    said = json.dumps(model.wait_until_asked("count").body["messages"])
    assert "You count carefully." in said
    assert "Always be kind." in said
    assert model.asked[-1].headers["authorization"] == f"Bearer {KEY}"
    await agency.destroy(info.id)

"""A user's configuration, in AgentPod's words, as what an agent program finds inside and what stays outside.

Keys and tokens become secrets of the sandbox's door (``docs/egress.md``), which adds them on the way to their host;
inside there is a placeholder. Files go below the home directory, not into the repository that is worked on.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from pydantic import SecretStr, ValidationError

from skerry.agents.claude.permissions import rules
from skerry.agents.claude.speech import CONFIGURATION, RULES, SERVERS
from skerry.agents.contract import DIRECTORY, Setup
from skerry.agents.models import AgentConfig, Credential
from skerry.agents.providers import PROVIDERS, ModelProvider, speaks_like
from skerry.errors import InvalidRequestError
from skerry.models import OAuthGrant, Secret, Secrets
from skerry.runtime.environment import LONGEST
from skerry.settings import Settings

PLACEHOLDER = "skerry-placeholder"
HOME = "/root"
SETTINGS = "OPENCODE_CONFIG_CONTENT"
_AUTHENTICATING = ("authorization", "x-api-key", "api-key", "x-auth-token", "x-goog-api-key", "private-token")
_SIGNING = ("secretAccessKey", "sessionToken", "googleAuthOptions", "serviceKey")
"""What is never shown to a provider, but used inside to sign what is asked of it."""
_PASSWORD = re.compile(r"[^/?#]*//[^/?#]*@")
_VARIABLE = re.compile(r"([^{}]*)\{(env|file):([^{}]*)\}([^{}]*)")
_NEEDS_PACKAGES = ("tool", "plugin")
_ALLOWED = {"*": "allow", "question": "deny"}
"""Nobody is there to be asked, unless the configuration says otherwise. The walls are those of the sandbox."""

Environment = Callable[[str, str], bool]
"""Whether the server has a variable that may go to a host."""


@dataclass(frozen=True, slots=True)
class Preparation:
    """What it takes to run an agent with a configuration."""

    setup: Setup
    secrets: Secrets = field(default_factory=dict)
    toolboxes: tuple[str, ...] = ()
    providers: tuple[str, ...] = ()
    """Those of the models that are asked for; none if that is left to the agent."""


def server_variables(settings: Settings, closed: bool) -> Environment:
    """Which of the server's own keys may be used: all, where nobody else can come; else those its operator lists."""

    def has(variable: str, host: str) -> bool:
        if variable not in os.environ:
            return False
        if settings.secret_sources is None:
            return not closed
        return f"env:{variable}@{host}" in settings.secret_sources

    return has


def parsed(config: Mapping[str, Any] | None) -> AgentConfig:
    try:
        return AgentConfig.model_validate(config or {})
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise InvalidRequestError(f"The agent's configuration is not right: {place}: {first['msg']}.") from None


def prepare(
    agent: str,
    config: AgentConfig | Mapping[str, Any] | None = None,
    *,
    directory: str = DIRECTORY,
    has: Environment = lambda variable, host: False,
) -> Preparation:
    """For ``opencode`` or ``claude-code``. ``has`` says which of the server's own variables may be used."""
    if not isinstance(config, AgentConfig):
        config = parsed(config)
    if agent == "claude-code":
        return _claude(config, directory, has)
    return _opencode(config, directory, has)


# -- OpenCode ----------------------------------------------------------------------------------------------------------


def _opencode(config: AgentConfig, directory: str, has: Environment) -> Preparation:
    check_model(config.model)
    secrets: Secrets = {}
    providers: dict[str, Any] = {}
    for id in _wanted(config):
        given = dict(config.provider.get(id) or {})
        options = _options(id, given)
        kind = speaks_like(id, given.get("npm"))
        credential = _credential(config, id, options.pop("apiKey", None))
        secret = _secret(id, kind, credential, options)
        url = options.get("baseURL")
        if secret is None and url is None and id in PROVIDERS and kind is not None and has(kind.variable, kind.host):
            secret = Secret(value_from=f"env:{kind.variable}", header=kind.header, scheme=kind.scheme)
        if secret is not None:
            _add(secrets, _host(id, kind, url), secret, has)
            options |= _shown(options, kind, secret, credential)
        if options or given:
            providers[id] = {**given, "options": options}
    mcp = {name: _mcp(name, server, secrets, has) for name, server in config.mcp.items()}
    settings = {"permission": _ALLOWED, **_denied_goes_on(config.settings), "share": "disabled", "autoupdate": False}
    for name, value in (("provider", providers), ("model", config.model), ("mcp", mcp)):
        if value:
            settings[name] = value
    written = json.dumps(settings)
    if len(f"{SETTINGS}={written}") > LONGEST:
        raise InvalidRequestError(
            "The settings of OpenCode are longer than the 128 KiB that a program can be given.",
            hint="Give the prompts of agents and commands as `files`, and what all are to be told as `agents_md`.",
        )
    place = f"{HOME}/.config/opencode"
    files = {f"{place}/{file.type}/{_file_name(file.name, file.extension)}": file.content for file in config.files}
    if config.agents_md is not None:
        files[f"{place}/AGENTS.md"] = config.agents_md
    toolboxes = ["opencode"]
    if any(file.type in _NEEDS_PACKAGES for file in config.files):
        toolboxes.append("opencode-plugin")
    setup = Setup(
        directory=directory,
        files={path: content.encode() for path, content in files.items()},
        env={SETTINGS: written},
        model=config.model,
    )
    return Preparation(setup, secrets, tuple(toolboxes), () if config.model is None else tuple(_wanted(config)))


def _shown(
    options: Mapping[str, Any], kind: ModelProvider | None, secret: Secret, credential: Credential | None
) -> dict[str, Any]:
    """What stands in place of the key, where the secret is shown as it is. Anthropic would look at a key first."""
    if kind is not PROVIDERS["anthropic"]:
        usual = "Authorization" if kind is None else kind.header
        return {"apiKey": PLACEHOLDER} if secret.header.lower() == usual.lower() else {}
    if secret.header.lower() != "authorization":
        return {"apiKey": PLACEHOLDER}
    if credential is None:
        return {"authToken": PLACEHOLDER}
    return {
        "authToken": PLACEHOLDER,
        "headers": {"anthropic-beta": "oauth-2025-04-20", **(options.get("headers") or {})},
    }


def check_model(model: str | None) -> None:
    """OpenCode takes what says no provider for a provider without a model."""
    if model is not None and "/" not in model.strip("/"):
        raise InvalidRequestError(
            f"{model[:100]!r} does not say whose model it is.",
            hint="Write PROVIDER/MODEL, such as anthropic/claude-sonnet-4-5.",
        )


def _denied_goes_on(settings: Mapping[str, Any]) -> dict[str, Any]:
    """An agent that is denied something is told so and goes on, as others do, unless the configuration wants it to
    stop there, without a word.
    """
    if not isinstance(settings.get("experimental") or {}, Mapping):
        return dict(settings)  # OpenCode says what is wrong with it
    return {**settings, "experimental": {"continue_loop_on_deny": True, **(settings.get("experimental") or {})}}


def _wanted(config: AgentConfig) -> list[str]:
    """Those that are configured, or have a credential, or whose model is asked for."""
    models = [config.model, config.settings.get("small_model")]
    named = [model.partition("/")[0] for model in models if isinstance(model, str) and "/" in model]
    return list(dict.fromkeys([*config.provider, *config.auth, *named]))


def _options(id: str, given: Mapping[str, Any]) -> dict[str, Any]:
    options = given.get("options") or {}
    if not isinstance(options, Mapping):
        raise InvalidRequestError("The options of a provider are not an object.")
    found = {name: value for name, value in options.items() if value is not None}
    if "baseUrl" in found:
        found.setdefault("baseURL", found.pop("baseUrl"))
    _check_address(id, found.get("baseURL"))
    if signing := [name for name in _SIGNING if name in found]:
        raise InvalidRequestError(
            f"The {signing[0]} of {id} would be inside of the sandbox, where it signs what the model is asked.",
            hint="Give a key that is shown as it is, and the `baseURL` that it is for.",
        )
    # Anthropic's package has a word of its own for this header.
    if (token := found.pop("authToken", None)) not in (None, PLACEHOLDER):
        if not isinstance(token, str) or not isinstance(found.setdefault("headers", {}), Mapping):
            raise InvalidRequestError(f"The authToken of {id} is no text, or its headers are no object.")
        found["headers"] = {**found["headers"], "Authorization": f"Bearer {token}"}
    return found


def _check_address(id: str, url: object) -> None:
    if isinstance(url, str) and _PASSWORD.match(url):
        raise InvalidRequestError(
            f"The address of {id} has a user or a password in it, which would be inside of the sandbox.",
            hint="Give it as an `Authorization` header.",
        )


# -- Claude Code -------------------------------------------------------------------------------------------------------


def _claude(config: AgentConfig, directory: str, has: Environment) -> Preparation:
    kind = PROVIDERS["anthropic"]
    options = _options("anthropic", config.provider.get("anthropic") or {})
    url = options.get("baseURL")
    credential = _credential(config, "anthropic", options.get("apiKey"))
    secret = _secret("anthropic", kind, credential, options)
    if secret is None and url is None and has(kind.variable, kind.host):
        secret = Secret(value_from=f"env:{kind.variable}", header=kind.header, scheme=kind.scheme)
    secrets: Secrets = {}
    if secret is not None:
        _add(secrets, _host("anthropic", kind, url), secret, has)
    # With a token it speaks otherwise than with a key, and a key that is none would be looked at first.
    token = "ANTHROPIC_AUTH_TOKEN" if credential is None else "CLAUDE_CODE_OAUTH_TOKEN"
    bearer = secret is not None and secret.header.lower() == "authorization"
    env = {token if bearer else "ANTHROPIC_API_KEY": PLACEHOLDER}
    if options.get("headers"):
        env["ANTHROPIC_CUSTOM_HEADERS"] = "\n".join(f"{name}: {value}" for name, value in options["headers"].items())
    if url is not None:
        # Claude Code adds /v1 by itself.
        env["ANTHROPIC_BASE_URL"] = str(url).rstrip("/").removesuffix("/v1")
    place = f"{HOME}/{CONFIGURATION}"
    folders = {"agent": "agents", "command": "commands"}
    files = {
        f"{place}/{folders[file.type]}/{_file_name(file.name, file.extension)}": file.content
        for file in config.files
        if file.type in folders
    }
    left_out = [file.name for file in config.files if file.type not in folders]
    if left_out:
        raise InvalidRequestError(
            f"Claude Code takes no {' or '.join(_NEEDS_PACKAGES)} files: {', '.join(left_out)}.",
            hint="Offer tools as an MCP server.",
        )
    if config.agents_md is not None:
        files[f"{place}/CLAUDE.md"] = config.agents_md
    wanted = {name: server for name, server in config.mcp.items() if server.get("enabled", True)}
    if wanted:
        servers = {name: _claude_mcp(name, _mcp(name, server, secrets, has)) for name, server in wanted.items()}
        files[f"{HOME}/{SERVERS}"] = json.dumps({"mcpServers": servers})
    model = None if config.model is None else config.model.removeprefix("anthropic/")
    permissions = rules(config.settings.get("permission") or {}, wanted)
    if permissions["ask"] or permissions["deny"]:
        files[f"{HOME}/{RULES}"] = json.dumps({"permissions": permissions})
    given = {path: content.encode() for path, content in files.items()}
    setup = Setup(directory, given, env, model, asks=bool(permissions["ask"]))
    return Preparation(setup, secrets, ("claude-code",))


def _claude_mcp(name: str, server: Mapping[str, Any]) -> dict[str, Any]:
    if server.get("type") == "remote":
        if not isinstance(server.get("url"), str):
            raise InvalidRequestError(f"The MCP server {name!r} is elsewhere and has no `url`.")
        return {"type": "http", "url": server["url"], "headers": server.get("headers") or {}}
    command = server.get("command")
    if not isinstance(command, list) or not command or not all(isinstance(word, str) for word in command):
        raise InvalidRequestError(f"The `command` of the MCP server {name!r} is no list of words.")
    return {"command": command[0], "args": command[1:], "env": server.get("environment") or {}}


# -- both --------------------------------------------------------------------------------------------------------------


def _credential(config: AgentConfig, id: str, key: object) -> Credential | None:
    if not isinstance(key, str | None):
        raise InvalidRequestError(f"The key of {id} is no text.")
    return config.auth.get(id) or (Credential(key=SecretStr(key)) if key else None)


def _add(secrets: Secrets, place: tuple[str, bool], secret: Secret, has: Environment) -> None:
    """For a host, as ``_host`` says it. A host can be shown only one."""
    host, insecure = place
    secret = _looked_up(secret, host, has).model_copy(update={"insecure": insecure})
    if secrets.setdefault(host, secret) != secret:
        raise InvalidRequestError(f"There are two keys for {host}, and a host can be shown only one.")


def _looked_up(secret: Secret, host: str, has: Environment) -> Secret:
    """OpenCode's configurations name variables in place of keys. Here they are the server's, if they may go there."""
    value = "" if secret.value is None else secret.value.get_secret_value()
    named = _VARIABLE.fullmatch(value)
    if named is None:
        return secret
    before, kind, name, after = named.groups()
    if kind != "env" or not has(name, host):
        raise InvalidRequestError(
            f"The key for {host} is to come from {kind}:{name}, which this server has not, or may not send there.",
            hint="Give the key itself; or have the server's operator set the variable, and list it in "
            f"SKERRY_SECRET_SOURCES as env:NAME@{host} where people need a key to come in.",
        )
    scheme = (secret.scheme or "{value}").replace("{value}", f"{before}{{value}}{after}")
    return Secret(value_from=f"env:{name}", header=secret.header, scheme=scheme)


def _secret(
    id: str, kind: ModelProvider | None, credential: Credential | None, options: dict[str, Any]
) -> Secret | None:
    """What is shown to a provider: its credential, or the one among its headers, which is taken out of them."""
    taken = _taken(options)
    if taken is not None and credential is not None:
        raise InvalidRequestError(f"There are two keys for {id}: among its headers, and beside them.")
    if credential is None:
        return taken
    header, scheme = ("Authorization", "Bearer {value}") if kind is None else (kind.header, kind.scheme)
    if credential.type == "api":
        if credential.key is None:
            raise InvalidRequestError(f"The credential for {id} has no key.")
        return Secret(value=credential.key, header=header, scheme=scheme)
    if credential.refresh is not None and credential.token_url is not None and credential.client_id is not None:
        grant = OAuthGrant(
            token_url=credential.token_url, client_id=credential.client_id, refresh_token=credential.refresh
        )
        return Secret(value_from="oauth", oauth=grant, scheme="Bearer {value}")
    if credential.access is not None:
        return Secret(value=credential.access, scheme="Bearer {value}")
    raise InvalidRequestError(
        f"The credential for {id} cannot be used: a refresh token says nothing of where to go with it.",
        hint="Give `tokenUrl` and `clientId` as well, so that this server refreshes the token; or an `access` token.",
    )


def _host(id: str, kind: ModelProvider | None, url: object) -> tuple[str, bool]:
    """As secrets name it, and whether it is spoken to without TLS."""
    if url is None:
        if kind is None or id not in PROVIDERS:
            raise InvalidRequestError(
                f"There is a key for {id}, but it is not known which host that is for.",
                hint=f"Say provider.{id}.options.baseURL. Known are: {', '.join(PROVIDERS)}.",
            )
        return kind.host, False
    try:
        parts = urlsplit(str(url))
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InvalidRequestError(f"{str(url)[:200]!r} is not the address of a model.", hint="Write https://host/path.")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    port = port or (443 if parts.scheme == "https" else 80)
    return (host if port == 443 else f"{host}:{port}"), parts.scheme == "http"


def _taken(about: dict[str, Any]) -> Secret | None:
    """The header that shows a key, taken out of the ``headers`` that somebody is to be sent."""
    headers = about.get("headers")
    if headers is None:
        return None
    if not isinstance(headers, Mapping) or not all(isinstance(value, str) for value in headers.values()):
        raise InvalidRequestError("The headers of a provider or of an MCP server are no object of texts.")
    found = [name for name in headers if name.lower() in _AUTHENTICATING]
    if len(found) > 1:
        raise InvalidRequestError(f"There are two keys among the headers: {' and '.join(found)}.")
    about["headers"] = {name: value for name, value in headers.items() if name not in found}
    return Secret(value=SecretStr(headers[found[0]]), header=found[0]) if found else None


def _mcp(name: str, server: Mapping[str, Any], secrets: Secrets, has: Environment) -> dict[str, Any]:
    """An MCP server elsewhere is shown its key at the door, as models are."""
    kept = dict(server)
    _check_address(name, server.get("url"))
    secret = _taken(kept)
    if secret is not None:
        host = _host("mcp", None, server.get("url"))
        if host[0] in secrets:
            raise InvalidRequestError(f"There are two keys for {host[0]}, and a host can be shown only one.")
        _add(secrets, host, secret, has)
    return kept


def _file_name(name: str, extension: str) -> str:
    suffix = f".{extension.removeprefix('.')}"
    return name if name.endswith(suffix) else name + suffix

"""What OpenCode knows of models, without the providers that a task has no use for.

OpenCode carries a list of all providers and their models, some 200 and 8,000, and goes through it before its first
answer: half of the time that takes. A task that says which model it wants is given the few that it can reach instead
(``OPENCODE_MODELS_PATH``). They are read out of the program itself, once for each version, into the cache:

    <cache>/models/opencode-<version>/index.json      the variables that hold the key of each provider
    <cache>/models/opencode-<version>/<digest>.json   one provider, as OpenCode has it

Nothing of the program is run for it. Where the list is not found in a version, OpenCode goes through all of it.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import mmap
import re
import secrets
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import structlog

from skerry.agents.config import HOME
from skerry.providers.toolboxes import Toolboxes

log = structlog.get_logger(__name__)

VARIABLE = "OPENCODE_MODELS_PATH"
ALWAYS = "opencode"
"""The provider that has models for those without a key."""
LARGEST = 32 << 20
_BEFORE = b"ModelsDev.fetchApi"
_BEGIN = b".sync(()=>({"
_NEAR = 4096
"""Bytes between the two."""
_BRACKETS = re.compile(rb'"(?:[^"\\]|\\.)*"|\'(?:[^\'\\]|\\.)*\'|`(?:[^`\\]|\\.)*`|[{}\[\]()]')
_NOT_JSON = re.compile(
    r'"(?:[^"\\]|\\.)*"|\'(?:[^\'\\]|\\.)*\'|`(?:[^`\\$]|\\.)*`|![01]|[A-Za-z_$][\w$]*(?=:)|(?<=[:,\[-])\.(?=\d)'
)
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u\{([0-9a-fA-F]+)\}|u([0-9a-fA-F]{4})|.)", re.DOTALL)


class Catalogue:
    """Of the OpenCode that is installed in a cache."""

    def __init__(self, cache: Path) -> None:
        self._toolboxes = Toolboxes(cache)
        self._directory = cache / "models"
        self._variables: dict[Path, dict[str, list[str]]] = {}
        self._reading = asyncio.Lock()
        self._last: tuple[tuple[Path, list[str]], bytes] | None = None
        """What was put together last: the members of a team want the same."""

    async def file(self, providers: Iterable[str], env: Mapping[str, str]) -> tuple[str, bytes] | None:
        """What to write inside, and where: of these providers, and of those for which there is a key in ``env``. None
        if the list could not be read."""
        directory = await self._read()
        if directory is None:
            return None
        variables = self._variables[directory]
        keyed = [id for id, names in variables.items() if any(name in env for name in names)]
        wanted = sorted({ALWAYS, *providers, *keyed} & variables.keys())
        if self._last is None or self._last[0] != (directory, wanted):
            try:
                parts = [_member(id, directory) for id in wanted]
            except OSError:  # somebody has emptied the cache
                del self._variables[directory]
                return None
            self._last = (directory, wanted), b"{%s}" % b", ".join(parts)
        content = self._last[1]
        return f"{HOME}/.cache/opencode/models-{hashlib.sha256(content).hexdigest()[:16]}.json", content

    async def _read(self) -> Path | None:
        """Where the providers are, each by itself."""
        toolbox = self._toolboxes.find("opencode")
        if toolbox is None:
            return None
        directory = self._directory / f"opencode-{toolbox.name}"
        async with self._reading:
            if directory not in self._variables:
                try:
                    self._variables[directory] = await asyncio.to_thread(_unpacked, toolbox, directory)
                except (OSError, ValueError) as error:
                    log.warning("OpenCode's list of models could not be read; it starts slower", reason=str(error))
                    self._variables[directory] = {}
        return directory if self._variables[directory] else None


def _unpacked(toolbox: Path, directory: Path) -> dict[str, list[str]]:
    """The variables of each provider; the providers themselves are in the directory then."""
    index = directory / "index.json"
    if not index.is_file():
        providers = read_catalogue(toolbox / "bin" / "opencode")
        staging = directory.with_name(f".staging-{secrets.token_hex(4)}")
        staging.mkdir(parents=True, mode=0o700)
        try:
            for id, provider in providers.items():
                (staging / _file_of(id)).write_text(json.dumps(provider))
            variables = {id: provider.get("env") or [] for id, provider in providers.items()}
            (staging / index.name).write_text(json.dumps(variables))
            staging.rename(directory)
        except OSError:
            shutil.rmtree(staging, ignore_errors=True)
            if not index.is_file():  # nobody else has done it meanwhile
                raise
    found: dict[str, list[str]] = json.loads(index.read_bytes())
    return found


def read_catalogue(program: Path) -> dict[str, Any]:
    """All providers, from the program, in which they are written as JavaScript. Raises ``ValueError``."""
    with program.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as code:
        near = code.find(_BEFORE)
        begin = code.find(_BEGIN, near, near + _NEAR) if near >= 0 else -1
        if begin < 0:
            raise ValueError("There is no list of models where it is looked for.")
        begin += len(_BEGIN) - 1
        text = _whole(code[begin : begin + LARGEST])
    found = json.loads(_NOT_JSON.sub(_as_json, text))
    if not isinstance(found, dict) or not all(isinstance(each, dict) and each.get("models") for each in found.values()):
        raise ValueError("What is found where the list of models should be is something else.")
    return found


def _whole(code: bytes) -> str:
    """The one object that the code begins with."""
    depth = 0
    for match in _BRACKETS.finditer(code):
        word = match.group()
        if word in b"{[(":
            depth += 1
        elif word in b"}])":
            depth -= 1
            if depth == 0:
                return code[: match.end()].decode()
    raise ValueError("The list of models has no end.")


def _as_json(match: re.Match[str]) -> str:
    word = match.group()
    if word[0] in "\"'`":
        return word if word[0] == '"' and "\\" not in word else json.dumps(_ESCAPE.sub(_character, word[1:-1]))
    return {"!0": "true", "!1": "false", ".": "0."}.get(word) or json.dumps(word)


def _character(match: re.Match[str]) -> str:
    """What an escape of JavaScript's stands for."""
    code = next((group for group in match.groups() if group is not None), None)
    word = match.group()[1:]
    return chr(int(code, 16)) if code is not None else {"n": "\n", "t": "\t", "r": "\r"}.get(word, word)


def _member(provider: str, directory: Path) -> bytes:
    return b"%s: %s" % (json.dumps(provider).encode(), (directory / _file_of(provider)).read_bytes())


def _file_of(provider: str) -> str:
    """A name that is one whatever the provider is called."""
    return f"{hashlib.sha256(provider.encode()).hexdigest()[:24]}.json"

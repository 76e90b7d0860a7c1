"""Where repositories and pull requests live: GitHub, or whatever speaks as much of its REST API as is used here."""

from __future__ import annotations

from functools import cached_property
from typing import Any, Protocol
from urllib.parse import quote, urlsplit

import httpx

from skerry.agents.sessions.models import PullRequest, Repository
from skerry.errors import ForgeError, InvalidRequestError, RepositoryNotFoundError
from skerry.models import Secret
from skerry.settings import Settings

PATIENCE = 30.0


class Forge(Protocol):
    def clone_url(self, owner: str, name: str) -> str:
        """Where git finds it. There is no credential in it."""
        ...

    def credential(self, token: str) -> tuple[str, Secret]:
        """The host that git speaks to, and what the door of a sandbox adds to requests that go there."""
        ...

    async def repositories(self, token: str | None) -> list[Repository]: ...

    async def repository(self, owner: str, name: str, token: str | None) -> Repository:
        """Raises ``RepositoryNotFoundError``."""
        ...

    async def open_pull_request(
        self, owner: str, name: str, *, head: str, base: str, title: str, body: str, draft: bool, token: str
    ) -> PullRequest:
        """Or find the one that is open for this branch already."""
        ...

    async def close(self) -> None: ...


class GitHub:
    def __init__(self, settings: Settings) -> None:
        self._git = settings.forge_git_url.rstrip("/")
        self._url = settings.forge_url.rstrip("/")

    @cached_property
    def _http(self) -> httpx.AsyncClient:
        # To read all certificates there are takes long, and most servers ask for nothing.
        return httpx.AsyncClient(
            base_url=self._url,
            timeout=PATIENCE,
            trust_env=True,
            headers={"Accept": "application/vnd.github+json", "User-Agent": "skerry"},
        )

    async def close(self) -> None:
        if "_http" in self.__dict__:
            await self._http.aclose()

    def clone_url(self, owner: str, name: str) -> str:
        return f"{self._git}/{quote(owner)}/{quote(name)}.git"

    def credential(self, token: str) -> tuple[str, Secret]:
        parts = urlsplit(self._git)
        return parts.netloc, Secret.model_validate(
            {"username": "x-access-token", "value": token, "insecure": parts.scheme == "http"}
        )

    async def repositories(self, token: str | None) -> list[Repository]:
        if token is None:
            return []
        found = await self._ask("GET", "/user/repos?per_page=100&sort=pushed", token)
        return [_repository(each) for each in found]

    async def repository(self, owner: str, name: str, token: str | None) -> Repository:
        return _repository(await self._ask("GET", f"/repos/{quote(owner)}/{quote(name)}", token))

    async def open_pull_request(
        self, owner: str, name: str, *, head: str, base: str, title: str, body: str, draft: bool, token: str
    ) -> PullRequest:
        place = f"/repos/{quote(owner)}/{quote(name)}/pulls"
        wanted = {"title": title, "body": body, "head": head, "base": base, "draft": draft}
        query = f"?state=open&head={quote(owner)}:{quote(head, safe='')}&base={quote(base, safe='')}"
        there = await self._ask("GET", place + query, token)
        made = there[0] if there else await self._ask("POST", place, token, wanted)
        return PullRequest(
            number=made["number"], url=made["html_url"], head_branch=head, base_branch=base, state=made["state"]
        )

    async def _ask(self, method: str, path: str, token: str | None, body: Any = None) -> Any:
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        try:
            answer = await self._http.request(method, path, json=body, headers=headers)
            said = answer.json() if answer.content else None
        except (httpx.HTTPError, ValueError) as error:
            raise ForgeError(f"The forge cannot be asked ({type(error).__name__}).", hint="Try again.") from None
        if answer.status_code == 404:
            raise RepositoryNotFoundError("The forge has no such repository, or it is not to be seen with this token.")
        if answer.status_code == 422:
            raise InvalidRequestError(f"The forge refused: {_message(said)}.")
        if answer.is_error:
            raise ForgeError(f"The forge answered with {answer.status_code}: {_message(said)}.")
        return said


def _message(said: Any) -> str:
    return str(said.get("message", ""))[:300] if isinstance(said, dict) else ""


def _repository(said: dict[str, Any]) -> Repository:
    return Repository(
        owner=said["owner"]["login"],
        name=said["name"],
        full_name=said.get("full_name") or f"{said['owner']['login']}/{said['name']}",
        private=bool(said.get("private")),
        default_branch=said.get("default_branch") or "main",
        description=said.get("description"),
    )

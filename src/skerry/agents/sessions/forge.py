"""Where repositories and pull requests live: GitHub, or whatever speaks as much of its REST API as is used here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any, Protocol
from urllib.parse import quote, urlsplit

import httpx

from skerry.agents.sessions.models import PullRequest, Repository
from skerry.errors import ForgeError, InvalidRequestError, RepositoryNotFoundError
from skerry.models import Secret
from skerry.settings import Settings

PATIENCE = 30.0
PAGE = 100
MOST_PAGES = 20


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
            follow_redirects=True,  # a repository that has another name now; the token is not taken along elsewhere
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
        found: list[Repository] = []
        for page in range(1, MOST_PAGES + 1):
            said = await self._ask("GET", f"/user/repos?per_page={PAGE}&sort=pushed&page={page}", token)
            with _understanding():
                found += [_repository(each) for each in said]
            if len(said) < PAGE:
                break
        return found

    async def repository(self, owner: str, name: str, token: str | None) -> Repository:
        said = await self._ask("GET", f"/repos/{quote(owner)}/{quote(name)}", token)
        with _understanding():
            return _repository(said)

    async def open_pull_request(
        self, owner: str, name: str, *, head: str, base: str, title: str, body: str, draft: bool, token: str
    ) -> PullRequest:
        place = f"/repos/{quote(owner)}/{quote(name)}/pulls"
        wanted = {"title": title, "body": body, "head": head, "base": base, "draft": draft}
        query = f"?state=open&head={quote(owner)}:{quote(head, safe='')}&base={quote(base, safe='')}"
        made = _first(await self._ask("GET", place + query, token))
        if made is None:
            try:
                made = await self._ask("POST", place, token, wanted)
            except InvalidRequestError:
                # Perhaps because somebody else, the agent for one, has just opened it.
                made = _first(await self._ask("GET", place + query, token))
                if made is None:
                    raise
        with _understanding():
            return PullRequest(
                number=made["number"], url=made["html_url"], head_branch=head, base_branch=base, state=made["state"]
            )

    async def _ask(self, method: str, path: str, token: str | None, body: Any = None) -> Any:
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        try:
            answer = await self._http.request(method, path, json=body, headers=headers)
        except (httpx.HTTPError, ValueError) as error:
            raise ForgeError(f"The forge cannot be asked ({type(error).__name__}).", hint="Try again.") from None
        try:
            said = answer.json()
        except ValueError:
            said = None  # a page, as what stands before a forge has for its errors
        if answer.status_code == 404:
            raise RepositoryNotFoundError("The forge has no such repository, or it is not to be seen with this token.")
        if answer.status_code == 422:
            raise InvalidRequestError(f"The forge refused: {_message(said)}.")
        if answer.status_code in (401, 403):
            hint = "Is the token still good, and may it do this? There may also be a limit on how often it asks."
            raise ForgeError(f"The forge answered with {answer.status_code}: {_message(said)}.", hint=hint)
        if answer.is_error:
            raise ForgeError(f"The forge answered with {answer.status_code}: {_message(said)}.", hint="Try again.")
        return said


@contextmanager
def _understanding() -> Iterator[None]:
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError):
        raise ForgeError(
            "The forge's answer is not one of GitHub's API.", hint="Does SKERRY_FORGE_URL name an API?"
        ) from None


def _first(said: Any) -> Any:
    return said[0] if isinstance(said, list) and said else None


def _message(said: Any) -> str:
    """What it says is wrong; the point of it is often in the list below."""
    if not isinstance(said, dict):
        return ""
    errors = said.get("errors")
    listed = errors if isinstance(errors, list) else []
    more = [each.get("message") if isinstance(each, dict) else each for each in listed]
    return ": ".join(str(each) for each in (said.get("message"), *more) if each)[:500].rstrip(".")


def _repository(said: dict[str, Any]) -> Repository:
    return Repository(
        owner=said["owner"]["login"],
        name=said["name"],
        full_name=said.get("full_name") or f"{said['owner']['login']}/{said['name']}",
        private=bool(said.get("private")),
        default_branch=said.get("default_branch") or "main",
        description=said.get("description"),
    )

"""What is given along with a task that nobody may read: in the store it is one sealed value."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from typing import Any
from urllib.parse import quote

from pydantic import ValidationError

from skerry.egress.vault import Vault
from skerry.errors import SkerryError


@dataclass(frozen=True, slots=True)
class Hidden:
    secrets: dict[str, Any] = field(default_factory=dict, repr=False)
    username: str | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)
    config: dict[str, Any] | None = field(default=None, repr=False)
    """Of the agent, with keys in it."""

    def sealed(self, vault: Vault, id: str) -> str | None:
        """As it is kept with the task or schedule of that id."""
        return None if self == Hidden() else vault.seal(self._written(), f"task/{id}")

    def _written(self) -> str:
        return json.dumps((self.secrets, self.username, self.password, self.config))

    @classmethod
    def opened(cls, vault: Vault, id: str, sealed: str | None) -> Hidden:
        """Raises ``SecretUnavailable`` where the vault is another's, ``ValueError`` if another version sealed it."""
        if sealed is None:
            return cls()
        values = json.loads(vault.open(sealed, f"task/{id}"))
        if not isinstance(values, list) or len(values) != len(fields(cls)):
            raise ValueError("what is sealed is of another version of Skerry")
        return cls(*values)

    def address(self, url: str) -> str:
        """The address of a repository as it was given, with its password."""
        if self.username is None and self.password is None:
            return url
        scheme, _, rest = url.partition("://")
        return f"{scheme}://{quote(self.username or '', safe='')}:{quote(self.password or '', safe='')}@{rest}"


def reason_of(error: Exception) -> str:
    """Why what the store has cannot be used here, without what it is."""
    if isinstance(error, SkerryError):
        return error.message
    if isinstance(error, ValidationError):
        first = error.errors(include_input=False, include_url=False)[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}."
    return f"{error}."

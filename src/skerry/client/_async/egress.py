"""What a sandbox may reach outside, and what is added to its requests on their way."""

from __future__ import annotations

from collections.abc import Sequence

from skerry.client import outward
from skerry.client._async.connection import AsyncLink
from skerry.client.outward import Rules, SecretsByHost
from skerry.client.values import given
from skerry.models import EgressInfo, EgressMode


class AsyncEgress:
    _link: AsyncLink

    async def egress(self) -> EgressInfo:
        """What it may reach, the names of its secrets, and how much has gone in and out."""
        return await self._link.get(EgressInfo, "/egress")

    async def set_egress(
        self,
        mode: EgressMode | None = None,
        *,
        allow: Rules | None = None,
        deny: Sequence[str] | None = None,
        secrets: SecretsByHost | None = None,
    ) -> EgressInfo:
        """Change what it may reach, from now on, also while it runs: 'none', 'open', or only what ``allow`` lists.

        A rule is ``pypi.org``, ``*.example.com``, ``api.example.com:443``, ``10.0.0.0/8:5432``,
        ``GET api.example.com/v1/`` or the word ``registries``; given rules replace those there were. ``deny`` lists
        hosts and networks that are refused all the same. ``secrets`` says, by host, which header the proxy adds with
        which value; given ones replace those there were.
        """
        body = given(mode=mode, allow=outward.rules(allow), deny=deny, secrets=outward.secrets(secrets))
        response = await self._link.request("PUT", "/egress", json=body)
        return EgressInfo.model_validate_json(response.content)

# Generated from src/skerry/client/_async/egress.py by scripts/generate_sync.py; change that file and run it again.
"""What a sandbox may reach outside, and what is added to its requests on their way."""

from __future__ import annotations

from collections.abc import Sequence

from skerry.client import outward
from skerry.client._sync.connection import Link
from skerry.client.outward import Rules, SecretsByHost
from skerry.client.values import given
from skerry.models import EgressInfo, EgressMode


class Egress:
    _link: Link

    def egress(self) -> EgressInfo:
        """What it may reach, the names of its secrets, and how much has gone in and out."""
        return self._link.get(EgressInfo, "/egress")

    def set_egress(
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
        response = self._link.request("PUT", "/egress", json=body)
        return EgressInfo.model_validate_json(response.content)

"""What a user says about a sandbox's way out, as it is sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from skerry.errors import InvalidRequestError
from skerry.models import EgressPolicy, EgressRule, Secret

Rules = Sequence[str | Mapping[str, Any] | EgressRule]
Policy = str | Mapping[str, Any] | EgressPolicy
SecretsByHost = Mapping[str, Mapping[str, Any] | Secret]


def rules(allow: Rules | None) -> list[Any] | None:
    if isinstance(allow, str):
        allow = [allow]
    return None if allow is None else [_dumped(rule, EgressRule) for rule in allow]


def policy(egress: Policy | None) -> Any:
    return None if egress is None else _dumped(egress, EgressPolicy)


def secrets(by_host: SecretsByHost | None) -> dict[str, Any] | None:
    return None if by_host is None else {host: _dumped(secret, Secret) for host, secret in by_host.items()}


def _dumped(given: Any, model: type[EgressRule] | type[EgressPolicy] | type[Secret]) -> Any:
    if isinstance(given, str):
        return given
    try:
        made = given if isinstance(given, model) else model.model_validate(given)
    except ValidationError as error:
        # Without what was given: it may be a secret.
        where = ", ".join(".".join(map(str, problem["loc"])) + f": {problem['msg']}" for problem in error.errors())
        raise InvalidRequestError(f"This is no {model.__name__}: {where}.") from None
    return made.model_dump(mode="json", by_alias=True, exclude_defaults=True, exclude_none=True)

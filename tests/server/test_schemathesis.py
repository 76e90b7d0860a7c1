"""Generated requests, against what the OpenAPI document promises: no 5xx, and only answers that it describes."""

from __future__ import annotations

import os

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from skerry.server.app import create_app
from skerry.settings import Settings
from tests.server.conftest import ServerProcess
from tests.server.tenants import ADMIN, keyed

__all__ = ["keyed"]

BOX = "/v1/sandboxes/fuzz"
# That every invalid value is refused is not checked: pydantic reads 0 as false and "5" as 5, which is meant.
CHECKED = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    unsupported_method,
]
# A watch has no end, and the client used here reads a response to its end before it looks at it.
ENDLESS = ["/v1/sandboxes/{id}/watch", "/v1/sandboxes/{id}/events/stream"]
# Left random, most of these would only ever be answered with 404.
KNOWN = {"id": "fuzz", "sid": "fuzz", "pid": "fuzz", "cid": "fuzz"}
# The first key would close the server that all other tests share.
ACCOUNTS = "^/(v1/(keys|owners|users|auth)|api/auth)"
LIFE = ("/v1/sandboxes/{id}", "/v1/sandboxes/{id}/destroy")


@pytest.fixture
def furnished(server: ServerProcess) -> None:
    """A sandbox with something in it to be found."""
    with httpx.Client(base_url=server.url, timeout=60) as http:
        http.post(f"{BOX}/sessions", json={"id": "fuzz", "isolation": False})
        http.post(f"{BOX}/contexts", json={"id": "fuzz"})
        http.post(f"{BOX}/processes", json={"command": "echo fuzz", "processId": "fuzz"})
        http.put(f"{BOX}/files", params={"path": "fuzz.txt"}, content=b"fuzz")


schema = schemathesis.openapi.from_dict(create_app(object(), Settings()).openapi())  # type: ignore[arg-type]


sparing = settings(
    max_examples=8 if os.environ.get("SKERRY_SOAK") else 4,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@schema.exclude(path=ENDLESS).exclude(path_regex=ACCOUNTS).parametrize()
@sparing
def test_every_answer_is_one_that_is_described(case: schemathesis.Case, server: ServerProcess, furnished: None) -> None:
    if case.path not in LIFE:
        case.path_parameters.update({name: value for name, value in KNOWN.items() if name in case.path_parameters})
    if isinstance(case.body, dict) and case.path.endswith(("/wait", "/clone", "/clone/stream")):
        case.body["timeout"] = 200
    if case.path.startswith(("/api/v2/agents/", "/v1/worker")) and isinstance(case.body, dict):
        # What would be valid would start real agents, which have nobody to ask: what is refused is what is looked at.
        for work in (case.body, *(case.body.get(kind) for kind in ("task", "team"))):
            if isinstance(work, dict):
                work["agent"] = "nobody"
    if case.path.endswith("/ports/{port}/wait") and not isinstance(case.body, dict):
        case.body = {"timeout": 200}
    case.call_and_validate(server.url, checks=CHECKED, timeout=30)


@schema.include(path_regex=ACCOUNTS).parametrize()
@sparing
def test_every_answer_about_keys_and_owners_is_described_too(case: schemathesis.Case, keyed: ServerProcess) -> None:
    headers = {"Authorization": f"Bearer {ADMIN}"}
    case.call_and_validate(keyed.url, checks=CHECKED, timeout=30, headers=headers)

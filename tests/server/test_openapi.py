"""The OpenAPI document, `docs/api.md` and the app name the same routes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI

from skerry.server.app import create_app
from skerry.settings import Settings

DOCS = Path(__file__).parents[2] / "docs" / "api.md"
METHODS = {"get", "head", "post", "put", "patch", "delete"}


def app(**settings: Any) -> FastAPI:
    return create_app(object(), Settings(**settings))  # type: ignore[arg-type]


def operations(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {
        f"{method.upper()} {path}": operation
        for path, item in document["paths"].items()
        for method, operation in item.items()
        if method in METHODS
    }


def documented() -> set[str]:
    found = re.findall(r"`(GET|HEAD|POST|PUT|PATCH|DELETE) (…?/[^`\s]*)`", DOCS.read_text())
    return {f"{method} {path.replace('…', '/v1/sandboxes/{id}')}" for method, path in found}


def test_every_route_is_in_the_documentation_and_the_other_way_round() -> None:
    served = {route for route in operations(app().openapi()) if not route.startswith("HEAD ")}
    assert served == documented()


def test_every_operation_documents_the_one_error_shape() -> None:
    for route, operation in operations(app().openapi()).items():
        schema = operation["responses"]["4XX"]["content"]["application/json"]["schema"]
        assert schema == {"$ref": "#/components/schemas/ErrorAnswer"}, route
        assert "422" not in operation["responses"], route


def test_operation_ids_are_unique() -> None:
    ids = [operation["operationId"] for operation in operations(app().openapi()).values()]
    assert len(ids) == len(set(ids))


def test_field_names_are_camel_case_on_the_wire() -> None:
    for name, schema in app().openapi()["components"]["schemas"].items():
        assert not [field for field in schema.get("properties", {}) if "_" in field], name


@pytest.mark.parametrize("keys", [(), ("secret",)])
def test_the_document_says_whether_a_key_is_needed(keys: tuple[str, ...]) -> None:
    document = app(api_keys=keys).openapi()
    assert ("security" in document) == bool(keys)
    for route in ("GET /health", "GET /tasks"):
        assert operations(document)[route].get("security") == ([] if keys else None)

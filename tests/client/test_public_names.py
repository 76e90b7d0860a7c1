from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import skerry
from skerry import errors
from skerry.client.values import FileText, refuse_shell_syntax, sandbox_name
from skerry.models import FileContent


def test_every_public_name_is_there() -> None:
    assert [name for name in skerry.__all__ if not hasattr(skerry, name)] == []


def test_every_error_is_public() -> None:
    kinds = {
        name for name, value in vars(errors).items() if inspect.isclass(value) and value.__module__ == errors.__name__
    }
    assert kinds <= set(skerry.__all__)


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import skerry", ["httpx", "pydantic", "fastapi", "sqlalchemy", "skerry.client"]),
        ("from skerry import Sandbox; Sandbox('demo')", ["fastapi", "sqlalchemy", "uvicorn", "skerry.server"]),
        ("import skerry.cli.main", ["httpx", "fastapi", "sqlalchemy", "rich.table"]),
    ],
)
def test_importing_loads_no_more_than_is_needed(statement: str, absent: list[str]) -> None:
    code = f"import sys; {statement}; print([m for m in {absent!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_sandbox_has_the_operations_of_a_session_and_more() -> None:
    session = {name for name in dir(skerry.Session) if not name.startswith("_")} - {"details", "delete"}
    sandbox = {name for name in dir(skerry.Sandbox) if not name.startswith("_")}
    assert sandbox - session == {"create", "create_session", "from_snapshot", "close", "list"}
    assert session <= sandbox


def test_both_clients_have_the_same_operations() -> None:
    def names(kind: type) -> set[str]:
        return {name.replace("aclose", "close") for name in dir(kind) if not name.startswith("_")}

    for one, other in (("AsyncSandbox", "Sandbox"), ("AsyncProcess", "Process"), ("AsyncClient", "Client")):
        assert names(getattr(skerry, one)) == names(getattr(skerry, other))


def test_every_operation_says_what_it_does() -> None:
    silent = [
        name
        for kind in (skerry.Sandbox, skerry.Process)
        for name, value in inspect.getmembers(kind, inspect.isfunction)
        if not name.startswith("_") and not value.__doc__
    ]
    assert silent == []


def test_a_file_is_its_text_and_has_content() -> None:
    text = FileText.from_wire(
        FileContent(path="/a", content="aGk=", encoding="base64", is_binary=True, mime_type="image/png", size=2)
    )
    assert text == text.content == "aGk="
    assert (text.data, text.size, text.mime_type, text.is_binary) == (b"hi", 2, "image/png", True)


def test_names_are_made_up_and_normalised() -> None:
    assert sandbox_name(None).startswith("session-")
    assert sandbox_name(None) != sandbox_name(None)
    assert sandbox_name(" Demo ") == "demo"


@pytest.mark.parametrize("id", ["", "a/b", "-a", "a-", "a" * 64, "ä", "..", "a b"])
def test_a_name_that_cannot_be_one_is_refused_without_asking_a_server(id: str) -> None:
    with pytest.raises(errors.InvalidSandboxIdError):
        skerry.Sandbox(id)


@pytest.mark.parametrize("text", ["rm -rf /", "echo $(id)", "a `b`", "a && b", "a || b", "a; b", "a | b", "a\nb"])
def test_shell_syntax_in_typed_text_is_refused(text: str) -> None:
    with pytest.raises(errors.InvalidRequestError):
        refuse_shell_syntax(text)
    assert refuse_shell_syntax("ls -la /workspace") == "ls -la /workspace"

"""The routes of code and its contexts, over real HTTP to a real server with real interpreters."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from skerry.errors import CircuitOpenError, InterpreterNotReadyError, NotFoundError
from skerry.server.errors import error_response
from tests.server.test_api import events, ok, until

Http = httpx.AsyncClient


async def run(http: Http, box: str, code: str, **fields: Any) -> Any:
    return await ok(await http.post(f"{box}/code", json={"code": code, **fields}))


async def refusal(response: httpx.Response) -> tuple[int, str]:
    error = response.json()["error"]
    assert set(error) == {"code", "message", "hint", "details", "requestId"}
    return response.status_code, error["code"]


# -- running -----------------------------------------------------------------------------------------------------------


async def test_output_results_and_errors_are_kept_apart(http: Http, shared: str) -> None:
    done = await run(http, shared, "import sys\nprint('out'); print('err', file=sys.stderr)\n6 * 7")
    assert ("".join(done["logs"]["stdout"]), "".join(done["logs"]["stderr"])) == ("out\n", "err\n")
    assert [(result["text"], result["isMainResult"]) for result in done["results"]] == [("42", True)]
    assert (done["error"], done["timedOut"], done["notices"]) == (None, False, [])
    assert (done["contextId"], done["language"]) == ("default-python", "python")


async def test_a_context_remembers_and_counts(http: Http, box: str) -> None:
    first = await run(http, box, "x = 20")
    second = await run(http, box, "x + 1")
    assert (second["results"][0]["text"], second["executionCount"] - first["executionCount"]) == ("21", 1)


async def test_code_that_fails_is_an_answer(http: Http, shared: str) -> None:
    done = await run(http, shared, "print('before')\n1 / 0")
    error = done["error"]
    assert (error["name"], error["message"], error["lineNumber"]) == ("ZeroDivisionError", "division by zero", 2)
    assert error["value"] == error["message"]
    assert any("1 / 0" in line for line in error["traceback"])
    assert done["logs"]["stdout"] == ["before\n"]


async def test_blank_lines_at_the_beginning_count(http: Http, shared: str) -> None:
    for language, code in (("python", "\n\n1 / 0"), ("javascript", "\n\nnowhere()"), ("typescript", "\n\nnowhere()")):
        assert (await run(http, shared, code, language=language))["error"]["lineNumber"] == 3, language


@pytest.mark.parametrize(
    ("alias", "language", "code", "json_"),
    [
        ("python3", "python", "{'a': [1, None]}", {"a": [1, None]}),
        ("js", "javascript", "({a: [1, null]})", {"a": [1, None]}),
        ("node", "javascript", "[await 5]", [5]),
        ("ts", "typescript", "const n: number[] = [1]; n", [1]),
    ],
)
async def test_languages_have_other_names_too(
    http: Http, shared: str, alias: str, language: str, code: str, json_: Any
) -> None:
    done = await run(http, shared, code, language=alias)
    assert (done["language"], done["error"]) == (language, None)
    assert done["results"][0]["json"] == json_


async def test_older_names_of_fields_are_taken(http: Http, box: str) -> None:
    await ok(await http.post(f"{box}/contexts", json={"id": "old", "envVars": {"A": "1"}}), 201)
    body = {"contextId": "old", "envVars": {"B": "2"}, "timeoutMs": 60_000}
    done = await run(http, box, "import os; os.environ['A'] + os.environ['B']", **body)
    assert (done["results"][0]["text"], done["contextId"]) == ("'12'", "old")


async def test_code_may_be_ten_megabytes_long(http: Http, shared: str) -> None:
    done = await run(http, shared, f"len('''{'é' * 5_000_000}''')")
    assert (done["results"][0]["text"], done["error"]) == ("5000000", None)


async def test_time_is_limited_in_milliseconds(http: Http, shared: str) -> None:
    done = await run(http, shared, "import time; time.sleep(1000)", timeout=200)
    assert (done["timedOut"], done["error"]["name"]) == (True, "TimeoutError")


# -- streams -----------------------------------------------------------------------------------------------------------

WAITING = """\
import os, time
print("one")
while not os.path.exists("go"):
    time.sleep(0.01)
print("two")
display({"a": None})
1 / 0
"""


async def test_a_stream_arrives_while_the_code_runs(http: Http, box: str) -> None:
    async with http.stream("POST", f"{box}/code/stream", json={"code": WAITING}) as live:
        feed = events(live)
        start = await anext(feed)
        assert (start["type"], start["contextId"], start["language"]) == ("start", "default-python", "python")
        assert (await anext(feed))["text"] == "one\n"
        await ok(await http.put(f"{box}/files", params={"path": "go"}, content=b""))
        rest = [event async for event in feed]
    assert [event["type"] for event in rest] == ["stdout", "result", "error", "complete"]
    assert rest[1]["result"]["json"] == {"a": None}
    assert (rest[2]["error"]["name"], rest[2]["error"]["lineNumber"]) == ("ZeroDivisionError", 7)
    assert "code" not in rest[2], "only what is no fault of the code has one"
    assert (rest[3]["executionCount"], rest[3]["timedOut"]) == (1, False)


async def test_a_stream_that_cannot_begin_is_an_http_error(http: Http, shared: str) -> None:
    refused = await http.post(f"{shared}/code/stream", json={"code": "1", "context": "nope"})
    assert await refusal(refused) == (404, "context_not_found")
    refused = await http.post(f"{shared}/code/stream", json={"code": "1", "language": "cobol"})
    assert await refusal(refused) == (400, "unknown_language")


ENDLESS = "kept = 5\nopen('began', 'w').close()\nprint('on')\nwhile True: pass"


async def test_a_client_that_leaves_interrupts_the_code_and_the_state_stays(http: Http, box: str) -> None:
    call = asyncio.ensure_future(http.post(f"{box}/code", json={"code": ENDLESS}))
    await until(http, box, "test -e began")
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    done = await run(http, box, "kept")
    assert (done["results"][0]["text"], done["notices"]) == ("5", [])


async def test_a_client_that_leaves_a_stream_interrupts_the_code(http: Http, box: str) -> None:
    async with http.stream("POST", f"{box}/code/stream", json={"code": ENDLESS}) as live:
        async for event in events(live):
            if event["type"] == "stdout":
                break
    done = await run(http, box, "kept")
    assert (done["results"][0]["text"], done["notices"]) == ("5", [])


async def test_a_stream_broken_by_the_end_of_its_sandbox_says_so_with_a_code(http: Http, box: str) -> None:
    async with http.stream("POST", f"{box}/code/stream", json={"code": ENDLESS}) as live:
        feed = events(live)
        while (await anext(feed))["type"] != "stdout":
            continue
        await ok(await http.delete(box))
        rest = [event async for event in feed]
    assert [(event["type"], event["code"]) for event in rest] == [("error", "sandbox_lost")]


# -- contexts ----------------------------------------------------------------------------------------------------------


async def test_contexts_come_and_go(http: Http, box: str) -> None:
    wanted = {"id": "mine", "language": "py", "cwd": "/tmp", "env": {"A": "b"}, "timeout": 60_000}
    made = await ok(await http.post(f"{box}/contexts", json=wanted), 201)
    assert (made["id"], made["language"], made["cwd"], made["timeout"]) == ("mine", "python", "/tmp", 60_000)
    assert (made["status"], made["executionCount"], made["default"]) == ("idle", 0, False)
    done = await run(http, box, "import os; os.getcwd() + os.environ['A']", context="mine")
    assert done["results"][0]["text"] == "'/tmpb'"
    assert await refusal(await http.post(f"{box}/contexts", json={"id": "mine"})) == (409, "context_exists")
    await run(http, box, "1")
    listed = (await ok(await http.get(f"{box}/contexts")))["contexts"]
    assert {found["id"]: found["default"] for found in listed} == {"mine": False, "default-python": True}
    assert (await ok(await http.get(f"{box}/contexts/mine")))["executionCount"] == 1
    assert (await ok(await http.delete(f"{box}/contexts/mine")))["ok"] is True
    assert await refusal(await http.get(f"{box}/contexts/mine")) == (404, "context_not_found")


async def test_a_context_needs_no_wishes(http: Http, box: str) -> None:
    made = await ok(await http.post(f"{box}/contexts"), 201)
    assert (made["language"], made["cwd"]) == ("python", "/workspace")
    assert (await run(http, box, "2 + 2", context=made["id"]))["results"][0]["text"] == "4"


async def test_restarting_forgets_and_keeps_the_settings(http: Http, box: str) -> None:
    await ok(await http.post(f"{box}/contexts", json={"id": "mine", "cwd": "/tmp"}), 201)
    await run(http, box, "x = 1", context="mine")
    again = await ok(await http.post(f"{box}/contexts/mine/restart"))
    assert (again["id"], again["executionCount"]) == ("mine", 0)
    assert (await run(http, box, "x", context="mine"))["error"]["name"] == "NameError"
    assert (await run(http, box, "%pwd", context="mine"))["results"][0]["text"] == "'/tmp'"


async def test_interrupting_ends_the_code_and_keeps_the_context(http: Http, box: str) -> None:
    async with http.stream("POST", f"{box}/code/stream", json={"code": ENDLESS}) as live:
        feed = events(live)
        while (await anext(feed))["type"] != "stdout":
            continue
        assert (await ok(await http.get(f"{box}/contexts/default-python")))["status"] == "running"
        answer = await ok(await http.post(f"{box}/contexts/default-python/interrupt"))
        assert (answer["ok"], answer["interrupted"]) == (True, True)
        rest = [event async for event in feed]
    assert [event["type"] for event in rest] == ["error", "complete"]
    assert rest[0]["error"]["name"] == "KeyboardInterrupt"
    assert (await run(http, box, "kept"))["results"][0]["text"] == "5"
    answer = await ok(await http.post(f"{box}/contexts/default-python/interrupt"))
    assert answer["interrupted"] is False


async def test_interpreters_can_be_had_ready(http: Http, box: str) -> None:
    for body in ({"language": "python", "preload": False}, {"language": "js", "count": 2}):
        assert (await ok(await http.post(f"{box}/code/warm", json=body)))["ok"] is True
    assert (await ok(await http.get(f"{box}/contexts")))["contexts"] == []
    refused = await http.post(f"{box}/code/warm", json={"language": "cobol"})
    assert await refusal(refused) == (400, "unknown_language")


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("route", ["code", "code/stream"])
@pytest.mark.parametrize(
    "body",
    [
        {},
        {"code": None},
        {"code": 7},
        {"code": ["1"]},
        {"code": "1", "cod": "2"},
        {"code": "1", "timeout": 0},
        {"code": "1", "env": {"A": 1}},
        {"code": "1", "env": {"A=B": "c"}},
        {"code": "1", "context": ""},
        {"code": "1", "context": "default-python", "language": "js"},
        {"code": "\ud800"},
        [],
    ],
    ids=json.dumps,
)
async def test_a_body_that_makes_no_sense_is_refused(http: Http, box: str, route: str, body: Any) -> None:
    await run(http, box, "1")
    content = json.dumps(body).encode()
    refused = await http.post(f"{box}/{route}", content=content, headers={"Content-Type": "application/json"})
    assert await refusal(refused) in {(400, "invalid_request"), (404, "context_not_found")}


async def test_an_unknown_language_is_told_which_there_are(http: Http, shared: str) -> None:
    for refused in (
        await http.post(f"{shared}/code", json={"code": "1", "language": "cobol"}),
        await http.post(f"{shared}/contexts", json={"language": "cobol"}),
    ):
        assert await refusal(refused) == (400, "unknown_language")
        assert refused.json()["error"]["details"]["languages"] == ["python", "javascript", "typescript"]


async def test_an_unknown_context_is_not_found(http: Http, shared: str) -> None:
    for refused in (
        await http.post(f"{shared}/code", json={"code": "1", "context": "nope"}),
        await http.get(f"{shared}/contexts/nope"),
        await http.delete(f"{shared}/contexts/nope"),
        await http.post(f"{shared}/contexts/nope/restart"),
        await http.post(f"{shared}/contexts/nope/interrupt"),
    ):
        assert await refusal(refused) == (404, "context_not_found")


async def test_a_context_that_cannot_be_is_refused(http: Http, shared: str) -> None:
    for body, expected in (
        ({"cwd": "relative"}, (400, "invalid_path")),
        ({"cwd": "/no/such/place"}, (404, "file_not_found")),
        ({"id": "a/b"}, (400, "invalid_request")),
        ({"env": {"": "x"}}, (400, "invalid_request")),
    ):
        assert await refusal(await http.post(f"{shared}/contexts", json=body)) == expected


@pytest.fixture
async def hurried(http: Http, box: str) -> str:
    """A sandbox whose interpreters never start in time."""
    env = {"INTERPRETER_SPAWN_TIMEOUT_MS": "1"}
    await ok(await http.post("/v1/sandboxes", json={"id": box.rpartition("/")[2], "env": env}), 201)
    return box


async def test_an_interpreter_that_does_not_start_says_when_to_try_again(http: Http, hurried: str) -> None:
    for route, body in (("code", {"code": "1"}), ("contexts", {}), ("code/stream", {"code": "1"})) * 2:
        refused = await http.post(f"{hurried}/{route}", json=body)
        status, code = await refusal(refused)
        details = refused.json()["error"]["details"]
        assert status == 503
        assert int(refused.headers["Retry-After"]) >= details["retryAfter"] > 0
        if code == "circuit_open":
            return
        assert (code, "progress" in details) == ("interpreter_not_ready", True)
    raise AssertionError("the circuit never opened")


def test_the_time_to_wait_is_said_in_whole_seconds() -> None:
    for error, header in (
        (CircuitOpenError("No.", details={"retryAfter": 29.1}), "30"),
        (InterpreterNotReadyError("No.", details={"retryAfter": 1}), "1"),
        (NotFoundError("No."), None),
    ):
        assert error_response(error).headers.get("Retry-After") == header

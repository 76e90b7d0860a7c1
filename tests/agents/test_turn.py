"""What OpenCode's event stream is taken to mean."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter

from skerry.agents.models import AgentEvent
from skerry.agents.opencode.spacing import Spacing
from skerry.agents.opencode.turn import MOST_RETRIES, Turn

SESSION, OURS = "ses_1", "msg_ours"


def event(type: str, **properties: Any) -> dict[str, Any]:
    return {"id": "evt_1", "type": type, "properties": {"sessionID": SESSION, **properties}}


def prompted(id: str = OURS, created: int = 100) -> dict[str, Any]:
    info = {"id": id, "role": "user", "sessionID": SESSION, "time": {"created": created}}
    return event("message.updated", info=info)


def answer(id: str = "msg_a", parent: str = OURS, **more: Any) -> dict[str, Any]:
    info = {"id": id, "parentID": parent, "role": "assistant", "sessionID": SESSION, "finish": "stop", **more}
    return event("message.updated", info=info)


def part(id: str, type: str, message: str = "msg_a", **more: Any) -> dict[str, Any]:
    body = {"id": id, "type": type, "messageID": message, "sessionID": SESSION, **more}
    return event("message.part.updated", part=body)


def delta(id: str, words: str, field: str = "text") -> dict[str, Any]:
    return event("message.part.delta", messageID="msg_a", partID=id, field=field, delta=words)


IDLE = event("session.idle")
DENIED = {"name": "APIError", "data": {"message": "no such key", "statusCode": 401, "isRetryable": False}}
REFUSED = {
    "name": "APIError",
    "data": {"message": "no way", "statusCode": 403, "responseBody": '{"error": {"code": "egress_refused"}}'},
}
ABORTED = {"name": "MessageAbortedError", "data": {"message": "Aborted"}}


def told(*events: dict[str, Any], turn: Turn | None = None) -> list[tuple[Any, ...]]:
    """What comes out, in short; and all of it is what the models say."""
    turn = turn or Turn(SESSION, OURS)
    short: list[tuple[Any, ...]] = []
    for said in events:
        for out in turn.feed(said):
            TypeAdapter(AgentEvent).validate_python(out)
            assert out["messageId"] == OURS
            keys = ("content", "callId", "status", "output", "cost", "attempt", "id", "code", "success")
            short.append((out["type"], *(out[key] for key in keys if key in out)))
    return short


def test_text_comes_as_the_answer_so_far() -> None:
    assert told(
        prompted(), answer(), part("p", "text", text=""), delta("p", "4"), delta("p", "2"), part("p", "text", text="42")
    ) == [("token", "4"), ("token", "42")]


def test_a_message_that_says_the_same_as_the_one_before_is_told() -> None:
    turn = Turn(SESSION, OURS)
    for id in ("msg_1", "msg_2"):
        turn.feed(prompted()), turn.feed(answer(id=id))
        said = turn.feed(part(f"p-{id}", "text", message=id, text="done"))
        assert [(each["content"], each["textId"]) for each in said] == [("done", id)]


def test_deltas_of_older_versions_come_inside_of_the_part() -> None:
    def old(text: str, words: str) -> dict[str, Any]:
        said = part("p", "text", text=text)
        said["properties"]["delta"] = words
        return said

    assert told(prompted(), answer(), old("4", "4"), old("42", "2")) == [("token", "4"), ("token", "42")]


def test_what_the_model_thinks_is_no_answer() -> None:
    thinks = (part("r", "reasoning", text=""), delta("r", "hm"), part("r", "reasoning", text="hm"))
    assert told(prompted(), answer(), *thinks) == []


def test_a_prompt_of_our_own_is_no_answer() -> None:
    assert told(prompted(), part("p", "text", message=OURS, text="what is it?")) == []


def test_the_answer_of_the_last_step_is_the_answer() -> None:
    turn = Turn(SESSION, OURS)
    steps = (part("p", "text", text="Looking."), answer("msg_b"), part("q", "text", message="msg_b", text="Done."))
    assert told(prompted(), answer(), *steps, IDLE, turn=turn)[-1] == ("execution_complete", True)
    assert turn.text == "Done."


def test_a_late_end_of_the_turn_before_is_not_the_end() -> None:
    turn = Turn(SESSION, OURS)
    late = (IDLE, answer("msg_old", parent="msg_before", error=ABORTED), IDLE)
    assert told(prompted(), *late, turn=turn) == []
    assert not turn.over
    assert told(answer(), IDLE, turn=turn) == [("execution_complete", True)]


def test_ids_that_wrapped_around_change_nothing() -> None:
    turn = Turn(SESSION, "msg_fff")
    said = turn.feed(prompted("msg_fff")) + turn.feed(answer("msg_000", parent="msg_fff")) + turn.feed(IDLE)
    assert [out["type"] for out in said] == ["execution_complete"]


def test_another_session_is_nothing_to_us() -> None:
    turn = Turn("ses_2", OURS)
    assert told(prompted(), answer(), part("p", "text", text="4"), IDLE, turn=turn) == []
    assert not turn.over


def test_each_state_of_a_tool_is_told_once() -> None:
    def tool(**state: Any) -> dict[str, Any]:
        return part("t", "tool", tool="bash", callID="c1", state=state)

    running = tool(status="running", input={"command": "ls"})
    states = (tool(status="pending", input={}), running, running, tool(status="completed", input={}, output="a"))
    assert told(prompted(), answer(), *states) == [
        ("tool_call", "c1", "pending"),
        ("tool_call", "c1", "running"),
        ("tool_call", "c1", "completed", "a"),
    ]
    failed = tool(status="error", input={}, error="The user rejected it.")
    assert told(prompted(), answer(), failed) == [("tool_call", "c1", "error", "The user rejected it.")]


def test_steps_say_what_they_cost() -> None:
    finish = part("s", "step-finish", reason="stop", cost=0.5, tokens={"input": 3, "output": 4, "cache": {"read": 1}})
    turn = Turn(SESSION, OURS)
    assert told(prompted(), answer(), part("b", "step-start"), finish, finish, turn=turn) == [
        ("step_start",),
        ("step_finish", 0.5),
    ]
    assert turn.cost == 0.5


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (DENIED, "model_denied"),
        ({"name": "ProviderAuthError", "data": {"providerID": "x", "message": "no key"}}, "model_denied"),
        ({"name": "APIError", "data": {"message": "bad day", "statusCode": 500}}, "model_failed"),
        ({"name": "ContextOverflowError", "data": {"message": "too long"}}, "model_failed"),
        (REFUSED, "model_unreachable"),
        (ABORTED, "aborted"),
        ({"name": "UnknownError", "data": {"message": "boom"}}, "agent_failed"),
        ({}, "agent_failed"),
    ],
)
def test_an_error_ends_the_turn_with_a_reason(error: dict[str, Any], code: str) -> None:
    ends = [("error", code), ("execution_complete", code, False)]
    assert told(prompted(), answer(), event("session.error", error=error), IDLE) == ends
    assert told(prompted(), answer(error=error or {"name": ""}), IDLE) == ends


def test_a_model_that_is_not_found_is_perhaps_one_without_a_key() -> None:
    turn = Turn(SESSION, OURS)
    error = {"name": "UnknownError", "data": {"message": "Model not found: a/b."}}
    turn.feed(prompted())
    turn.feed(answer(error=error))
    said = turn.feed(IDLE)
    expected = "Model not found: a/b. If it is the right one, there is no key for its provider on the server."
    assert {out["error"] for out in said} == {expected}


def test_an_error_before_any_answer_ends_the_turn_as_well() -> None:
    assert told(prompted(), event("session.error", error=DENIED), IDLE)[-1] == (
        "execution_complete",
        "model_denied",
        False,
    )


def test_an_answer_that_was_never_finished_is_no_success() -> None:
    assert told(prompted(), answer(finish=None), IDLE)[-1] == ("execution_complete", "agent_failed", False)


def test_one_that_begins_while_it_is_looked_at_has_not_given_up() -> None:
    """Whether it works is asked first, and what it has written then."""
    turn = Turn(SESSION, OURS)
    told(prompted(), turn=turn)
    begun = [{"info": {"id": "msg_a", "role": "assistant", "parentID": OURS, "time": {"created": 101}}, "parts": []}]
    assert turn.catch_up(begun, busy=False) == []
    denied = answer(error=DENIED)
    assert told(denied, IDLE, turn=turn)[-1] == ("execution_complete", "model_denied", False)
    given_up = Turn(SESSION, OURS)
    told(prompted(), turn=given_up)
    assert given_up.catch_up(begun, busy=False) == []
    assert [out["type"] for out in given_up.catch_up(begun, busy=False)] == ["error", "execution_complete"]


def test_an_error_is_not_forgotten_for_an_older_state_of_its_message() -> None:
    said = told(prompted(), answer(), event("session.error", error=DENIED), answer(finish=None), IDLE)
    assert said[-1] == ("execution_complete", "model_denied", False)


def test_a_model_that_is_asked_again_is_told_of_and_may_recover() -> None:
    retry = event("session.status", status={"type": "retry", "attempt": 1, "message": "bad day", "next": 1})
    assert told(prompted(), answer(), retry, part("p", "text", text="4"), IDLE) == [
        ("retry", 1),
        ("token", "4"),
        ("execution_complete", True),
    ]


def test_a_model_that_fails_again_and_again_is_given_up() -> None:
    turn = Turn(SESSION, OURS)
    retries = [
        event("session.status", status={"type": "retry", "attempt": number, "message": "bad day", "next": 1})
        for number in range(1, MOST_RETRIES + 1)
    ]
    *before, _, last = told(prompted(), answer(), *retries, turn=turn)
    assert before == [("retry", number) for number in range(1, MOST_RETRIES)]
    assert (last, turn.gave_up) == (("execution_complete", "model_failed", False), True)


def test_permissions_are_asked_for_subagents_too() -> None:
    child = event("session.created", info={"id": "ses_child", "parentID": SESSION})
    asked = {"permission": "bash", "patterns": ["ls"]}
    assert told(
        prompted(),
        answer(),
        event("permission.asked", id="per_1", **asked),
        child,
        event("permission.asked", id="per_2", **{**asked, "sessionID": "ses_child"}),
        event("permission.asked", id="per_3", **{**asked, "sessionID": "ses_stranger"}),
    ) == [("permission", "per_1"), ("permission", "per_2")]


def test_a_turn_goes_on_when_the_context_was_made_smaller() -> None:
    turn = Turn(SESSION, OURS)
    made_smaller = (prompted("msg_continue", created=200), answer("msg_b", parent="msg_continue"))
    assert told(prompted(), answer(), *made_smaller, part("p", "text", message="msg_b", text="4"), turn=turn) == [
        ("token", "4")
    ]


def test_what_was_missed_is_caught_up_with_and_told_once() -> None:
    turn = Turn(SESSION, OURS)
    told(prompted(), answer(), part("p", "text", text="4"), turn=turn)
    messages = [
        {"info": {"id": OURS, "role": "user", "time": {"created": 100}}, "parts": []},
        {
            "info": {"id": "msg_a", "role": "assistant", "parentID": OURS, "time": {"completed": 5}},
            "parts": [{"id": "p", "messageID": "msg_a", "type": "text", "text": "42"}],
        },
    ]
    said = turn.catch_up(messages, busy=True) + turn.catch_up(messages, busy=False)
    assert [(out["type"], out.get("content")) for out in said] == [("token", "42"), ("execution_complete", None)]


def test_what_is_written_while_it_is_caught_up_with_is_not_told_twice() -> None:
    turn = Turn(SESSION, OURS)
    told(prompted(), answer(), turn=turn)
    info = {"id": "msg_a", "role": "assistant", "parentID": OURS}
    text = {"id": "p", "messageID": "msg_a", "type": "text", "text": "one two"}
    said = turn.catch_up([{"info": info, "parts": [text]}], busy=True)
    assert [out["content"] for out in said] == ["one two"]
    # The first may be in what was read, and nobody can tell.
    assert told(delta("p", " two"), delta("p", " three"), turn=turn) == []
    whole = part("p", "text", text="one two three", time={"start": 1, "end": 2})
    assert told(whole, turn=turn) == [("token", "one two three")]


def test_who_knows_better_ends_it_once() -> None:
    turn = Turn(SESSION, OURS)
    assert [out["type"] for out in turn.end("OpenCode died.", "agent_died")] == ["error", "execution_complete"]
    assert turn.end("again", "agent_died") == []
    assert told(answer(), IDLE, turn=turn) == []


@pytest.mark.parametrize(
    "junk", [{}, {"type": 3}, {"type": "session.idle"}, {"type": "message.updated", "properties": 1}]
)
def test_junk_is_passed_over(junk: dict[str, Any]) -> None:
    assert Turn(SESSION, OURS).feed(junk) == []


def test_of_an_answer_that_grows_few_states_are_told_and_always_the_last() -> None:
    def token(content: str) -> dict[str, Any]:
        return {"type": "token", "content": content}

    spacing, end = Spacing(pause=60), {"type": "step_finish"}
    assert spacing.let([token("a")]) == [token("a")], "the first word waits for nothing"
    assert spacing.due is None
    assert spacing.let([token("a b")]) == []
    assert spacing.let([token("a b c")]) == []
    assert spacing.due is not None
    assert spacing.let([end]) == [token("a b c"), end], "and nothing comes before what it followed"
    assert spacing.let([token("d")]) == []
    assert spacing.rest() == [token("d")]
    assert spacing.rest() == []
    soon = Spacing(pause=0)
    assert [soon.let([token(word)]) for word in "ab"] == [[token("a")], [token("b")]]

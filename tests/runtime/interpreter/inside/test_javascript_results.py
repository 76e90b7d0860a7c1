"""What a value becomes: text, JSON, other formats, and their limits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.runtime.interpreter.inside.javascript_executor import Executor

TEXT_LIMIT = 1_000_000


@pytest.fixture(scope="module")
def executor() -> Iterator[Executor]:
    with Executor() as executor:
        yield executor


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("1 + 1", "2"),
        ("'a' + 'b'", "'ab'"),
        ("true", "true"),
        ("null", "null"),
        ("10n ** 20n", "100000000000000000000n"),
        ("-0", "-0"),
        ("NaN", "NaN"),
        ("Symbol('s')", "Symbol(s)"),
        ("(function named() {})", "[Function: named]"),
        ("class Klass {}; Klass", "[class Klass]"),
    ],
)
def test_a_primitive_or_a_function_is_text_only(executor: Executor, code: str, text: str) -> None:
    assert executor.run(code).result == {"text": text}


@pytest.mark.parametrize(
    "code", ["", "undefined", "let nothing = 1", "void 0", "function declared() {}", "// only a comment"]
)
def test_undefined_is_no_result(executor: Executor, code: str) -> None:
    run = executor.run(code)
    assert (run.results, run.error) == ([], None)


def test_an_object_is_text_and_json(executor: Executor) -> None:
    run = executor.run(
        "({ name: 'x', list: [1, 2.5, null], nested: { yes: true }, gone: undefined, infinite: Infinity })"
    )
    assert run.main == [True]
    assert run.result["json"] == {"name": "x", "list": [1, 2.5, None], "nested": {"yes": True}, "infinite": None}
    assert "name: 'x'" in run.text
    assert executor.value("class Point { constructor() { this.x = 1 } method() {} }; new Point()") == {"x": 1}
    assert executor.value("new Date(0)") == "1970-01-01T00:00:00.000Z"
    assert executor.value("Object.create(null, { own: { value: 1, enumerable: true } })") == {"own": 1}


@pytest.mark.parametrize(
    ("code", "value"),
    [("{a: 1}", {"a": 1}), ("{a: 1, b: [2]}\n", {"a": 1, "b": [2]}), ("{}", {}), ("  { 'x y': 1 } // yes", {"x y": 1})],
)
def test_an_object_literal_is_no_block(executor: Executor, code: str, value: object) -> None:
    assert executor.value(code) == value


def test_a_block_is_no_object_literal(executor: Executor) -> None:
    run = executor.run("{ let inner = 4; inner * 2 }")
    assert (run.text, run.stderr) == ("8", "")
    assert executor.run("{ a: 1 };").text == "1"


def test_flaws_and_lines_are_those_of_the_code_as_written_even_if_it_begins_like_an_object(executor: Executor) -> None:
    error = executor.fail("{\n  a: 1,,\n}")
    assert (error["name"], error["line"]) == ("SyntaxError", 2)
    assert executor.fail("{\n  a: null.b\n}")["line"] == 2


@pytest.mark.parametrize(
    "code",
    [
        "const loop = {}; loop.self = loop; loop",
        "({ big: 1n })",
        "({ run() {} })",
        "new Map([[1, 2]])",
        "new Set([1])",
        "[new Map()]",
        "/re/",
        "new Error('kept')",
        "new Uint8Array(3)",
        "({ toJSON() { throw new Error('no') } })",
        "({ get field() { throw new Error('no') } })",
        "({ [Symbol.for('x')]: 1, s: Symbol('y') })",
        "new Proxy({}, { ownKeys() { throw new Error('trap') } })",
        "({ toJSON() {} })",
    ],
)
def test_what_json_would_not_tell_is_text_only(executor: Executor, code: str) -> None:
    assert list(executor.run(code).result) == ["text"]


def test_a_value_that_cannot_be_shown_says_so(executor: Executor) -> None:
    assert (
        executor.run("({ [require('util').inspect.custom]() { throw new TypeError('shy') } })").text
        == "<cannot be shown: TypeError: shy>"
    )


def test_long_text_is_cut_and_its_length_told(executor: Executor) -> None:
    result = executor.run("'x'.repeat(3_000_000)").result
    assert TEXT_LIMIT - 2 <= len(result["text"]) <= TEXT_LIMIT
    assert result["truncated"] == {"text": 3_000_000}
    assert executor.run("'x'.repeat(999_000)").result == {"text": "'" + "x" * 999_000 + "'"}


def test_a_cut_never_halves_a_character(executor: Executor) -> None:
    assert set(executor.run("'😀'.repeat(1_000_000)").text.strip("'")) == {"😀"}
    assert set(executor.run("'a' + '😀'.repeat(1_000_000)").text.strip("'a")) == {"😀"}


def test_half_a_gigabyte_of_text_is_shown_in_part(executor: Executor) -> None:
    result = executor.run("'y'.repeat(500_000_000)").result
    assert result["truncated"] == {"text": 500_000_000}
    assert executor.fail("'y'.repeat(2 ** 30)")["name"] == "RangeError"
    executor.run("_ = undefined; 1")


def test_json_that_is_too_large_is_left_out_and_noted(executor: Executor) -> None:
    result = executor.run("Array.from({ length: 3_000_000 }, (_, i) => 'item ' + i)").result
    assert "json" not in result
    assert result["truncated"]["json"] > 16 << 20
    assert "more items" in result["text"]
    assert len(executor.value("Array.from({ length: 100_000 }, (_, i) => i)")) == 100_000


def test_lone_surrogates_are_replaced(executor: Executor) -> None:
    result = executor.run(r"({ '\udc00 key': 'a\ud800b', whole: '😀', escaped: '\\ud800' })").result
    assert result["json"] == {"\ufffd key": "a\ufffdb", "whole": "😀", "escaped": "\\ud800"}
    result["text"].encode()
    assert executor.fail(r"throw new Error('\ud800')")["message"] == "\ufffd"
    run = executor.run(r"console.log('\ud800'); 1")
    assert run.stdout == "\ufffd\n"


def test_display_gives_further_results_in_order(executor: Executor) -> None:
    run = executor.run("display({ a: 1 }); display('two'); 3")
    assert run.results == [{"text": "{ a: 1 }", "json": {"a": 1}}, {"text": "'two'"}, {"text": "3"}]
    assert run.main == [False, False, True]


def test_display_takes_any_format(executor: Executor) -> None:
    run = executor.run(
        "display.html('<b>b</b>'); display.markdown('*m*'); display.svg('<svg/>'); display.latex('x^2')\n"
        "display.json([1])\n"
        "display.png(Buffer.from([1, 2])); display.png('QUJD'); display.jpeg(new Uint8Array([255]))"
    )
    assert run.results == [
        {"html": "<b>b</b>"},
        {"markdown": "*m*"},
        {"svg": "<svg/>"},
        {"latex": "x^2"},
        {"json": [1]},
        {"png": "AQI="},
        {"png": "QUJD"},
        {"jpeg": "/w=="},
    ]


def test_display_of_too_much_is_noted(executor: Executor) -> None:
    assert executor.run("display.html('h'.repeat(20_000_000))").results == [{"truncated": {"html": 20_000_000}}]


def test_display_when_nothing_runs_prints(executor: Executor) -> None:
    executor.run("setTimeout(() => display({ shown: 'later' }), 20); 1")
    executor.until("{ shown: 'later' }")


def test_values_of_the_users_that_patch_the_language_do_no_harm(executor: Executor) -> None:
    executor.run("Array.prototype.toJSON = () => 'patched'; JSON.stringify = () => 'no'; Promise.prototype.then = null")
    assert executor.run("1 + 1").text == "2"
    assert executor.fail("throw new Error('still')")["message"] == "still"

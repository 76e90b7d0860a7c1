"""TypeScript cells: types are stripped, the rest is compiled, and errors point at what was written."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.runtime.interpreter.inside.javascript_executor import Executor


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("typescript")


@pytest.fixture(scope="module")
def executor(folder: Path) -> Iterator[Executor]:
    (folder / "types.ts").write_text(
        "export interface Shape { sides: number }\nexport const square: Shape = { sides: 4 }"
    )
    (folder / "more.ts").write_text(
        "export enum Color { Red = 'red' }\n\n"
        "export function fail(x: number): never {\n  throw new Error(`in a file ${x}`)\n}"
    )
    (folder / "common.cts").write_text("const value: number = 3; module.exports = { value }")
    with Executor("typescript", folder) as executor:
        yield executor


def test_types_are_stripped(executor: Executor) -> None:
    run = executor.run(
        "interface Point { x: number }\nconst point: Point = { x: 1 }\n"
        "function double<T extends Point>(p: T): number { return p.x * 2 }\ndouble(point as Point)"
    )
    assert run.text == "2"
    assert run.stderr == ""
    assert executor.run("point satisfies Point; point!.x").text == "1"


def test_what_is_more_than_types_is_compiled(executor: Executor) -> None:
    assert executor.run("enum Level { Low = 1, High = Low << 1 }\nLevel.High").text == "2"
    assert executor.run("Level[1]").text == "'Low'"
    assert executor.run("class Person { constructor(public name: string) {} }\nnew Person('Ada').name").text == "'Ada'"
    run = executor.run("namespace Space { export const inner: number = 7 }\nSpace.inner")
    assert (run.text, run.stderr) == ("7", "")


@pytest.mark.parametrize(
    "code",
    [
        "type Lines = {\n  a: number\n}\n\nconst none: any = null\nnone.field",
        "enum Many {\n  A,\n  B,\n}\nconst none2: any = null\nnone2.field",
    ],
)
def test_errors_point_at_the_line_that_was_written(executor: Executor, code: str) -> None:
    error = executor.fail(code)
    assert (error["name"], error["line"]) == ("TypeError", 6)
    assert f"<cell-{executor.runs}>:6:" in error["traceback"][1]


def test_a_flaw_is_a_syntax_error_with_its_line(executor: Executor) -> None:
    error = executor.fail("const fine: number = 1\nlet bad: = 3")
    assert (error["name"], error["line"]) == ("SyntaxError", 2)
    assert error["traceback"][:3] == [f"<cell-{executor.runs}>:2", "let bad: = 3", "         ^"]
    assert executor.fail("enum Half {")["name"] == "SyntaxError"


def test_object_literals_imports_and_awaits_are_as_in_javascript(executor: Executor) -> None:
    assert executor.value("{ a: 1 as number, b: [2] as const }") == {"a": 1, "b": [2]}
    assert (
        executor.run("const slow: Promise<number> = new Promise(done => setTimeout(done, 5, 9)); await slow").text
        == "9"
    )
    assert executor.value(
        "import type { Stats } from 'fs'\nimport { type Dirent, existsSync } from 'node:fs'\n[existsSync('/')]"
    ) == [True]


def test_files_in_typescript_can_be_loaded(executor: Executor) -> None:
    run = executor.run("import { square, Shape } from './types.ts'\nconst shape: Shape = square; shape")
    assert (run.result["json"], run.stderr) == ({"sides": 4}, "")
    assert executor.run("require('./common.cts').value").text == "3"


def test_files_may_hold_more_than_types_and_their_errors_point_at_what_was_written(
    executor: Executor, folder: Path
) -> None:
    run = executor.run("import { Color, fail } from './more.ts'\nColor.Red")
    assert (run.text, run.stderr) == ("'red'", "")
    error = executor.fail("\nfail(1)")
    assert error["line"] == 2
    assert f"{folder / 'more.ts'}:4:9" in error["traceback"][1]


def test_a_javascript_context_loads_types_too(folder: Path, executor: Executor) -> None:
    with Executor("javascript", folder) as plain:
        run = plain.run("import { square } from './types.ts'; square")
        assert (run.result["json"], run.stderr) == ({"sides": 4}, "")

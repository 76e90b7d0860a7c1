"""Modules: require, import and export in cells, relative to the working directory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.runtime.interpreter.inside.javascript_executor import Executor


@pytest.fixture
def executor(tmp_path: Path) -> Iterator[Executor]:
    (tmp_path / "common.cjs").write_text("exports.kind = 'common'; exports.where = __filename")
    (tmp_path / "modern.mjs").write_text(
        "export const kind = 'modern', url = import.meta.url; export default 'default'; export { kind as 'any name' }"
    )
    (tmp_path / "chain.mjs").write_text("export const loaded = (await import('./modern.mjs')).kind")
    (tmp_path / "data.json").write_text('{"from": "json"}')
    package = tmp_path / "node_modules" / "local-package"
    package.mkdir(parents=True)
    (package / "index.js").write_text("module.exports = { local: true }")
    with Executor(cwd=tmp_path) as executor:
        yield executor


def test_require_finds_files_json_packages_and_what_node_has(executor: Executor, tmp_path: Path) -> None:
    assert executor.value("[require('./common.cjs').where, require('./data.json'), require('local-package')]") == [
        str(tmp_path / "common.cjs"),
        {"from": "json"},
        {"local": True},
    ]
    assert executor.run("require('node:path').sep").text == "'/'"
    assert executor.run("require('./modern.mjs').default").text == "'default'"


def test_require_follows_the_working_directory(executor: Executor, tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "here.cjs").write_text("module.exports = 'below'")
    executor.run("process.chdir('below')")
    assert executor.run("require('./here.cjs')").text == "'below'"
    assert executor.run("(await import('./here.cjs')).default").text == "'below'"


def test_every_form_of_import_works(executor: Executor) -> None:
    code = """import whole, { kind as renamed, 'any name' as odd } from './modern.mjs'
import * as everything from './modern.mjs'
import both, * as also from './modern.mjs'
import './common.cjs'
import data from './data.json' with { type: 'json' };
import fs, { existsSync } from 'node:fs'
[whole, renamed, odd, everything.kind, both, also.kind, data.from, typeof fs.readFileSync, existsSync('/')]"""
    assert executor.value(code) == [
        "default",
        "modern",
        "modern",
        "modern",
        "default",
        "modern",
        "json",
        "function",
        True,
    ]
    assert executor.value("[renamed, everything.default]") == ["modern", "default"]


def test_an_import_may_be_repeated_and_replaced(executor: Executor) -> None:
    executor.run("import { kind } from './modern.mjs'")
    executor.run("import { kind } from './modern.mjs'")
    assert executor.run("const { kind } = require('./common.cjs'); kind").text == "'common'"


def test_imports_come_first_and_no_line_moves(executor: Executor) -> None:
    code = "const early = kind\nimport {\n  kind,\n} from './modern.mjs'\nearly.missing.field"
    error = executor.fail(code)
    assert (error["message"], error["line"]) == ("Cannot read properties of undefined (reading 'field')", 5)
    assert executor.run("early").text == "'modern'"


def test_import_as_a_function_works_everywhere(executor: Executor) -> None:
    assert executor.run("(await import('./modern.mjs')).kind").text == "'modern'"
    assert executor.run("import('./chain.mjs').then(module => module.loaded)").text == "'modern'"
    executor.run("async function later() { return (await import('./common.cjs')).kind }")
    assert executor.run("later()").text == "'common'"
    assert executor.run("eval('import(\"./modern.mjs\")').then(module => module.kind)").text == "'modern'"
    assert (
        executor.run("new Function('return import(\"./modern.mjs\")')().then(module => module.kind)").text == "'modern'"
    )
    assert executor.run("(await import('data:text/javascript,export default 5')).default").text == "5"


def test_import_meta_tells_where_the_cell_is(executor: Executor, tmp_path: Path) -> None:
    assert executor.value("[import.meta.dirname, import.meta.url, import.meta.resolve('./modern.mjs')]") == [
        str(tmp_path),
        (tmp_path / "cell.js").as_uri(),
        (tmp_path / "modern.mjs").as_uri(),
    ]


def test_exports_are_declarations(executor: Executor) -> None:
    executor.run("export const one = 1; export function two() { return 2 }; const three = 3\nexport { three as drei }")
    assert executor.value("[one, two(), three]") == [1, 2, 3]
    assert executor.value("export default { four: 4 }") == {"four": 4}
    assert executor.run("export default function five() { return 5 }\nfive()").text == "5"
    assert executor.run("export * from './modern.mjs'; export { kind } from './modern.mjs'; 6").text == "6"


def test_what_a_cell_finds_is_that_of_a_main_module(executor: Executor, tmp_path: Path) -> None:
    assert executor.value("[require.main === module, module.exports === exports, __dirname, __filename]") == [
        True,
        True,
        str(tmp_path),
        str(tmp_path / "cell.js"),
    ]


def test_what_node_has_is_there_by_name_until_the_user_takes_it(executor: Executor) -> None:
    assert executor.run("path.join('a', 'b')").text == "'a/b'"
    assert executor.run("const path = require('path').posix; var os = 5; fs = 6; os + fs").text == "11"
    assert executor.run("let url = 7; url").text == "7"


@pytest.mark.parametrize(
    "code", ["\nimport 'no-such-package'", "\nimport x from './no-such-file.mjs'", "\nawait import('no-such-package')"]
)
def test_a_module_that_is_missing_is_an_error_at_its_line(executor: Executor, code: str) -> None:
    error = executor.fail(code)
    assert error["message"].startswith("Cannot find")
    assert error["line"] == 2
    assert "node:internal" not in "".join(error["traceback"])


def test_a_name_that_is_not_exported_is_an_error(executor: Executor) -> None:
    error = executor.fail("import { absent } from './modern.mjs'")
    assert error["name"] == "SyntaxError"
    assert "does not provide an export named 'absent'" in error["message"]


def test_errors_in_files_name_the_file(executor: Executor, tmp_path: Path) -> None:
    (tmp_path / "faulty.cjs").write_text("\n\nthrow new Error('inside')")
    (tmp_path / "flawed.cjs").write_text("let fine\nlet bad = ;")
    error = executor.fail("\nrequire('./faulty.cjs')")
    assert error["line"] == 2
    assert any(f"{tmp_path / 'faulty.cjs'}:3:7" in line for line in error["traceback"])
    error = executor.fail("require('./flawed.cjs')")
    assert error["traceback"][:2] == [f"{tmp_path / 'flawed.cjs'}:2", "let bad = ;"]


def test_a_flaw_beside_an_import_is_the_one_that_is_told(executor: Executor) -> None:
    error = executor.fail("import fs from 'fs'\nlet bad = ;")
    assert (error["name"], error["line"]) == ("SyntaxError", 2)
    assert "import" not in error["message"]
    assert executor.fail("import fs from")["line"] == 1

"""IPython without a terminal: what runs cells, and says what came of them by calling `publish`."""

from __future__ import annotations

import ast
import asyncio
import builtins
import contextvars
import getpass
import importlib
import inspect
import os
import shlex
import site
import subprocess
import sys
import types
from collections.abc import Callable, Coroutine
from typing import Any

import IPython
import skerry_figures
import skerry_programs
import skerry_shortcuts
import skerry_tracebacks
from IPython.core import interactiveshell
from IPython.core.display_functions import display
from IPython.core.displayhook import DisplayHook
from IPython.core.displaypub import DisplayPublisher
from IPython.core.error import StdinNotImplementedError
from IPython.core.history import HistoryManager
from IPython.core.interactiveshell import ExecutionInfo, ExecutionResult, InteractiveShell
from IPython.core.profiledir import ProfileDir
from IPython.utils.text import LSString, SList
from skerry_figures import Figures
from skerry_formats import Formatter, InlineBackend
from skerry_imports import Watcher
from skerry_pictures import Pictures
from traitlets import Type

skerry_tracebacks.ours.append(os.path.dirname(os.path.abspath(IPython.__file__)) + os.sep)

Publish = Callable[[dict[str, Any], bool], None]


class Hook(DisplayHook):  # type: ignore[misc]
    """Takes the value of the last expression."""

    def __call__(self, result: Any = None) -> None:
        self.check_for_underscore()
        if result is None or self.shell.silenced:
            return
        bundle, _ = self.shell.display_formatter.format(result)
        if bundle:
            # Before it becomes part of Out, which may be what it is.
            self.shell.publish(bundle, True)
        self.update_user_ns(result)
        self.fill_exec_result(result)


class Publisher(DisplayPublisher):  # type: ignore[misc]
    """Takes what ``display()`` is given."""

    def publish(self, data: dict[str, Any], metadata: Any = None, source: Any = None, **options: Any) -> None:
        self._validate_data(data, metadata)
        if options.get("update"):
            # There is nothing to change any more in what was sent, so the last state is sent when the run is over.
            self.shell.updates[(options.get("transient") or {}).get("display_id")] = data
        else:
            self.shell.publish(data, False)

    def clear_output(self, wait: bool = False) -> None:
        """Nothing: what was sent was seen."""


class Profile(ProfileDir):  # type: ignore[misc]
    """A profile that makes no directories until something is stored in it."""

    def _location_changed(self, change: Any) -> None: ...
    def check_dirs(self) -> None: ...


class Shell(InteractiveShell):  # type: ignore[misc]
    """One per process. `execute` runs a cell; `publish` is called with each result as a bundle of MIME types."""

    displayhook_class = Type(Hook)
    display_pub_class = Type(Publisher)

    silenced = False
    shown: BaseException | None = None
    """An exception that was shown instead of raised: by ``%run``, or by a cell within the cell."""

    def __init__(self) -> None:
        self.publish: Publish = lambda bundle, main: None
        self.updates: dict[Any, dict[str, Any]] = {}
        self._stored: Any = None
        self.context = contextvars.copy_context()
        # Releases before 9.18 open their store at once, and with it a directory.
        before = interactiveshell.__dict__.get("PickleShareDB")
        if before is not None:
            interactiveshell.PickleShareDB = lambda path: None
        super().__init__(
            profile_dir=Profile(location=os.path.expanduser("~/.ipython/profile_default")),
            display_page=True,
            show_rewritten_input=False,
            colors="NoColor" if IPython.version_info < (9,) else "nocolor",
        )
        if before is not None:
            interactiveshell.PickleShareDB = before
        inline = InlineBackend(parent=self)
        self.configurables.append(inline)
        watcher = Watcher()
        self.pictures = Pictures(inline, display)
        watcher.after("matplotlib.artist", skerry_shortcuts.take)
        self.pictures.watch(watcher)
        Figures(display).watch(watcher)
        self.display_formatter.figures += [
            ("matplotlib", self.pictures.describe),
            ("plotly", skerry_figures.plotly),
            ("altair", skerry_figures.altair),
        ]
        watcher.install()
        self.register_magic_function(self._pip, "line", "pip")
        for name in ("bash", "sh"):
            self._register_script(name)
        asks: list[tuple[Any, str]] = [(builtins, "input"), (getpass, "getpass"), (getpass, "unix_getpass")]
        for module, name in asks:
            setattr(module, name, self._nobody_to_ask)
        os.system = skerry_programs.system

    # -- running a cell

    def execute(self, code: str) -> BaseException | None:
        """Run a cell and return what it raised. Results go to `publish` while it runs."""
        if not code or code.isspace():
            return None
        self.shown = None
        info = ExecutionInfo(code, True, False, True, None)
        result = ExecutionResult(info)
        count = result.execution_count = self.execution_count
        self.execution_count += 1
        try:
            self._execute(code, count, info, result)
        except BaseException as error:  # noqa: BLE001 - whatever the user's code raises is its result
            result.error_in_exec = error
        finally:
            self.displayhook.exec_result = None
            self.last_execution_result = result
            self.last_execution_succeeded = result.success
        found = result.error_in_exec
        try:
            self._finish(result)
        except BaseException as failure:  # noqa: BLE001 - as above: a user's hook, or an interrupt
            found = found or failure
        return found or self.shown

    def _execute(self, code: str, count: int, info: Any, result: Any) -> None:
        self.events.trigger("pre_execute")
        self.events.trigger("pre_run_cell", info)
        self.cell_name = ""
        cell = self._transform(code)
        self.history_manager.store_inputs(count, cell, code)
        with self.builtin_trap:
            self.cell_name = self.compile.cache(cell, count, raw_code=code)
            with self.display_trap:
                self.displayhook.exec_result = result
                tree = self.transform_ast(self.compile.ast_parse(cell, filename=self.cell_name))
                self.silenced = ends_in_semicolon(cell, tree)
                try:
                    self._run_parts(self._compile(tree))
                finally:
                    self.silenced = False

    def _transform(self, code: str) -> str:
        """Magics and commands as Python, line for line."""
        try:
            cell: str = self.transform_cell(code)
        except SyntaxError:
            # The parser says better what is wrong, and in which line.
            return code
        # IPython drops empty lines at the start, and every line after them would be counted wrong.
        return "\n" * code[: len(code) - len(code.lstrip())].count("\n") + cell

    def _compile(self, tree: ast.Module) -> list[types.CodeType]:
        parts = []
        with self.compile.extra_flags(ast.PyCF_ALLOW_TOP_LEVEL_AWAIT if self.autoawait else 0):
            for nodes, interactive in parts_of(tree.body, self.ast_node_interactivity):
                if interactive:
                    parts.append(self.compile(ast.Interactive(nodes), self.cell_name, "single"))
                else:
                    parts.append(self.compile(ast.Module(nodes, tree.type_ignores), self.cell_name, "exec"))
        return parts

    def _run_parts(self, parts: list[types.CodeType]) -> None:
        if any(part.co_flags & inspect.CO_COROUTINE for part in parts):
            self._wait_for(self._run_async(parts))
            return
        for part in parts:
            self.context.run(exec, part, self.user_global_ns, self.user_ns)

    async def _run_async(self, parts: list[types.CodeType]) -> None:
        for part in parts:
            value = eval(part, self.user_global_ns, self.user_ns)
            if part.co_flags & inspect.CO_COROUTINE:
                await value

    def _wait_for(self, work: Coroutine[Any, Any, None]) -> None:
        """Run on the event loop that goes on between runs, so that tasks outlive the cell that made them."""
        loop = asyncio.get_event_loop()
        if sys.version_info >= (3, 11):  # noqa: UP036 - an image may have an older one
            task = loop.create_task(work, context=self.context)
        else:
            task = loop.create_task(work)
        try:
            loop.run_until_complete(task)
        except KeyboardInterrupt as interrupt:
            if task.done():
                if not task.cancelled():
                    task.exception()  # it is the interrupt, and need not be reported as one nobody has looked at
                raise
            task.cancel()
            try:
                loop.run_until_complete(task)
            except asyncio.CancelledError as cancelled:
                # It was awaiting: say where. (Before Python 3.11 that is known only to the exception behind it.)
                behind = cancelled.__context__ if sys.version_info < (3, 11) else None
                raise interrupt.with_traceback((behind or cancelled).__traceback__) from None
            raise

    def _finish(self, result: Any) -> None:
        try:
            self.pictures.finish()
            self.events.trigger("post_execute")
            self.events.trigger("post_run_cell", result)
        finally:
            updates, self.updates = self.updates, {}
            for bundle in updates.values():
                self.publish(bundle, False)

    def moved(self) -> None:
        """The process has another directory and another home than it was built in."""
        self.starting_dir = os.getcwd()
        self.home_dir = os.path.expanduser("~")
        self.history_manager.dir_hist[:] = [self.starting_dir]

    # -- errors

    def describe(self, error: BaseException) -> dict[str, Any]:
        return skerry_tracebacks.describe(error, self.cell_name, self.compile._filename_map)

    cell_name = ""

    def showtraceback(self, exc_tuple: Any = None, *args: Any, **kwargs: Any) -> None:
        """Show an exception that does not end the run, or not here."""
        error = exc_tuple[1] if exc_tuple else sys.exc_info()[1]
        if error is None:
            # %tb: only to be looked at.
            error = getattr(sys, "last_value", None)
            if error is None:
                print("No traceback available to show.", file=sys.stderr)
            else:
                print("\n".join(self.describe(error)["traceback"]), file=sys.stderr)
        elif self.display_formatter.failed(error):
            return
        elif self.shown is None:
            self.shown = error

    def showsyntaxerror(self, *args: Any, **kwargs: Any) -> None:
        self.showtraceback()

    def safe_execfile(self, fname: Any, *where: Any, **options: Any) -> None:
        """For ``%run``: what the file raises, the cell raises."""
        super().safe_execfile(fname, *where, **{**options, "raise_exceptions": True})

    # -- programs

    def system(self, cmd: str) -> None:
        code, _ = skerry_programs.run(self.var_expand(cmd, depth=1), skerry_programs.shell(), None, None)
        self.user_ns["_exit_code"] = code

    system_raw = system_piped = system

    def getoutput(self, cmd: str, split: bool = True, depth: int = 0) -> Any:
        command = self.var_expand(cmd, depth=depth + 1)
        code, output = skerry_programs.run(command, skerry_programs.shell(), None, subprocess.PIPE)
        self.user_ns["_exit_code"] = code
        text = output.decode("utf-8", "replace")
        return SList(text.splitlines()) if split else LSString(text)

    def _pip(self, line: str) -> None:
        """Run pip for the Python that runs this code."""
        command = f"{shlex.quote(sys.executable)} -m pip {line}"
        self.user_ns["_exit_code"], _ = skerry_programs.run(command, skerry_programs.shell(), None, None)
        if site.ENABLE_USER_SITE and os.path.isdir(site.getusersitepackages()):
            site.addsitedir(site.getusersitepackages())
        importlib.invalidate_caches()

    def _register_script(self, name: str) -> None:
        theirs = self.find_cell_magic(name)

        def script(line: str, cell: str) -> Any:
            if "--" in line:
                return theirs(line, cell)
            arguments = [name, *shlex.split(line)]
            code, _ = skerry_programs.run(arguments, None, cell.encode(), None)
            if code:
                raise subprocess.CalledProcessError(code, cell)
            return None

        script.__doc__ = f"Run the cell with {name}; its output is shown as it comes."
        self.register_magic_function(script, "cell", name)

    # -- what a terminal would have

    def _nobody_to_ask(self, *args: Any, **kwargs: Any) -> str:
        raise StdinNotImplementedError("There is nobody here to ask: write the value into the code instead of input().")

    def ask_exit(self) -> None:
        raise SystemExit

    def enable_gui(self, gui: Any = None) -> None:
        """Nothing: there is no screen."""

    def enable_matplotlib(self, gui: Any = None) -> tuple[Any, str]:
        """Nothing: figures come back as results, whichever way was asked for."""
        return gui, "agg"

    def init_ipython_dir(self, ipython_dir: Any) -> None: ...
    def init_virtualenv(self) -> None: ...

    def init_history(self) -> None:
        self.history_manager = HistoryManager(shell=self, parent=self, enabled=False, hist_file=":memory:")
        self.configurables.append(self.history_manager)

    def init_display_formatter(self) -> None:
        self.display_formatter = Formatter(parent=self)
        self.configurables.append(self.display_formatter)

    @property
    def db(self) -> Any:
        """What ``%store`` and ``%bookmark`` keep, in the home directory."""
        if self._stored is None:
            try:
                from IPython.external.pickleshare import PickleShareDB
            except ImportError:
                from pickleshare import PickleShareDB
            self._stored = PickleShareDB(os.path.expanduser("~/.ipython/profile_default/db"))
        return self._stored

    @db.setter
    def db(self, value: Any) -> None:
        self._stored = value


def parts_of(nodes: list[ast.stmt], interactivity: str) -> list[tuple[list[Any], bool]]:
    """Which statements run together, and whether the values of their expressions are shown."""
    if interactivity == "last_expr_or_assign":
        last = nodes[-1] if nodes else None
        target = last.targets[0] if isinstance(last, ast.Assign) and len(last.targets) == 1 else None
        if isinstance(last, (ast.AugAssign, ast.AnnAssign)):
            target = last.target
        if isinstance(target, ast.Name):
            shown = ast.Expr(ast.Name(target.id, ast.Load()))
            nodes = [*nodes, ast.fix_missing_locations(ast.copy_location(shown, target))]
    if interactivity == "all":
        return [([node], isinstance(node, ast.Expr)) for node in nodes]
    parts: list[tuple[list[Any], bool]] = []
    shows = bool(nodes) and interactivity != "none" and (interactivity == "last" or isinstance(nodes[-1], ast.Expr))
    before = nodes[:-1] if shows else nodes
    if before:
        parts.append((before, False))
    if shows:
        parts.append((nodes[-1:], True))
    return parts


def ends_in_semicolon(cell: str, tree: ast.Module) -> bool:
    if not tree.body or ";" not in cell[-200:]:
        return False
    last = tree.body[-1]
    if last.end_lineno is None or last.end_col_offset is None:
        return False
    line = cell.split("\n")[last.end_lineno - 1].encode()
    return line[last.end_col_offset :].lstrip().startswith(b";")

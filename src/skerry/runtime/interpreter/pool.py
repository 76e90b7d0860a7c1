"""Executors ready before they are asked for, and how many there may be."""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field

from skerry.errors import (
    ContextLimitError,
    FileNotFoundInSandboxError,
    InterpreterNotReadyError,
    LanguageUnavailableError,
    SkerryError,
)
from skerry.models import Language
from skerry.portal.clock import Clock
from skerry.portal.contract import Portal
from skerry.runtime.environment import WORKSPACE
from skerry.runtime.faults import Faults
from skerry.runtime.flow import Flow
from skerry.runtime.interpreter.breaker import Breaker
from skerry.runtime.interpreter.executor import Executor, Pipes
from skerry.runtime.interpreter.languages import LANGUAGES
from skerry.runtime.interpreter.nursery import PRELOADED, Nursery

READY = 60.0
"""Seconds an executor may take until it can run something."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How many executors of a language are kept ready, and how many there may be in all."""

    least: int = 1
    most: int = 64
    idle: float = 300.0
    """Seconds after which ready ones above ``least`` are ended."""


@dataclass(frozen=True, slots=True)
class Provision:
    """What a server keeps ready for code, and how long code may run where nobody says."""

    sizes: Mapping[Language, Sizes] = field(default_factory=dict)
    timeout: float | None = None
    """Milliseconds."""
    warm: Sequence[Language] = ()
    """Languages to have ready as soon as a sandbox starts."""


class Pool:
    def __init__(
        self,
        portal: Portal,
        env: Mapping[str, str],
        provision: Provision,
        faults: Faults | None = None,
        flow: Flow | None = None,
    ) -> None:
        self._flow = flow
        self.faults = Faults() if faults is None else faults
        self._portal = portal
        self._env = env
        self._sizes = {
            language: _asked(language, provision.sizes.get(language, Sizes()), env) for language in LANGUAGES
        }
        self._ready_within = number(env, "INTERPRETER_SPAWN_TIMEOUT_MS", READY * 1000) / 1000
        self._nursery: Nursery | None = None
        self._opening = asyncio.Lock()
        self._breakers = {language: Breaker(f"Starting {language}") for language in LANGUAGES}
        self._spares: dict[Language, list[tuple[float, Executor]]] = {language: [] for language in LANGUAGES}
        self._filling = {language: asyncio.Lock() for language in LANGUAGES}
        self._used: Counter[Language] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        for language in provision.warm:
            self._own(self.warm(language, self._sizes[language].least, PRELOADED))

    @property
    def clock(self) -> Clock:
        return self._portal.clock

    # -- taking and giving back ----------------------------------------------------------------------------------------

    async def take(self, language: Language, cwd: str, env: Mapping[str, str]) -> Executor:
        """An executor that is ready for code, in ``cwd`` and with ``env`` over the sandbox's own."""
        self._require(language)
        breaker = self._breakers[language]
        self._reserve(language)
        try:
            executor = await self._begin(language, cwd, {**self._env, **env})
        except BaseException as error:
            self._used[language] -= 1
            if isinstance(error, OSError | InterpreterNotReadyError):
                breaker.failed(str(error))
            if isinstance(error, OSError):
                raise _unready(language, error) from error
            raise
        breaker.succeeded()
        self._replenish(language)
        return executor

    def release(self, language: Language) -> None:
        """An executor that was taken has ended."""
        self._used[language] -= 1
        if language == "python" and not self._used[language] and not self._sizes[language].least:
            self._own(self._retire())

    def _require(self, language: Language) -> None:
        self._breakers[language].check()
        if not self._portal.code[language]:
            raise LanguageUnavailableError(
                f"No interpreter for {language} is installed beside Skerry.",
                hint="Reinstall Skerry where the server runs: its dependencies include Node and IPython.",
            )

    def _reserve(self, language: Language) -> None:
        most = self._sizes[language].most
        if self._used[language] >= most:
            raise ContextLimitError(
                f"There are {most} {language} contexts in this sandbox already, and no more are allowed.",
                hint=f"Delete one, or raise {language.upper()}_POOL_MAX_SIZE.",
                details={"limit": most, "retryAfter": 1},
            )
        self._used[language] += 1

    # -- starting ------------------------------------------------------------------------------------------------------

    async def _begin(self, language: Language, cwd: str, env: Mapping[str, str]) -> Executor:
        if language == "python":
            nursery = await self._template()
            try:
                executor = await nursery.fork(cwd, env)
            except OSError:
                if nursery.alive:
                    raise
                # It had just ended, which nobody knew yet; a new one is made.
                executor = await (await self._template()).fork(cwd, env)
            return await self._settled(executor, cwd)
        while self._spares[language]:
            _, executor = self._spares[language].pop()
            if not executor.ended.done():
                return await self._settled(executor, cwd, env)
        executor = await self._settled(await self._node(language), cwd)
        return await self._settled(executor, cwd, env)

    async def _settled(self, executor: Executor, cwd: str, env: Mapping[str, str] | None = None) -> Executor:
        """The executor once it is ready (with ``env``: for this context); whatever goes wrong, none is left behind."""
        try:
            if env is not None:
                executor.ready = asyncio.get_running_loop().create_future()
                await executor.begin(cwd, env)
            async with self._portal.clock.timeout(self._ready_within):
                waits: set[asyncio.Future[object]] = {executor.ready, executor.ended}  # type: ignore[arg-type]
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if executor.failure is not None:
                raise FileNotFoundInSandboxError(
                    f"The context could not begin in {cwd!r}: {executor.failure}",
                    hint="Make the directory first, or name another as cwd.",
                    details={"cwd": cwd},
                )
            if executor.ended.done():
                raise OSError(executor.ended.result() + executor.last_words())
            executor.within(self._flow)
            return executor
        except TimeoutError:
            await executor.kill()
            raise self._late() from None
        except BaseException:
            await executor.kill()
            raise

    async def _template(self) -> Nursery:
        async with self._opening:
            if self._nursery is None or not self._nursery.alive:
                self._nursery = Nursery(self._portal)
                try:
                    async with self._portal.clock.timeout(self._ready_within):
                        await self._nursery.open(self._clean())
                except BaseException as error:
                    await self._nursery.close()
                    self._nursery = None
                    if isinstance(error, TimeoutError):
                        raise self._late() from None
                    raise
            return self._nursery

    def _late(self) -> InterpreterNotReadyError:
        return InterpreterNotReadyError(
            f"The interpreter was not ready after {self._ready_within:g} seconds.",
            hint="Try again; the machine may be busy.",
            details={"retryAfter": 5, "progress": 50, "status": "initializing"},
        )

    def _clean(self) -> dict[str, str]:
        """The sandbox's environment without what would change how Skerry's own programs start."""
        return {k: v for k, v in self._env.items() if not k.startswith(("PYTHON", "NODE_", "LD_"))}

    async def _node(self, language: Language) -> Executor:
        pipes = Pipes.open(interrupts=True)
        null = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        try:
            child = await self._portal.spawn(
                self._portal.code[language][0],
                env=self._clean(),
                cwd="/",
                stdio=[null, *pipes.theirs],
            )
        except BaseException:
            pipes.close()
            raise
        finally:
            os.close(null)
        pipes.close_theirs()
        return Executor(child, pipes, child.wait())

    # -- in advance ----------------------------------------------------------------------------------------------------

    async def warm(self, language: Language, count: int = 1, preload: Sequence[str] = ()) -> None:
        """Have ``count`` contexts ready. For Python that is the template, with modules imported in it."""
        self._require(language)
        try:
            if language == "python":
                await (await self._template()).preload(preload)
            else:
                await self._fill(language, min(count, self._sizes[language].most))
        except OSError as error:
            self._breakers[language].failed(str(error))
            raise _unready(language, error) from error

    def imported(self, modules: Sequence[str]) -> None:
        """A context uses these: the next ones shall not have to import them again."""
        nursery = self._nursery
        wanted = [whole for whole in PRELOADED if whole.partition(".")[0] in modules]
        if nursery is not None and nursery.alive and not set(wanted) <= nursery.preloaded:
            self._own(nursery.preload(wanted))

    def _replenish(self, language: Language) -> None:
        if language != "python" and len(self._spares[language]) < self._sizes[language].least:
            self._own(self._fill(language, self._sizes[language].least))

    async def _fill(self, language: Language, count: int) -> None:
        async with self._filling[language]:
            while len(self._spares[language]) < count and not self._closed:
                executor = await self._settled(await self._node(language), WORKSPACE)
                self._spares[language].append((time.monotonic(), executor))
        if len(self._spares[language]) > self._sizes[language].least:
            self._own(self._thin(language))

    async def _thin(self, language: Language) -> None:
        sizes = self._sizes[language]
        while len(self._spares[language]) > sizes.least:
            since, executor = self._spares[language][0]
            await asyncio.sleep(max(0.0, since + sizes.idle - time.monotonic()))
            spares = self._spares[language]
            if len(spares) > sizes.least and spares[0][1] is executor:
                spares.pop(0)
                await executor.kill()

    async def _retire(self) -> None:
        """Where nothing is to be kept ready, the template ends some time after the last context."""
        await asyncio.sleep(self._sizes["python"].idle)
        async with self._opening:
            if self._nursery is not None and not self._used["python"]:
                await self._nursery.close()
                self._nursery = None

    def _own(self, work: Awaitable[None]) -> None:
        if self._closed:
            return

        async def quietly() -> None:
            try:
                await work
            except (OSError, SkerryError):
                return  # whoever needs one next is told why there is none

        task = asyncio.get_running_loop().create_task(quietly())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        self._closed = True
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for spares in self._spares.values():
            while spares:
                await spares.pop()[1].close()
        if self._nursery is not None:
            await self._nursery.close()


def _unready(language: Language, error: OSError) -> InterpreterNotReadyError:
    return InterpreterNotReadyError(
        f"The interpreter for {language} could not be started: {error}.",
        hint="Is memory or the number of processes used up?",
        details={"retryAfter": 1, "progress": 0, "status": "initializing"},
    )


def _asked(language: Language, sizes: Sizes, env: Mapping[str, str]) -> Sizes:
    """Sizes as the sandbox's environment asks for them, in the names the older SDK has."""
    name = language.upper()
    least = int(number(env, f"{name}_POOL_MIN_SIZE", sizes.least))
    return Sizes(least, max(1, int(number(env, f"{name}_POOL_MAX_SIZE", sizes.most))), sizes.idle)


def number(env: Mapping[str, str], name: str, otherwise: float) -> float:
    try:
        value = float(env[name])
    except (KeyError, ValueError):
        return otherwise
    return value if 0 <= value < 1e9 else otherwise

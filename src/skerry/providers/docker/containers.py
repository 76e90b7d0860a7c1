"""The containers of one home. A sandbox's container is a name: what is behind it is exchanged when its settings change.

skerry-HOME-ID         the sandbox's files, and its processes while it runs
skerry-HOME.next-ID    what is about to take its place, or was when a server was killed
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from skerry.errors import SandboxStartError
from skerry.providers.contract import Spec
from skerry.providers.docker.description import HOME, SANDBOX, SETTINGS, SNAPSHOT, resources
from skerry.providers.docker.engine import Engine, Refused
from skerry.providers.docker.images import Images

Describe = Callable[[Spec, str], Awaitable[dict[str, Any]]]
"""What a container of an image is made with."""


class Containers:
    def __init__(self, engine: Engine, images: Images, home: str) -> None:
        self._engine = engine
        self._images = images
        self._home = home

    def name(self, id: str) -> str:
        return f"skerry-{self._home}-{id}"

    def next(self, id: str) -> str:
        """Of the container that is to take a sandbox's place."""
        return f"skerry-{self._home}.next-{id}"

    async def exists(self, id: str) -> bool:
        if await self._engine.inspect(self.name(id)) is not None:
            return True
        return await self._engine.inspect(self.next(id)) is not None

    async def all(self) -> AsyncIterator[tuple[str, str]]:
        """The id of each sandbox, and the state of its container; exchanges that were not finished are, first."""
        for prefix in (self.next(""), self.name("")):
            for one in await self._engine.containers(label=[f"{HOME}={self._home}"], name=[f"^/{prefix}"]):
                id = one["Names"][0].removeprefix(f"/{prefix}")
                if prefix == self.next(""):
                    await self.settle(id)
                else:
                    yield id, one["State"]

    async def prepare(self, spec: Spec, describe: Describe) -> bool:
        """See to it that there is a container with these settings, over the sandbox's files if it has some. Whether
        nothing ever ran in it."""
        await self.settle(spec.id)
        name = self.name(spec.id)
        found = await self._engine.inspect(name)
        if found is None:
            await self._create(name, await describe(spec, await self._images.find(spec.image)))
            return True
        image: str = found["Image"]
        untouched: bool = found["State"]["Status"] == "created"
        if found["State"]["Running"]:  # left by a server that was killed, and paused, or about to end
            await self.end(name)
        if found["Config"]["Labels"].get(SETTINGS) == (await describe(spec, image))["Labels"][SETTINGS]:
            await self._engine.update(name, resources(spec.limits))
            return untouched
        if not untouched:  # it has files of its own
            image = await self._images.commit(name, f"kept-{secrets.token_hex(8)}", {})
        elif await self._images.is_nothing(image):
            image = await self._images.find(spec.image)
        await self._create(self.next(spec.id), await describe(spec, image))
        await self.exchange(spec.id)
        return untouched

    async def _create(self, name: str, settings: dict[str, Any]) -> None:
        try:
            await self._engine.create(name, settings)
        except Refused as refused:
            raise SandboxStartError(f"The Docker Engine could not make a container: {refused}.") from refused

    async def hold(self, name: str, id: str, image: str) -> None:
        """A container that is never started: a place for files, until the sandbox is. Raises ``Refused``."""
        labels = {HOME: self._home, SANDBOX: id, SETTINGS: "", SNAPSHOT: ""}
        await self._engine.create(
            name,
            {"Image": image, "Entrypoint": ["/"], "Labels": labels, "HostConfig": {"NetworkMode": "none"}},
        )

    async def exchange(self, id: str) -> None:
        """What was prepared takes the place of what was there; a server that is killed between finds both, or one."""
        old = await self._engine.inspect(self.name(id))
        await self._engine.remove(self.name(id))
        await self._engine.rename(self.next(id), self.name(id))
        if old is not None:
            await self._images.let_go(old["Image"])

    async def settle(self, id: str) -> None:
        """Finish, or take back, an exchange in which a server was killed."""
        if await self._engine.inspect(self.next(id)) is None:
            return
        if await self._engine.inspect(self.name(id)) is None:
            await self._engine.rename(self.next(id), self.name(id))
        else:
            await self.remove(self.next(id))

    async def end(self, name: str) -> None:
        await self._engine.kill(name)
        await self._engine.wait(name)

    async def remove(self, name: str) -> None:
        found = await self._engine.inspect(name)
        if found is not None:
            await self._engine.remove(name)
            await self._images.let_go(found["Image"])

    async def forget(self, id: str) -> None:
        for name in (self.next(id), self.name(id)):
            await self.remove(name)

"""The rival of code contexts: a real Jupyter kernel, started by the bench and ended by it."""

from __future__ import annotations

import itertools
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Empty
from typing import Any

from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager

PATIENCE = 60.0


class Kernel:
    """IPython's own kernel with one client, both as quick as they can be."""

    _numbers = itertools.count(1)

    def __init__(self, scratch: Path) -> None:
        # In a place of its own: neither the user's history and start-up files, nor connection files left in the home.
        place = scratch / "jupyter"
        place.mkdir(exist_ok=True)
        places = ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR")
        self._env = {**os.environ, **{name: str(place) for name in places}}
        self._manager = KernelManager(connection_file=str(place / f"{next(self._numbers)}.json"))
        self._client: BlockingKernelClient | None = None

    @property
    def pid(self) -> int:
        provisioner: Any = self._manager.provisioner
        return int(provisioner.process.pid)

    def start(self) -> None:
        self._manager.start_kernel(env=self._env, stderr=subprocess.DEVNULL)
        self._client = client = self._manager.client()
        client.start_channels(stdin=False, hb=False)
        # `wait_for_ready` would listen for a fifth of a second more, to be sure that there is nothing left to hear.
        until = time.monotonic() + PATIENCE
        while True:
            client.kernel_info()
            self._receive(client.shell_channel)
            try:
                client.iopub_channel.get_msg(timeout=0.05)
                return
            except Empty:
                if time.monotonic() > until:
                    raise OSError("The kernel did not become ready.") from None

    def run(self, code: str) -> str:
        """Run code to its end; the last expression as text, or what was drawn as base64."""
        assert self._client is not None
        request = self._client.execute(code)
        found = ""
        while True:
            message = self._receive(self._client.iopub_channel)
            if message["parent_header"].get("msg_id") != request:
                continue
            content = message["content"]
            if message["msg_type"] == "error":
                raise OSError(f"{content['ename']}: {content['evalue']}")
            if message["msg_type"] in ("execute_result", "display_data"):
                found = content["data"].get("image/png") or content["data"]["text/plain"]
            if message["msg_type"] == "status" and content["execution_state"] == "idle":
                break
        while self._receive(self._client.shell_channel)["parent_header"].get("msg_id") != request:
            pass
        return found

    def stop(self) -> None:
        if self._client is not None:
            self._client.stop_channels()
        if self._manager.has_kernel:
            self._manager.shutdown_kernel(now=True)
        self._manager.cleanup_resources()

    def _receive(self, channel: Any) -> dict[str, Any]:
        try:
            message: dict[str, Any] = channel.get_msg(timeout=PATIENCE)
            return message
        except Empty:
            raise OSError("The kernel said nothing.") from None


@contextmanager
def kernel(scratch: Path) -> Iterator[Kernel]:
    made = Kernel(scratch)
    try:
        made.start()
        yield made
    finally:
        made.stop()

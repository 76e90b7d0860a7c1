"""The ``host`` image: the host's own programs in a system of their own.

/usr is bound in from the host; what is built here is everything around it, as the lowest layer of the root file system:
the links into /usr, an /etc that is made up except for an explicit list, and empty directories. Nothing else of the
host is in it, and of the list nothing that not everybody on the host may read, and nothing that holds a private key.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from skerry.providers.local.idmap import IdMap
from skerry.providers.local.links import Links
from skerry.providers.local.mapped import run_mapped
from skerry.providers.local.rootfs import Meta, Rootfs, components
from skerry.providers.local.trees import private_directory, staging

# The only files of the host's /etc that sandboxes see. A directory stands for all that is in it.
COPIED = (
    "alternatives",
    "ca-certificates",
    "ca-certificates.conf",
    "debian_version",
    "default/locale",
    "default/useradd",
    "fonts",
    "java*",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "locale.alias",
    "localtime",
    "login.defs",
    "magic",
    "magic.mime",
    "mime.types",
    "os-release",
    "pam.d/chfn",
    "pam.d/chpasswd",
    "pam.d/chsh",
    "pam.d/common-*",
    "pam.d/newusers",
    "pam.d/other",
    "pam.d/passwd",
    "pam.d/runuser*",
    "pam.d/su",
    "pam.d/su-l",
    "pki/ca-trust/extracted",
    "pki/tls/cert.pem",
    "pki/tls/certs",
    "protocols",
    "python3*",
    "security",
    "services",
    "skel",
    "ssl/cert.pem",
    "ssl/certs",
    "ssl/openssl.cnf",
    "timezone",
)

_LINKS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_DIRECTORIES = {
    "etc": 0o755,
    "home": 0o755,
    "media": 0o755,
    "mnt": 0o755,
    "opt": 0o755,
    "srv": 0o755,
    "usr": 0o755,
    "var": 0o755,
    "var/cache": 0o755,
    "var/lib": 0o755,
    "var/log": 0o755,
    "var/tmp": 0o1777,
}
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_USER = 1000
_WRITTEN = {
    "passwd": (
        "root:x:0:0:root:/root:/bin/bash\n"
        "daemon:x:1:1:daemon:/usr/sbin:/usr/sbin/nologin\n"
        f"user:x:{_USER}:{_USER}::/home/user:/bin/bash\n"
        "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n"
    ),
    "group": (
        "root:x:0:\ndaemon:x:1:\nadm:x:4:\ntty:x:5:\nmail:x:8:\nshadow:x:42:\nutmp:x:43:\nstaff:x:50:\nusers:x:100:\n"
        f"user:x:{_USER}:\nnogroup:x:65534:\n"
    ),
    "shadow": "root:*:19000:0:99999:7:::\ndaemon:*:19000:0:99999:7:::\n"
    "user:*:19000:0:99999:7:::\nnobody:*:19000:0:99999:7:::\n",
    "gshadow": "root:*::\nuser:*::\n",
    "hosts": "127.0.0.1 localhost\n::1 localhost ip6-localhost ip6-loopback\n",
    "hostname": "sandbox\n",
    "resolv.conf": "# The door of this sandbox, which looks up what its egress policy allows.\nnameserver 127.0.0.1\n",
    "nsswitch.conf": (
        "passwd: files\ngroup: files\nshadow: files\nhosts: files dns\n"
        "networks: files\nprotocols: files\nservices: files\n"
    ),
    "shells": "/bin/sh\n/bin/bash\n/usr/bin/sh\n/usr/bin/bash\n",
    "profile": (
        f'if [ "$(id -u)" = 0 ] || [ -z "$PATH" ]; then PATH={_PATH}; export PATH; fi\n'
        'if [ -n "$BASH" ] && [ -r /etc/bash.bashrc ]; then . /etc/bash.bashrc; fi\n'
    ),
    "bash.bashrc": "[ -z \"$PS1\" ] && return\nshopt -s checkwinsize\nPS1='\\u@\\h:\\w\\$ '\n",
}
_FORMAT = 1
# Files that hold every certificate a program trusts.
_BUNDLES = (
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/ssl/cert.pem",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/pki/tls/cert.pem",
    "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
)
_MAX_FILE = 64 << 20


def host_skeleton(home: Path, idmap: IdMap, authority: str = "", cache: Path | None = None) -> Path:
    """The skeleton for the host as it is now, built anew only when something it is made of has changed.

    ``authority`` is a certificate that its programs are to trust beside those the host does. What skeletons of several
    homes can have in common is in ``cache``.
    """
    base = home / "images"
    target = base / ".host" / _digest(idmap, authority)
    if target.is_dir():
        return target
    private_directory(base, idmap)
    (base / ".host").mkdir(exist_ok=True)
    (base / ".host").chmod(0o755)
    with staging(base, idmap) as place:
        (place / "root").mkdir(mode=0o700)
        fd = os.open(place / "root", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            links = str(cache / "links") if cache is not None and idmap.kind == "root" else None
            run_mapped(idmap, build, fd, authority, links, descriptors=(fd,))
        finally:
            os.close(fd)
        try:
            os.rename(place / "root", target)
        except OSError as error:
            # Someone else was faster with the same.
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
    return target


def build(
    idmap: IdMap,
    progress: Callable[[int], None] | None,
    target: int,
    authority: str = "",
    links: str | None = None,
) -> None:
    """Write the skeleton into the empty directory open as ``target``; ``links`` is where its links may be shared."""
    root = Rootfs(target, idmap, links=None if links is None else Links(Path(links)))
    try:
        for name, link in _layout():
            if link is None:
                root.directory((name,), Meta(0o755))
            else:
                root.symlink((name,), Meta(0o777), link)
        for name, mode in _DIRECTORIES.items():
            root.directory(components(name), Meta(mode))
        for path, found in _sources():
            _copy(root, path, found, authority)
        for name, text in _WRITTEN.items():
            mode = 0o640 if name.endswith("shadow") else 0o644
            root.file(("etc", name), Meta(mode), io.BytesIO(text.encode()).read)
        root.symlink(("etc", "mtab"), Meta(0o777), "/proc/self/mounts")
        root.directory(("home", "user"), Meta(0o755, _USER, _USER))
        root.add_mount_points()
        root.settle()
    finally:
        root.close()


def skeleton(trusted: str) -> Iterator[tuple[str, int, int, bytes]]:
    """The same as entries to be archived: path, mode, owner, and what a file holds or a link leads to. Lists of
    certificates are links to ``trusted``, for all homes at once."""
    for name, link in _layout():
        yield name, stat.S_IFDIR | 0o755 if link is None else stat.S_IFLNK | 0o777, 0, (link or "").encode()
    for name, mode in {**_DIRECTORIES, "root": 0o700, "run": 0o755, "tmp": 0o1777}.items():
        yield name, stat.S_IFDIR | mode, 0, b""
    for path, found in _sources():
        mode = stat.S_IFMT(found.st_mode) | stat.S_IMODE(found.st_mode) & 0o755
        content = b""
        if stat.S_ISLNK(found.st_mode):
            content = os.fsencode(os.readlink(path))
        elif path in _BUNDLES:
            mode, content = stat.S_IFLNK | 0o777, trusted.encode()
        elif stat.S_ISREG(found.st_mode):
            content = Path(path).read_bytes()
        if b"PRIVATE KEY-----" not in content:
            yield path.lstrip("/"), mode, 0, content
    for name, text in _WRITTEN.items():
        yield f"etc/{name}", stat.S_IFREG | (0o640 if name.endswith("shadow") else 0o644), 0, text.encode()
    yield "home/user", stat.S_IFDIR | 0o755, _USER, b""


def _copy(root: Rootfs, path: str, found: os.stat_result, authority: str) -> None:
    meta = Meta(stat.S_IMODE(found.st_mode) & 0o755, mtime=found.st_mtime)
    inside = components(path)
    if stat.S_ISDIR(found.st_mode):
        root.directory(inside, meta)
    elif stat.S_ISLNK(found.st_mode):
        root.symlink(inside, meta, os.readlink(path))
    else:
        content = Path(path).read_bytes()
        if path in _BUNDLES and authority:
            content = content.rstrip() + b"\n" + authority.encode()
        if b"PRIVATE KEY-----" not in content:
            root.file(inside, meta, io.BytesIO(content).read)


def _layout() -> Iterator[tuple[str, str | None]]:
    """/bin and its like as the host has them: a link, or (``None``) a directory of its own to mount over."""
    for name in _LINKS:
        path = f"/{name}"
        if os.path.islink(path):
            yield name, os.readlink(path)
        elif os.path.isdir(path):
            yield name, None


def _sources() -> Iterator[tuple[str, os.stat_result]]:
    """Every host path that is copied, parents first, in a stable order."""
    for pattern in COPIED:
        for path in sorted(Path("/etc").glob(pattern)):
            yield from _readable(os.fspath(path), os.lstat(path))


def _readable(path: str, found: os.stat_result) -> Iterator[tuple[str, os.stat_result]]:
    if stat.S_ISLNK(found.st_mode):
        yield path, found
    elif stat.S_ISREG(found.st_mode):
        if found.st_mode & 0o004 and found.st_size <= _MAX_FILE:
            yield path, found
    elif stat.S_ISDIR(found.st_mode) and found.st_mode & 0o005 == 0o005:
        yield path, found
        with os.scandir(path) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                yield from _readable(entry.path, entry.stat(follow_symlinks=False))


def _digest(idmap: IdMap, authority: str) -> str:
    """By what the files' inodes say: reading them all again at every start would take too long."""
    digest = hashlib.sha256(repr((_FORMAT, _DIRECTORIES, _WRITTEN, authority, list(_layout()))).encode())
    digest.update(repr((idmap.kind, idmap.uid_ranges, idmap.gid_ranges)).encode())
    for path, found in _sources():
        link = os.readlink(path) if stat.S_ISLNK(found.st_mode) else ""
        digest.update(repr((path, link, found.st_mode, found.st_size, found.st_mtime_ns)).encode())
    return digest.hexdigest()[:20]

"""What may be cloned: repository addresses and branch names, checked before git sees them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from urllib.parse import SplitResult, quote, unquote, urlsplit

from skerry.errors import InvalidGitUrlError, InvalidRequestError, SkerryError
from skerry.runtime.paths import resolve

SCHEMES = ("https", "http", "git", "ssh", "file")
LONGEST = 4096

_FORBIDDEN = re.compile(r"[\x00-\x20\x7f\ud800-\udfff]")
_CONTROL = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")
_HOST = re.compile(r"[A-Za-z0-9_:][A-Za-z0-9._:%-]*\Z")
_USER = re.compile(r"[A-Za-z0-9_.][A-Za-z0-9_.+-]*\Z")
_SCP = re.compile(r"(?:(?P<user>[^@/:]+)@)?(?P<host>[^@/:]+):(?P<path>[^:].*)\Z")
_BRANCH = re.compile(r"[\x00-\x20\x7f~^:?*\[\\\ud800-\udfff]|\.\.|@\{|//|/\.|\.lock(?:/|\Z)")


@dataclass(frozen=True, slots=True)
class Repository:
    """An address without any secret in it, and the secret beside it."""

    url: str
    name: str
    origin: str | None = None
    """Scheme and host that the credentials are for, and for no other."""
    username: str | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)
    secrets: tuple[str, ...] = field(default=(), repr=False)

    def redact(self, text: str) -> str:
        for secret in self.secrets:
            text = text.replace(secret, "***")
        return text


def parse_repository(url: str, username: str | None = None, password: str | None = None) -> Repository:
    for value, what in ((username, "username"), (password, "password")):
        # A line break would add lines to what git's credential protocol reads.
        if value is not None and _CONTROL.search(value):
            raise InvalidRequestError(f"The {what} contains a control character.")
    if not url or len(url) > LONGEST or _FORBIDDEN.search(url) or url.startswith("-"):
        raise _invalid("it is empty, too long, begins with '-' or contains a space or control character")
    credentials = bool(username or password)
    if url.startswith("/"):
        repository = Repository(resolve(url, "/"), _name(url))
    elif re.match(r"[A-Za-z0-9+.-]+::", url):
        raise _invalid("transports such as ext:: are not allowed")
    elif "://" in url:
        parts = _split(url)
        if parts.scheme in ("http", "https"):
            return _with_credentials(parts, username, password)
        repository = _other(parts)
    else:
        repository = _scp(url)
    if credentials:
        raise InvalidRequestError(
            "A username and password can be used only with http and https addresses.",
            hint="For ssh, put a key into the sandbox's ~/.ssh.",
        )
    return repository


def check_branch(branch: str | None) -> None:
    if branch is None:
        return
    bad = not branch or len(branch) > 250 or branch.startswith(("-", ".", "/")) or branch.endswith(("/", "."))
    if bad or branch == "@" or _BRANCH.search(branch):
        raise InvalidRequestError("This is not a name that a branch or tag can have.", details={"branch": branch})


def _split(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise _invalid("its host or port is malformed") from None
    if parts.scheme not in SCHEMES:
        raise _invalid(f"the scheme {parts.scheme!r} is not one of {', '.join(SCHEMES)}")
    host = parts.hostname or ""
    if parts.scheme == "file":
        if host not in ("", "localhost") or port is not None:
            raise _invalid("a file:// address names no host")
    elif not _HOST.match(host):
        raise _invalid("it names no host")
    return parts


def _with_credentials(parts: SplitResult, username: str | None, password: str | None) -> Repository:
    username = username or unquote(parts.username or "")
    password = password or unquote(parts.password or "")
    if _CONTROL.search(username) or _CONTROL.search(password):
        raise _invalid("its username or password contains a control character")
    host = parts.netloc.rpartition("@")[2]
    origin = f"{parts.scheme}://{host}"
    # A username alone is often a token.
    secret = password or username
    return Repository(
        url=parts._replace(netloc=host).geturl(),
        name=_name(parts.path),
        origin=origin if secret else None,
        username=(username or "x-access-token") if secret else None,
        password=password if secret else None,
        secrets=tuple(dict.fromkeys(s for s in (secret, quote(secret, safe=""), quote(secret)) if s)),
    )


def _other(parts: SplitResult) -> Repository:
    netloc = parts.netloc.rpartition("@")[2]
    secrets: tuple[str, ...] = ()
    if parts.scheme == "ssh" and parts.username:
        if not _USER.match(parts.username):
            raise _invalid("its user name is malformed")
        netloc = f"{parts.username}@{netloc}"
    if parts.password:
        secrets = (parts.password, unquote(parts.password))
    if parts.scheme == "file":
        return Repository(f"file://{resolve(parts.path, '/')}", _name(parts.path))
    return Repository(parts._replace(netloc=netloc).geturl(), _name(parts.path), secrets=secrets)


def _scp(url: str) -> Repository:
    match = _SCP.match(url)
    if match is None or not _HOST.match(match["host"]) or (match["user"] and not _USER.match(match["user"])):
        raise _invalid("it is neither a URL, nor user@host:path, nor an absolute path inside the sandbox")
    if match["path"].startswith("-"):
        raise _invalid("its path begins with '-'")
    return Repository(url, _name(match["path"]))


def _name(path: str) -> str:
    name = unquote(path).rstrip("/").removesuffix("/.git").rpartition("/")[2].removesuffix(".git")
    if name in ("", ".", "..") or _CONTROL.search(name) or name.startswith("-"):
        raise _invalid("it does not end in the name of a repository")
    return name


def _invalid(why: str) -> SkerryError:
    # The address itself is left out of the message: it may hold a password.
    return InvalidGitUrlError(
        f"The repository address cannot be used: {why}.",
        hint="Use https://host/path, ssh://, git@host:path, or an absolute path inside the sandbox.",
    )

# Generated from src/skerry/client/_async/mounts.py by scripts/generate_sync.py; change that file and run it again.
"""Buckets mounted in a sandbox."""

from __future__ import annotations

from skerry.client._sync.connection import Link
from skerry.client.values import given
from skerry.errors import SandboxNotFoundError
from skerry.models import MountInfo, MountList, MountResult


class Mounts:
    _link: Link

    def mount_bucket(
        self,
        bucket: str | None = None,
        path: str = "/persist",
        prefix: str | None = None,
        read_only: bool = False,
        *,
        local_bucket: bool = False,
        endpoint: str | None = None,
        access_key_id: str | None = None,
        secret_access_key: str | None = None,
    ) -> MountInfo:
        """Show the files of a bucket in the running sandbox, and keep there what is written to them.

        ``bucket`` is one that the server knows; without it, the server's own directory (``local_bucket=True``) or the
        one its environment names. ``prefix`` says what of it is shown, by default ``/projects/<id>/``. A file is in the
        bucket when its program's ``close`` returns; what others change there is seen inside within two seconds.
        The mount comes back when the sandbox wakes. The same mount again changes nothing.

        A bucket of your own is one with an ``endpoint`` and keys, which the server keeps, encrypted, and shows nobody.
        """
        body = {"mountPath": path, "readOnly": read_only, "localBucket": local_bucket}
        body |= given(bucket=bucket, prefix=prefix, endpoint=endpoint)
        if access_key_id is not None or secret_access_key is not None:
            body["credentials"] = {"accessKeyId": access_key_id, "secretAccessKey": secret_access_key}
        return (self._link.post(MountResult, "/mount", body)).mount

    def unmount_bucket(self, path: str = "/persist") -> MountInfo:
        """Take a mount away; raises ``MountNotFoundError`` if nothing is mounted there."""
        return (self._link.post(MountResult, "/unmount", {"mountPath": path}, prepare=False)).mount

    def list_mounts(self) -> list[MountInfo]:
        """What is mounted, also while the sandbox sleeps."""
        try:
            return (self._link.get(MountList, "/mounts", prepare=False)).mounts
        except SandboxNotFoundError:
            return []

"""Whole machines, backed up and brought into others over the same image."""

from __future__ import annotations

import pytest

from skerry.control.registry import Registry
from skerry.errors import SkerryError
from skerry.models import BackupRequest, MountBucket, RestoreRequest
from tests.storage.trees import sh

CHANGES = """cd /etc; rm -rf /usr/share/doc/bash /etc/debian_version /etc/alternatives/awk /srv
    mkdir ../kept; mv profile.d ../kept/
    rm -rf ssl; mkdir -p ssl/certs; echo new >ssl/new
    rm -rf /usr/share/perl5; echo a file now >/usr/share/perl5
    touch .wh.mine"""
LISTED = (
    "find /etc /srv /kept /usr/share/doc/bash /usr/share/perl5 '(' -type d -printf '%p %y %m\\n' ')'"
    " -o -printf '%p %y %m %s %l\\n' 2>&1 | sort"
)


async def test_what_a_machine_deleted_of_its_image_is_deleted_where_it_arrives(registry: Registry) -> None:
    async with registry.use("one") as one, registry.use("other") as other:
        await sh(one, CHANGES)
        backup = (await registry.backups.backup(one, "one", BackupRequest(dir="/"))).backup
        await sh(other, "echo theirs >/etc/ssl/theirs; echo theirs >/srv/theirs")
        before = await sh(other, LISTED)
        await registry.backups.restore(other, "other", RestoreRequest(backup=backup.id))
        sent, arrived = [set((await sh(each, LISTED)).splitlines()) for each in (one, other)]
        assert {"/etc/.wh.mine f 644 0 ", "/etc/ssl/new f 644 4 ", "/etc/ssl/certs d 755"} <= sent
        assert arrived - sent == {"/etc/ssl/theirs f 644 7 "}
        assert sent - arrived == set()
        assert "find: ‘/srv’: No such file or directory" in sent
        assert {"/etc/debian_version", "/etc/alternatives/awk"} < {line.split(" ")[0] for line in before.splitlines()}
        assert await sh(other, "find / -xdev -name '.skerry-restore-*'") == ""


async def test_a_machine_that_cannot_be_restored_has_everything_it_had(registry: Registry) -> None:
    async with registry.use("one") as one, registry.use("other") as other:
        await sh(one, f"{CHANGES}; rm -rf /mnt")
        backup = (await registry.backups.backup(one, "one", BackupRequest(dir="/"))).backup
        await registry.mounts.mount("other", MountBucket(local_bucket=True, prefix="/p", path="/mnt"))
        before = await sh(other, LISTED)
        with pytest.raises(SkerryError, match="/mnt"):
            await registry.backups.restore(other, "other", RestoreRequest(backup=backup.id))
        assert await sh(other, LISTED) == before
        assert await sh(other, "find / -xdev -name '.skerry-restore-*'") == ""

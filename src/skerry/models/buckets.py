"""Buckets and mounts."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from pydantic import AliasChoices, Field, SecretStr, field_serializer

from skerry.models.base import Done, Request, Result


class BucketCredentials(Request):
    access_key_id: str = Field(min_length=1, max_length=1000)
    secret_access_key: SecretStr = Field(min_length=1, max_length=1000, description="Kept encrypted, never shown.")

    @field_serializer("secret_access_key", when_used="json")
    def _sent(self, value: SecretStr) -> str:
        return value.get_secret_value()


class MountBucket(Request):
    bucket: str | None = Field(None, description="One that is configured; without it, the one of R2_ENDPOINT & co.")
    endpoint: str | None = Field(
        None, max_length=500, description="Where a bucket of one's own is, if it is not one that is configured."
    )
    credentials: BucketCredentials | None = Field(None, description="Of a bucket of one's own.")
    mount_path: str = Field("/persist", validation_alias=AliasChoices("mountPath", "path", "mount_path"))
    prefix: str | None = Field(None, description="What of the bucket is shown. Default: /projects/<id>/.")
    local_bucket: bool = Field(False, description="The server's own directory, for which no credentials are needed.")
    read_only: bool = False


class UnmountBucket(Request):
    mount_path: str = Field("/persist", validation_alias=AliasChoices("mountPath", "path", "mount_path"))


class MountInfo(Result):
    mount_path: str
    prefix: str
    mode: Literal["localBucket", "remoteR2"]
    bucket: str
    endpoint: str | None = Field(None, description="Where a bucket is that came with the request.")
    read_only: bool = False
    state: Literal["mounted", "asleep", "failed"]
    """``asleep`` with its sandbox; ``failed``: everything in it is an error."""
    error: str | None = Field(None, description="What the bucket last failed with.")
    mounted_at: datetime


class MountResult(Done):
    mount: MountInfo


class MountList(Done):
    mounts: list[MountInfo]


class BucketInfo(Result):
    name: str
    kind: Literal["directory", "s3", "gcs"]
    location: str = Field(description="Where it is; never with credentials.")
    default: bool = False


class BucketList(Result):
    buckets: list[BucketInfo]

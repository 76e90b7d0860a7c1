from __future__ import annotations

from pathlib import Path

import pytest

from skerry.errors import BucketNotConfiguredError, BucketNotFoundError, BucketSettingsError, InvalidKeyError
from skerry.storage.buckets import Buckets
from tests.s3 import S3

REMOTE = {
    "R2_ENDPOINT": "https://r2.example.com",
    "AWS_ACCESS_KEY_ID": "key-of-the-sea",
    "AWS_SECRET_ACCESS_KEY": "neap-tide",
    "PROJECT_DATA_BUCKET_NAME": "project-data",
}


def written(tmp_path: Path, text: str, mode: int = 0o600) -> Path:
    path = tmp_path / "buckets.toml"
    path.write_text(text)
    path.chmod(mode)
    return path


async def test_the_default_is_a_directory_in_the_home_that_needs_nothing(tmp_path: Path) -> None:
    buckets = Buckets(tmp_path, environ={})
    bucket = buckets.open()
    await bucket.put("a/b", b"1")
    assert (tmp_path / "buckets/default/a/b").read_bytes() == b"1"
    assert bucket is buckets.open("default")
    assert [(one.name, one.kind, one.default) for one in buckets.list()] == [("default", "directory", True)]


async def test_a_file_in_the_home_names_more(tmp_path: Path, s3: S3) -> None:
    written(
        tmp_path, f'[near]\nurl = "{(tmp_path / "near").as_uri()}"\n[far]\n{s3.table(s3.create_bucket(), "deep/er")}'
    )
    buckets = Buckets(tmp_path, environ={})
    assert buckets.names == ["default", "far", "near"]
    await buckets.open("near").put("k", b"near")
    await buckets.open("far").put("k", b"far")
    assert (tmp_path / "near/k").read_bytes() == b"near"
    assert await buckets.open("far").get("k") == b"far"
    assert [item.key async for item in buckets.open("far").list()] == ["k"]


async def test_keys_may_come_from_the_environment(tmp_path: Path, s3: S3) -> None:
    text = f'[far]\nurl = "s3://{s3.create_bucket()}"\nendpoint = "{s3.endpoint}"\n'
    path = written(tmp_path, f'{text}access_key_env = "TIDE_KEY"\nsecret_key_env = "TIDE_SECRET"\n', mode=0o644)
    buckets = Buckets(tmp_path, path, environ={"TIDE_KEY": s3.access_key, "TIDE_SECRET": s3.secret_key})
    await buckets.open("far").put("k", b"1")
    with pytest.raises(BucketNotConfiguredError, match="missing env vars: TIDE_KEY"):
        Buckets(tmp_path, path, environ={}).open("far")


def test_one_key_of_two_is_refused_and_not_completed_from_elsewhere(tmp_path: Path) -> None:
    path = written(tmp_path, '[far]\nurl = "s3://far"\naccess_key = "tide"\n')
    with pytest.raises(BucketSettingsError, match="one of its two keys"):
        Buckets(tmp_path, path, environ={}).open("far")


def test_an_unknown_name_is_answered_with_those_that_are_known(tmp_path: Path) -> None:
    buckets = Buckets(tmp_path, environ=REMOTE)
    with pytest.raises(
        BucketNotFoundError, match="no bucket 'sea'; those that are configured are default, project-data"
    ):
        buckets.open("sea")


def test_the_environment_alone_names_the_remote_one(tmp_path: Path) -> None:
    buckets = Buckets(tmp_path, environ=REMOTE)
    assert (buckets.remote().name, buckets.remote().kind) == ("project-data", "s3")
    assert [one.location for one in buckets.list() if one.name == "project-data"] == [
        "s3://project-data at https://r2.example.com"
    ]
    some = {name: value for name, value in REMOTE.items() if "AWS" not in name}
    with pytest.raises(BucketNotConfiguredError) as caught:
        Buckets(tmp_path, environ=some).remote()
    assert caught.value.message == "missing env vars: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY"


def test_nothing_shows_a_secret(tmp_path: Path) -> None:
    path = written(tmp_path, '[far]\nurl = "s3://x"\naccess_key = "key-of-the-sea"\nsecret_key = "neap-tide"\n')
    buckets = Buckets(tmp_path, path, environ=REMOTE)
    shown = f"{buckets!r} {buckets.list()!r} {buckets.open('far')!r} {buckets.remote()!r} {buckets.open('far')}"
    assert "neap-tide" not in shown
    assert "key-of-the-sea" not in shown


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[far\n", "cannot be read"),
        ("far = 1\n", "'far' in .* is no table"),
        ("[far]\nregion = 'x'\n", "url: Field required"),
        ("[far]\nurl = 'ftp://x'\n", "not one Skerry knows"),
        ("[far]\nurl = 's3://key:neap-tide@x'\n", "without credentials"),
        ("[far]\nurl = 's3://x'\nendpoint = 'https://key:neap-tide@host'\n", "without credentials"),
        ("[far]\nurl = 's3://x?secret=neap-tide'\n", "without credentials"),
        ("[far]\nurl = 's3://x'\npassword = 'neap-tide'\n", "password: Extra inputs"),
        ("[far]\nurl = 's3://x'\ntimeout = 'neap-tide'\n", "timeout"),
    ],
)
def test_a_file_that_makes_no_sense_is_refused_without_showing_it(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(BucketSettingsError, match=words) as caught:
        Buckets(tmp_path, written(tmp_path, text), environ={})
    assert "neap-tide" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("[near]\nurl = 's3://x'\n\n[far]\nregion = 'x'\n", 4),
        ("[near]\nurl = 's3://x'\n[ 'far' ]\nregion = 'x'\n", 3),
        ("# far\nfar = 1\n", 2),
        ("[near]\nurl = 's3://x'\nurl\n", 3),
        ("# far\n\nfar.region = 'x'\n", 3),
    ],
)
def test_what_makes_no_sense_is_named_with_its_line(tmp_path: Path, text: str, line: int) -> None:
    with pytest.raises(BucketSettingsError, match=rf"buckets\.toml'.*\bline {line}\b"):
        Buckets(tmp_path, written(tmp_path, text), environ={})


def test_a_file_with_keys_that_others_may_read_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, "[far]\nurl = 's3://x'\naccess_key = 'a'\nsecret_key = 'b'\n", mode=0o640)
    with pytest.raises(BucketSettingsError, match=r"holds keys and may be read by others.*chmod 600"):
        Buckets(tmp_path, path, environ={})


def test_a_file_that_was_asked_for_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(BucketSettingsError, match="does not exist"):
        Buckets(tmp_path, tmp_path / "nothing.toml", environ={})


def test_a_prefix_that_leads_out_is_refused(tmp_path: Path) -> None:
    buckets = Buckets(tmp_path, written(tmp_path, "[far]\nurl = 's3://x/../y'\n"), environ={})
    with pytest.raises(InvalidKeyError):
        buckets.open("far")

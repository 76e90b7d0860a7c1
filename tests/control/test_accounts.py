"""What the store knows of keys, owners and users, on both databases."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import timedelta

import pytest
from pydantic import SecretStr

from skerry.control import users as users_module
from skerry.control.account_rows import KeyRow
from skerry.control.keys import Keys, digest_of, is_key, new_key
from skerry.control.reception import Reception
from skerry.control.store import Store
from skerry.control.users import Users
from skerry.errors import InvalidRequestError, RateLimitedError, UnauthorizedError, UserExistsError
from skerry.models import ChangePassword, CreateKey, CreateUser, KeyScope, SignIn, now
from skerry.settings import Settings

GOOD = "correct horse battery"


@pytest.fixture
def keys(store: Store) -> Keys:
    return Keys(store.accounts)


@pytest.fixture
def users(store: Store) -> Users:
    return Users(store.accounts, Settings())


@pytest.fixture
async def reception(store: Store) -> AsyncIterator[Reception]:
    reception = Reception(Settings(), store.accounts)
    await reception.open()
    yield reception
    await reception.close()


def who(email: str, password: str) -> SignIn:
    return SignIn(email=email, password=SecretStr(password))


def new_user(email: str, **more: str) -> CreateUser:
    return CreateUser.model_validate({"email": email, "password": GOOD, **more})


def test_a_key_is_known_by_its_form_and_anothers_is_not() -> None:
    key = new_key()
    assert is_key(key)
    assert len({new_key() for _ in range(100)}) == 100
    swapped = key[:5] + ("a" if key[5] != "a" else "b") + key[6:]
    for other in (swapped, key[:-1], key + "0", "sk_live_" + "a" * 44, "", key.upper()):
        assert not is_key(other)


async def test_what_is_revoked_or_expired_is_found_no_more(store: Store, keys: Keys) -> None:
    made = await keys.create(CreateKey(owner="ada", name="one"))
    found = await keys.find(made.key.encode())
    assert found is not None
    assert (found[1].owner, found[1].scope, found[1].credential) == ("ada", KeyScope.USE, made.id)
    await keys.revoke(made.id)
    (first,) = await keys.list("ada")
    await keys.revoke(made.id)
    assert await keys.list("ada") == [first]  # it keeps the time of the first
    assert await keys.find(made.key.encode()) is None
    old = new_key()
    row = KeyRow("key-old", digest_of(old.encode()), "sk_", "", "ada", KeyScope.USE)
    await store.accounts.insert_key(replace(row, expires_at=now() - timedelta(seconds=1)))
    assert await keys.find(old.encode()) is None
    assert await store.accounts.valid_keys([made.id, "key-old", "key-none"]) == {}


async def test_what_was_looked_up_is_remembered_and_forgotten_when_something_changes(
    reception: Reception, keys: Keys
) -> None:
    assert not reception.closed
    made = await keys.create(CreateKey(owner="ada"))
    await reception.renew()
    assert reception.closed
    assert await reception.by_key(made.key.encode()) is not None
    assert reception.remembered(made.key.encode()) is not None
    await keys.revoke(made.id)
    async with asyncio.timeout(10):  # as another process would have done it: the reception looks by itself
        while reception.remembered(made.key.encode()) is not None:
            await asyncio.sleep(0.02)
    assert await reception.by_key(made.key.encode()) is None
    assert reception.closed


async def test_a_key_that_is_revoked_while_it_is_looked_up_is_not_remembered(
    store: Store, reception: Reception, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = await keys.create(CreateKey(owner="ada"))
    await reception.renew()
    found = await store.accounts.key_by_digest(digest_of(made.key.encode()))
    real, looks = store.accounts.key_by_digest, []

    async def slow(digest: str) -> KeyRow | None:
        looks.append(digest)
        if len(looks) > 1:
            return await real(digest)
        await keys.revoke(made.id)
        await reception.renew()
        return found  # as it was read before

    monkeypatch.setattr(store.accounts, "key_by_digest", slow)
    assert await reception.by_key(made.key.encode()) is None
    assert len(looks) == 2


async def test_nothing_that_was_read_before_is_believed_when_the_store_is_silent(
    reception: Reception, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = await keys.create(CreateKey(owner="ada"))
    await reception.renew()
    assert await reception.by_key(made.key.encode()) is not None
    monkeypatch.setattr("skerry.control.reception.STALE", 0.0)
    assert reception.remembered(made.key.encode()) is None


async def test_people_sign_in_and_out(users: Users) -> None:
    await users.add(new_user(" Ada@Example.com ", owner="ada", role="admin"))
    with pytest.raises(UserExistsError):
        await users.add(new_user("ada@example.com"))
    session = await users.sign_in(who("ADA@example.com", GOOD), "::1")
    found = await users.find(session.token.encode())
    assert found is not None
    row, caller = found
    assert (caller.owner, caller.scope, row.csrf) == ("ada", KeyScope.ADMIN, session.csrf)
    assert session.token not in repr(row)
    await users.sign_out(row.digest)
    assert await users.find(session.token.encode()) is None


async def test_who_signs_out_is_told_so_even_if_somebody_else_sees_it_first(reception: Reception) -> None:
    await reception.users.add(new_user("ada@example.com"))
    session = await reception.users.sign_in(who("ada@example.com", GOOD), "::1")
    known = await reception.by_session(session.token.encode())
    assert known is not None

    async def stay() -> None:
        with reception.visit(known):
            await asyncio.sleep(60)

    other = asyncio.create_task(stay())
    await asyncio.sleep(0)
    with reception.visit(known) as visit:
        async with reception.changing():
            await reception.users.sign_out(known.caller.credential or "")
            await asyncio.create_task(reception.renew())  # as happens all the time
            with pytest.raises(asyncio.CancelledError):
                await other
        assert not visit.ended


async def test_an_unknown_email_and_a_wrong_password_are_told_apart_by_nothing(users: Users) -> None:
    await users.add(new_user("ada@example.com"))
    said = []
    for email in ("ada@example.com", "bea@example.com", "no email", "a\0b@c"):
        with pytest.raises(UnauthorizedError) as caught:
            await users.sign_in(who(email, "something else"), "::1")
        said.append(caught.value.to_wire())
    assert said == said[:1] * 4


async def test_another_password_ends_all_sessions(users: Users) -> None:
    await users.add(new_user("ada@example.com"))
    sessions = [await users.sign_in(who("ada@example.com", GOOD), "::1") for _ in range(2)]
    change = ChangePassword(old=SecretStr("wrong"), new=SecretStr("another horse"))
    with pytest.raises(UnauthorizedError):
        await users.change_password("ada@example.com", change)
    await users.change_password("ada@example.com", change.model_copy(update={"old": SecretStr(GOOD)}))
    assert [await users.find(one.token.encode()) for one in sessions] == [None, None]
    with pytest.raises(UnauthorizedError):
        await users.sign_in(who("ada@example.com", GOOD), "::1")
    await users.sign_in(who("ada@example.com", "another horse"), "::1")


async def test_guessing_is_throttled(users: Users, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(users_module, "ATTEMPTS", 3)
    await users.add(new_user("ada@example.com"))
    for _ in range(3):
        with pytest.raises(UnauthorizedError):
            await users.sign_in(who("ada@example.com", "a guess"), "192.0.2.1")
    with pytest.raises(RateLimitedError) as caught:
        await users.sign_in(who("ada@example.com", GOOD), "192.0.2.2")
    assert (caught.value.retry_after or 0) > 800
    await users.add(new_user("bea@example.com"))
    await users.sign_in(who("bea@example.com", GOOD), "192.0.2.1")


async def test_a_thousand_guesses_at_once_are_throttled_too(users: Users, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(users_module, "ATTEMPTS", 3)
    await users.add(new_user("ada@example.com"))
    guesses = (users.sign_in(who("ada@example.com", f"guess {number}"), "192.0.2.1") for number in range(1000))
    said = [type(one) for one in await asyncio.gather(*guesses, return_exceptions=True)]
    assert (said.count(UnauthorizedError), said.count(RateLimitedError)) == (3, 997)


async def test_an_email_that_can_name_no_owner_needs_one(users: Users) -> None:
    with pytest.raises(InvalidRequestError):
        await users.add(new_user("ä@example.com"))
    assert (await users.add(new_user("ä@example.com", owner="a"))).owner == "a"


async def test_passwords_are_kept_by_argon2id(store: Store, users: Users) -> None:
    await users.add(new_user("ada@example.com"))
    row = await store.accounts.user("ada@example.com")
    assert row is not None
    assert row.password.startswith("$argon2id$")
    assert GOOD not in repr(row) + repr(new_user("x@y"))
    with pytest.raises(InvalidRequestError):
        await users.add(CreateUser(email="bea@example.com", password=SecretStr("short")))
    with pytest.raises(InvalidRequestError):
        await users.add(CreateUser(email="not an email", password=SecretStr(GOOD)))
    await users.remove("ada@example.com")
    assert await users.list() == []

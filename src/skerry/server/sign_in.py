"""Signing in with email and password, for people with a browser; programs use keys.

The session is a cookie that no script can read. A request that changes something must also say the session's word
against forgery (`X-Skerry-CSRF`), which only a page of this origin can have read. Below `/api` there are programs
that do not know of it; they need not say it, as they say neither where they come from, which every browser does.
"""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from skerry.control.accounts import Accounts
from skerry.control.actor import caller
from skerry.control.reception import Known
from skerry.control.registry import Registry
from skerry.control.users import Session
from skerry.errors import ForbiddenError, UnauthorizedError
from skerry.models import ChangePassword, Done, KeyScope, Me, Person, SignedIn, SignedOut, SignIn
from skerry.server import security
from skerry.server.answers import answer
from skerry.server.auth import SESSION_COOKIES, is_loopback
from skerry.server.nouns import noun_router


def routes(registry: Registry) -> APIRouter:
    router = noun_router("/v1/auth", "sign-in")
    accounts = Accounts(registry)

    @router.post("/sign-in", response_model=Me)
    async def sign_in(request: Request, body: SignIn) -> Response:
        session = await _open(registry, request, body)
        scope = KeyScope.ADMIN if session.user.role == "admin" else KeyScope.USE
        me = Me(owner=session.user.owner, scope=scope, name=session.user.email, email=session.user.email)
        me.csrf = session.csrf
        response = answer(me)
        _set_cookie(response, request, session.token, session.seconds)
        return response

    @router.post("/sign-out", response_model=Done)
    async def sign_out(request: Request) -> Response:
        await accounts.sign_out(_session(request))
        response = answer(Done())
        _set_cookie(response, request, "", 0)
        return response

    @router.get("/me", response_model=Me)
    async def me(request: Request) -> Response:
        who, session = caller.get(), request.scope.get("session")
        known: Known | None = session
        return answer(
            Me(
                owner=who.owner,
                scope=who.scope,
                name=who.name,
                email=None if known is None else known.caller.name,
                sandbox=who.sandbox,
                csrf=None if known is None else known.csrf,
            )
        )

    @router.post("/password", response_model=Done)
    async def change_password(request: Request, body: ChangePassword) -> Response:
        known: Known = request.scope["session"]
        await accounts.change_password(known.caller.name, body)
        response = answer(Done())
        _set_cookie(response, request, "", 0)
        return response

    return router


def session_routes(registry: Registry) -> APIRouter:
    """The same as AgentPod's programs ask for it."""
    router = noun_router("/api/auth", "sign-in")
    accounts = Accounts(registry)

    @router.post("/sign-in/email", response_model=SignedIn)
    async def sign_in_as_person(request: Request, body: SignIn) -> Response:
        session = await _open(registry, request, body)
        response = answer(SignedIn(user=_person(session.user.email, session.user.role)))
        _set_cookie(response, request, session.token, session.seconds)
        return response

    @router.get("/get-session", response_model=SignedIn)
    async def get_session(request: Request) -> Response:
        known: Known = request.scope["session"]
        role = "admin" if known.caller.scope is KeyScope.ADMIN else "user"
        return answer(SignedIn(user=_person(known.caller.name, role)))

    @router.post("/sign-out", response_model=SignedOut)
    async def sign_out_as_person(request: Request) -> Response:
        await accounts.sign_out(_session(request))
        response = answer(SignedOut())
        _set_cookie(response, request, "", 0)
        return response

    return router


async def _open(registry: Registry, request: Request, body: SignIn) -> Session:
    _require_own_origin(request)
    address = request.client.host if request.client else ""
    try:
        return await registry.reception.users.sign_in(body, address)
    except UnauthorizedError:
        security.report("sign_in_failed", address)
        raise


def _person(email: str, role: str) -> Person:
    return Person(id=email, email=email, name=email.partition("@")[0], role=role)


def _session(request: Request) -> str:
    known: Known = request.scope["session"]
    return known.caller.credential or ""


def _secure(request: Request) -> bool:
    public = request.app.state.settings.public_url
    return request.url.scheme == "https" or (public is not None and public.startswith("https:"))


def _require_own_origin(request: Request) -> None:
    """Where previews share the API's host name, an app in a sandbox would act as whoever is signed in."""
    origin = request.headers.get("origin")
    host = request.headers.get("host", "").lower()
    if origin is not None and origin.lower() not in (f"http://{host}", f"https://{host}"):
        raise ForbiddenError("A page of another origin may not sign anybody in.")
    settings = request.app.state.settings
    name = host.partition("]")[0] + "]" if host.startswith("[") else host.partition(":")[0]
    if settings.preview_domain is None and not is_loopback(name):
        raise ForbiddenError(
            "Nobody can sign in where previews share the API's host name: their pages could act for whoever did.",
            hint="Give previews a domain of their own (SKERRY_PREVIEW_DOMAIN).",
        )


def _set_cookie(response: Response, request: Request, token: str, seconds: float) -> None:
    secure = _secure(request)
    name = SESSION_COOKIES[0 if secure else 1].decode()
    response.set_cookie(name, token, max_age=int(seconds), path="/", httponly=True, samesite="lax", secure=secure)
    response.headers["Cache-Control"] = "no-store"

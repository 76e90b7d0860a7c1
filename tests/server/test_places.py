"""The addresses that an exposed port is given out with."""

from __future__ import annotations

from typing import Any

import pytest

from skerry.control.exposures import Exposure
from skerry.server.places import Places
from skerry.settings import Settings

TAIL = "/preview/demo/3000/?token=tok"


def places(
    asked: str = "127.0.0.1:8787",
    /,
    *,
    server: tuple[str, int | None] | None = ("127.0.0.1", 8787),
    exposure: Exposure | None = None,
    **settings: Any,
) -> Places:
    scope = {"type": "http", "scheme": "http", "server": server, "headers": [(b"host", asked.encode())]}
    return Places(exposure or Exposure("demo", 3000, "tok"), Settings(**settings), scope)


def exposed(hostname: str) -> Exposure:
    return Exposure("demo", 3000, "tok", hostname=hostname)


def test_on_this_machine_it_is_a_name_below_localhost() -> None:
    found = places()
    assert found.url == "http://3000-demo-tok.localhost:8787/"
    assert found.path_url == f"http://127.0.0.1:8787{TAIL}"
    assert found.note is None


@pytest.mark.parametrize("host", ["localhost:9000", "127.0.0.1:9000", "[::1]:9000"])
def test_a_port_that_a_tunnel_or_a_container_maps_is_the_one_the_client_used(host: str) -> None:
    found = places(host, server=("172.17.0.2", 8787), host="0.0.0.0", api_keys=("k",))
    assert found.url == "http://3000-demo-tok.localhost:9000/"
    assert found.path_url == f"http://{host}{TAIL}"


def test_the_usual_port_is_left_out() -> None:
    assert places("localhost").url == "http://3000-demo-tok.localhost/"


def test_a_domain_is_served_by_https_and_localhost_by_http_unless_said_otherwise() -> None:
    domain: dict[str, Any] = {"preview_domain": "preview.example.com"}
    assert places(**domain).url == "https://3000-demo-tok.preview.example.com/"
    assert places(**domain, preview_scheme="http").url == "http://3000-demo-tok.preview.example.com/"
    assert places(preview_scheme="https").url == "https://3000-demo-tok.localhost:8787/"


def test_the_hostname_of_an_exposure_comes_before_the_servers_domain() -> None:
    found = places(exposure=exposed("own.example.org:8443"), preview_domain="preview.example.com")
    assert found.url == "https://3000-demo-tok.own.example.org:8443/"
    assert places(exposure=exposed("localhost")).url == "http://3000-demo-tok.localhost:8787/"
    assert places(exposure=exposed("localhost:99")).url == "http://3000-demo-tok.localhost:99/"


def test_a_public_address_is_the_base_of_paths() -> None:
    found = places(public_url="https://skerry.example.com/")
    assert found.path_url == f"https://skerry.example.com{TAIL}"


def test_without_a_domain_a_server_of_the_network_offers_the_path_and_says_why() -> None:
    found = places("skerry.example.com", server=("10.0.0.5", 80), host="0.0.0.0", api_keys=("k",))
    assert found.url is None
    assert found.path_url == f"http://skerry.example.com{TAIL}"
    assert "SKERRY_PREVIEW_DOMAIN" in (found.note or "")


def test_an_id_too_long_for_a_name_gets_the_path_and_the_reason() -> None:
    fits, too_long = Exposure("a" * 54, 3000, "tok"), Exposure("a" * 55, 3000, "tok")
    assert places(exposure=fits).url == f"http://3000-{'a' * 54}-tok.localhost:8787/"
    found = places(exposure=too_long)
    assert found.url is None
    assert "64 characters" in (found.note or "")
    assert found.path_url == f"http://127.0.0.1:8787/preview/{'a' * 55}/3000/?token=tok"


def test_inside_a_program_nothing_listens_and_the_note_says_so() -> None:
    found = places("localhost", server=None)
    assert (found.url, found.path_url) == (None, TAIL)
    assert "skerry serve" in (found.note or "")


@pytest.mark.parametrize("domain", ["https://example.com", "a..b", "example.com/x", "exa mple.com", "-a.com"])
def test_a_domain_that_is_none_is_refused(domain: str) -> None:
    with pytest.raises(ValueError, match="preview_domain"):
        Settings(preview_domain=domain)


@pytest.mark.parametrize("url", ["example.com", "ftp://example.com", "https://", "https://a.b/?x=1"])
def test_a_public_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="public_url"):
        Settings(public_url=url)


def test_a_wildcard_names_its_domain() -> None:
    assert Settings(preview_domain="*.Preview.example.com.").preview_domain == "preview.example.com"

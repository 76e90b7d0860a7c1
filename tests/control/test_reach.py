"""Requests to addresses of others go only where they may."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from ipaddress import ip_address

import pytest

from skerry.control.reach import Reach, Targets, UnreachedError, check_target, permits
from skerry.errors import WebhookTargetError
from tests.receiver import Receiver

PUBLIC = ["93.184.216.34", "8.8.8.8", "2606:4700::1111"]
LOOPBACK = ["127.0.0.1", "127.8.9.1", "::1", "::ffff:127.0.0.1", "2002:7f00:1::", "64:ff9b::7f00:1"]
PRIVATE = ["10.0.0.1", "192.168.1.1", "172.16.0.1", "fd12::1", "::ffff:10.0.0.1", "64:ff9b::a00:1"]
NEVER = [
    "169.254.169.254",
    "::ffff:169.254.169.254",
    "fe80::1",
    "fd00:ec2::254",
    "100.100.100.200",
    "0.0.0.0",
    "::",
    "224.0.0.1",
    "ff02::1",
    "255.255.255.255",
]


@pytest.mark.parametrize(
    ("targets", "allowed"),
    [("public", PUBLIC), ("loopback", PUBLIC + LOOPBACK), ("private", PUBLIC + LOOPBACK + PRIVATE)],
)
def test_each_setting_allows_what_it_says(targets: Targets, allowed: list[str]) -> None:
    for address in PUBLIC + LOOPBACK + PRIVATE + NEVER:
        assert permits(ip_address(address), targets) == (address in allowed), address


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1/x",
        "http://localhost:8787/v1/sandboxes",
        "http://a.localhost/",
        "http://[::1]/",
        "http://[::ffff:169.254.169.254]/latest/meta-data",
        "https://user:password@example.com/",
        "ftp://example.com/",
        "http:///x",
        "example.com",
        "http://example.com:99999/",
        "http://exa mple.com/",
        "http://example.com/\r\nX: y",
        "http://example.com/#part",
        "http://[::1",
    ],
)
def test_addresses_that_can_be_seen_to_be_wrong_are_refused_at_once(url: str) -> None:
    with pytest.raises(WebhookTargetError):
        check_target(url, "public")


def test_addresses_that_may_be_right_are_not() -> None:
    check_target("https://example.com:8443/hooks?a=b", "public")
    check_target("http://localhost:1/", "loopback")


async def test_a_name_is_judged_by_what_it_means_when_it_is_used() -> None:
    async with Receiver() as receiver:
        meanings = iter([["127.0.0.1"], ["93.184.216.34", "127.0.0.1"], ["169.254.169.254"], []])

        async def rebound(host: str, port: int) -> list[str]:
            return next(meanings)

        reach = Reach(lambda: "public", rebound)
        for _ in range(4):
            with pytest.raises(UnreachedError, match="may not be sent to innocent"):
                await reach.post(f"http://innocent.example:{receiver.port}/", [], b"{}", 5)
        assert receiver.received == []


async def test_what_was_checked_is_what_is_connected_to() -> None:
    asked = []
    async with Receiver() as receiver:

        async def once(host: str, port: int) -> list[str]:
            asked.append(host)
            return ["127.0.0.1"]

        status = await Reach(lambda: "loopback", once).post(f"http://hooks.example:{receiver.port}/x?y=z", [], b"{}", 5)
        assert (status, asked) == (200, ["hooks.example"])
        assert receiver.received[0].headers["host"] == f"hooks.example:{receiver.port}"


async def test_a_redirect_is_not_followed() -> None:
    async with Receiver() as inner, Receiver() as outer:
        outer.behave = lambda _: f"HTTP/1.1 307 X\r\nlocation: {inner.url}\r\ncontent-length: 0\r\n\r\n".encode()
        assert await Reach(lambda: "loopback").post(outer.url, [], b"{}", 5) == 307
        assert inner.received == []


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (None, "no answer within"),
        (b"", "lost|not one of HTTP"),
        (b"SSH-2.0-OpenSSH\r\n", "not one of HTTP"),
        (b"HTTP/1.1 200 X\r\nx: " + b"y" * 1_000_000 + b"\r\n\r\n", "not one of HTTP"),
    ],
)
async def test_strange_receivers_are_given_up_in_time(answer: bytes | None, said: str) -> None:
    async with Receiver(lambda _: answer) as receiver:
        began = time.monotonic()
        with pytest.raises(UnreachedError, match=said):
            await Reach(lambda: "loopback").post(receiver.url, [], b"{}", 0.5)
        assert time.monotonic() - began < 5
        while receiver.connections:
            await asyncio.sleep(0.01)


async def test_an_endless_answer_is_not_read_to_its_end() -> None:
    endless = b"HTTP/1.1 200 X\r\ncontent-length: 100000000\r\n\r\n" + b"x" * 10_000_000
    async with Receiver(lambda _: endless) as receiver:
        assert await Reach(lambda: "loopback").post(receiver.url, [], b"{}", 5) == 200
        while receiver.connections:
            await asyncio.sleep(0.01)


async def test_nobody_there_is_said_without_detail() -> None:
    async with Receiver() as receiver:
        url = receiver.url
    with pytest.raises(UnreachedError, match="could not be made"):
        await Reach(lambda: "loopback").post(url, [], b"{}", 5)


async def test_an_answer_that_came_in_time_counts_though_the_server_was_too_busy_to_read_it() -> None:
    asked, answered = threading.Event(), threading.Event()

    def receive() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(1 << 16)
            asked.set()
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
            answered.set()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        receiver = threading.Thread(target=receive)
        receiver.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
        sending = asyncio.ensure_future(Reach(lambda: "loopback").post(url, [], b"{}", timeout=2.0))
        while not asked.is_set():
            await asyncio.sleep(0)
        answered.wait()
        time.sleep(2.5)  # noqa: ASYNC251 (this is what is tested)
        assert await sending == 200
        receiver.join()

"""How values of the configuration are read, checked and shown."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from transport.hosts import MAX_PORT, bracketed, check_host

T = TypeVar("T")
SHORT_TEXT = 500
"Bytes: fits into a push beside what else is in it."
_HEADER = re.compile(r"[A-Za-z0-9-]{1,100}")
_PROXY = re.compile(r"(?:socks5h?://)?(?:[^\s@/]+@)?(?:[\w.-]+|\[[0-9a-fA-F:.]+\]):([0-9]{1,5})")


@dataclass(frozen=True)
class ValueKind:
    """How a value is read from text and written back; `allowed` finishes the sentence 'must be …'."""

    parse: Callable[[str], Any]
    allowed: str
    show: Callable[[Any], str] = str


_SWITCHES = {"on": True, "off": False, "true": True, "false": False, "yes": True, "no": False}


def _number(kind: Callable[[str], T], low: float, high: float) -> Callable[[str], T]:
    def parse(text: str) -> T:
        value = kind(text)
        if not low <= value <= high:  # type: ignore[operator]
            raise ValueError
        return value

    return parse


def whole(low: int, high: int) -> ValueKind:
    return ValueKind(_number(int, low, high), f"a whole number from {low} to {high}")


def seconds(low: float, high: float) -> ValueKind:
    return ValueKind(_number(float, low, high), f"seconds from {low:g} to {high:g}", lambda v: f"{v:g}")


def choice(*words: str) -> ValueKind:
    return ValueKind({word: word for word in words}.__getitem__, "one of " + ", ".join(words))


def text(is_allowed: Callable[[str], object], allowed: str) -> ValueKind:
    """Nothing, or what passes the check, which may also raise ValueError."""

    def parse(text: str) -> str:
        if text and not is_allowed(text):
            raise ValueError
        return text

    return ValueKind(parse, allowed)


def _hosts(text: str) -> tuple[str, ...]:
    """As the addresses of routers spell them: IPv6 in brackets."""
    bare = [word.strip("[]").rstrip(".") for word in text.replace(",", " ").split()]
    return tuple(bracketed(check_host(host)) for host in bare)


def _is_local_address(text: str) -> bool:
    return text == "localhost" or bool(ipaddress.ip_address(text))


def _is_proxy(text: str) -> bool:
    found = _PROXY.fullmatch(text)
    return found is not None and 0 < int(found[1]) <= MAX_PORT


def _is_url(text: str, *schemes: str) -> bool:
    parts = urlsplit(text)
    return parts.scheme in schemes and bool(parts.hostname) and parts.port != 0


def _is_header(text: str) -> bool:
    return bool(_HEADER.fullmatch(text)) and text.lower() not in ("host", "content-length")


SWITCH = ValueKind(lambda text: _SWITCHES[text.lower()], "on or off", lambda value: "on" if value else "off")
TEXT = ValueKind(str, "text")
SHORT = text(lambda text: len(text.encode()) <= SHORT_TEXT, f"text of at most {SHORT_TEXT} bytes")
FILE = ValueKind(
    lambda text: Path(text).expanduser() if text else None, "a path, or nothing", lambda path: str(path or "")
)
PORT = whole(0, MAX_PORT)
HOSTS = ValueKind(_hosts, "host names or IP addresses without a port, separated by commas", ", ".join)
HOST = text(check_host, "a host name or an IP address")
LISTEN = text(_is_local_address, "an IP address of this machine, or nothing")
PROXY = text(_is_proxy, "host:port, or nothing")
WEBSOCKET = text(lambda text: _is_url(text, "ws", "wss"), "a ws: or wss: URL, or nothing")
HEADER = text(_is_header, "the name of a header, or nothing")
HTTPS = text(lambda text: _is_url(text, "https"), "an https: URL, or nothing")

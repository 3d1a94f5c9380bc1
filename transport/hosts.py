"""Hosts and ports as people write them: on command lines and in configurations."""

from __future__ import annotations

import argparse
import ipaddress
import re
from collections.abc import Callable

MAX_PORT = 65535
_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9])?", re.IGNORECASE)
_MAX_NAME = 253


def check_host(text: str) -> str:
    """A host name or an IP address, as it is; a ValueError if it is neither."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        name = text.encode("idna").decode("ascii")
        if len(name) > _MAX_NAME or not all(_LABEL.fullmatch(part) for part in name.split(".")):
            raise ValueError from None
    return text


def bracketed(host: str) -> str:
    """As it stands in the address of a server."""
    return f"[{host}]" if ":" in host else host


def named_host(header: str) -> str:
    """The host that a `Host` header names, in lower case and without a port; IPv6 stays in brackets."""
    host = header.strip().lower()
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0].rstrip(".")


def is_address(host: str) -> bool:
    """Whether it is an IP address, in brackets if of version 6."""
    try:
        ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True


def is_own_host(host: str, local_address: str) -> bool:
    """Whether a host that `named_host` returned is `localhost` or the address that was connected to."""
    try:
        named = ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
        return named == ipaddress.ip_address(local_address.partition("%")[0])
    except ValueError:
        return host == "localhost"


def host_option(text: str) -> str:
    """An option that names a server; `argparse` tells what is wrong with it."""
    try:
        host = check_host(text.removeprefix("[").removesuffix("]"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a host name") from None
    return host if ":" in host else host.encode("idna").decode("ascii")  # clients know no other letters


def number_option(low: int, high: int, what: str) -> Callable[[str], int]:
    """An option that is a number; `what` says what it must be."""

    def parse(text: str) -> int:
        if not (text.isdecimal() and low <= int(text) <= high):
            raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
        return int(text)

    return parse


client_port_option = number_option(1, MAX_PORT, "a port that clients can connect to")
any_port_option = number_option(0, MAX_PORT, f"a port: 1 to {MAX_PORT}, or 0 for any free one")

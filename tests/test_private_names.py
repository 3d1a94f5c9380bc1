"""Names inside other people's libraries that we use: a new version that drops one is noticed here first."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiosqlite
import pytest
from nacl import _sodium
from OpenSSL import SSL, _util

DOCUMENT = Path(__file__).parents[1] / "docs" / "dependencies.md"

NAMES: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "pyOpenSSL's bindings": (lambda: _util, ("ffi", "lib", "exception_from_error_queue")),
    "a TLS connection": (
        lambda: SSL.Connection(SSL.Context(SSL.TLS_METHOD)),
        ("_ssl", "_into_ssl", "_from_ssl"),
    ),
    "a TLS context": (lambda: SSL.Context(SSL.TLS_METHOD), ("_context",)),
    "pyOpenSSL's module": (lambda: SSL, ("_lib",)),
    "libsodium": (lambda: _sodium, ("ffi", "lib")),
    "an SQLite connection": (
        lambda: aiosqlite.Connection(lambda: sqlite3.connect(":memory:"), 1),
        ("_execute", "_conn", "_thread"),
    ),
}
BINDINGS = {
    "OpenSSL": (
        _util.lib,
        ("SSL_read", "SSL_write", "SSL_set_bio", "BIO_read", "BIO_write", "SSL_CTX_set1_curves_list"),
    ),
    "libsodium": (_sodium.lib, ("crypto_sign_open",)),
}


@pytest.mark.parametrize("where", NAMES)
def test_the_names_are_there_and_documented(where: str) -> None:
    make, names = NAMES[where]
    made, text = make(), DOCUMENT.read_text()
    for name in names:
        assert name in dir(made), f"{where} has no {name} any more"
        assert f"`{name}`" in text or f".{name}`" in text, f"{DOCUMENT.name} does not say that we use {name}"


@pytest.mark.parametrize("library", BINDINGS)
def test_the_calls_are_bound(library: str) -> None:
    bindings, names = BINDINGS[library]
    assert [name for name in names if not hasattr(bindings, name)] == []

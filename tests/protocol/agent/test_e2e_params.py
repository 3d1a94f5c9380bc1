"""Key parameters in confirmations and links."""

from __future__ import annotations

from typing import Any

import pytest

from protocol.agent.e2e_params import (
    E2E_PARAMS,
    E2E_URI,
    E2eKeys,
    E2eParams,
    E2eUri,
    e2e_uri_text,
    parse_e2e_uri,
)
from protocol.agent.kem import KEM_PARAMS, Accepted
from protocol.agent.ratchet_state import E2E_KEYS
from protocol.agent.versions import E2E_PQ, E2E_VERSIONS, acceptable, pq_possible
from protocol.encoding import Reader, Writer
from protocol.errors import DecodeError
from protocol.versions import VersionRange
from tests.protocol.agent.captured import kem_pair, kem_params, label, pair, public, raw, vectors


@pytest.mark.parametrize("vector", vectors("kem_params"), ids=label)
def test_kem_params(vector: Any) -> None:
    params, w = kem_params(vector["value"]), Writer()
    assert params is not None
    KEM_PARAMS.push(w, params)
    assert w.value().hex() == vector["binary"]
    assert KEM_PARAMS.pull(Reader(w.value())) == params


@pytest.mark.parametrize("vector", vectors("e2e_params"), ids=label)
def test_e2e_params(vector: Any) -> None:
    value = vector["value"]
    params = E2eParams(value["version"], public(value["k1"]), public(value["k2"]), kem_params(value["kem"]))
    w = Writer()
    E2E_PARAMS.push(w, params)
    assert w.value().hex() == vector["binary"]
    assert E2E_PARAMS.pull(Reader(w.value())) == params
    keys = E2eKeys(pair(vector["k1_private"]), pair(vector["k2_private"]), kem_pair(vector["kem_private"]))
    if not isinstance(params.kem, Accepted):
        assert keys.params(params.version) == params
    assert E2E_KEYS.decode(E2E_KEYS.encode(keys)) == keys


@pytest.mark.parametrize("vector", vectors("e2e_params_uri"), ids=label)
def test_e2e_uri(vector: Any) -> None:
    kem = kem_params(vector["kem"])
    uri = E2eUri(VersionRange(*vector["versions"]), public(vector["k1"]), public(vector["k2"]), kem)
    w = Writer()
    E2E_URI.push(w, uri)
    assert w.value().hex() == vector["binary"]
    assert E2E_URI.pull(Reader(w.value())) == uri
    assert e2e_uri_text(uri) == vector["text"]
    read = parse_e2e_uri(vector["text"])
    assert read == uri or (uri.versions.max < E2E_PQ and read.kem is None)
    assert uri.at(E2E_PQ).kem == kem
    assert uri.at(E2E_PQ - 1).kem is None


def test_a_link_with_an_accepted_key() -> None:
    vector = next(v for v in vectors("e2e_params") if v["name"].startswith("v3_kem2"))
    params = E2E_PARAMS.pull(Reader(raw(vector["binary"])))
    uri = E2eUri(E2E_VERSIONS, params.k1, params.k2, params.kem)
    assert parse_e2e_uri(e2e_uri_text(uri)) == uri
    assert "&kem_ct=" in e2e_uri_text(uri)


def _text(**changed: str | None) -> str:
    vector = next(v for v in vectors("e2e_params_uri") if v["name"].startswith("2-3_pq"))
    fields: dict[str, str | None] = dict(part.split("=", 1) for part in vector["text"].split("&"))
    return "&".join(f"{name}={value}" for name, value in (fields | changed).items() if value is not None)


@pytest.mark.parametrize(
    "changed",
    [
        {"v": None},
        {"v": "3-2"},
        {"v": "2-70000"},
        {"v": "x"},
        {"x3dh": None},
        {"x3dh": "AAAA,AAAA"},
        {"x3dh": "é"},
        {"kem_key": "AAAA"},
        {"kem_key": None, "kem_ct": "AAAA"},
        {"kem_ct": "AAAA"},
    ],
    ids=str,
)
def test_refused_texts(changed: dict[str, str | None]) -> None:
    with pytest.raises(DecodeError):
        parse_e2e_uri(_text(**changed))


def test_one_key_is_not_enough() -> None:
    first, _, _ = _text().partition(",")
    with pytest.raises(DecodeError):
        parse_e2e_uri(first)


def test_unknown_parameters_are_ignored() -> None:
    assert parse_e2e_uri(_text(later="1") + "&later=2&x") == parse_e2e_uri(_text())


def test_versions() -> None:
    assert pq_possible(5, 3)
    assert not pq_possible(4, 3)
    assert not pq_possible(5, 2)
    assert acceptable(3, E2E_VERSIONS, 0)
    assert acceptable(9, E2E_VERSIONS, 9)
    assert not acceptable(9, E2E_VERSIONS, 3)

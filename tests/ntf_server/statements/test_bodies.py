"""Bodies and other JSON from strangers: read a little at a time, and no further than the first mistake."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ntf_server.statements.bodies import CODE_SIZE, LONGEST_RULE, BadBody, RulesBody, verification
from ntf_server.statements.json_scanner import LONGEST_NAME, LONGEST_SPACE, NotJson, Scanner

ID = "00000000-0000-4000-8000-000000000000"
MOST = 1000


def rule(number: int) -> dict[str, str]:
    return {"sender_pubkey": "5e" * 32, "topic": f"{number:064x}"}


def read(value: Any) -> tuple[bytes, int]:
    """The subscription, and how many rules."""
    body = RulesBody(value if isinstance(value, bytes) else json.dumps(value).encode(), MOST)
    for _ in body:
        pass
    return body.subscription_id, len(body.rules)


def test_rules_are_read_one_by_one() -> None:
    value = {"subscription_id": ID, "rules": [rule(number) for number in range(MOST)]}
    for text in (json.dumps(value), json.dumps(value, indent=4), json.dumps(value, separators=(",", ":"))):
        body = RulesBody(text.encode(), MOST)
        assert sum(1 for _ in body) == MOST
        assert [one.topic for one in body.rules] == [number.to_bytes(32, "big") for number in range(MOST)]
    assert read({"rules": [], "subscription_id": ID})[1] == 0


def test_the_first_mistake_is_the_last_thing_read() -> None:
    """However much follows."""
    keys = "{" + ",".join(f'"k{number}":1' for number in range(100_000)) + "}"
    reading = RulesBody(keys.encode(), MOST)
    with pytest.raises(BadBody, match="unknown field 'k0'"):
        next(iter(reading))


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ({"subscription_id": ID, "rules": [rule(number) for number in range(MOST + 1)]}, "at most 1000"),
        ({"subscription_id": ID, "rules": [rule(1), rule(1)]}, "twice"),
        ({"subscription_id": ID, "rules": [{**rule(1), "more": 1}]}, "unknown field 'more'"),
        ({"subscription_id": ID}, "rules is missing"),
        ({"rules": []}, "subscription_id is missing"),
        ({"subscription_id": ID, "rules": [{**rule(1), "topic": "0" * LONGEST_RULE}]}, "JSON"),
        ({"subscription_id": ID, "rules": {}}, "JSON"),
        (b'{"rules": [], "rules": [], "subscription_id": "%s"}' % ID.encode(), "JSON"),
        (b'{"rules": [], "subscription_id": "%s"} ,' % ID.encode(), "JSON"),
        (b'{"rules": [], "subscription_id": "%s"' % ID.encode(), "JSON"),
        (b'{"rules": [],%s"subscription_id": "%s"}' % (b" " * (LONGEST_SPACE + 1), ID.encode()), "JSON"),
        (b'{"%s": 1}' % (b"k" * LONGEST_NAME), "JSON"),
        (b"{1: 1}", "JSON"),
        ("ü".encode(), "JSON"),
    ],
    ids=range(14),
)
def test_rules_that_are_none(value: Any, why: str) -> None:
    with pytest.raises(BadBody, match=why):
        read(value)


names = st.text(max_size=20)
documents = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | names,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names, inner, max_size=4),
    max_leaves=20,
)


@given(documents, st.sampled_from([None, 2]))
def test_it_reads_what_json_reads(value: Any, indent: int | None) -> None:
    text = json.dumps(value, indent=indent)
    scanner = Scanner(text)
    assert scanner.value(len(text)) == value
    scanner.end()


@given(st.text(alphabet='{}[]",:0a\\ ', max_size=30))
def test_nonsense_is_not_json(text: str) -> None:
    try:
        json.loads(text)
    except ValueError:
        with pytest.raises(NotJson):
            scanner = Scanner(text)
            scanner.value(len(text))
            scanner.end()


@pytest.mark.parametrize(
    "code", ["", "0x", "ab" * (CODE_SIZE - 1), "ab" * (CODE_SIZE + 1), "zz" * CODE_SIZE, 1]
)
def test_a_code_has_its_size(code: object) -> None:
    asked = {"subscription_id": "00000000-0000-0000-0000-000000000001", "code": "0x" + "ab" * CODE_SIZE}
    assert verification(asked) == ((1).to_bytes(16, "big"), b"\xab" * CODE_SIZE)
    with pytest.raises(BadBody, match="code must be 16 bytes in hex"):
        verification(asked | {"code": code})

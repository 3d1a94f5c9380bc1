"""Names and their records: which are accepted, and how records stand on the wire."""

from __future__ import annotations

import json

import pytest

from protocol.error_codec import decode_error
from protocol.errors import CMD_SYNTAX, DecodeError
from protocol.names import NameRecord
from protocol.smp_codec import SMP_COMMANDS, SMP_MESSAGES
from protocol.smp_messages import Rname, Rslv
from protocol.versions import SMP_VERSIONS

NEWEST = SMP_VERSIONS.max
FIELDS = {
    "name": "team.simplex",
    "nickname": "Team",
    "website": "https://example.com",
    "location": "",
    "simplexContact": ["simplex:/contact#one", "simplex:/contact#two"],
    "simplexChannel": [],
    "eth": "0x12",
    "btc": None,
    "xmr": None,
    "dot": None,
    "owner": "0x34",
    "resolver": "0x56",
}


@pytest.mark.parametrize(
    "name", ["a.simplex", "my-team.testing", "team.example.com", "a.bücher", "x" * 63 + ".simplex"]
)
def test_names(name: str) -> None:
    wire = b"RSLV " + name.encode()
    assert SMP_COMMANDS.encode(Rslv(name), NEWEST) == wire
    assert SMP_COMMANDS.decode(wire, NEWEST) == Rslv(name)


@pytest.mark.parametrize(
    "name",
    [
        *("", "simplex", "-a.simplex", "a-.simplex", "a..simplex", ".simplex", "a.simplex.", "a_b.simplex"),
        *("a b.simplex", "a.simplex\n", "x" * 64 + ".simplex", "ü" * 32 + ".simplex", "a." * 126 + "ab"),
    ],
)
def test_what_is_no_name(name: str) -> None:
    with pytest.raises(DecodeError) as refused:
        SMP_COMMANDS.decode(b"RSLV " + name.encode(), NEWEST)
    assert refused.value.error == CMD_SYNTAX


def test_a_name_is_text() -> None:
    with pytest.raises(DecodeError):
        SMP_COMMANDS.decode(b"RSLV \xff.simplex", NEWEST)


def test_a_record() -> None:
    wire = b"RNAME " + json.dumps(FIELDS | {"later": [1]}).encode()
    message = SMP_MESSAGES.decode(wire, NEWEST)
    record = NameRecord(
        name="team.simplex",
        owner="0x34",
        resolver="0x56",
        nickname="Team",
        website="https://example.com",
        location="",
        contacts=("simplex:/contact#one", "simplex:/contact#two"),
        eth="0x12",
    )
    assert message == Rname(record)
    written = SMP_MESSAGES.encode(message, NEWEST)
    assert json.loads(written.removeprefix(b"RNAME ")) == FIELDS


@pytest.mark.parametrize(
    "text",
    [
        *(b"", b"{", b"[]", b"\xff", b"[" * 16000, b"{}"),
        *(
            json.dumps(FIELDS | change).encode()
            for change in (
                {"name": None},
                {"owner": 1},
                {"eth": 1},
                {"simplexContact": "one"},
                {"simplexChannel": [1]},
                {"simplexChannel": None},
            )
        ),
    ],
)
def test_what_is_no_record(text: bytes) -> None:
    with pytest.raises(DecodeError):
        SMP_MESSAGES.decode(b"RNAME " + text, NEWEST)


@pytest.mark.parametrize("text", [b"NO_RESOLVER", b"NOT_FOUND", b"RESOLVER timed out"])
def test_errors(text: bytes) -> None:
    assert decode_error(b"NAME " + text).text == b"NAME " + text

"""What clients of the gateway send: bodies and headers, as parsers among the others."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ntf_server.statements import bodies
from ntf_server.statements.signed_requests import SCHEME, Request, Unauthenticated, authenticate
from protocol.device_token import Provider
from tests.protocol.parsers import Parser

TYPED = (bodies.BadBody, Unauthenticated)
MOST_RULES = 1000
_ID = "0f6c1e5a-7f8e-4b2f-9d3c-1a2b3c4d5e6f"
_RULE = {"sender_pubkey": "5e" * 32, "topic": "0x" + "70" * 32}
_BODIES: tuple[Any, ...] = (
    {"notificationType": "apns", "token": "a1" * 32},
    {"platform": "fcm", "notificationType": "fcm", "token": "dQw4:APA91b", "call": True},
    {"notificationType": "voip", "token": "b2" * 32},
    {"subscription_ids": [_ID, _ID.upper()]},
    {"subscription_id": _ID, "rules": [_RULE, {**_RULE, "topic": "71" * 32}]},
    {"rules": [_RULE], "subscription_id": _ID},
    {"subscription_id": _ID, "rules": []},
)
_NOW = 1_700_000_000
_AUTHORIZATION = f"{SCHEME} {'ab' * 32}:{_NOW}:{'cd' * 64}"
EXAMPLES = (
    *(json.dumps(body).encode() for body in _BODIES),
    *(json.dumps(body, indent=1).encode() for body in _BODIES),
    _AUTHORIZATION.encode(),
)
"Of which changed ones are tried."


def _registration(data: bytes) -> None:
    bodies.registration(bodies.json_object(data), Provider.APNS_PROD)


def _subscription_ids(data: bytes) -> None:
    bodies.subscription_ids(bodies.json_object(data))


def _rules(data: bytes) -> None:
    body = bodies.RulesBody(data, MOST_RULES)
    for _ in body:
        pass
    assert len(body.rules) <= MOST_RULES
    assert len(body.subscription_id) == 16


def _authorization(data: bytes) -> None:
    request = Request("gateway.example", "PUT", "/v1/rules", bytes(32))
    authenticate(data.decode("latin-1"), request, _NOW)


PARSERS: Mapping[str, Parser] = {
    "gateway registration": _registration,
    "gateway subscription ids": _subscription_ids,
    "gateway rules": _rules,
    "gateway authorization": _authorization,
}

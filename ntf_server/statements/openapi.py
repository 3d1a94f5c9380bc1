"""The gateway's API as an OpenAPI document: what `bodies.py` checks and `api.py` answers."""

from __future__ import annotations

from typing import Any

from ntf_server.config import StatementsConfig
from ntf_server.statements.bodies import CODE_SIZE, KEY_SIZE, MAX_FCM_TOKEN, MAX_IDS, MAX_TOKEN
from ntf_server.statements.signed_requests import SCHEME
from store.statement_records import Channel

SUBSCRIPTIONS = "/v1/subscriptions"
RULES = "/v1/subscriptions/rules"
VERIFY = "/v1/subscriptions/verify"
SPEC_PATH = "/v1/subscriptions/openapi.json"

Schema = dict[str, Any]

_UUID: Schema = {"type": "string", "format": "uuid", "pattern": "^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$"}
_KEY: Schema = {"type": "string", "pattern": f"^(0x)?[0-9a-fA-F]{{{2 * KEY_SIZE}}}$"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_STATE: Schema = {"type": "string", "enum": ["active", "pending"]}
_TYPE: Schema = {"type": "string", "enum": [channel.value for channel in Channel]}


def _object(required: list[str], **properties: Schema) -> Schema:
    return {
        "type": "object",
        "required": required,
        "properties": properties,
        "additionalProperties": False,
    }


_RULE = _object(["sender_pubkey", "topic"], sender_pubkey=_KEY, topic=_KEY)
_ERROR = _object(["error"], error={"type": "string"}, message={"type": "string"}, subscription_id=_UUID)
_FAILURE: Schema = {"description": "Refused", "content": {"application/json": {"schema": _ERROR}}}
_SHOWN = _object(
    ["subscription_id", "notificationType", "token", "call", "created_at", "updated_at", "state", "rules"],
    subscription_id=_UUID,
    notificationType=_TYPE,
    token={"type": "string"},
    call={"type": "boolean"},
    created_at={"type": "integer"},
    updated_at={"type": "integer"},
    state=_STATE,
    rules={
        "type": "array",
        "items": _object(
            ["id", "sender_pubkey", "topic", "created_at", "state"],
            id=_UUID,
            sender_pubkey=_KEY,
            topic=_KEY,
            created_at={"type": "integer"},
            state=_STATE,
        ),
    },
)
_APPLE_TOKEN: Schema = {"type": "string", "pattern": f"^([0-9a-fA-F]{{2}}){{1,{MAX_TOKEN // 2}}}$"}
_FCM_TOKEN: Schema = {"type": "string", "pattern": f"^[ -~]{{1,{MAX_FCM_TOKEN}}}$"}


def _registration() -> Schema:
    def form(name: str, types: list[str], token: Schema, **more: Schema) -> Schema:
        kind: Schema = {"type": "string", "enum": types}
        return _object([name, "token"], **{name: kind}, token=token, **more)

    apple = [Channel.APNS.value, Channel.VOIP.value]
    google = [Channel.FCM.value]
    return {
        "oneOf": [
            form(name, types, token, **more)
            for name in ("notificationType", "platform")
            for types, token, more in (
                (apple, _APPLE_TOKEN, {}),
                (google, _FCM_TOKEN, {"call": {"type": "boolean"}}),
            )
        ]
    }


def document(config: StatementsConfig) -> Schema:
    rules = _object(
        ["subscription_id", "rules"],
        subscription_id=_UUID,
        rules={
            "type": "array",
            "items": _RULE,
            "uniqueItems": True,
            "maxItems": config.rules_per_subscription,
        },
    )
    ids: Schema = {"type": "array", "items": _UUID, "minItems": 1, "maxItems": MAX_IDS}
    created = _object(["subscription_id"], subscription_id=_UUID, state=_STATE)
    verified = _object(["subscription_id", "state"], subscription_id=_UUID, state=_STATE)
    code = _object(
        ["subscription_id", "code"],
        subscription_id=_UUID,
        code={"type": "string", "pattern": f"^(0x)?[0-9a-fA-F]{{{2 * CODE_SIZE}}}$"},
    )
    added = _object(["added", "total_rules"], added=_COUNT, total_rules=_COUNT)
    removed = _object(["removed", "total_rules"], removed=_COUNT, total_rules=_COUNT)
    operations: dict[str, Schema] = {
        SUBSCRIPTIONS: {
            "post": _operation("Register a device token", 201, created, _registration(), 403, 409, 422),
            "delete": _operation(
                "Remove subscriptions", 204, None, _object(["subscription_ids"], subscription_ids=ids), 404
            ),
            "get": _operation("The client's subscriptions", 200, {"type": "array", "items": _SHOWN}, None),
        },
        VERIFY: {"post": _operation("Show the code pushed to a device", 200, verified, code, 403, 404)},
        RULES: {
            "put": _operation("Replace all rules", 204, None, rules, 403, 404),
            "post": _operation("Add rules", 201, added, rules, 403, 404),
            "delete": _operation("Remove rules", 200, removed, rules, 404),
        },
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "Statement gateway", "version": "1"},
        "paths": operations,
        "components": {"securitySchemes": {"client": _security(config)}},
        "security": [{"client": []}],
    }


def _security(config: StatementsConfig) -> Schema:
    name = config.client_header or "Authorization"
    described = "the client's key, from a trusted proxy" if config.client_header else f"{SCHEME} …"
    return {"type": "apiKey", "in": "header", "name": name, "description": described}


def _operation(summary: str, status: int, answer: Schema | None, body: Schema | None, *errors: int) -> Schema:
    success: Schema = {"description": "Done"}
    if answer is not None:
        success["content"] = {"application/json": {"schema": answer}}
    failures = {400, 401, 408, 413, 421, 429, 500, 503, *errors}
    responses = {str(status): success} | {str(code): _FAILURE for code in sorted(failures)}
    operation: Schema = {"summary": summary, "responses": responses}
    if body is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    return operation

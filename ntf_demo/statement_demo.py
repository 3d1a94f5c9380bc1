"""`ntf-server demo --statements`: signed statements wake the phones that asked for them, and no other."""

from __future__ import annotations

import json
import logging
import secrets
import uuid
from pathlib import Path

from prometheus_client import REGISTRY

from ntf_demo.demo import EXCERPT, Story, until
from ntf_demo.fake_push.recorder import RecordedPush
from ntf_demo.fake_push.server import wall_clock
from ntf_demo.statement_gateway import (
    GatewayClient,
    GatewayWorld,
    gateway_world,
    key_pair,
    signed_statement,
)
from ntf_server.config import LOCALHOST
from ntf_server.metrics import PREFIX
from ntf_server.statements.openapi import SPEC_PATH, SUBSCRIPTIONS
from protocol.crypto import X25519PrivateKey, box, open_box
from protocol.encoding import NONCE_SIZE
from protocol.statements import Signed, decode_statement, statement_hash
from transport.cancellation import stop_signal

ALICE, MALLORY = key_pair("Alice"), key_pair("Mallory")
CHAT, CALLS = b"chat of Alice and Bob".ljust(32, b"."), b"calls of Alice and Bob".ljust(32, b".")
TEXT, OFFER = "Lunch at 12?", "an offer of a call"
LONG = 3000
"Bytes that fit into no push."
LOUD = 40


class Sealed:
    """What Alice and Bob share and nobody else has: the gateway passes on what it cannot read."""

    def __init__(self) -> None:
        alice, bob = X25519PrivateKey(secrets.token_bytes(32)), X25519PrivateKey(secrets.token_bytes(32))
        self._secret = alice.exchange(bob.public)

    def seal(self, text: str) -> bytes:
        nonce = secrets.token_bytes(NONCE_SIZE)
        return nonce + box(self._secret, nonce, text.encode())

    def open(self, sealed: bytes) -> str:
        return open_box(self._secret, sealed[:NONCE_SIZE], sealed[NONCE_SIZE:]).decode()


async def tell(story: Story, folder: Path, *, keep: bool) -> None:
    # What goes wrong here does so on purpose, and the story tells it.
    logging.getLogger("ntf_server.statements").setLevel(logging.ERROR)
    story.title("ntf-server demo: how a signed statement finds a phone, and who may wake it")
    async with gateway_world(folder) as world:
        story.chapter("Three servers start, on free ports of this machine")
        story.fact("statement store", f"{world.node.url} (stands in for a node of the chain)")
        story.fact("push provider", f"https://{LOCALHOST}:{world.push.port} (stands in for APNs)")
        story.fact("notification server", f"http://{LOCALHOST}:{world.server.gateway_port}/v1/subscriptions")
        bob, sealed = world.client("Bob"), Sealed()
        await _register(story, world, bob)
        await _message(story, world, bob, sealed)
        await _call(story, world, sealed)
        await _long(story, world, sealed)
        await _refused(story, world, sealed)
        await _again(story, world)
        await _loud(story, world, sealed)
        if keep:
            story.chapter("It keeps running until Ctrl-C. In another terminal:")
            story.plain(f"    curl http://{LOCALHOST}:{world.server.gateway_port}{SPEC_PATH}")
            await stop_signal().wait()


async def _register(story: Story, world: GatewayWorld, bob: GatewayClient) -> None:
    story.chapter("Bob's phone says whom it wants to hear of")
    alerts = await bob.register("apns", secrets.token_hex(32))
    calls = await bob.register("voip", secrets.token_hex(32))
    story.step("POST", "phone → notification server", "two device tokens: for alerts and for calls")
    await bob.allow(alerts, (ALICE[0], CHAT))
    await bob.allow(calls, (ALICE[0], CALLS))
    story.step("PUT", "phone → notification server", "rules: Alice about their chat; her calls")
    await until(lambda: world.node.watched == {CHAT, CALLS})
    story.step("subscribe", "notification server → statement store", "both topics are watched")


async def _message(story: Story, world: GatewayWorld, bob: GatewayClient, sealed: Sealed) -> None:
    story.chapter(f"The phone sleeps. Alice writes: “{TEXT}”")
    statement = signed_statement(ALICE, CHAT, data=sealed.seal(TEXT))
    push, seconds = await _submitted(world, statement)
    story.step("submit", "Alice → statement store", f"a signed statement of {len(statement)} bytes")
    story.step("statement", "statement store → notification server", "genuine; a rule of Bob's names her")
    story.step("push", "notification server → provider → phone", f"an alert, {seconds * 1000:.1f} ms later")
    told = json.loads(push.body)["statement"]
    data = bytes.fromhex(told["data"])
    story.plain()
    story.text("What each of them could see", style="bold")
    for name, view in (
        ("Alice", "Bob's public key and their topics; no device token, no answer"),
        ("statement store", f"{_stored(statement)}, {len(data)} bytes, sealed: {_excerpt(data)}"),
        ("notification server", await _known(world, bob)),
        ("push provider", f"device {push.token[:EXCERPT]}…, sender, topic, sealed: {_excerpt(data)}"),
    ):
        story.fact(name, view, style="dim")
    story.fact("Bob's phone", f"from Alice: “{sealed.open(data)}”", style="bold green")


async def _call(story: Story, world: GatewayWorld, sealed: Sealed) -> None:
    story.chapter("Alice calls")
    push, seconds = await _submitted(world, signed_statement(ALICE, CALLS, data=sealed.seal(OFFER)))
    headers = push.headers
    kind = f"{headers['apns-push-type']}, priority {headers['apns-priority']}"
    story.step("push", "notification server → provider → phone", f"{kind}, {seconds * 1000:.1f} ms later")
    data = bytes.fromhex(json.loads(push.body)["statement"]["data"])
    story.fact("Bob's phone", f"rings: {sealed.open(data)}", style="bold green")


async def _long(story: Story, world: GatewayWorld, sealed: Sealed) -> None:
    story.chapter("Alice has more to say than a push can carry")
    statement = signed_statement(ALICE, CHAT, data=sealed.seal("x" * LONG))
    push, _ = await _submitted(world, statement)
    assert json.loads(push.body)["truncated"] is True
    story.step("push", "notification server → provider → phone", "without the data: the phone fetches it")


async def _refused(story: Story, world: GatewayWorld, sealed: Sealed) -> None:
    story.chapter("Mallory wants to wake Bob, too")
    seen, forged = len(world.accepted), _count("statements_dropped_total", reason="forged")
    own = signed_statement(MALLORY, CHAT, data=b"spam")
    changed = bytearray(signed_statement(ALICE, CHAT, data=b"spam"))
    changed[-1] ^= 1
    await world.node.submit(own)
    await world.node.submit(bytes(changed))
    await until(lambda: _count("statements_dropped_total", reason="forged") > forged)
    story.step("submit", "Mallory → statement store", "signed by Mallory: no rule names him")
    story.step("submit", "Mallory → statement store", "in Alice's name: the signature is not hers")
    await _submitted(world, signed_statement(ALICE, CHAT, data=sealed.seal("Still there?")))
    story.step("push", f"{len(world.accepted) - seen} since then", "Alice's next; of Mallory's, none")


async def _again(story: Story, world: GatewayWorld) -> None:
    story.chapter("The statement store restarts and tells everything once more")
    seen, repeated = len(world.accepted), _count("statements_repeated_total")
    await world.node.stop()
    await world.node.start()
    await until(lambda: _count("statements_repeated_total") >= repeated + seen)
    told = int(_count("statements_repeated_total") - repeated)
    story.step("statement", "statement store → notification server", f"{told} that were pushed before")
    story.step("push", f"{len(world.accepted) - seen} for them", "each is pushed once")


async def _loud(story: Story, world: GatewayWorld, sealed: Sealed) -> None:
    story.chapter(f"Alice sends {LOUD} statements at once")
    seen, limited = len(world.accepted), _count("statements_limited_total")
    for number in range(LOUD):
        await world.node.submit(signed_statement(ALICE, CHAT, data=sealed.seal(f"Hello {number}")))

    def silent() -> int:
        return int(_count("statements_limited_total") - limited)

    await until(lambda: len(world.accepted) - seen + silent() == LOUD)
    limit = f"with the {seen} before 30 a minute, then two minutes of silence"
    story.step("push", f"{len(world.accepted) - seen} of {LOUD}", limit)


async def _submitted(world: GatewayWorld, statement: bytes) -> tuple[RecordedPush, float]:
    """The push that a statement led to, and the seconds it took."""
    seen, at = len(world.accepted), wall_clock()
    await world.node.submit(statement)
    await until(lambda: len(world.accepted) > seen)
    push = world.accepted[seen]
    return push, push.received - at


def _count(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"{PREFIX}{name}", labels) or 0.0


def _stored(statement: bytes) -> str:
    proof = decode_statement(statement).proof
    assert isinstance(proof, Signed)
    return f"statement {_excerpt(statement_hash(statement))} of {_excerpt(proof.signer)}"


async def _known(world: GatewayWorld, bob: GatewayClient) -> str:
    """What the server's database says of Bob's first push."""
    one = (await bob.ask("GET", SUBSCRIPTIONS)).body[0]
    (made,) = await world.server.store.push_records(uuid.UUID(one["subscription_id"]).bytes)
    device = one["token"][:EXCERPT]
    return f"statement {_excerpt(made.statement_hash)} of {_excerpt(made.sender)}, for Bob's device {device}…"


def _excerpt(data: bytes) -> str:
    return data.hex()[:EXCERPT] + "…"

"""The time an answer takes does not tell whether an entity exists."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from statistics import NormalDist, median

from ntf_server.app import running
from protocol.connection import Outgoing
from protocol.crypto import AuthPrivateKey, Ed448PrivateKey, Ed448PublicKey, Ed25519PrivateKey
from protocol.encoding import NO_ENTITY, CorrId, EntityId
from protocol.ntf_commands import NtfCommand, Ping, Schk, Tchk
from protocol.session_params import ntf_params
from protocol.transmission import RawTransmission, verify
from tests import builders
from tests.ntf_server.conftest import active_device, make_app, make_config
from tests.ntf_server.ntf_client import NtfClient

SAMPLES, ROUNDS = 1200, 3
"What another process does to one round, it does not do to all; a missing check shows in each."
ALIKE = (
    ("unknown token", "wrong signature of a token"),
    ("unknown subscription", "wrong signature of a subscription"),
)
Ask = tuple[NtfCommand, Callable[[], EntityId], AuthPrivateKey | None]


async def times(client: NtfClient, asks: dict[str, Ask]) -> dict[str, list[float]]:
    """Seconds per answer, in random order, so that a busy machine disturbs all kinds alike."""
    order = [name for name in asks for _ in range(SAMPLES)]
    random.Random(1).shuffle(order)
    taken: dict[str, list[float]] = {name: [] for name in asks}
    for name in order:
        command, entity, key = asks[name]
        data = client.connection.send([Outgoing(CorrId(os.urandom(24)), entity(), command, key)])
        started = time.perf_counter()
        client.stream.write(data)
        await client.receive(1)
        taken[name].append(time.perf_counter() - started)
    return taken


def p_value(a: list[float], b: list[float]) -> float:
    """Mann-Whitney: how likely so different ranks are if both come from one distribution."""
    ranked = sorted([(value, 0) for value in a] + [(value, 1) for value in b])
    rank_sum = sum(rank for rank, (_, source) in enumerate(ranked, 1) if source == 0)
    mean = len(a) * (len(a) + len(b) + 1) / 2
    deviation = (len(a) * len(b) * (len(a) + len(b) + 1) / 12) ** 0.5
    return 2 * (1 - NormalDist().cdf(abs(rank_sum - mean) / deviation))


async def test_unknown_and_wrong_cannot_be_told_apart(tmp_path: Path) -> None:
    limits = {
        "commands_per_second": 0,
        "address_commands_per_second": 0,
        "address_cpu_percent": 0,
        "address_failures_burst": 1_000_000,
    }
    async with running(make_app(tmp_path, make_config(tmp_path, LIMITS=limits))) as app:
        client = await NtfClient.open(app.address)
        device = await active_device(app, client)
        subscription = await device.subscribe(client, builders.queue_ntf(1), builders.ed25519())
        stranger = Ed25519PrivateKey(os.urandom(32))
        asks: dict[str, Ask] = {
            "unknown token": (Tchk(), lambda: EntityId(os.urandom(24)), stranger),
            "wrong signature of a token": (Tchk(), lambda: device.token_id, stranger),
            "unknown subscription": (Schk(), lambda: EntityId(os.urandom(24)), stranger),
            "wrong signature of a subscription": (Schk(), lambda: subscription, stranger),
            "not checked at all": (Ping(), lambda: NO_ENTITY, None),
        }
        told_apart = set(ALIKE)
        for _ in range(ROUNDS):
            taken = await times(client, asks)
            # The measurement is fine enough to see a missing check.
            assert p_value(taken["unknown token"], taken["not checked at all"]) < 1e-9
            told_apart &= {pair for pair in ALIKE if p_value(*(taken[name] for name in pair)) <= 1e-4}
            if not told_apart:
                break
        client.close()
    assert not told_apart


def test_an_unknown_entity_costs_an_ed448_key() -> None:
    """The point of a stored key is loaded for every check; so is that of the key that stands in for none."""
    own = Ed448PrivateKey(b"\1" * 57).public.raw
    params = ntf_params(3, bytes(32))
    wrong = RawTransmission(
        Ed448PrivateKey(b"\2" * 57).sign(b"text"),
        None,
        builders.corr_id(),
        builders.entity_id(),
        b"",
        b"text",
    )
    order = ["known", "unknown"] * SAMPLES
    random.Random(2).shuffle(order)
    taken: dict[str, list[float]] = {"known": [], "unknown": []}
    for name in order:
        key = Ed448PublicKey(own) if name == "known" else None
        started = time.perf_counter()
        assert not verify(params, key, wrong)
        taken[name].append(time.perf_counter() - started)
    known, unknown = median(taken["known"]), median(taken["unknown"])
    assert abs(known - unknown) < 0.03 * known  # loading the point is about a tenth

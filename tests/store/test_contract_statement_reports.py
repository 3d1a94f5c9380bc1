"""What both databases tell operators about the gateway."""

from __future__ import annotations

from store.interface import NtfStore
from store.statement_records import Channel, GatewayCounts, Outcome, OutcomeCount, PushKey
from tests.store.test_contract_statements import NOW, accept, rule, statement, subscribed


async def test_an_empty_gateway(store: NtfStore) -> None:
    assert await store.gateway_counts() == GatewayCounts({}, rules=0, topics=0, waiting=0, heard_at=None)
    assert await store.newest_outcomes(10) == []


async def test_counts_and_outcomes(store: NtfStore) -> None:
    one, other = rule(), rule()
    made = await subscribed(store, one, other)
    await subscribed(store, one, client_id=b"d" * 32, channel=Channel.VOIP)
    await store.note_listening([0, 3], NOW)
    first, second = statement(one, data=b"first"), statement(other, data=b"second")
    await accept(store, first)
    keys = await store.unsent_statement_pushes(after=PushKey(0), limit=10)
    await store.end_statement_pushes(sent=keys, given_up=[], again=[], now=NOW)
    await accept(store, second)
    counts = await store.gateway_counts()
    assert counts == GatewayCounts(
        {Channel.APNS: 1, Channel.VOIP: 1}, rules=3, topics=2, waiting=1, heard_at=NOW
    )
    assert await store.newest_outcomes(10) == [
        OutcomeCount(Channel.APNS, Outcome.SENT, 1),
        OutcomeCount(Channel.APNS, Outcome.WAITING, 1),
        OutcomeCount(Channel.VOIP, Outcome.SENT, 1),
    ]
    assert await store.newest_outcomes(1) == [OutcomeCount(Channel.APNS, Outcome.WAITING, 1)]
    await store.delete_gateway_subscriptions(made.client_id, [made.subscription_id], None)
    assert OutcomeCount(None, Outcome.SENT, 1) in await store.newest_outcomes(10)
    found = await store.push_records(made.subscription_id, 1)
    assert [record.statement_hash for record in found] == [second.statement_hash]
    assert len(await store.push_records_of_sender(one.sender, 10)) == 2

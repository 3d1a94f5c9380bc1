"""Sending what is queued: one message of a queue at a time, for as long as the table allows."""

from __future__ import annotations

from agent.duplex.message_kinds import SWITCHING, MessageKind
from agent.duplex.outgoing import (
    CONFIRMATIONS,
    Delivery,
    delivered,
    delivery_delayed,
    delivery_failed,
    expire,
)
from agent.duplex.queue_maker import Ask
from agent.duplex.replies import HostFailure, RouterFailure, RouterRefused, TemporaryFailure
from agent.duplex.store import Transact, Tx
from agent.duplex.tables import receive_queues
from agent.duplex.workers import Wait
from agent.errors import A_QUEUE, NOT_ACCEPTED, NOT_AVAILABLE
from protocol.errors import AUTH, QUOTA, TooLarge
from smp_client.requests import Request

MESSAGE_TIME = 2 * 86400
"Seconds for which a message is tried."
QUOTA_TIME = 7 * 86400
"The same for a queue that is full."


CONTINUED_TIME = 60
"Seconds after QCONT in which a queue that is still full is tried often: peers send it before there is room."
CONTINUED_DELAY = 2.0


async def attempt(ask: Ask, delivery: Delivery, nonce: bytes) -> RouterFailure | None:
    """What went wrong, if anything did."""
    failure: RouterFailure | None = None
    try:
        command = delivery.command(nonce)
    except TooLarge as error:
        return RouterRefused(error.error)
    for key in delivery.keys:
        try:
            await ask(delivery.queue.server, Request(delivery.queue.sender_id, command, key))
        except RouterFailure as error:
            failure = error
        else:
            return None
        if not isinstance(failure, RouterRefused) or failure.error != AUTH:
            break
    return failure


async def after_attempt(
    transact: Transact, wait: Wait, delivery: Delivery, failure: RouterFailure | None, now: float
) -> None:
    """Store what came of an attempt, and wait if there has to be another."""
    if failure is None:
        await transact(lambda tx: delivered(tx, delivery))
        return
    slow = isinstance(failure, RouterRefused)
    if slow and not _is_full(delivery, failure):
        await transact(lambda tx: delivery_failed(tx, delivery, _word(tx, delivery, failure)))
        return
    limit = QUOTA_TIME if slow else MESSAGE_TIME
    if now - delivery.queued_at >= limit:
        await transact(lambda tx: expire(tx, delivery, limit, str(failure)))
        return
    if slow and _continues(delivery, now):
        await wait.sleep(CONTINUED_DELAY)
        return
    warning = None if isinstance(failure, TemporaryFailure) else str(failure)
    await transact(lambda tx: delivery_delayed(tx, delivery, slow=slow, warning=warning))
    await wait.sleep((delivery.slow if slow else delivery.fast).seconds)


def _continues(delivery: Delivery, now: float) -> bool:
    continued_at = delivery.queue.continued_at
    return continued_at is not None and now - continued_at < CONTINUED_TIME


def _is_full(delivery: Delivery, failure: RouterFailure) -> bool:
    assert isinstance(failure, RouterRefused | HostFailure)
    full = isinstance(failure, RouterRefused) and failure.error == QUOTA
    return full and delivery.kind not in CONFIRMATIONS


def _word(tx: Tx, delivery: Delivery, failure: RouterFailure) -> str:
    """Why a message of its kind cannot be delivered."""
    assert isinstance(failure, RouterRefused)
    if delivery.kind in CONFIRMATIONS and failure.error in (AUTH, QUOTA):
        return NOT_AVAILABLE
    if failure.error != AUTH:
        return str(failure)
    if delivery.kind is MessageKind.HELLO:
        return NOT_AVAILABLE if receive_queues(tx.db, delivery.connection_id) else NOT_ACCEPTED
    if delivery.kind is MessageKind.RATCHET_KEY:
        return NOT_AVAILABLE
    return A_QUEUE if delivery.kind in SWITCHING else str(failure)

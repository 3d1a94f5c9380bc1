"""Notification subscriptions of all queues, in two stages, every step stored first.

    rows -> routers: NKEY, NDEL -> the notification server: SNEW, SCHK -> checked now and then

What is due at a server goes there in one batch. A killed agent finds its rows again and goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from agent.duplex.replies import RouterFailure, RouterRefused, failure_of
from agent.duplex.store import Tx
from agent.notifications.records import DeletedSubscription, SubAction, Subscription, Token
from agent.notifications.rows import (
    advance_subscription,
    drop_deleted_subscription,
    set_deleted_subscription,
)
from protocol.addresses import SmpQueueNtf
from protocol.encoding import NO_ENTITY
from protocol.errors import AUTH, DecodeError
from protocol.ntf_commands import IdSub, NtfCommand, NtfResponse, Schk, Snew, Sub
from protocol.smp_messages import Ndel, Nid, Nkey, NotifierKeys, SmpCommand, SmpMessage
from protocol.statuses import SUBSCRIBABLE
from smp_client.errors import ClientError
from smp_client.requests import Request

UNUSABLE = "an answer that makes no sense"


@dataclass(frozen=True, slots=True, kw_only=True)
class NotificationConfig:
    """Seconds."""

    first_check: int = 600
    "From SNEW to the first SCHK."
    check_interval: int = 86_400
    recreate_delay: int = 600
    "After the server refused a new subscription, before it is tried with a new notifier."


Answer = SmpMessage | NtfResponse | ClientError
After = Callable[[Tx, Subscription, Answer, RouterRefused | None], Subscription | None]
"What becomes of a row; None if it is done with."


def router_command(row: Subscription) -> SmpCommand:
    if row.action is SubAction.SMP_DELETE:
        return Ndel()
    return Nkey(NotifierKeys(row.notifier_key.public, row.dh_key.public))


def after_router(
    tx: Tx, row: Subscription, answer: Answer, refused: RouterRefused | None
) -> Subscription | None:
    if row.action is SubAction.SMP_DELETE:
        is_done = refused is None or refused.error == AUTH  # AUTH: the queue is gone
        return None if is_done else _given_up(row, refused)
    if not isinstance(answer, Nid):
        return _given_up(row, refused)
    try:
        secret = row.dh_key.exchange(answer.ids.dh_key)
    except DecodeError:
        return _given_up(row, None)
    named = replace(row, notifier_id=answer.ids.notifier_id, dh_secret=secret)
    return replace(named, action=SubAction.NTF_CREATE, due=tx.now)


def server_request(row: Subscription, token: Token) -> Request[NtfCommand]:
    if row.action is SubAction.NTF_CREATE:
        assert row.notifier_id is not None
        queue = SmpQueueNtf(row.smp_server, row.notifier_id)
        return Request(NO_ENTITY, Snew(row.token_id, queue, row.notifier_key), token.auth_key)
    assert row.subscription_id is not None
    return Request(row.subscription_id, Schk(), token.auth_key)


def after_server(
    config: NotificationConfig, tx: Tx, row: Subscription, answer: Answer, refused: RouterRefused | None
) -> Subscription | None:
    if isinstance(answer, IdSub):
        made = replace(row, subscription_id=answer.subscription_id, status="NEW")
        return replace(made, action=SubAction.NTF_CHECK, due=tx.now + config.first_check)
    if isinstance(answer, Sub):
        seen = replace(row, status=answer.status.text, due=tx.now + config.check_interval)
        return seen if answer.status.state in SUBSCRIBABLE else _recreated(tx, seen, 0)
    if refused is not None and refused.error == AUTH:  # the server does not know it
        return _recreated(tx, row, config.recreate_delay if row.action is SubAction.NTF_CREATE else 0)
    return _given_up(row, refused)


def take(
    tx: Tx, due: Sequence[Subscription], answers: Sequence[Answer], after: After
) -> RouterFailure | None:
    """Store the results of a batch together; the failure of those that have to be tried again."""
    again: RouterFailure | None = None
    for row, answer in zip(due, answers, strict=True):
        failure = failure_of(answer)
        if failure is None or isinstance(failure, RouterRefused):
            advance_subscription(tx, row, after(tx, row, answer, failure))
        else:
            again = failure
    return again


def take_deletions(
    tx: Tx, due: Sequence[DeletedSubscription], answers: Sequence[NtfResponse | ClientError]
) -> RouterFailure | None:
    """What the server refuses to delete is gone there; the failure of those that have to be tried again."""
    again: RouterFailure | None = None
    for row, answer in zip(due, answers, strict=True):
        failure = failure_of(answer)
        if isinstance(answer, IdSub):
            set_deleted_subscription(tx, row.key, subscription_id=answer.subscription_id)
        elif failure is None or isinstance(failure, RouterRefused):
            drop_deleted_subscription(tx, row.key)
        else:
            again = failure
    return again


def _recreated(tx: Tx, row: Subscription, delay: int) -> Subscription:
    """From the beginning, with a new notifier."""
    return replace(
        row,
        action=SubAction.SMP_KEY,
        due=tx.now + delay,
        notifier_key=tx.secrets.ed25519(),
        dh_key=tx.secrets.x25519(),
        notifier_id=None,
        dh_secret=None,
        subscription_id=None,
    )


def _given_up(row: Subscription, refused: RouterRefused | None) -> Subscription:
    """Nothing more is tried until somebody asks for it."""
    why = UNUSABLE if refused is None else refused.error
    return replace(row, action=None, status=f"given up: {why}")

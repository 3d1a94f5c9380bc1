"""Kinds of messages as the store knows them."""

from __future__ import annotations

from enum import StrEnum


class MessageKind(StrEnum):
    CONFIRMATION = "D"
    REPLY = "I"
    RATCHET_KEY = "R"
    HELLO = "HELLO"
    USER = "A_MSG"
    RECEIPTS = "A_RCVD"
    CONTINUE = "QCONT"
    ADD = "QADD"
    KEY = "QKEY"
    USE = "QUSE"
    TEST = "QTEST"
    READY = "EREADY"


SWITCHING = {MessageKind.ADD, MessageKind.KEY, MessageKind.USE, MessageKind.TEST}

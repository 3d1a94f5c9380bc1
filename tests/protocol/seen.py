"""What a peer of some version sees of a message: the oracle of round trips."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from protocol import ntf_commands as ntf
from protocol import smp_messages as smp
from protocol.errors import AUTH, ErrorType
from protocol.statuses import TokenStatus


def ntf_seen(message: Any, version: int) -> Any:
    if isinstance(message, ntf.Tkn) and version < 3 and message.status.is_invalid:
        return ntf.Tkn(TokenStatus.INVALID)
    return message


def smp_seen(message: Any, version: int) -> Any:
    match message:
        case smp.New():
            return _new_seen(message, version)
        case smp.Ids():
            return _ids_seen(message, version)
        case smp.Sok() if version < 16:
            return smp.Ok()
        case smp.Deld() if version < 10:
            return smp.End()
        case smp.Subs() | smp.Nsubs() if version < 19:
            return type(message)()
        case smp.Soks() | smp.Ends() if version < 19:
            return type(message)(smp.QueueSet(message.queues.count))
        case smp.Err() if message.error.text.startswith(b"BLOCKED"):
            return smp.Err(_blocked_seen(message.error, version))
    return message


def _mode_seen(mode: smp.QueueMode | None, version: int) -> smp.QueueMode | None:
    """Before v15 it is one flag, and false is a contact's queue; before v9 nothing."""
    if version >= 15:
        return mode
    return None if version < 9 else mode or smp.QueueMode.CONTACT


def _new_seen(new: smp.New, version: int) -> smp.New:
    link = new.link if version >= 15 and new.mode is not None else None
    notifier = new.notifier if version >= 17 else None
    return replace(new, mode=_mode_seen(new.mode, version), link=link, notifier=notifier)


def _ids_seen(ids: smp.Ids, version: int) -> smp.Ids:
    return replace(
        ids,
        mode=_mode_seen(ids.mode, version),
        link_id=ids.link_id if version >= 15 else None,
        service_id=ids.service_id if version >= 16 else None,
        notifier=ids.notifier if version >= 17 else None,
    )


def _blocked_seen(error: ErrorType, version: int) -> ErrorType:
    if version < 12:
        return AUTH
    return error if version >= 18 else ErrorType(error.text.partition(b",")[0])

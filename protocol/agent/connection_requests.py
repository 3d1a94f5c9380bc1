"""What a link offers: queues to send to, versions, and for an invitation the keys of a ratchet."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from urllib.parse import quote

from protocol.agent.e2e_params import E2E_URI, E2eUri, e2e_uri_text, parse_e2e_uri
from protocol.agent.forms import (
    LARGE,
    QUEUE_URI,
    VERSIONS,
    Form,
    checked,
    nonempty,
    optional,
    record,
    tagged,
    text,
)
from protocol.agent.versions import AGENT_VERSIONS
from protocol.errors import DecodeError
from protocol.query import parse_versions, required, split_query, versions_text
from protocol.queue_uri import QueueUri, parse_queue_uri
from protocol.smp_messages import QueueMode
from protocol.versions import VersionRange

_LINK = re.compile(r"(?:simplex:|https://[^\s/?#]+)/(invitation|contact)/?#/?\?([!-~]+)")


@dataclass(frozen=True, slots=True)
class ContactRequest:
    """A link that many may use."""

    agent_versions: VersionRange
    queues: tuple[QueueUri, ...]
    data: str | None = None
    "The application's."


@dataclass(frozen=True, slots=True)
class InvitationRequest:
    """A link for one."""

    agent_versions: VersionRange
    queues: tuple[QueueUri, ...]
    e2e: E2eUri
    data: str | None = None


ConnectionRequest = ContactRequest | InvitationRequest


def request_text(request: ConnectionRequest) -> str:
    fields = {
        "v": versions_text(request.agent_versions),
        "smp": ";".join(queue.text() for queue in request.queues),
    }
    kind = "contact"
    if isinstance(request, InvitationRequest):
        kind, fields["e2e"] = "invitation", e2e_uri_text(request.e2e)
    if request.data is not None:
        fields["data"] = request.data
    query = "&".join(f"{name}={quote(value, safe='')}" for name, value in fields.items())
    return f"simplex:/{kind}#/?{query}"


def parse_request(text: str) -> ConnectionRequest:
    match = _LINK.fullmatch(text)
    if match is None:
        raise DecodeError
    fields = split_query(match[2])
    versions = parse_versions(required(fields, "v"))
    queues = tuple(parse_queue_uri(queue) for queue in required(fields, "smp").split(";"))
    data = fields.get("data")
    if match[1] == "contact":
        return ContactRequest(_lifted(versions), queues, data)
    return InvitationRequest(versions, queues, parse_e2e_uri(required(fields, "e2e")), data)


def _lifted(versions: VersionRange) -> VersionRange:
    """Old addresses name a version that was never used with them."""
    lowest = AGENT_VERSIONS.min
    return VersionRange(max(lowest, versions.min), max(lowest, versions.max))


def _with_modes(queues: tuple[QueueUri, ...]) -> tuple[QueueUri, ...]:
    """The binary form of our version range says nothing for an address."""
    return tuple(queue if queue.mode else replace(queue, mode=QueueMode.CONTACT) for queue in queues)


_QUEUES = checked(nonempty(QUEUE_URI), _with_modes)
_DATA = optional(text(LARGE))
REQUEST: Form[ConnectionRequest] = tagged(
    {
        b"C": record(ContactRequest, agent_versions=checked(VERSIONS, _lifted), queues=_QUEUES, data=_DATA),
        b"I": record(InvitationRequest, agent_versions=VERSIONS, queues=_QUEUES, data=_DATA, e2e=E2E_URI),
    }
)

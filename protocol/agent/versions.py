"""Versions of the agents' protocol and of the ratchet, and what depends on them."""

from __future__ import annotations

from protocol.versions import VersionRange

AGENT_VERSIONS = VersionRange(2, 7)
E2E_VERSIONS = VersionRange(2, 3)

AGENT_SYNC = 3
"Ratchets can be synchronised anew."
AGENT_RECEIPTS = 4
AGENT_PQ = 5
AGENT_EARLY_RATCHET = 7
"The creator of a link has a ratchet from the confirmation on, so the joiner may write at once."
E2E_PQ = 3
"Headers carry KEM keys; lengths of headers take two bytes."


def pq_possible(agent_version: int, e2e_version: int) -> bool:
    return agent_version >= AGENT_PQ and e2e_version >= E2E_PQ


def acceptable(version: int, ours: VersionRange, agreed: int) -> bool:
    """In our range, or not above what was agreed before: that survives a downgrade of ours."""
    return version in ours or version <= agreed

"""The state of the statement gateway in a few lines, for `status` and `doctor`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from urllib.parse import urlsplit

from ntf_server.config import StatementsConfig
from store.interface import ReportStore
from store.statement_records import GatewayCounts, Outcome, OutcomeCount
from transport.hosts import bracketed

NEWEST = 10_000
"Statements that met a rule whose outcomes are counted."


def node_name(url: str) -> str:
    """The address of a node without what may be a secret: providers of nodes put keys of their customers into
    the path, and a proxy may ask for a password."""
    parts = urlsplit(url)
    port = "" if parts.port is None else f":{parts.port}"
    return f"{parts.scheme}://{bracketed(parts.hostname or '')}{port}"


async def summary(store: ReportStore, config: StatementsConfig, now: float) -> list[str]:
    counts = await store.gateway_counts()
    return [
        _node(config, counts, now),
        _kept(counts),
        *_outcomes(await store.newest_outcomes(NEWEST)),
    ]


def _node(config: StatementsConfig, counts: GatewayCounts, now: float) -> str:
    node = node_name(config.node) if config.node else "no node"
    if counts.heard_at is None:
        return f"{node}: never connected"
    return f"{node}: last connected {_ago(now - counts.heard_at)}"


def _ago(seconds: float) -> str:
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{max(0.0, seconds):.0f} s ago"


def _kept(counts: GatewayCounts) -> str:
    by_type = _listed({channel.value: count for channel, count in counts.subscriptions.items()})
    total = sum(counts.subscriptions.values())
    return (
        f"{_count(total, 'subscription')}{f' ({by_type})' if by_type else ''},"
        f" {_count(counts.rules, 'rule')}, {_count(counts.topics, 'topic')}"
    )


def _outcomes(found: Sequence[OutcomeCount]) -> list[str]:
    """What became of the newest statements, and which types of pushes were sent."""
    outcomes: Counter[str] = Counter()
    sent: Counter[str] = Counter()
    for channel, outcome, count in found:
        outcomes[outcome.value] += count
        if outcome is Outcome.SENT:
            sent["deleted subscription" if channel is None else channel.value] += count
    if not outcomes:
        return []
    total = sum(outcomes.values())
    lines = [f"newest {_count(total, 'statement')} with a rule: {_listed(outcomes)}"]
    return lines + ([f"sent by type: {_listed(sent)}"] if sent else [])


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in sorted(counts.items()))


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"

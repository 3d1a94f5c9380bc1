"""What an operator should know first: one sentence per problem, the worst first. Pure.

Thresholds say when something is worth a sentence.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from analytics.results import Row, Rows
from analytics.times import SECOND_US

Tables = Mapping[str, Rows]


@dataclass(frozen=True, kw_only=True, slots=True)
class Thresholds:
    """When something is a problem. What leads to a sentence makes `--check` fail."""

    outage_seconds: float = 60.0
    "A disconnection for so long, of any size."
    lost_subscriptions: int = 1
    "Subscriptions that a router lost at once."
    failure_rate: float = 0.02
    "Share of failed pushes."
    latency_ms: float = 5_000.0
    "p95 latency from received notification to accepted push, in milliseconds."
    down_seconds: float = 300.0
    "How long nobody may run between two starts of a daemon."
    silent_seconds: float = 3_600.0
    "How long a daemon may give no sign of life; the journal shows what is in closed segments only."
    score: float = 60.0
    "The health score of a router."


PROVIDERS = {
    "AP": "Apple",
    "AD": "Apple's sandbox",
    "AT": "Apple's stand-in",
    "FC": "Google",
    "WP": "Web Push",
}
LASTING = 1e15
"The least weight of what is not over: more than any number of subscriptions waited any number of seconds."


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem in plain words; the higher its weight, the worse."""

    weight: float
    text: str
    kind: str

    @property
    def is_over(self) -> bool:
        """Whether there is nothing left to be done."""
        return self.weight < LASTING


def find(tables: Tables, thresholds: Thresholds, unreadable: Sequence[str] = ()) -> list[Finding]:
    """All problems, the worst first; `unreadable` are segments of the time that is reported on."""
    found = [
        *outages(tables.get("health_outages", ()), thresholds),
        *scores(tables.get("health", ()), thresholds),
        *providers(tables.get("delivery_providers", ()), thresholds),
        *gaps(tables.get("incidents_gaps", ())),
        *masses(tables.get("incidents_disconnects", ()), tables.get("health_outages", ())),
        *restarts(tables.get("incidents_restarts", ()), thresholds),
        *silences(tables.get("incidents_daemons", ()), thresholds),
        *provider_outages(tables.get("incidents_providers", ())),
        *refusals(tables.get("incidents_refused", ())),
        *dead_tokens(tables.get("incidents_tokens", ())),
        *losses(tables.get("incidents_losses", ())),
        *missing(unreadable),
    ]
    return sorted(found, key=lambda finding: (-finding.weight, finding.text))


Found = Iterator[Finding]


def outages(rows: Rows | tuple[()], limits: Thresholds) -> Found:
    """Routers that lost subscriptions, and those that were away for long."""
    for row in rows:
        size, lasted = row["subscriptions"], row["heal_s"]
        is_loss = row["kind"] != "disconnected" and size >= limits.lost_subscriptions
        too_long = row["is_open"] or lasted >= limits.outage_seconds
        if is_loss or (too_long and size):
            yield Finding(weight(row["subscriptions"], row), outage_text(row), "outage")


def weight(size: float, row: Row) -> float:
    """What has not healed first, then by how many subscriptions or pushes waited how long."""
    waited: float = size * (60 + (row["heal_s"] or 0))
    return waited + (10 * LASTING if row["is_open"] else 0)


def healing(row: Row) -> str:
    """Whether it is over, and how long it took."""
    return "and has not healed" if row["is_open"] else f"healed after {span(row['heal_s'])}"


def outage_text(row: Row) -> str:
    """One outage."""
    how = {
        "lost": "lost {n} of {all} subscriptions on {when}",
        "disconnected": "was away from {when} with {n} of {all} subscriptions",
        "service reset": "refused our service on {when}, which cut off {n} of {all} subscriptions",
    }[row["kind"]]
    said = how.format(
        n=number(row["subscriptions"]), all=number(row["of_subscriptions"]), when=moment(row["start"])
    )
    return f"{row['server']} {said}, {healing(row)}."


def scores(rows: Rows | tuple[()], limits: Thresholds) -> Found:
    """Routers that are degraded at the end."""
    for row in rows:
        if row["score"] < limits.score and row["subscriptions"]:
            share = f"{number(row['active'])} of {number(row['subscriptions'])} subscriptions active"
            text = f"{row['server']} is degraded: score {int(row['score'])}, {share} ({row['reasons']})."
            yield Finding(LASTING + (100 - row["score"]) * row["subscriptions"], text, "health")


def providers(rows: Rows | tuple[()], limits: Thresholds) -> Found:
    """Providers that refuse pushes or are slow."""
    for row in rows:
        failed = row["failure_rate"] or 0
        if failed > limits.failure_rate:
            many = f"{number(row['failed'])} of {number(row['sent'] + row['failed'])}"
            text = f"{many} pushes to {provider(row['provider'])} failed ({failed:.1%})."
            yield Finding(row["failed"] * 60, text, "push")
        late = row["latency_ms_p95"] or 0
        if late > limits.latency_ms:
            text = f"Pushes through {provider(row['provider'])} are slow: p95 latency {span(late / 1000)}."
            yield Finding(0.05 * row["sent"] * late / 1000, text, "latency")


def gaps(rows: Rows | tuple[()]) -> Found:
    """Routers that were silent when they usually are not."""
    for row in rows:
        when = f"from {moment(row['start'])} to {moment(row['end'], '%H:%M')}"
        text = f"{row['server']} sent {number(row['received'])} instead of about {number(row['expected'])}"
        yield Finding(row["missed"] * 60, f"{text} notifications {when}.", "gap")


def masses(rows: Rows | tuple[()], outages: Rows | tuple[()]) -> Found:
    """Many routers at once: the network, not a router."""
    for row in rows:
        parts = [o for o in outages if row["start"] <= o["start"] <= row["end"]]
        is_open = any(o["is_open"] for o in parts)
        ends = [o["end"] - row["start"] for o in parts if not o["is_open"]]
        whole = {"is_open": is_open, "heal_s": max(ends, default=0) / SECOND_US}
        many = f"{row['servers']} of {row['servers_seen']} routers went away at once"
        text = f"{many} on {moment(row['start'])} with {number(row['subscriptions'])} subscriptions"
        end = f", {healing(whole)}" if parts else ""
        yield Finding(weight(row["subscriptions"], whole), f"{text}{end}.", "mass disconnect")


def restarts(rows: Rows | tuple[()], limits: Thresholds) -> Found:
    """Daemons that died, or were away for long while no other ran."""
    for row in rows:
        down = row["down_s"] or 0
        if row["clean"] is False or (down >= limits.down_seconds and not row["others_running"]):
            how = "died" if row["clean"] is False else "was stopped"
            text = f"{row['daemon']} {how} and was back on {moment(row['start'])} after {span(down)}"
            text += f" with {number(row['subscriptions'] or 0)} subscriptions"
            if row["restore_s"] is not None:
                text += f"; 99 % were active again {span(row['restore_s'])} later"
            yield Finding((row["subscriptions"] or 0) * (60 + down), f"{text}.", "restart")


def silences(rows: Rows | tuple[()], limits: Thresholds) -> Found:
    """Daemons that do not run any more: those that died, and the last one however it ended."""
    nobody_runs = all(row["silent_s"] >= limits.silent_seconds for row in rows)
    for place, row in enumerate(rows):  # the last sign of life first
        is_last = nobody_runs and place == 0
        if row["silent_s"] < limits.silent_seconds or (row["clean"] and not is_last):
            continue
        how = "was stopped on" if row["clean"] else "has given no sign of life since"
        text = f"{row['daemon']} {how} {moment(row['last_seen'])}"
        held = f"{number(row['subscriptions'] or 0)} subscriptions"
        who = f": nobody serves {held}." if nobody_runs else f", when there were {held}; others run."
        since = 20 * LASTING if nobody_runs else 0
        yield Finding(since + (row["subscriptions"] or 0) * (60 + row["silent_s"]), text + who, "silence")


def provider_outages(rows: Rows | tuple[()]) -> Found:
    """Providers that took no pushes for a while."""
    for row in rows:
        how = "refused us" if row["reason"] == "refused" else "was down"
        waited = "" if row["waited"] is None else f", {number(row['waited'])} pushes waited"
        text = f"{provider(row['provider'])} {how} on {moment(row['start'])}{waited}, {healing(row)}."
        yield Finding(weight(row["waited"] or 0, row), text, "provider")


def refusals(rows: Rows | tuple[()]) -> Found:
    """Routers that do not know subscriptions any more, or gave them to somebody else."""
    for row in rows:
        many = f"{number(row['subscriptions'])} of {number(row['of_subscriptions'])} subscriptions"
        text = f"{row['server']} refused {many} ({row['reason']}) on {moment(row['start'])}"
        yield Finding(weight(row["subscriptions"], row), f"{text}, {healing(row)}.", "refused")


def dead_tokens(rows: Rows | tuple[()]) -> Found:
    """Many devices at once that a provider calls invalid."""
    for row in rows:
        many = f"{number(row['tokens'])} of {number(row['of_tokens'])} tokens"
        text = f"{provider(row['provider'])} called {many} invalid ({row['reason']})"
        held = f"on {moment(row['start'])}, they hold {number(row['subscriptions'])} subscriptions"
        yield Finding(weight(row["subscriptions"], row), f"{text} {held}, {healing(row)}.", "tokens")


def losses(rows: Rows | tuple[()]) -> Found:
    """The journal itself is incomplete."""
    if lost := sum(row["events"] for row in rows):
        yield Finding(lost, f"The journal lacks {number(lost)} events that could not be written.", "journal")


def missing(unreadable: Sequence[str]) -> Found:
    """What was not read may have been anything: it comes before all that is over."""
    if many := len(unreadable):
        what, whose = f"{many} segments of the journal", "their"
        if many == 1:
            what, whose = f"{unreadable[0]}, a segment of the journal,", "its"
        yield Finding(LASTING, f"{what} could not be read: {whose} events may be missing here.", "journal")


def provider(tag: str) -> str:
    """A push provider for a sentence, with its tag in tables and settings."""
    return f"{PROVIDERS[tag]} ({tag})" if tag in PROVIDERS else tag


def number(value: float) -> str:
    """A whole number for a sentence."""
    return f"{round(value):,}"


def moment(us: int, form: str = "%-d %B %H:%M") -> str:
    """A time for a sentence."""
    return f"{datetime.fromtimestamp(us // SECOND_US, UTC):{form}}"


def span(seconds: float) -> str:
    """A duration in its own unit."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}".replace(".0 ", " ")
    return f"{seconds:.0f} s"

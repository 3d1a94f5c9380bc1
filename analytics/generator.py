"""Realistic journals of any size with planted incidents whose answers are known.

The same plan gives the same bytes. Everything is drawn in whole columns: one `Part` per kind of event holds
indices into small vocabularies, and only writing a segment turns them into texts and ids.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from analytics.errors import AnalyticsError
from analytics.rollups_schema import TRAFFIC
from analytics.times import DAY_US, HOUR_US, MINUTE_US, SECOND_US
from store.journal_files import SCHEMA, write_parquet
from store.journal_schema import (
    CONTRACT,
    GIVEN_COLUMNS,
    MESSAGE_PUSH,
    PSEUDONYM_SIZE,
    WRITER_ID_SIZE,
    DeletionReason,
)
from store.journal_schema import JournalEvent as E

Ints = NDArray[np.int64]
Column = Ints | int | str
"Numbers, or indices into the column's vocabulary; one for all events, if it is one."

ANSWERS_NAME = "answers.json"
ABSENT = -1
EVENTS = [event.value for event in E]
PROVIDERS = ["AP", "FC", "WP"]
KINDS = [MESSAGE_PUSH]
DAEMONS = ["ntf1.example.net:443"]
LIVES = [EVENTS.index(e.value) for e in (E.SERVER_STARTED, E.SERVER_ALIVE, E.SERVER_STOPPED)]
RESOLUTIONS = np.array([CONTRACT[event].resolution_us for event in E])
STATUSES = ["NEW", "PENDING", "ACTIVE", "INACTIVE", "END", "AUTH", "DELETED", "SERVICE"]
ERRORS = [
    "TIMEOUT",
    "UNAVAILABLE",
    "TOO_MANY_REQUESTS",
    "CONNECTION_LOST",
    "BAD",
    "TOPIC",
    "EXPIRED",
    "UNREGISTERED",
    *[reason.value for reason in DeletionReason],
    "dropped",
    "down",
]
RETRY_ERRORS, TOKEN_ERRORS = (0, 3), (4, 8)
VOCABULARIES = {
    "event": EVENTS,
    "provider": PROVIDERS,
    "status_from": STATUSES,
    "status_to": STATUSES,
    "error": ERRORS,
    "kind": KINDS,
    "daemon": DAEMONS,
}
ALIVE_EVERY, SAMPLE_EVERY = 10 * MINUTE_US, HOUR_US

DETECTABLE_RATE = 80.0  # an hour with fewer expected notifications cannot be told from chance if it is empty
QUIET = 2 * HOUR_US  # between planted incidents that touch all servers


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to generate; `events` is approximate."""

    seed: int = 1
    events: int = 1_000_000
    days: int = 28
    start: str = "2026-01-05"
    "First day; the default is a Monday."
    servers: int = 12
    gaps: int = 4
    mass_disconnects: int = 2
    restarts: int = 2
    rows_per_segment: int = 500_000

    @property
    def start_us(self) -> int:
        """The first day's start in microseconds."""
        return int(datetime.fromisoformat(self.start).replace(tzinfo=UTC).timestamp()) * SECOND_US

    @property
    def end_us(self) -> int:
        """The end of the last day in microseconds."""
        return self.start_us + self.days * DAY_US


@dataclass
class Answers:
    """What was planted, and how many events were written."""

    events: int = 0
    segments: int = 0
    gaps: list[dict[str, Any]] = field(default_factory=list)
    "server, start_us, end_us (whole hours)"
    mass_disconnects: list[dict[str, Any]] = field(default_factory=list)
    "start_us, end_us, servers, subscriptions"
    restarts: list[dict[str, Any]] = field(default_factory=list)
    "start_us, down_us, restore_us, subscriptions, clean"
    provider_outages: list[dict[str, Any]] = field(default_factory=list)
    "provider, start_us, end_us, waited"


class Part:
    """Columns of some events; what is not given is absent."""

    NAMES = ("event", *[name for name in GIVEN_COLUMNS if name != "uptime_us"])  # known once writers are

    def __init__(self, time: Ints | int, event: E, **columns: Column) -> None:
        self.time = np.atleast_1d(time)
        given: dict[str, Column] = {**dict.fromkeys(self.NAMES, ABSENT), "event": event.value, **columns}
        for name, value in given.items():
            if isinstance(value, str):
                given[name] = VOCABULARIES[name].index(value)
        self.columns = {
            name: np.broadcast_to(np.asarray(given[name], dtype=np.int32), self.time.shape)
            for name in self.NAMES
        }


class Generator:
    """Draws one plan. Call `parts` once; `answers` is complete after it."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.rng = np.random.default_rng(plan.seed)
        self.answers = Answers()
        self.server_names = [f"smp{i + 1}.example.net:5223" for i in range(plan.servers)]
        self.weights = 1.0 / (1.0 + np.arange(plan.servers))
        self.weights /= self.weights.sum()
        self.tokens = max(20, plan.events // 2_000)
        self.subs = self.tokens * 5
        self.token_provider = self.rng.choice(len(PROVIDERS), self.tokens, p=[0.6, 0.3, 0.1])
        self.sub_token = self.rng.integers(0, self.tokens, self.subs)
        self.sub_server = self.rng.choice(plan.servers, self.subs, p=self.weights)
        self.verified = np.zeros(self.tokens, np.int64)
        self.sub_active = np.zeros(self.subs, np.int64)
        self.sub_gone = np.full(self.subs, np.iinfo(np.int64).max)
        self.incident_times = np.zeros(0, np.int64)
        self.downs: list[tuple[int, int]] = []

    def parts(self) -> Iterator[Part]:
        """All events, in no order."""
        restart_times, mass_times = self._incident_times()
        self.incident_times = np.array([*restart_times, *mass_times], dtype=np.int64)
        yield from self._token_life()
        yield from self._subscription_life()
        yield from self._connections()
        yield from self._traffic()
        for at in mass_times:
            yield from self._mass_disconnect(at)
        for number, at in enumerate(restart_times):
            yield from self._restart(at, clean=number % 2 == 0)
        yield Part(self.plan.start_us, E.SERVER_STARTED, count=0, daemon=0)
        yield from self._provider_outage()
        yield from self._signs_of_life()

    def _provider_outage(self) -> Iterator[Part]:
        """The first provider takes no pushes for some minutes, at a time when nothing else happens."""
        start = int(self.incident_times.min(initial=self.plan.end_us)) - QUIET
        lasted, waited = int(self._seconds(600, 0.3, 1)[0]), int(self.rng.integers(50, 500))
        yield Part(start, E.PROVIDER_DOWN, provider=0, error="down")
        yield Part(start + lasted, E.PROVIDER_UP, provider=0, latency_us=lasted, count=waited)
        outage = {"provider": PROVIDERS[0], "start_us": start, "end_us": start + lasted, "waited": waited}
        self.answers.provider_outages.append(outage)

    def _signs_of_life(self) -> Iterator[Part]:
        """What the daemon says of itself: that it lives, how subscriptions are, what it could not write."""
        plan = self.plan
        alive = np.arange(plan.start_us + ALIVE_EVERY, plan.end_us, ALIVE_EVERY)
        began, gone = np.sort(self.sub_active), np.sort(self.sub_gone)
        held = np.searchsorted(began, alive) - np.searchsorted(gone, alive)
        yield Part(alive, E.SERVER_ALIVE, daemon=0, count=held, total=held)
        hours = np.arange(plan.start_us + SAMPLE_EVERY, plan.end_us, SAMPLE_EVERY)
        for server in range(plan.servers):
            held = self._held(np.full(hours.size, server), hours)
            yield Part(hours, E.SMP_SAMPLED, server=server, count=held, status_to="ACTIVE")
        yield Part(alive[-1:], E.EVENTS_LOST, error="dropped", count=3)

    def _incident_times(self) -> tuple[list[int], list[int]]:
        """Times for what touches all servers: apart from each other, not in the first or last three days."""
        plan = self.plan
        slots = np.arange(plan.start_us + 3 * DAY_US, plan.end_us - 3 * DAY_US, 2 * QUIET)
        if slots.size < plan.restarts + plan.mass_disconnects:
            raise AnalyticsError(f"{plan.days} days are too few for so many restarts and mass disconnects")
        chosen = self.rng.choice(slots, plan.restarts + plan.mass_disconnects, replace=False)
        times = [int(t) + int(self.rng.integers(0, QUIET)) for t in chosen]
        return sorted(times[: plan.restarts]), sorted(times[plan.restarts :])

    def _seconds(self, median: float, sigma: float, size: int) -> Ints:
        return (self.rng.lognormal(np.log(median), sigma, size) * SECOND_US).astype(np.int64)

    def _token_life(self) -> Iterator[Part]:
        plan, rng, n = self.plan, self.rng, self.tokens
        span = plan.days * DAY_US
        registered = plan.start_us + 1 + (rng.random(n) ** 3 * 0.95 * span).astype(np.int64)
        confirmed = registered + self._seconds(0.4, 0.5, n)
        verified = confirmed + self._seconds(8, 1.0, n)
        ids = np.arange(n)
        takes = rng.random(n)
        is_confirmed, is_verified = takes < 0.97, takes < 0.93
        self.verified = np.where(is_verified, verified, 0)

        def part(when: Ints, chosen: NDArray[np.bool_], event: E, **columns: Column) -> Part:
            who = ids[chosen]
            return Part(when[chosen], event, token=who, provider=self.token_provider[who], **columns)

        everyone = np.ones(n, bool)
        yield part(registered, everyone, E.TOKEN_REGISTERED)
        yield part(confirmed, is_confirmed, E.TOKEN_CONFIRMED)
        yield part(verified, is_verified, E.TOKEN_VERIFIED)
        later = verified + HOUR_US + (rng.random(n) * (plan.end_us - verified)).astype(np.int64)
        fate = rng.random(n)
        inside = is_verified & (later < plan.end_us - HOUR_US)
        requested, superseded = inside & (fate < 0.03), inside & (fate >= 0.03) & (fate < 0.04)
        held = np.bincount(self.sub_token, minlength=n)
        for chosen, reason in ((requested, "requested"), (superseded, "superseded")):
            yield part(later, chosen, E.TOKEN_DELETED, error=reason, count=held[chosen])
        replaced = inside & (fate >= 0.04) & (fate < 0.08)
        yield part(later, replaced, E.TOKEN_REPLACED)
        yield part(later + self._seconds(10, 1.0, n), replaced, E.TOKEN_VERIFIED)
        refused = inside & (fate >= 0.08) & (fate < 0.13)
        reasons = rng.integers(*TOKEN_ERRORS, int(refused.sum()))
        yield part(later, refused, E.TOKEN_INVALID, error=reasons)
        periodic = is_verified & (rng.random(n) < 0.1)
        for day in range(1, plan.days):
            due = plan.start_us + day * DAY_US + rng.integers(0, DAY_US, n)
            yield part(due, periodic & (due > verified), E.CRON_SENT)

    def _subscription_life(self) -> Iterator[Part]:
        plan, rng, n = self.plan, self.rng, self.subs
        owner_ready = self.verified[self.sub_token]
        created = owner_ready + self._seconds(60, 2.0, n)
        real = (owner_ready > 0) & (created < plan.end_us - HOUR_US)
        ids = np.arange(n)
        fate = rng.random(n)
        active = created + self._seconds(0.3, 0.7, n)
        becomes_active = real & (fate > 0.03)
        self.sub_active = np.where(becomes_active, active, np.iinfo(np.int64).max)

        def part(when: Ints, chosen: NDArray[np.bool_], event: E, **columns: Column) -> Part:
            who = ids[chosen]
            owner, server = self.sub_token[who], self.sub_server[who]
            return Part(when[chosen], event, subscription=who, token=owner, server=server, **columns)

        def change(when: Ints, chosen: NDArray[np.bool_], before: str, after: str) -> Part:
            return part(when, chosen, E.SUB_STATUS_CHANGED, status_from=before, status_to=after)

        yield part(created, real, E.SUB_CREATED)
        yield change(active, becomes_active, "PENDING", "ACTIVE")
        yield change(active, real & (fate <= 0.01), "PENDING", "AUTH")
        later = active + MINUTE_US + (rng.random(n) * (plan.end_us - active)).astype(np.int64)
        inside = becomes_active & (later < plan.end_us - HOUR_US)
        yield change(later, inside & (fate > 0.97), "ACTIVE", "END")
        yield change(later, inside & (fate > 0.96) & (fate <= 0.97), "ACTIVE", "DELETED")
        flaps = inside & (fate > 0.90) & (fate <= 0.96)
        yield change(later, flaps, "ACTIVE", "SERVICE")
        yield change(later + self._seconds(600, 0.5, n), flaps & (fate > 0.92), "SERVICE", "ACTIVE")
        deleted = inside & (fate > 0.85) & (fate <= 0.90)
        yield part(later, deleted, E.SUB_DELETED, error="requested")
        self.sub_gone = np.where(inside & (fate > 0.85), later, self.sub_gone)

    def _connections(self) -> Iterator[Part]:
        """The first connections, then now and then a server that goes away alone for a moment."""
        plan, rng = self.plan, self.rng
        servers = np.arange(plan.servers)
        yield self._connected(plan.start_us + 1 + self._seconds(0.2, 0.3, plan.servers), servers)
        lonely = np.arange(plan.start_us + DAY_US, plan.end_us - HOUR_US, DAY_US // 2)
        at = lonely + rng.integers(0, 6 * HOUR_US, lonely.size)
        at = at[(np.abs(at[:, None] - self.incident_times) > QUIET // 4).all(axis=1)]
        who = rng.integers(0, plan.servers, at.size)
        yield Part(at, E.SMP_DISCONNECTED, server=who, error="CONNECTION_LOST", changed=self._held(who, at))
        back = at + self._seconds(5, 0.8, at.size)
        yield self._connected(back, who)
        yield self._service(back + self._seconds(0.1, 0.3, at.size), who)
        drift = rng.random(at.size) < 0.2
        held = self._held(who[drift], back[drift])
        lost = np.minimum(held, rng.integers(1, 20, int(drift.sum())))
        seen = back[drift] + SECOND_US
        yield Part(seen, E.SMP_DRIFT, server=who[drift], count=held - lost, expected=held)
        took = self._seconds(20, 0.4, int(drift.sum()))
        yield Part(seen + took, E.SMP_HEALED, server=who[drift], count=lost, latency_us=took)
        reset, who = at[:1] - HOUR_US // 2, who[:1]
        held = self._held(who, reset)
        yield Part(reset, E.SMP_SERVICE_RESET, server=who, error="UNAVAILABLE", changed=held)
        yield self._service(reset + SECOND_US, who)

    def _held(self, servers: Ints, when: Ints) -> Ints:
        """Active subscriptions of each server at its time."""
        held = np.zeros(when.size, np.int64)
        for server in np.unique(servers):
            its, mine = servers == server, self.sub_server == server
            began, gone = np.sort(self.sub_active[mine]), np.sort(self.sub_gone[mine])
            held[its] = np.searchsorted(began, when[its]) - np.searchsorted(gone, when[its])
        return held

    def _connected(self, when: Ints, servers: Ints) -> Part:
        took = self.rng.integers(20_000, 400_000, when.size)
        return Part(when, E.SMP_CONNECTED, server=servers, latency_us=took)

    def _service(self, when: Ints, servers: Ints) -> Part:
        held = self._held(servers, when)
        counts = {"count": held, "expected": held, "changed": held, "total": held}
        return Part(when, E.SMP_SERVICE_SUBSCRIBED, server=servers, **counts)

    def _rates(self) -> NDArray[np.float64]:
        """Expected notifications per (server, hour): a day curve, quieter weekends."""
        hours = np.arange(self.plan.days * 24)
        day_curve = 0.35 + 0.65 * np.sin((hours % 24) / 24 * np.pi) ** 2
        week_curve = np.where((hours // 24) % 7 >= 5, 0.75, 1.0)
        shape = day_curve * week_curve
        notifications = self.plan.events * 0.47
        rates: NDArray[np.float64] = np.outer(self.weights, shape) * notifications / shape.sum()
        return rates

    def _plant_gaps(self, rates: NDArray[np.float64]) -> None:
        """Silence some (server, hours), each in another week-hour region so that no two touch."""
        taken = np.zeros(rates.shape, bool)
        taken[:, :48] = taken[:, -2:] = True  # servers get their first subscriptions on the first days
        for _ in range(self.plan.gaps):
            length = int(self.rng.integers(2, 6))
            usable = (rates >= DETECTABLE_RATE) & ~taken
            runs = np.lib.stride_tricks.sliding_window_view(usable, length, axis=1).all(axis=2)
            places = np.argwhere(runs)
            if not places.size:
                return
            server, hour = (int(v) for v in places[self.rng.integers(0, len(places))])
            rates[server, hour : hour + length] = 0.0
            for week in range(-5, 6):  # a baseline of few weeks must not be silenced twice in the same hour
                at = hour + week * 168
                taken[server, max(0, at - 2) : max(0, at + length + 2)] = True
            start = self.plan.start_us + hour * HOUR_US
            gap = {"server": self.server_names[server], "start_us": start, "end_us": start + length * HOUR_US}
            self.answers.gaps.append(gap)

    def _traffic(self) -> Iterator[Part]:
        rates = self._rates()
        self._plant_gaps(rates)
        for server in range(self.plan.servers):
            counts = self.rng.poisson(rates[server])
            hours = self.plan.start_us + np.arange(counts.size) * HOUR_US
            time = np.repeat(hours, counts) + self.rng.integers(0, HOUR_US, int(counts.sum()))
            yield from self._notifications(server, time)

    def _notifications(self, server: int, time: Ints) -> Iterator[Part]:
        mine = np.flatnonzero((self.sub_server == server) & (self.sub_active < self.plan.end_us))
        mine = mine[np.argsort(self.sub_active[mine], kind="stable")]
        known = np.searchsorted(self.sub_active[mine], time)
        time, known = time[known > 0], known[known > 0]
        sub = mine[(self.rng.random(time.size) ** 2 * known).astype(np.int64)]
        token = self.sub_token[sub]
        yield Part(time, E.NTF_RECEIVED, server=server, subscription=sub, token=token)
        fate = self.rng.random(time.size)
        sent, retried, failed = fate < 0.90, (fate < 0.02), (fate >= 0.90) & (fate < 0.905)
        coalesced, trimmed = fate >= 0.905, (fate >= 0.5) & (fate < 0.501)

        def push(event: E, chosen: NDArray[np.bool_], delay: Ints | int, **columns: Column) -> Part:
            who = token[chosen]
            columns = {"server": server, "kind": 0, **columns}
            return Part(time[chosen] + delay, event, token=who, provider=self.token_provider[who], **columns)

        latency = self._seconds(0.06, 0.7, int(sent.sum())) + (fate[sent] < 0.02) * SECOND_US
        entries = self.rng.choice([1, 2, 3, 6], latency.size, p=[0.9, 0.06, 0.03, 0.01])
        again = self.rng.integers(0, 6, latency.size)
        yield push(E.PUSH_SENT, sent, latency, latency_us=latency, count=entries, total=entries + again)
        for event, chosen in ((E.PUSH_RETRIED, retried), (E.PUSH_FAILED, failed)):
            size = int(chosen.sum())
            reasons = self.rng.integers(*RETRY_ERRORS, size)
            given_up = {"count": 1} if event is E.PUSH_FAILED else {}
            yield push(event, chosen, self._seconds(0.03, 0.5, size), error=reasons, **given_up)
        yield push(E.PUSH_COALESCED, coalesced, 0, count=1, server=ABSENT)
        left_out = self.rng.integers(1, 5, int(trimmed.sum()))
        yield push(E.PUSH_TRIMMED, trimmed, 0, count=left_out, server=ABSENT)

    def _mass_disconnect(self, at: int) -> Iterator[Part]:
        plan, rng = self.plan, self.rng
        hit = max(min(plan.servers, 3), round(plan.servers * rng.uniform(0.5, 1.0)))
        who = rng.choice(plan.servers, hit, replace=False)
        when = at + rng.integers(0, 40 * SECOND_US, hit)
        held = self._held(who, when)
        yield Part(when, E.SMP_DISCONNECTED, server=who, error="CONNECTION_LOST", changed=held)
        back = when + self._seconds(15, 0.5, hit) + 5 * SECOND_US
        yield self._connected(back, who)
        yield self._service(back + self._seconds(0.1, 0.3, hit), who)
        span = {"start_us": int(when.min()), "end_us": int(when.max())}
        self.answers.mass_disconnects.append({**span, "servers": hit, "subscriptions": int(held.sum())})

    def _restart(self, at: int, *, clean: bool) -> Iterator[Part]:
        """The daemon stops or dies; the next one makes half of the subscriptions active by service."""
        plan, rng = self.plan, self.rng
        stop, start = at, at + int(rng.integers(20, 90)) * SECOND_US
        self.downs.append((stop, start))
        living = np.flatnonzero((self.sub_active < stop) & (self.sub_gone > start + HOUR_US))
        by_service = rng.random(living.size) < 0.5
        servers = np.arange(plan.servers)
        associated = np.bincount(self.sub_server[living[by_service]], minlength=plan.servers)
        connected = start + 1 + self._seconds(0.3, 0.4, plan.servers)
        service_at = connected + self._seconds(0.05, 0.3, plan.servers)
        single = living[~by_service]
        single_at = connected[self.sub_server[single]] + self._seconds(6, 0.9, single.size)
        if clean:
            yield Part(stop, E.SERVER_STOPPED, daemon=0)
        yield Part(start, E.SERVER_STARTED, count=living.size, daemon=0)
        yield self._connected(connected, servers)
        held = self._held(servers, service_at)
        counts = {"count": associated, "expected": associated, "changed": associated, "total": held}
        yield Part(service_at, E.SMP_SERVICE_SUBSCRIBED, server=servers, **counts)
        yield Part(
            single_at,
            E.SUB_STATUS_CHANGED,
            subscription=single,
            token=self.sub_token[single],
            server=self.sub_server[single],
            status_from="INACTIVE",
            status_to="ACTIVE",
        )
        told_at = single_at - single_at % CONTRACT[E.SUB_STATUS_CHANGED].resolution_us
        when = np.concatenate([told_at, np.repeat(service_at, associated)])
        needed = -(-living.size * 99 // 100)
        restored = int(np.sort(when)[needed - 1]) - start if needed else None
        facts = {"start_us": start, "restore_us": restored, "subscriptions": int(living.size), "clean": clean}
        self.answers.restarts.append(facts)


def columns_in_order(generator: Generator) -> tuple[Ints, dict[str, NDArray[np.int32]]]:
    """All events by time, without those that fall into a time when no daemon was running."""
    parts = [part for part in generator.parts() if part.time.size]
    time = np.concatenate([part.time for part in parts])
    keep = (time >= generator.plan.start_us) & (time < generator.plan.end_us)
    event = np.concatenate([part.columns["event"] for part in parts])
    for stop, start in generator.downs:
        own = (time == stop) & (event == EVENTS.index(E.SERVER_STOPPED.value))
        keep &= (time < stop) | (time >= start) | own
    kept = np.flatnonzero(keep)
    rank = kept[np.argsort(time[kept], kind="stable")]
    columns = {name: np.concatenate([part.columns[name] for part in parts])[rank] for name in Part.NAMES}
    return time[rank], columns


def id_column(rng: np.random.Generator, number: int, size: int) -> pa.Array:
    """Random ids as a binary vocabulary."""
    fixed = pa.Array.from_buffers(pa.binary(size), number, [None, pa.py_buffer(rng.bytes(number * size))])
    return fixed.cast(pa.binary())


def write_journal(plan: Plan, folder: Path) -> Answers:
    """Generate a journal into `folder` and its answers beside it as JSON."""
    generator = Generator(plan)
    time, columns = columns_in_order(generator)
    ids = np.random.default_rng([plan.seed, 1])
    writers = id_column(ids, len(generator.downs) + 1, WRITER_ID_SIZE)
    vocabularies = {name: pa.array(words) for name, words in VOCABULARIES.items()} | {
        "server": pa.array(generator.server_names),
        "token": id_column(ids, generator.tokens, PSEUDONYM_SIZE),
        "subscription": id_column(ids, generator.subs, PSEUDONYM_SIZE),
    }
    starts = np.array(sorted(start for _, start in generator.downs), dtype=np.int64)
    began = np.array([plan.start_us, *starts])
    written = time - time % RESOLUTIONS[columns["event"]]
    bounds = segment_bounds(time, starts, plan.rows_per_segment)
    for first, last, writer, seq in bounds:
        part = slice(first, last)
        lives = np.isin(columns["event"][part], LIVES)
        known = {
            "time": pa.array(written[part]).view(SCHEMA.field("time").type),
            "writer": pa.repeat(writers[writer], last - first),
            "seq": pa.array(np.arange(seq, seq + last - first)),
            "epoch": pa.repeat(pa.scalar(plan.seed, pa.int64()), last - first),
            "uptime_us": pa.array(time[part] - began[writer], mask=~lives),
        }
        drawn = {name: drawn_column(values[part], vocabularies.get(name)) for name, values in columns.items()}
        arrays = {**known, **drawn}
        batch = pa.record_batch([arrays[name] for name in SCHEMA.names], schema=SCHEMA)
        write_segment(folder, batch, f"{writers[writer].as_py().hex()}-{seq:015d}")
    answers = generator.answers
    silent = np.isin(columns["event"], [EVENTS.index(event.value) for event in TRAFFIC])
    add_down_times(answers, np.where(silent, 0, written), np.searchsorted(time, starts))
    answers.events, answers.segments = len(time), len(bounds)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ANSWERS_NAME).write_text(json.dumps({"plan": asdict(plan), **asdict(answers)}, indent=2))
    return answers


def drawn_column(values: NDArray[np.int32], vocabulary: pa.Array | None) -> pa.Array:
    """Numbers, or what they stand for."""
    numbers = pa.array(values, mask=values == ABSENT)
    return numbers.cast(pa.int64()) if vocabulary is None else vocabulary.take(numbers)


def add_down_times(answers: Answers, time: Ints, places: Ints) -> None:
    """Put into each restart's answer how long before its start the daemon before last gave a sign of life."""
    last = np.maximum.accumulate(time)
    restarts = sorted(answers.restarts, key=lambda restart: int(restart["start_us"]))
    for restart, place in zip(restarts, places, strict=True):
        restart["down_us"] = int(time[place] - last[place - 1])


def segment_bounds(time: Ints, starts: Ints, rows: int) -> list[tuple[int, int, int, int]]:
    """(first, last, writer, seq of first): cut at days, at restarts and at the segment size."""
    days = np.flatnonzero(np.diff(time // DAY_US)) + 1
    restarts = np.searchsorted(time, starts)
    cuts = sorted({0, len(time), *days.tolist(), *restarts.tolist()})
    bounds = []
    for begin, end in pairwise(cuts):
        writer = int(np.searchsorted(restarts, begin, side="right"))
        origin = int(restarts[writer - 1]) if writer else 0
        firsts = range(begin, end, rows)
        bounds += [(first, min(first + rows, end), writer, first - origin) for first in firsts]
    return bounds


def write_segment(folder: Path, batch: pa.RecordBatch, name: str) -> None:
    """Write one segment into its day's partition."""
    day = batch.column("time")[0].as_py()
    partition = folder / f"date={day:%Y-%m-%d}"
    partition.mkdir(parents=True, exist_ok=True)
    with (partition / f"{name}.parquet").open("wb") as file:
        write_parquet([batch], file)

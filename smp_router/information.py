"""What a router says about itself over HTTP: a page for people, JSON for programs, metrics to watch it."""

from __future__ import annotations

import html
import json
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from protocol.messages_crypto import max_message_length
from smp_router.router import Router
from transport.plain_http import HttpPages, Page

JSON, HTML = "application/json", "text/html; charset=utf-8"
PREFIX = "smp_router_"

COUNTERS: Mapping[str, str] = {
    "connections": "Connections that were admitted",
    "connections_refused": "Connections that were closed before TLS",
    "clients_too_slow": "Clients that were disconnected because they did not take what was sent to them",
    "clients_unauthorised": "Clients disconnected because their address failed to authorise too often",
    "queues_created": "Queues created by NEW",
    "queues_expired": "Suspended and unused queues removed after their time",
    "messages_received": "SEND commands for existing queues",
    "messages_delivered": "Messages sent to recipients, repeated ones included",
    "messages_expired": "Messages that nobody took in time",
    "notifications_delivered": "NMSGs sent",
    "drift_messaging": "SUBS whose count or hash of queues differs from the router's",
    "drift_notifier": "NSUBS whose count or hash of queues differs from the router's",
    "commands_forwarded": "PFWD commands of this router's clients",
    "commands_relayed": "RFWD commands of other proxies",
}


def describe(router: Router, entries: Mapping[str, str]) -> dict[str, Any]:
    """The public information: limits and rules that the router enforces, and what its operator adds."""
    config = router.config
    return {
        "address": str(router.address),
        "versions": {"min": config.versions.min, "max": config.versions.max},
        "persistence": router.state.records.place,
        "message_expiration_seconds": int(config.message_ttl),
        "messages_per_queue": config.quota,
        "message_bytes": max_message_length(config.versions.max),
        "password_required": config.password is not None,
        "new_queues": config.new_queues,
        "proxy": config.proxy,
        "information": dict(entries),
    }


class RouterPages(HttpPages):
    """`/`, `/information.json` and `/metrics`."""

    def __init__(self, router: Router, entries: Mapping[str, str]) -> None:
        super().__init__()
        self._router = router
        self._entries = entries
        self._registry = CollectorRegistry()
        self._registry.register(_RouterCollector(router))

    def page(self, path: bytes) -> Page | None:
        if path == b"/metrics":
            return Page(CONTENT_TYPE_LATEST, generate_latest(self._registry))
        if path == b"/information.json":
            return Page(JSON, json.dumps(describe(self._router, self._entries), indent=2).encode())
        return Page(HTML, self._html().encode()) if path == b"/" else None

    def _html(self) -> str:
        described = describe(self._router, self._entries)
        entries = described.pop("information") | described
        rows = "".join(
            f"<tr><th>{html.escape(key.replace('_', ' '))}</th><td>{html.escape(_text(value))}</td></tr>\n"
            for key, value in entries.items()
        )
        title = "SMP router"
        return (
            f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title></head>\n'
            f"<body><h1>{title}</h1><table>\n{rows}</table></body></html>\n"
        )


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return " to ".join(str(part) for part in value.values())
    return {True: "yes", False: "no"}.get(value, str(value)) if isinstance(value, bool) else str(value)


class _RouterCollector(Collector):
    """Reads the router's numbers when somebody asks for them."""

    def __init__(self, router: Router) -> None:
        self._router = router

    def collect(self) -> Iterator[Metric]:
        router = self._router
        for name, value, text in (
            ("connections_open", router.connections, "Connections that are open"),
            ("queues", len(router.state.queues), "Queues"),
            ("messages_stored", router.state.stored_messages, "Messages waiting in all queues"),
            ("message_bytes", router.state.storage.total.message_bytes, "Bytes of messages waiting"),
            ("notifications_stored", router.state.stored_nmsgs, "NMSGs that nobody has taken yet"),
            ("services", len(router.state.services), "Services"),
            ("relays", router.relays, "Sessions with other routers"),
            ("relays_waiting", router.relays_waiting, "Forwarded commands without an answer yet"),
        ):
            yield GaugeMetricFamily(PREFIX + name, text, value)
        for name, text in COUNTERS.items():
            yield CounterMetricFamily(PREFIX + name, text, router.counts[name])

"""Metrics, health and the status page over plain local HTTP: a few GET paths, nothing else."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Collection
from pathlib import Path

from prometheus_client import CONTENT_TYPE_LATEST

from ntf_server.config import MetricsConfig
from ntf_server.health import Health
from ntf_server.metrics import counter, exposition
from ntf_server.status_page import StatusPage
from transport.plain_http import PLAIN, UNAVAILABLE, HttpPages, Page

FILE_FAILURES = counter("metrics_file_failures", "Attempts to write the metrics file that failed")

logger = logging.getLogger(__name__)


class HttpEndpoint(HttpPages):
    """Figures for programs, and whether the server is well."""

    def __init__(self, health: Health, status: StatusPage, hosts: Collection[str]) -> None:
        """`hosts`: names that it may be asked for by, beside `localhost` and IP addresses."""
        super().__init__(hosts)
        self._health = health
        self._status = status

    def page(self, path: bytes) -> Page | None:
        if path == b"/metrics":
            return Page(CONTENT_TYPE_LATEST, exposition())
        if path == b"/metrics/strict":
            return Page(CONTENT_TYPE_LATEST, exposition(old_names=False))
        if path == b"/health/live":
            return Page(PLAIN, b"live\n")
        if path != b"/health/ready":
            return self._status.page(path)
        if missing := self._health.missing():
            return Page(PLAIN, _lines("not ready", missing), UNAVAILABLE)
        return Page(PLAIN, _lines("ready", self._health.worries()))


def _lines(headline: str, lines: list[str]) -> bytes:
    return "\n".join([headline, *(f"- {line}" for line in lines), ""]).encode()


async def write_metrics_file(path: Path, config: MetricsConfig) -> None:
    """Keep `path` up to date, for ever; readers never see half a file.

    A missing folder or a full disk is said once and tried again: figures are not worth a daemon.
    """
    draft, failing = path.with_name(f".{path.name}.new"), False
    while True:
        try:
            await asyncio.to_thread(_replace, draft, path, exposition())
        except OSError as error:
            FILE_FAILURES.inc()
            if not failing:
                logger.error("cannot write the metrics to %s: %s; it is tried again", path, error.strerror)
            failing = True
        else:
            if failing:
                logger.info("the metrics are written to %s again", path)
            failing = False
        await asyncio.sleep(config.file_interval)


def _replace(draft: Path, path: Path, data: bytes) -> None:
    draft.write_bytes(data)
    os.replace(draft, path)

"""What `ntf-server start` does: the server as a program, with its signals."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
from collections import Counter
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

from ntf_server.app import App
from ntf_server.config import Config, ConfigError
from ntf_server.logs import log_loop_error, set_level, tell_left_out
from ntf_server.memory import Tidying, relax_garbage_collection
from ntf_server.metrics import gauge
from ntf_server.secret_files import readable_by_others, secret_files
from ntf_server.service_manager import ServiceManager
from transport.cancellation import TaskGroup
from transport.core_dumps import forbid_core_dumps
from transport.errors import TransportError
from transport.open_files import raise_limit

logger = logging.getLogger(__name__)

STDIN = 0
_IS_SPECIFIC = re.compile(r"[.:]|^\W*\d+\W*$").search
"A word of a task's name: an address, or a number."
TOGETHER = 1.0  # seconds; what stops a process often signals it and its process group, which is one wish
BUILD = gauge("build_info", "The version that runs; always 1", ["version"])


async def run_until_signal(
    config_dir: Path, load: Callable[[], Config], *, maintenance: bool, is_worker: bool = False
) -> int:
    """SIGTERM or SIGINT ends it in order, another one a moment later at once. `load` reads the configuration,
    now and at each SIGHUP. A worker also ends when its standard input does: whoever watched it is gone."""
    raise_limit()
    forbid_core_dumps()
    asyncio.get_running_loop().set_exception_handler(log_loop_error)
    config = load()
    app = App(config_dir, config)
    logger.info("%s", app.descriptors)
    for path in readable_by_others(secret_files(config_dir, config)):
        logger.warning("others on this machine can read %s: chmod 600 it", path)
    if maintenance:
        await app.check()
        print("Store and configuration are fine.")
        return 0
    BUILD.labels(metadata.version("ntf-server")).set(1)
    relax_garbage_collection()
    await Daemon(app, load, ServiceManager(os.environ), is_worker=is_worker).run()
    tell_left_out()
    logger.info("stopped")
    return 0


class Daemon:
    """An App that listens to signals and tells the service manager how it is."""

    def __init__(
        self, app: App, load: Callable[[], Config], manager: ServiceManager, *, is_worker: bool
    ) -> None:
        self._app = app
        self._is_worker = is_worker
        self._load = load
        self._manager = manager
        self._stop = asyncio.Event()
        self._ended_at = 0.0

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._end)
        loop.add_signal_handler(signal.SIGINT, self._end)
        loop.add_signal_handler(signal.SIGHUP, self._reload)
        loop.add_signal_handler(signal.SIGUSR1, self._describe)
        if self._is_worker:
            loop.add_reader(STDIN, self._hear_parent)
        async with TaskGroup() as tasks:
            watchdog = tasks.create_task(self._manager.keep_alive(), name="watchdog")
            tidying = tasks.create_task(Tidying().run(), name="memory")
            await self._app.run(self._stop, self._ready)
            watchdog.cancel()
            tidying.cancel()

    def _ready(self) -> None:
        app = self._app
        lines = [f"Server address: {app.address}", f"Listening on port {app.listener.port}"]
        if app.metrics_port:
            lines.append(f"Metrics on port {app.metrics_port}")
        if app.gateway_port:
            lines.append(f"Statement gateway on port {app.gateway_port}")
        try:
            # one write, also where output is not buffered: workers share this output
            print("".join(f"{line}\n" for line in lines), end="", flush=True)
        except OSError as error:  # whoever started us does not listen
            logger.warning("cannot print the address: %s", error.strerror)
        self._manager.ready()

    def _end(self) -> None:
        now = asyncio.get_running_loop().time()
        if self._stop.is_set():
            if now - self._ended_at >= TOGETHER:
                os._exit(1)
            return
        self._ended_at = now
        logger.info("stopping")
        self._manager.stopping()
        self._stop.set()

    def _hear_parent(self) -> None:
        """It never says anything."""
        if os.read(STDIN, 1):
            return
        asyncio.get_running_loop().remove_reader(STDIN)
        if not self._stop.is_set():
            logger.error("the process that watched this worker is gone")
            self._end()

    def _reload(self) -> None:
        self._manager.reloading()
        try:
            config = self._load()
            waiting = self._app.reload(config)
        except (ConfigError, TransportError, OSError) as error:
            logger.error("nothing was reloaded: %s", error)
        else:
            set_level(config.LOG)
            logger.warning("reloaded: certificate, keys of push providers, log level, limits")
            if waiting:
                logger.warning("changed, but needs a restart: %s", ", ".join(waiting))
        self._manager.ready()

    def _describe(self) -> None:
        """One line, so that it stays together."""
        tasks = Counter(_kind(task) for task in asyncio.all_tasks())
        parts = [f"{count} {name}" for name, count in tasks.most_common()]
        queues = [f"{count} {name}" for name, count in self._app.queues().items()]
        logger.warning("tasks: %s; queues: %s", ", ".join(parts), ", ".join(queues))


def _kind(task: asyncio.Task[object]) -> str:
    """The name of a task without the peer or the number that it is about: there may be thousands of them, and
    addresses of clients do not belong in a log."""
    name, coroutine = task.get_name(), task.get_coro()
    if name.startswith("Task-"):
        return getattr(coroutine, "__qualname__", "unnamed")
    return " ".join(word for word in name.split() if not _IS_SPECIFIC(word)) or "unnamed"

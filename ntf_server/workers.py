"""`ntf-server start --workers N`: N daemons on one port of this machine, started and watched by this process.

Python runs on one core; so there is one for each. They share the database as daemons on several machines do.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import signal
import sys
from collections.abc import Sequence

from ntf_server.config import Config, ConfigError
from ntf_server.stores import daemon_name
from smp_client.backoff import Backoff
from transport.cancellation import TaskGroup

log = logging.getLogger(__name__)

FIRST_DELAY, LONGEST_DELAY = 1.0, 60.0
"Seconds until a worker that ended is started again."
STEADY = 60.0
"One that ran for so long is started again without a longer delay."
WORKER = "--worker"
"Option of `ntf-server start` for a process that is to end with the one that started it."
USAGE = 2
"Exit code of what an operator has to put right, as of argparse: starting again would not help."


def check(config: Config, count: int) -> None:
    if config.STORE.database != "postgres":
        raise ConfigError("--workers needs [STORE] database = postgres: an SQLite file is for one process")
    if not config.TRANSPORT.port:
        raise ConfigError("--workers needs a fixed [TRANSPORT] port")
    for name, port in (
        ("[METRICS] port", config.METRICS.port),
        ("control_port", config.TRANSPORT.control_port),
    ):
        if port and port + count - 1 > 65535:
            raise ConfigError(f"--workers: {name} {port} leaves no ports for all workers")


def environment(config: Config, number: int) -> dict[str, str]:
    """What differs for a worker: its name, and what only one process can have."""
    env = {
        "NTF_TRANSPORT_REUSE_PORT": "on",
        "NTF_STORE_DAEMON": f"{daemon_name(config)}#{number}",
    }
    if config.METRICS.port:
        env["NTF_METRICS_PORT"] = str(config.METRICS.port + number - 1)
    if config.TRANSPORT.control_port:
        env["NTF_TRANSPORT_CONTROL_PORT"] = str(config.TRANSPORT.control_port + number - 1)
    if config.METRICS.file is not None:
        env["NTF_METRICS_FILE"] = f"{config.METRICS.file}.{number}"
    return env


class WorkerProcesses:
    """Runs until a signal, or until a worker says at its first start that it can never run."""

    def __init__(self, config: Config, arguments: Sequence[str]) -> None:
        """`arguments`: of `ntf-server start`, for each worker."""
        self._config = config
        self._arguments = arguments
        self._running: dict[int, asyncio.subprocess.Process] = {}
        self._stopping = asyncio.Event()
        self._code = 0

    async def run(self, count: int) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop, number)
        for number in (signal.SIGHUP, signal.SIGUSR1):
            loop.add_signal_handler(number, self._pass_on, number)
        async with TaskGroup() as tasks:
            for worker in range(1, count + 1):
                tasks.create_task(self._keep(worker), name=f"worker {worker}")
        return self._code

    def _stop(self, number: int) -> None:
        """One that follows ends workers at once: they know."""
        self._stopping.set()
        self._pass_on(number)

    def _pass_on(self, number: int) -> None:
        for process in self._running.values():
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)

    async def _keep(self, worker: int) -> None:
        """One that cannot even begin is a mistake of the operator's, and the end of all. Later it is not: the
        database may be away just then, and the others wait for it with their connections."""
        has_begun = False
        backoff = Backoff(FIRST_DELAY, LONGEST_DELAY, random.random)
        clock = asyncio.get_running_loop().time
        while not self._stopping.is_set():
            started = clock()
            exit_code = await self._run(worker)
            if self._stopping.is_set():
                return
            if exit_code == USAGE and not has_begun:
                self._code = USAGE
                self._stop(signal.SIGTERM)
                return
            has_begun = True
            if clock() - started >= STEADY:
                backoff.reset()
            delay = backoff.next()
            log.error("worker %d ended with %d; it is started again in %.0f s", worker, exit_code, delay)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(delay):
                    await self._stopping.wait()

    async def _run(self, worker: int) -> int:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "ntf_server", "start", WORKER, *self._arguments),
            stdin=asyncio.subprocess.PIPE,  # it ends with this process, however that ends
            env=os.environ | environment(self._config, worker),
            start_new_session=True,  # what a terminal sends comes by way of this process, once
        )
        self._running[worker] = process
        try:
            if self._stopping.is_set():
                process.terminate()
            return await process.wait()
        finally:
            del self._running[worker]
            if process.returncode is None:
                process.kill()

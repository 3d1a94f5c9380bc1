"""Guesses at the password of the control port, over as many connections as somebody on the machine likes."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

from tests.drills.world import DEADLINE, world
from tests.ports import free_port

SECONDS = 4.0
GUESSERS = 100
PASSWORD = "operator's own"


async def guess(port: int, answers: list[bytes]) -> None:
    """One after the other, and anew when the connection ends."""
    while True:
        with suppress(OSError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                while await reader.readline():  # the greeting, or the last answer
                    writer.write(b"auth %d\n" % len(answers))
                    answers.append(await reader.readline())
                    writer.write(b"stats\n")
            finally:
                writer.close()
        await asyncio.sleep(0.01)


async def log_in(port: int) -> bytes:
    """What the operator, who knows the password, gets once the guessing is over."""
    async with asyncio.timeout(DEADLINE):
        while True:
            with suppress(OSError):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                await reader.readline()
                writer.write(f"auth {PASSWORD}\n".encode())
                answer = await reader.readline()
                writer.close()
                if answer:
                    return answer
            await asyncio.sleep(0.1)


async def test_guesses_are_few_however_many_guess(tmp_path: Path) -> None:
    port, answers = free_port(), list[bytes]()
    env = {"NTF_TRANSPORT_CONTROL_PORT": str(port), "NTF_AUTH_CONTROL_PORT_ADMIN_PASSWORD": PASSWORD}

    async def attack() -> None:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(GUESSERS):
                tasks.create_task(guess(port, answers))

    async with world(tmp_path, seconds=SECONDS, env=env) as drill:
        service = await drill.measure(SECONDS, beside=attack())
        guesses = sum(map(bool, answers))
        print(service.row(f"guesses at the control port: {guesses}"))
        assert await log_in(port) == b"role: admin\n"
    assert set(answers) <= {b"AUTH\n", b""}
    assert 0 < guesses <= 2 * SECONDS  # one a second; a busy machine ends the attack later
    service.check()

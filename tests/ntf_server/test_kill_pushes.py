"""kill -9 under a load of notifications: what was stored and not pushed is pushed after the restart."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from ntf_demo.fake_push.server import FakePushConfig, FakePushServer
from protocol.device_token import ApnsToken, Provider
from protocol.encoding import EntityId, unb64
from protocol.push_messages import decode_pn_messages, open_push
from protocol.statuses import TokenInput
from smp_router.router import Router
from store.records import NewSubscription, NewToken, TokenKey
from store.sqlite import SqliteStore
from tests.ntf_server.test_cli import ANY_PORT, init

KILLS = 50
TOKENS, QUEUES_PER_TOKEN = 8, 4
RATE = 600.0
DEADLINE = 60.0

Entry = tuple[bytes, bytes]
"(notifier id, nonce): one notification."


class World:
    """A router and a push provider that live on, and a server that is killed again and again."""

    def __init__(self, folder: Path, router: Router, push: FakePushServer) -> None:
        self.folder = folder
        self.router = router
        self.push = push
        self.queues = router.load.create_queues(TOKENS * QUEUES_PER_TOKEN)
        self.secrets = {os.urandom(32).hex(): os.urandom(32) for _ in range(TOKENS)}
        self.pushed: list[Entry] = []
        self._read = 0

    @asynccontextmanager
    async def store(self) -> AsyncIterator[SqliteStore]:
        store = SqliteStore(self.folder / "d" / "ntf-server.db")
        await store.open()
        yield store
        await store.close()

    async def fill(self) -> None:
        async with self.store() as store:
            for number, (token, secret) in enumerate(self.secrets.items()):
                record = await store.create_token(
                    NewToken(
                        token_id=EntityId(os.urandom(24)),
                        device_token=ApnsToken(Provider.APNS_TEST, token.encode()),
                        verify_key=os.urandom(44),
                        dh_private=os.urandom(32),
                        dh_secret=secret,
                        code=os.urandom(32),
                        updated_on=0,
                    )
                )
                await store.move_token(record, TokenInput.CODE_MATCHED, 0)
                own = self.queues[number * QUEUES_PER_TOKEN : (number + 1) * QUEUES_PER_TOKEN]
                news = [
                    NewSubscription(
                        subscription_id=EntityId(os.urandom(24)),
                        token_key=record.key,
                        server=self.router.address,
                        notifier_id=queue.notifier_id,
                        notifier_key=queue.notifier_key.der,
                    )
                    for queue in own
                ]
                assert None not in await store.create_subscriptions(news)

    async def unsent(self) -> list[Entry]:
        """What a dead server left behind."""
        async with self.store() as store:
            keys = await store.unsent_tokens(after=TokenKey(0), limit=TOKENS)
            pushes = await store.pushes(keys)
        return [(e.notifier_id, e.nonce) for push in pushes for e in push.entries if not e.sent]

    def read_pushes(self) -> None:
        """Decrypt what the provider took since the last call, as the devices do."""
        pushes = self.push.pushes
        for push in pushes[self._read :]:
            data = json.loads(push.body)["notificationData"]
            boxed = unb64(data["message"].encode())
            plain = open_push(self.secrets[push.token], unb64(data["nonce"].encode()), boxed)
            self.pushed += [(entry.queue.notifier_id, entry.nonce) for entry in decode_pn_messages(plain)]
        self._read = len(pushes)

    async def start(self) -> asyncio.subprocess.Process:
        env = ANY_PORT | {
            "NTF_APNS_ALLOW_TEST_PROVIDER": "on",
            "NTF_APNS_TEST_PORT": str(self.push.port),
            "NTF_APNS_TEST_CA_FILE": str(self.push.ca_file),
        }
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "ntf_server", "start", "--config-dir", str(self.folder / "c")),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | env,
        )
        assert process.stdout is not None
        assert await process.stdout.readline()
        return process

    async def wait_for(self, left_behind: list[Entry], seen_before: int) -> None:
        """Until each entry, or a newer one of its queue, has been pushed since the restart."""
        async with asyncio.timeout(DEADLINE):
            while True:
                self.read_pushes()
                old = set(self.pushed[:seen_before])
                fresh = set(self.pushed[seen_before:])
                newer = {queue for queue, nonce in fresh if (queue, nonce) not in old}
                if all(entry in fresh or entry[0] in newer for entry in left_behind):
                    return
                await asyncio.sleep(0.02)

    async def wait_subscribed(self) -> None:
        async with asyncio.timeout(DEADLINE):
            while len(self.router.subscribed_notifiers()) < len(self.queues):
                await asyncio.sleep(0.02)


async def test_stored_notifications_survive_kills(tmp_path: Path) -> None:
    assert init(tmp_path).returncode == 0
    chance = random.Random(9)
    config = FakePushConfig(folder=tmp_path / "push", record_limit=1_000_000)
    (tmp_path / "push").mkdir()
    async with Router.start(host="127.0.0.1") as router, FakePushServer(config) as push:
        world = World(tmp_path, router, push)
        await world.fill()
        left_behind: list[Entry] = []
        total = 0
        for _ in range(KILLS):
            world.read_pushes()
            seen = len(world.pushed)
            process = await world.start()
            await world.wait_for(left_behind, seen)
            await world.wait_subscribed()
            push.delay = chance.choice([0.0, 0.05, 0.3])
            seconds = chance.uniform(0.05, 0.5)
            emitting = router.load.emit(world.queues, int(RATE * (seconds + 1)), RATE, fresh=True)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await emitting
            process.kill()
            await process.wait()
            left_behind = await world.unsent()
            total += len(left_behind)
            push.delay = 0.0
        assert total > KILLS  # the kills did come in the middle of things

"""The fake push service as a program, and as a child process of tests and benchmarks."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from ntf_demo.fake_push.server import CONTROL_PATH, FakePushConfig, FakePushServer
from ntf_server.push.http2 import CurlHttp2, Origin
from transport.cancellation import stop_signal
from transport.hosts import any_port_option

START_TIMEOUT: Final = 20.0
CONTROL_TIMEOUT: Final = 10.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Command line of the fake push service."""
    option, default = parser.add_argument, FakePushConfig
    option("--folder", type=Path, required=True, help="where its CA and certificate are written")
    option("--host", default=default.host, help="address to listen on")
    option("--port", type=any_port_option, default=default.port, help="port to listen on; 0: any free one")
    option("--record", type=Path, metavar="FILE", help="append pushes to FILE as JSON lines")
    option("--record-limit", type=int, default=default.record_limit, help="pushes kept in memory")
    option("--delay", type=float, default=default.delay, help="seconds until a push is answered")
    option("--apns-key", type=Path, metavar="PEM", help="public key that signs APNs tokens")
    option("--fcm-key", type=Path, metavar="PEM", help="public key of the FCM service account")
    option("--without-alpn", action="store_true", help="also serve clients that do not negotiate h2 in TLS")
    option("--body-limit", type=int, help="refuse longer bodies with 413")


def run(args: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM; the first line printed is JSON with address and CA file."""
    config = FakePushConfig(
        folder=args.folder,
        host=args.host,
        port=args.port,
        record_file=args.record,
        record_limit=args.record_limit,
        delay=args.delay,
        apns_key=_public_key(args.apns_key, ec.EllipticCurvePublicKey),
        fcm_key=_public_key(args.fcm_key, rsa.RSAPublicKey),
        body_limit=args.body_limit,
        requires_alpn=not args.without_alpn,
    )
    asyncio.run(_serve(config))
    return 0


async def _serve(config: FakePushConfig) -> None:
    stop = stop_signal()
    async with FakePushServer(config) as server:
        address = {"host": config.host, "port": server.port, "ca_file": str(server.ca_file)}
        print(json.dumps(address), flush=True)
        await stop.wait()
        print(json.dumps(server.summary()), flush=True)


def _public_key(path: Path | None, kind: type[Any]) -> Any:
    if path is None:
        return None
    key = serialization.load_pem_public_key(path.read_bytes())
    if not isinstance(key, kind):
        raise SystemExit(f"{path} holds no public key of the right kind")
    return key


@dataclass(frozen=True, slots=True)
class FakePushProcess:
    """A fake push service in a process of its own."""

    host: str
    port: int
    ca_file: str
    pid: int
    _http: CurlHttp2

    async def control(self, **command: Any) -> dict[str, Any]:
        """Send a command to the control endpoint; returns its counts."""
        origin = Origin(self.host, self.port, ca_file=self.ca_file)
        body = json.dumps(command).encode()
        response = await self._http.post(origin, CONTROL_PATH, [], body, CONTROL_TIMEOUT)
        answer: dict[str, Any] = json.loads(response.body)
        if response.status != 200:
            raise ValueError(answer["error"])
        return answer


@contextlib.asynccontextmanager
async def fake_push_process(folder: Path, *options: str) -> AsyncIterator[FakePushProcess]:
    """Run `python -m ntf_demo.fake_push` with further command line options until the block is left."""
    command = [sys.executable, "-m", "ntf_demo.fake_push", "--folder", str(folder), *options]
    child = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    http = CurlHttp2()
    try:
        assert child.stdout is not None
        async with asyncio.timeout(START_TIMEOUT):
            address = json.loads(await child.stdout.readline())
        yield FakePushProcess(address["host"], address["port"], address["ca_file"], child.pid, http)
    finally:
        await http.close()
        with contextlib.suppress(ProcessLookupError):
            child.terminate()
        await child.communicate()

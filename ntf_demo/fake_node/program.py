"""The fake node as a program."""

from __future__ import annotations

import argparse
import asyncio
import json
import signal

from ntf_demo.fake_node.server import FakeNode


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Command line of the fake node."""
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=9944, help="port to listen on; 0: any free one")


def run(args: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM; the first line printed is JSON with the address."""
    asyncio.run(_serve(args.host, args.port))
    return 0


async def _serve(host: str, port: int) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with FakeNode(host=host, port=port) as node:
        print(json.dumps({"url": node.url}), flush=True)
        await stop.wait()

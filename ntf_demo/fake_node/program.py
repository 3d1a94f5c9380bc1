"""The fake node as a program."""

from __future__ import annotations

import argparse
import asyncio
import json

from ntf_server.config import LOCALHOST, ConfigError
from transport.cancellation import stop_signal
from transport.hosts import any_port_option


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Command line of the fake node."""
    parser.add_argument("--host", default=LOCALHOST, help="address to listen on")
    about = "port to listen on; 0: any free one"
    parser.add_argument("--port", type=any_port_option, default=9944, help=about)


def run(args: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM; the first line printed is JSON with the address."""
    asyncio.run(_serve(args.host, args.port))
    return 0


async def _serve(host: str, port: int) -> None:
    try:
        from ntf_demo.fake_node.server import FakeNode  # with libraries of its own
    except ImportError:
        raise ConfigError("fake-node needs pip install 'ntf-server[statements]'") from None
    stop = stop_signal()
    async with FakeNode(host=host, port=port) as node:
        print(json.dumps({"url": node.url}), flush=True)
        await stop.wait()

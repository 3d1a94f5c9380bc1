"""`ntf-server demo`: the whole path of one notification, on this machine, in a few seconds."""

from __future__ import annotations

import argparse
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from ntf_server import setup
from ntf_server.app import App, running
from ntf_server.clock import SystemClock, as_datetime
from ntf_server.config import Config
from ntf_server.fake_push.server import FakePushConfig, FakePushServer
from smp_router.config import RouterConfig
from smp_router.router import Router
from transport.certificates import KeyAlgorithm

LOCALHOST = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Playground:
    """A router, a push provider and a notification server that know each other."""

    router: Router
    push: FakePushServer
    server: App


@asynccontextmanager
async def playground(
    folder: Path, *, router: RouterConfig | None = None, record_file: Path | None = None
) -> AsyncIterator[Playground]:
    """All three on free ports of this machine, with everything they write in `folder`."""
    async with AsyncExitStack() as stack:
        smp = await stack.enter_async_context(Router.start(router, host=LOCALHOST))
        push_config = FakePushConfig(folder=folder / "push", record_file=record_file)
        push = await stack.enter_async_context(FakePushServer(push_config))
        server = await stack.enter_async_context(running(_server(folder, push)))
        yield Playground(smp, push, server)


def _server(folder: Path, push: FakePushServer) -> App:
    options = setup.InitOptions(
        config_dir=folder / "etc",
        data_dir=folder / "data",
        host=LOCALHOST,
        port=0,
        algorithm=KeyAlgorithm.ED25519,
    )
    config = setup.init(options, as_datetime(SystemClock().now()))
    return App(options.config_dir, _with_test_provider(config, push))


def _with_test_provider(config: Config, push: FakePushServer) -> Config:
    return replace(
        config,
        TRANSPORT=replace(config.TRANSPORT, listen=LOCALHOST),
        APNS=replace(
            config.APNS,
            allow_test_provider=True,
            test_host=LOCALHOST,
            test_port=push.port,
            test_ca_file=push.ca_file,
        ),
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the demonstration."""
    parser.add_argument("--keep", action="store_true", help="leave everything running until Ctrl-C")


def run(args: argparse.Namespace) -> int:
    """Run the demonstration; return the exit code of the process."""
    raise SystemExit("the demonstration is not available in this build")

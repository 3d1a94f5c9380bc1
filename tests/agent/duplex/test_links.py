"""Short links, and sending through a proxy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from agent.duplex.agent import open_duplex
from agent.duplex.events import Confirmed, Connected, ContactRequested, Failed, MessageSent
from agent.duplex.replies import RouterRefused
from agent.errors import LinkRefused, Prohibited
from protocol.agent.short_links import parse_short_link
from protocol.crypto import Ed25519PrivateKey
from smp_client.proxy import ProxyConfig, ProxyPolicy
from smp_router.config import RouterConfig
from smp_router.router import Router
from tests.agent.duplex.world import Person, config, connect, person

ROOT = Ed25519PrivateKey(bytes(range(32)))


async def connected(creator: Person, joiner: Person) -> None:
    confirmed = await creator.event(Confirmed)
    await creator.agent.allow(confirmed.connection_id, b"creator")
    await creator.event(Connected)
    await joiner.event(Connected)


@pytest.mark.parametrize("pq", [False, True])
async def test_a_short_invitation(tmp_path: Path, pq: bool) -> None:
    async with (
        Router.start() as router,
        person(tmp_path / "alice.db", router.address) as alice,
        person(tmp_path / "bob.db", router.address) as bob,
        person(tmp_path / "carol.db", router.address) as carol,
    ):
        hers, link = await alice.agent.create_short_invitation(b"Alice's profile", pq=pq)
        assert link.startswith("simplex:/i#")
        await alice.agent.set_link_data(hers, b"Alice's other profile")
        only_host = link.partition("?")[0] + "?h=127.0.0.1"
        assert await bob.agent.link_data(only_host) == b"Alice's other profile"
        with pytest.raises(RouterRefused):  # it is Bob's now
            await carol.agent.link_data(link)
        his = await bob.agent.join(only_host, b"Bob", pq=pq)
        await connected(alice, bob)
        await alice.agent.send(hers, b"hello")
        message = await bob.reads()
        assert (message.connection_id, message.body) == (his, b"hello")
        await carol.agent.join(link, b"Carol")
        assert (await carol.event(Failed)).error == "SMP AUTH"


async def test_an_address_whose_link_came_first(tmp_path: Path) -> None:
    async with (
        Router.start() as router,
        person(tmp_path / "alice.db", router.address) as alice,
        person(tmp_path / "bob.db", router.address) as bob,
    ):
        prepared = alice.agent.prepare_address(ROOT, b"group")
        link = prepared.link().text()
        address, made = await alice.agent.create_prepared(prepared, b"profile")
        assert made == link
        assert await bob.agent.link_data(link) == b"profile"
        await bob.agent.join(link, b"Bob")
        request = await alice.event(ContactRequested)
        await alice.agent.accept(request.invitation_id, b"Alice")
        await connected(bob, alice)
        assert await alice.agent.create_prepared(prepared, b"again") == (address, link)
        with pytest.raises(LinkRefused):
            await bob.agent.create_prepared(prepared, b"with other keys for the queue")
        assert len(await bob.agent.connections()) == 1
        await alice.agent.delete_link(address)
        with pytest.raises(RouterRefused):
            await bob.agent.link_data(link)
        with pytest.raises(Prohibited):
            await alice.agent.delete_link(address)


async def test_links_that_lead_nowhere(tmp_path: Path) -> None:
    async with (
        Router.start() as router,
        person(tmp_path / "alice.db", router.address) as alice,
        person(tmp_path / "bob.db", router.address) as bob,
    ):
        hers, link = await alice.agent.create_short_invitation(pq=False)
        other_key = replace(parse_short_link(link), link_key=bytes(32))
        await bob.agent.join(other_key.text(), b"Bob")
        assert (await bob.event(Failed)).error == "A_LINK"
        for wrong in (other_key.text(), "https://example.org/a#" + "A" * 43, "rubbish"):
            with pytest.raises(Prohibited):
                await bob.agent.link_data(wrong)
        await bob.agent.join("https://example.org/a#" + "A" * 43, b"Bob")
        assert (await bob.event(Failed)).error == "A_LINK"
        without, _ = await alice.agent.create_invitation()
        with pytest.raises(Prohibited):
            await alice.agent.set_link_data(without, b"")
        with pytest.raises(RouterRefused):  # whoever had the link with a wrong key has used it up
            await alice.agent.set_link_data(hers, b"is it there?")


async def test_through_a_proxy(tmp_path: Path) -> None:
    async with (
        Router.start() as one,
        Router.start() as two,
        Router.start(RouterConfig(private_relays=True)) as relay,
        person(tmp_path / "alice.db", one.address) as alice,
    ):
        hidden = replace(
            config(tmp_path / "bob.db", two.address),
            proxy=ProxyConfig(policy=ProxyPolicy.ALWAYS, proxies=(relay.address,)),
        )
        async with open_duplex(hidden) as agent:
            bob = Person(agent)
            hers, his = await connect(alice, bob)
            before = one.connections
            for number in range(3):
                await bob.agent.send(his, b"%d" % number)
                assert (await alice.reads()).body == b"%d" % number
                await bob.event(MessageSent)
            assert one.connections == before == 2  # Alice and the relay: Bob is never there
            await alice.agent.send(hers, b"who are you?")
            assert (await bob.reads()).body == b"who are you?"


@pytest.mark.parametrize("policy", [None, ProxyPolicy.ALWAYS])
async def test_routers_with_passwords(tmp_path: Path, policy: ProxyPolicy | None) -> None:
    """One for creating queues, one for acting as a proxy; the same if nothing else is said."""
    closed = RouterConfig(password=b"open sesame", private_relays=True)
    async with Router.start(closed) as router, person(tmp_path / "carol.db", router.address) as carol:
        with pytest.raises(RouterRefused, match="AUTH"):
            await carol.agent.create_invitation()
        passwords = {router.address: b"open sesame"}
        proxy = policy and ProxyConfig(policy=policy, proxies=(router.address,), passwords=passwords)
        made = replace(config(tmp_path / "alice.db", router.address), passwords=passwords, proxy=proxy)
        async with (
            Router.start() as other,
            open_duplex(made) as agent,
            person(tmp_path / "bob.db", other.address) as bob,
        ):
            alice = Person(agent)
            hers, _ = await connect(alice, bob, pq=False)
            await agent.send(hers, b"through the proxy")
            assert (await bob.reads()).body == b"through the proxy"

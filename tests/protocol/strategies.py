"""Every message and value of the protocol, as Hypothesis strategies."""

from __future__ import annotations

from hypothesis import strategies as st

from protocol import ntf_commands as ntf
from protocol import smp_messages as smp
from protocol.addresses import SmpQueueNtf, SmpServer
from protocol.crypto import (
    Ed448PrivateKey,
    Ed448PublicKey,
    Ed25519PrivateKey,
    Ed25519PublicKey,
    X25519PrivateKey,
    X25519PublicKey,
    is_weak,
)
from protocol.device_token import ApnsToken, FcmToken, Provider, WebPushToken
from protocol.encoding import CorrId, EntityId
from protocol.errors import ErrorType
from protocol.names import NameRecord
from protocol.push_messages import PnMessage
from protocol.statuses import SubState, SubStatus, TokenStatus
from protocol.versions import VersionRange

raw32 = st.binary(min_size=32, max_size=32)
raw57 = st.binary(min_size=57, max_size=57)
shorts = st.binary(max_size=255)
entity_ids = shorts.map(EntityId)
corr_ids = shorts.map(CorrId)
bodies = st.binary(max_size=400)

x25519_keys = raw32.map(X25519PublicKey).filter(lambda key: not is_weak(key))
signing_keys = st.one_of(raw32.map(Ed25519PublicKey), raw57.map(Ed448PublicKey))
public_keys = st.one_of(x25519_keys, signing_keys.filter(lambda key: not is_weak(key)))
private_keys = st.one_of(
    raw32.map(Ed25519PrivateKey), raw32.map(X25519PrivateKey), raw57.map(Ed448PrivateKey)
)

apns_tokens = st.builds(ApnsToken, st.sampled_from([p for p in Provider if p.value.startswith(b"A")]), shorts)
web_push_tokens = st.builds(
    WebPushToken,
    shorts,
    shorts,
    shorts,
    st.binary(min_size=16, max_size=16),
    st.binary(min_size=65, max_size=65),
)
device_tokens = st.one_of(apns_tokens, st.builds(FcmToken, shorts), web_push_tokens)

hosts = st.from_regex(r"[A-Za-z0-9._-]{1,40}|\[[0-9A-Fa-f:.]{2,30}\]", fullmatch=True)
ports = st.one_of(st.just(""), st.integers(1, 65535).map(str))
smp_servers = st.builds(SmpServer, st.lists(hosts, min_size=1, max_size=3).map(tuple), ports, raw32)
queues = st.builds(SmpQueueNtf, smp_servers, entity_ids)
pn_messages = st.builds(
    PnMessage,
    queues,
    st.integers(0, 2**63 - 1),
    st.binary(min_size=24, max_size=24),
    st.binary(max_size=200),
)

ERRORS = (
    [
        "BLOCK",
        "SESSION",
        "AUTH",
        "SERVICE",
        "CRYPTO",
        "QUOTA",
        "EXPIRED",
        "NO_MSG",
        "LARGE_MSG",
        "INTERNAL",
        "DUPLICATE_",
    ]
    + [f"CMD {word}" for word in ["UNKNOWN", "SYNTAX", "PROHIBITED", "NO_AUTH", "HAS_AUTH", "NO_ENTITY"]]
    + ["BLOCKED reason=spam", "BLOCKED reason=content,notice={}", "NAME NO_RESOLVER", "NAME RESOLVER x"]
    + ["PROXY BASIC_AUTH", "PROXY PROTOCOL PROXY PROTOCOL QUOTA", "PROXY BROKER NETWORK"]
    + ["PROXY BROKER NO_SERVICE"]
    + ["PROXY BROKER TRANSPORT HANDSHAKE BAD_AUTH", "PROXY BROKER UNEXPECTED \x02xy"]
)
errors = st.one_of(
    st.sampled_from(ERRORS).map(lambda text: ErrorType(text.encode())),
    st.binary(max_size=40).map(lambda text: ErrorType(b"STORE " + text)),
)
sub_statuses = st.one_of(
    st.sampled_from([state for state in SubState if state is not SubState.ERR]).map(SubStatus),
    st.text(max_size=30).map(lambda detail: SubStatus(SubState.ERR, detail)),
)

ntf_commands: st.SearchStrategy[ntf.NtfCommand] = st.one_of(
    st.builds(ntf.Tnew, device_tokens, public_keys, x25519_keys),
    st.builds(ntf.Tvfy, shorts),
    st.just(ntf.Tchk()),
    st.builds(ntf.Trpl, device_tokens),
    st.just(ntf.Tdel()),
    st.builds(ntf.Tcrn, st.integers(0, 65535)),
    st.builds(ntf.Snew, entity_ids, queues, private_keys),
    st.just(ntf.Schk()),
    st.just(ntf.Sdel()),
    st.just(ntf.Ping()),
)
ntf_responses: st.SearchStrategy[ntf.NtfResponse] = st.one_of(
    st.builds(ntf.IdTkn, entity_ids, x25519_keys),
    st.builds(ntf.IdSub, entity_ids),
    st.just(ntf.Ok()),
    st.builds(ntf.Err, errors),
    st.builds(ntf.Tkn, st.sampled_from(TokenStatus)),
    st.builds(ntf.Sub, sub_statuses),
    st.just(ntf.Pong()),
)

version_ranges = st.tuples(st.integers(0, 65535), st.integers(0, 65535)).map(
    lambda pair: VersionRange(min(pair), max(pair))
)
queue_sets = st.builds(smp.QueueSet, st.integers(-(2**63), 2**63 - 1), st.binary(min_size=16, max_size=16))
notifier_keys = st.builds(smp.NotifierKeys, public_keys, x25519_keys)
notifier_ids = st.builds(smp.NotifierIds, entity_ids, x25519_keys)


link_data = st.builds(smp.LinkData, bodies, bodies)


@st.composite
def news(draw: st.DrawFn) -> smp.New:
    """A link belongs to a mode, and only a contact's link has an id."""
    mode = draw(st.sampled_from([None, *smp.QueueMode]))
    link = None
    if mode is not None and draw(st.booleans()):
        link_id = draw(entity_ids) if mode is smp.QueueMode.CONTACT else None
        link = smp.NewLink(link_id, draw(entity_ids), draw(link_data))
    return smp.New(
        recipient_key=draw(public_keys),
        dh_key=draw(x25519_keys),
        password=draw(st.none() | shorts),
        subscribe=draw(st.booleans()),
        mode=mode,
        link=link,
        notifier=draw(st.none() | notifier_keys),
    )


ids = st.builds(
    smp.Ids,
    recipient_id=entity_ids,
    sender_id=entity_ids,
    dh_key=x25519_keys,
    mode=st.sampled_from([None, *smp.QueueMode]),
    link_id=st.none() | entity_ids,
    service_id=st.none() | entity_ids,
    notifier=st.none() | notifier_ids,
)
names = st.from_regex(r"[a-z0-9]([a-z0-9-]{0,8}[a-z0-9])?\.(simplex|testing|example\.com)", fullmatch=True)
texts = st.text(max_size=20)
name_records = st.builds(
    NameRecord,
    texts,
    texts,
    texts,
    *[st.none() | texts] * 3,
    *[st.lists(texts, max_size=3).map(tuple)] * 2,
    *[st.none() | texts] * 4,
)
smp_commands: st.SearchStrategy[smp.SmpCommand] = st.one_of(
    news(),
    st.sampled_from(
        [smp.Sub(), smp.Ndel(), smp.Get(), smp.Off(), smp.Del(), smp.Que(), smp.Nsub(), smp.Ping()]
    ),
    st.sampled_from([smp.Ldel(), smp.Lget()]),
    st.builds(smp.Rkey, st.lists(public_keys, min_size=1, max_size=4).map(tuple)),
    st.builds(smp.Lset, entity_ids, link_data),
    st.builds(smp.Lkey, public_keys),
    st.builds(smp.Prxy, smp_servers, st.none() | shorts),
    st.builds(smp.Pfwd, st.integers(0, 65535), x25519_keys, bodies),
    st.builds(smp.Rfwd, bodies),
    st.builds(smp.Subs, queue_sets),
    st.builds(smp.Nsubs, queue_sets),
    st.builds(smp.Key, public_keys),
    st.builds(smp.Skey, public_keys),
    st.builds(smp.Nkey, notifier_keys),
    st.builds(smp.Ack, shorts),
    st.builds(smp.Send, st.booleans(), bodies),
    st.builds(smp.Rslv, names),
)
smp_messages: st.SearchStrategy[smp.SmpMessage] = st.one_of(
    ids,
    st.builds(smp.Nid, notifier_ids),
    st.builds(smp.Sok, st.none() | entity_ids),
    st.builds(smp.Soks, queue_sets),
    st.builds(smp.Ends, queue_sets),
    st.builds(smp.Msg, shorts, bodies),
    st.builds(smp.Nmsg, st.binary(min_size=24, max_size=24), shorts),
    st.sampled_from([smp.End(), smp.Deld(), smp.Alls(), smp.Ok(), smp.Pong()]),
    st.builds(smp.Info, bodies),
    st.builds(smp.Lnk, entity_ids, link_data),
    st.builds(smp.Pkey, shorts, version_ranges, st.lists(bodies, min_size=1, max_size=4).map(tuple), bodies),
    st.builds(smp.Pres, bodies),
    st.builds(smp.Rres, bodies),
    st.builds(smp.Rname, name_records),
    st.builds(smp.Err, errors),
)
ntf_versions = st.integers(1, 3)
smp_versions = st.integers(6, 20)

// Prints tests/vectors/statements.json: statements signed by @polkadot/util-crypto (npm), which shares no code with ours.
import * as c from '@polkadot/util-crypto';
import { u8aConcat, u8aToHex, compactToU8a, stringToU8a, bnToU8a } from '@polkadot/util';
await c.cryptoWaitReady();
const seed = (n) => c.blake2AsU8a(stringToU8a('seed ' + n), 256);
const bytes = (n, word) => c.blake2AsU8a(stringToU8a(word + n), 256);
const le64 = (v) => bnToU8a(v, { bitLength: 64, isLe: true });
function fields(s) {
  const out = [];
  if (s.key) out.push(u8aConcat([1], s.key));
  out.push(u8aConcat([2], le64(s.expiry)));
  if (s.channel) out.push(u8aConcat([3], s.channel));
  s.topics.forEach((t, i) => { if (t) out.push(u8aConcat([4 + i], t)); });
  if (s.data) out.push(u8aConcat([8], compactToU8a(s.data.length), s.data));
  return out;
}
const kinds = {
  sr25519: (n, m) => { const p = c.sr25519PairFromSeed(seed(n)); return [0, c.sr25519Sign(m, p), p.publicKey]; },
  ed25519: (n, m) => { const p = c.ed25519PairFromSeed(seed(n)); return [1, c.ed25519Sign(m, p), p.publicKey]; },
  secp256k1: (n, m) => { const p = c.secp256k1PairFromSeed(seed(n)); return [2, c.secp256k1Sign(m, p, 'blake2'), p.publicKey]; },
};
const vectors = [];
let n = 0;
for (const kind of Object.keys(kinds)) {
  for (const [topics, size, extra] of [[0, null, false], [1, 0, false], [2, 5, true], [4, 63, false], [4, 64, true], [3, 16384, false], [1, 70000, true]]) {
    n += 1;
    const s = {
      key: extra ? bytes(n, 'key') : null, channel: extra ? bytes(n, 'channel') : null,
      expiry: (BigInt(1800000000 + n) << 32n) + BigInt(n),
      topics: [0, 1, 2, 3].map((i) => (i < topics ? bytes(n, 'topic' + i) : null)),
      data: size === null ? null : new Uint8Array(size).map((_, i) => (i * 7 + n) & 255),
    };
    const parts = fields(s), message = u8aConcat(...parts);
    const [variant, signature, signer] = kinds[kind](n, message);
    const encoded = u8aConcat(compactToU8a(parts.length + 1), [0, variant], signature, signer, message);
    vectors.push({ kind, encoded: u8aToHex(encoded), signer: u8aToHex(signer), hash: u8aToHex(c.blake2AsU8a(encoded, 256)),
      expiry: s.expiry.toString(), topics: s.topics.map((t) => t && u8aToHex(t)), data_size: size });
  }
}
console.log(JSON.stringify(vectors));

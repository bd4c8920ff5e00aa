// The page's data: scenes, which Python has executed and packed (ringlet/schedule/explore/embed.py), as objects.

const data = JSON.parse(document.getElementById("data").textContent);
const packs = new Map(); // row of data.algorithms -> promise of {places, scenes}

async function inflate(text) {
  const packed = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  return new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"))).json();
}

const rooted = (collective) => data.rooted.includes(collective);
const rowOf = (name, collective) => data.algorithms.find((row) => row.name === name && row.collective === collective);

async function unpack(row) {
  const { index, scenes } = await inflate(row.data);
  const places = new Map();
  for (const world of data.worlds)
    for (const [words] of data.hosts[world])
      for (let root = 0; root < (rooted(row.collective) ? world : 1); root++) places.set(`${world} ${words} ${root}`, index[places.size]);
  return { places, scenes };
}

/** A scene as `scene` of embed.py describes it, with frames[moment][rank][box]; null if the algorithm has none there. */
async function load(row, world, hosts, root) {
  if (!packs.has(row)) packs.set(row, unpack(row));
  const { places, scenes } = await packs.get(row);
  const packed = scenes[places.get(`${world} ${hosts} ${root}`)];
  if (!packed) return null;
  const [ranks, texts] = [[], []]; // of the nodes: the ranks in it as a mask, and "((0+1)+(2+3))"
  for (const terms of packed.nodes) {
    const under = Array.isArray(terms) ? terms : [];
    ranks.push(under.length ? under.reduce((mask, term) => mask | ranks[term], 0) : 1 << terms);
    texts.push(under.length ? `(${under.map((term) => texts[term]).join("+")})` : String(terms));
  }
  const frames = packed.done.map(() => Array.from({ length: world }, () => []));
  for (const value of objects(packed.contents, ["moment", "rank", "box", "origin", "node", "until"])) {
    Object.assign(value, { ranks: ranks[value.node], text: texts[value.node] });
    for (const frame of frames.slice(value.moment)) frame[value.rank][value.box] = value;
  }
  const moves = objects(packed.messages, ["verb", "source", "target", "first", "into", "count", "begins", "ends"]);
  const [messages, copies] = [moves.filter(({ verb }) => verb < 2), moves.filter(({ verb }) => verb === 2)];
  const known = { algorithm: row.name, collective: row.collective, world, root, barrier: row.collective === "barrier" };
  const hostOf = data.hosts[world].find(([words]) => words === hosts)[1];
  return { ...packed, ...known, hosts: hostOf, frames, messages, copies, moments: frames.length - 1 };
}

function objects(columns, names) {
  const filled = columns.map((steps) => {
    let sum = 0;
    return steps.map((step) => (sum += step));
  });
  return (filled[0] ?? []).map((_, i) => Object.fromEntries(names.map((name, k) => [name, filled[k][i]])));
}

const ranksIn = (mask) => [...Array(31).keys()].filter((rank) => (mask >> rank) & 1);
const boxesOf = (scene) => (scene.byRank ? scene.world : scene.parts);

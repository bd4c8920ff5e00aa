// The page's data, as ringlet/schedule/explore/embed.py packed it, back into schedules.

const VERBS = ["send", "recv", "reduce", "copy"];
const data = JSON.parse(document.getElementById("data").textContent);
const unpacked = new Map(); // row of data.algorithms -> promise of {bytes, index, places}

async function inflate(text) {
  const packed = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

class Reader {
  constructor(bytes, at = 0) {
    this.bytes = bytes;
    this.at = at;
  }

  number() {
    let value = 0;
    for (let shift = 0; ; shift += 7) {
      const byte = this.bytes[this.at++];
      value += (byte & 127) * 2 ** shift;
      if (byte < 128) return value;
    }
  }
}

const rooted = (collective) => data.rooted.includes(collective);
const placeKey = (world, hosts, root) => `${world} ${hosts} ${root}`;

async function unpack(row) {
  const reader = new Reader(await inflate(row.data));
  const index = new Map();
  for (const world of data.worlds) {
    for (const [hosts] of data.hosts[world]) {
      for (let root = 0; root < (rooted(row.collective) ? world : 1); root++) {
        const number = reader.number();
        if (number) index.set(placeKey(world, hosts, root), number - 1);
      }
    }
  }
  const places = [];
  while (reader.at < reader.bytes.length) {
    const length = reader.number();
    places.push(reader.at);
    reader.at += length;
  }
  return { bytes: reader.bytes, index, places };
}

/** The row of an algorithm for a collective; undefined where there is none. */
const rowOf = (name, collective) => data.algorithms.find((row) => row.name === name && row.collective === collective);

/** What all ranks do, or null where the algorithm has no schedule for that place. */
async function load(row, world, hosts, root) {
  if (!unpacked.has(row)) unpacked.set(row, unpack(row));
  const { bytes, index, places } = await unpacked.get(row);
  const number = index.get(placeKey(world, hosts, root));
  if (number === undefined) return null;
  const hostOf = data.hosts[world].find(([words]) => words === hosts)[1];
  const place = { algorithm: row.name, collective: row.collective, world, root, hosts: hostOf };
  return read(new Reader(bytes, places[number]), place);
}

function read(reader, place) {
  const { world, collective, root } = place;
  const parts = reader.number();
  const ranks = [];
  for (let rank = 0; rank < world; rank++) {
    const rounds = [];
    for (let left = reader.number(); left > 0; left--) {
      const steps = [];
      for (let more = reader.number(); more > 0; more--) {
        const verb = VERBS[reader.number()];
        const peer = (reader.number() + rank) % (verb === "copy" ? parts : world);
        const first = (reader.number() + rank) % parts;
        steps.push({ verb, peer, first, count: reader.number() });
      }
      rounds.push(steps);
    }
    ranks.push(rounds);
  }
  const each = (chunks) => ranks.map((_, rank) => chunks(collective, rank, world, root, parts));
  return { ...place, parts, ranks, inputs: each(inputChunks), outputs: each(outputChunks) };
}

// As ringlet/schedule/collectives.py: [first, count].
function inputChunks(collective, rank, world, root, parts) {
  if (collective === "broadcast" || collective === "scatter") return rank === root ? [0, parts] : [0, 0];
  if (collective === "all_gather" || collective === "gather") return [rank, 1];
  return { all_to_all: [0, world], barrier: [0, 0] }[collective] ?? [0, parts];
}

function outputChunks(collective, rank, world, root, parts) {
  if (collective === "reduce" || collective === "gather") return rank === root ? [0, parts] : [0, 0];
  if (collective === "reduce_scatter" || collective === "scatter") return [rank, 1];
  return { all_to_all: [world, world], barrier: [0, 0] }[collective] ?? [0, parts];
}

/** How many chunks make S, the collective's unit of bytes. */
const partsOfS = (schedule) => (data.divided.includes(schedule.collective) ? schedule.parts : schedule.world);

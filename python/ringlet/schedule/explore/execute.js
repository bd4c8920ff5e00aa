// One symbolic execution, as ringlet/schedule/execution.py and frames.py: the port that test_explore.py compares.
// A moment counts rounds on a common clock; frame 0 is the input, frame m what has been reached after m rounds.

/** Expression trees, each once: trees that differ only in the order of a node's first two terms are one. */
class Trees {
  constructor() {
    this.terms = [];
    this.ranks = [];
    this.depth = [];
    this.numbers = new Map();
  }

  leaf(rank) {
    return this.find(`leaf ${rank}`, [], 1 << rank, 0);
  }

  combine(terms) {
    const lowest = (tree) => this.ranks[tree] & -this.ranks[tree];
    const ordered = [...terms.slice(0, 2).sort((a, b) => lowest(a) - lowest(b)), ...terms.slice(2)];
    const ranks = terms.reduce((mask, tree) => mask | this.ranks[tree], 0);
    return this.find(ordered.join(), ordered, ranks, 1 + Math.max(...terms.map((tree) => this.depth[tree])));
  }

  find(key, terms, ranks, depth) {
    if (!this.numbers.has(key)) {
      this.numbers.set(key, this.terms.length);
      this.terms.push(terms);
      this.ranks.push(ranks);
      this.depth.push(depth);
    }
    return this.numbers.get(key);
  }
}

const ranksIn = (mask) => [...Array(31).keys()].filter((rank) => (mask >> rank) & 1);
const bitCount = (mask) => ranksIn(mask).length;

/** The k-th send from a to b meets the k-th recv or reduce at b from a. */
function pairMessages({ ranks }) {
  const sends = new Map();
  const receives = new Map();
  const put = (map, source, target, entry) => {
    const key = `${source} ${target}`;
    if (!map.has(key)) map.set(key, []);
    map.get(key).push(entry);
  };
  ranks.forEach((rounds, rank) =>
    rounds.forEach((steps, round) => {
      for (const step of steps) {
        if (step.verb === "send") put(sends, rank, step.peer, { round, step });
        else if (step.verb !== "copy") put(receives, step.peer, rank, { round, step });
      }
    }),
  );
  const messages = [];
  for (const [key, sent] of sends) {
    const [source, target] = key.split(" ").map(Number);
    sent.forEach(({ round, step }, index) => {
      const met = receives.get(key)[index];
      messages.push({
        ...{ source, sourceRound: round, target, targetRound: met.round },
        ...{ verb: met.step.verb, first: step.first, into: met.step.first, count: step.count },
      });
    });
  }
  return messages.sort((a, b) => a.source - b.source || a.target - b.target);
}

class Execution {
  constructor(schedule) {
    this.schedule = schedule;
    this.trees = new Trees();
    this.messages = pairMessages(schedule);
    this.touching = schedule.ranks.map((rounds) => rounds.map(() => []));
    for (const message of this.messages) {
      this.touching[message.source][message.sourceRound].push(message);
      this.touching[message.target][message.targetRound].push(message);
    }
    this.at = schedule.ranks.map(() => -1);
    this.open = schedule.ranks.map(() => 0);
    this.incoming = schedule.ranks.map(() => []);
    this.heard = schedule.ranks.map((_, rank) => 1 << rank);
    this.ends = schedule.ranks.map(() => []);
    this.order = [];
    this.changes = [];
    this.values = schedule.inputs.map((held, rank) => this.input(held, rank));
  }

  input([first, count], rank) {
    const tree = this.trees.leaf(rank);
    return Array.from({ length: this.schedule.parts }, (_, chunk) =>
      chunk >= first && chunk < first + count ? { origin: chunk, tree } : null,
    );
  }

  run() {
    const waiting = [...this.schedule.ranks.keys()];
    this.done = (rank) => waiting.push(rank);
    while (waiting.length) this.post(waiting.pop());
    return this;
  }

  starts(rank, round) {
    return round ? this.ends[rank][round - 1] : 0;
  }

  post(rank) {
    const round = ++this.at[rank];
    if (round === this.schedule.ranks[rank].length) return;
    const messages = this.touching[rank][round];
    this.open[rank] = messages.length;
    if (!messages.length) this.complete(rank);
    for (const message of messages) {
      const toOther = message.source === rank;
      const other = toOther ? message.target : message.source;
      if (this.at[other] === (toOther ? message.targetRound : message.sourceRound)) this.deliver(message);
    }
  }

  deliver(message) {
    const { source, target } = message;
    const payload = this.values[source].slice(message.first, message.first + message.count);
    this.incoming[target].push({ message, payload, heard: this.heard[source] });
    message.begins = Math.max(this.starts(source, message.sourceRound), this.starts(target, message.targetRound));
    for (const rank of [source, target]) if (--this.open[rank] === 0) this.complete(rank);
  }

  complete(rank) {
    const round = this.at[rank];
    const begun = this.touching[rank][round].map((message) => message.begins);
    const end = 1 + Math.max(...(begun.length ? begun : [this.starts(rank, round)]));
    const values = this.newValues(rank, round);
    for (const [chunk, value] of values) this.values[rank][chunk] = value;
    for (const { heard } of this.incoming[rank]) this.heard[rank] |= heard;
    this.incoming[rank] = [];
    this.ends[rank].push(end);
    this.order.push([rank, round]);
    this.changes.push({ moment: end, rank, values, heard: this.heard[rank] });
    this.done(rank);
  }

  newValues(rank, round) {
    const before = this.values[rank].slice();
    const values = new Map();
    const terms = new Map();
    for (const step of this.schedule.ranks[rank][round]) {
      if (step.verb !== "copy") continue;
      for (let i = 0; i < step.count; i++) values.set(step.peer + i, before[step.first + i]);
    }
    for (const { message, payload } of this.incoming[rank]) {
      payload.forEach((value, i) => {
        const chunk = message.into + i;
        if (message.verb === "recv") values.set(chunk, value);
        else terms.set(chunk, [...(terms.get(chunk) ?? [[rank, before[chunk]]]), [message.source, value]]);
      });
    }
    for (const [chunk, found] of terms) {
      found.sort(([a], [b]) => a - b);
      const tree = this.trees.combine(found.map(([, value]) => value.tree));
      values.set(chunk, { origin: found[0][1].origin, tree });
    }
    return values;
  }
}

/** A schedule with all that the page shows of it. A frame is [rank][chunk] of {origin, tree, ranks} or null. */
function sceneOf(schedule) {
  const run = new Execution(schedule).run();
  const { messages, trees } = run;
  for (const message of messages) message.ends = run.ends[message.target][message.targetRound];
  const barrier = schedule.collective === "barrier";
  const sums = data.reductions.includes(schedule.collective);
  const whole = barrier || sums ? schedule.world : 1;
  const scene = {
    ...{ schedule, messages, trees, order: run.order, ends: run.ends, barrier, sums, whole },
    byRank: whole > 1 && schedule.parts === 1,
    frames: framesOf(schedule, run, barrier),
    copies: copiesOf(schedule, run.ends),
  };
  scene.moments = scene.frames.length - 1;
  scene.spent = barrier ? scene.frames.map(() => new Set()) : spentOf(scene);
  return scene;
}

function framesOf(schedule, { changes, trees }, barrier) {
  const withRanks = (value) => value && { ...value, ranks: trees.ranks[value.tree] };
  const fresh = new Execution(schedule);
  let now = fresh.values.map((chunks) => chunks.map(withRanks));
  if (barrier) now = now.map((_, rank) => [{ origin: 0, tree: -1, ranks: 1 << rank }]);
  const frames = [now];
  const last = Math.max(0, ...changes.map((change) => change.moment));
  for (let moment = 1; moment <= last; moment++) {
    now = now.map((chunks) => chunks.slice());
    for (const change of changes.filter((found) => found.moment === moment)) {
      for (const [chunk, value] of change.values) now[change.rank][chunk] = withRanks(value);
      if (barrier) now[change.rank][0] = { origin: 0, tree: -1, ranks: change.heard };
    }
    frames.push(now);
  }
  return frames;
}

function copiesOf(schedule, ends) {
  const copies = [];
  schedule.ranks.forEach((rounds, rank) =>
    rounds.forEach((steps, round) => {
      const begins = round ? ends[rank][round - 1] : 0;
      for (const { verb, first, peer, count } of steps) {
        if (verb === "copy") copies.push({ rank, first, into: peer, count, begins, ends: ends[rank][round] });
      }
    }),
  );
  return copies;
}

/** [moment]: set of "rank chunk" that nobody will read again and that are no result. */
function spentOf({ schedule, messages, copies, frames }) {
  const reads = new Set();
  const writes = new Set();
  const mark = (set, moment, rank, first, count) => {
    for (let i = 0; i < count; i++) set.add(`${moment} ${rank} ${first + i}`);
  };
  for (const message of messages) {
    mark(reads, message.begins, message.source, message.first, message.count);
    mark(writes, message.ends, message.target, message.into, message.count);
    if (message.verb === "reduce") mark(reads, message.ends - 1, message.target, message.into, message.count);
  }
  for (const copy of copies) {
    mark(reads, copy.begins, copy.rank, copy.first, copy.count);
    mark(writes, copy.ends, copy.rank, copy.into, copy.count);
  }
  const spent = frames.map(() => new Set());
  schedule.outputs.forEach(([first, count], rank) => {
    for (let chunk = 0; chunk < schedule.parts; chunk++) {
      let needed = chunk >= first && chunk < first + count;
      for (let moment = frames.length - 1; moment >= 0; moment--) {
        needed = reads.has(`${moment} ${rank} ${chunk}`) || (needed && !writes.has(`${moment + 1} ${rank} ${chunk}`));
        if (!needed) spent[moment].add(`${rank} ${chunk}`);
      }
    }
  });
  return spent;
}

/** What the prover finds: rounds, chunks sent by the rank that sends most, depth and number of summation trees. */
function measuresOf(scene) {
  const { schedule, trees, sums, frames } = scene;
  const found = new Set();
  schedule.outputs.forEach(([first, count], rank) => {
    for (let chunk = first; sums && chunk < first + count; chunk++) found.add(frames.at(-1)[rank][chunk].tree);
  });
  const sent = schedule.ranks.map(() => 0);
  for (const message of scene.messages) sent[message.source] += message.count;
  const depth = Math.max(0, ...[...found].map((tree) => trees.depth[tree]));
  const rounds = Math.max(...schedule.ranks.map((list) => list.length));
  return { rounds, sent: Math.max(...sent), unit: partsOfS(schedule), depth, trees: found.size };
}

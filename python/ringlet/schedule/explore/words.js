// Numbers and rounds in words: for the headline, the labels and readers of the screen.

const plural = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;
const titleOf = (name) => name.replaceAll("_", " ");
const listed = (all) => all.slice(0, 4).join(", ") + (all.length > 4 ? ` and ${all.length - 4} more` : "");
const divisor = (a, b) => (b ? divisor(b, a % b) : a);

/** 7, 4 -> "7/4 S"; of S, the collective's unit of bytes. */
function share(chunks, unit) {
  if (!chunks) return "0";
  const [above, below] = [chunks, unit].map((value) => value / divisor(chunks, unit));
  return below > 1 ? `${above}/${below} S` : above === 1 ? "S" : `${above} S`;
}

const TASKS = {
  all_reduce: (p) => `${p} ranks sum their buffers; each gets the whole sum`,
  reduce_scatter: (p) => `${p} ranks sum their buffers; each gets one block of the sum`,
  all_gather: (p) => `${p} ranks give each other their blocks`,
  broadcast: (p, root) => `Rank ${root} gives its buffer to ${plural(p - 1, "other rank")}`,
  reduce: (p, root) => `${p} ranks sum their buffers; rank ${root} gets the sum`,
  gather: (p, root) => `Rank ${root} collects a block from each of ${p} ranks`,
  scatter: (p, root) => `Rank ${root} sends one block to each of ${p} ranks`,
  all_to_all: (p) => `${p} ranks swap blocks, each with every other`,
  barrier: (p) => `${p} ranks wait for each other`,
};

/** "every rank r sends chunk r−2 to rank r+1" where all do the same, a pairing or a list otherwise. */
function movesOf({ world, parts, barrier, messages, copies }, moment) {
  const moving = messages.filter((message) => message.begins === moment);
  if (!moving.length) return copies.some((copy) => copy.begins === moment) ? "ranks copy chunks in their own memory" : "";
  const only = (values) => (new Set(values).size === 1 ? values[0] : undefined);
  const what = barrier ? "word" : plural(moving[0].count, "chunk");
  const everyone = moving.length === world && new Set(moving.map((message) => message.source)).size === world;
  const step = only(moving.map((message) => (message.target - message.source + world) % world));
  if (everyone && step !== undefined) {
    const offset = (by) => (by === 0 ? "r" : 2 * by <= world ? `r+${by}` : `r−${world - by}`);
    const first = only(moving.map((message) => (message.first - message.source + parts) % parts));
    const one = !barrier && parts === world && first !== undefined && only(moving.map((message) => message.count)) === 1;
    return `every rank r sends ${one ? `chunk ${offset(first)}` : what} to rank ${offset(step)}`;
  }
  if (everyone && moving.every((a) => moving.some((b) => b.source === a.target && b.target === a.source))) {
    const pairs = moving.filter((message) => message.source < message.target);
    return `ranks swap ${what} in pairs: ${listed(pairs.map((pair) => `${pair.source} and ${pair.target}`))}`;
  }
  const ways = [...new Set(moving.map((message) => `${message.source} to ${message.target}`))];
  return `${plural(moving.length, "message")}: ${listed(ways)}`;
}

/** The state after `moment` rounds and what comes next, as a sentence or two. */
function describe(scene, moment) {
  const { moments, barrier, world } = scene;
  const verbs = new Set(scene.messages.filter((message) => message.begins === moment).map((message) => message.verb));
  const kept = verbs.has(1) ? "the receiver adds it to its own" : "the receiver keeps it";
  const effect = barrier || !verbs.size ? "" : `; ${verbs.size > 1 ? "some receivers add it, others keep it" : kept}`;
  const next = moment < moments ? `Next, round ${moment}: ${movesOf(scene, moment)}${effect}.` : "";
  if (moment === 0) return `${titleOf(scene.algorithm)}, at the start. ${next}`;
  const done = scene.done[moment];
  const where = moment === moments ? `done after ${plural(moments, "round")}` : `after ${moment} of ${plural(moments, "round")}`;
  const who = done === world ? "all ranks" : `${done} of ${world} ranks`;
  return `${titleOf(scene.algorithm)}, ${where}: ${who} ${barrier ? "have heard of all" : "hold their result"}. ${next}`;
}

/** What a box holds, as a sum of ranks' contributions: how a result grows. */
function heldBy({ frames, whole, byRank, barrier }, moment, rank, box) {
  const value = frames[moment][rank][byRank ? 0 : box];
  if (!value) return `Rank ${rank}, chunk ${box}: empty.`;
  if (barrier) return `Rank ${rank} has heard of rank ${listed(ranksIn(value.ranks))}.`;
  const held = whole === 1 ? `chunk ${value.origin} of rank ${ranksIn(value.ranks)}` : value.text;
  return `Rank ${rank}${byRank ? "" : `, chunk ${box}`}: ${held}`;
}

// Numbers and rounds in words: for the headline, the labels and readers of the screen.

const plural = (count, noun, many = `${noun}s`) => `${count} ${count === 1 ? noun : many}`;
const MINUS = "−";

function divisor(a, b) {
  return b ? divisor(b, a % b) : a;
}

/** 7, 4 -> "7/4 S"; of S, the collective's unit of bytes. */
function share(chunks, unit) {
  if (!chunks) return "0";
  const d = divisor(chunks, unit);
  if (d === unit) return chunks === unit ? "S" : `${chunks / unit} S`;
  return `${chunks / d}/${unit / d} S`;
}

function bytesText(bytes) {
  const units = ["B", "KiB", "MiB", "GiB"];
  let unit = 0;
  while (bytes >= 1024 && unit < 3) {
    bytes /= 1024;
    unit++;
  }
  return `${significant(bytes)} ${units[unit]}`;
}

function secondsText(seconds) {
  const units = [[1, "s"], [1e-3, "ms"], [1e-6, "µs"], [1e-9, "ns"]];
  const [size, unit] = units.find(([least]) => seconds >= least * 0.9995) ?? units[3];
  return `${significant(seconds / size)} ${unit}`;
}

function significant(value) {
  if (value >= 1000) return String(Math.round(value));
  return String(Number(value.toPrecision(3)));
}

const TASKS = {
  all_reduce: (p) => `${p} ranks sum their buffers; each gets the whole sum`,
  reduce_scatter: (p) => `${p} ranks sum their buffers; each gets one block of the sum`,
  all_gather: (p) => `${p} ranks give each other their blocks`,
  broadcast: (p, root) => `rank ${root} gives its buffer to ${plural(p - 1, "other rank")}`,
  reduce: (p, root) => `${p} ranks sum their buffers; rank ${root} gets the sum`,
  gather: (p, root) => `rank ${root} collects a block from each of ${p} ranks`,
  scatter: (p, root) => `rank ${root} sends one block to each of ${p} ranks`,
  all_to_all: (p) => `${p} ranks swap blocks, each with every other`,
  barrier: (p) => `${p} ranks wait for each other`,
};

function taskOf({ collective, world, root }) {
  const text = (TASKS[collective] ?? ((p) => `${collective} of ${p} ranks`))(world, root);
  return text[0].toUpperCase() + text.slice(1);
}

const titleOf = (name) => name.replaceAll("_", " ");

/** "all 8 ranks send chunk r−2 to r+1" where all do the same, a pairing or a list otherwise. */
function movesOf(scene, moment) {
  const { world, parts } = scene.schedule;
  const moving = scene.messages.filter((message) => message.begins === moment);
  if (!moving.length) return scene.copies.some((copy) => copy.begins === moment) ? "ranks copy chunks in their own memory" : "";
  const from = moving.map((message) => message.source);
  const steps = new Set(moving.map((message) => (message.target - message.source + world) % world));
  const everyone = moving.length === world && new Set(from).size === world;
  if (everyone && steps.size === 1) {
    const firsts = new Set(moving.map((message) => (message.first - message.source + parts) % parts));
    const counts = new Set(moving.map((message) => message.count));
    const known = firsts.size === 1 && counts.size === 1 && parts === world;
    const what = scene.barrier ? "word" : known ? chunksFromRank([...firsts][0], [...counts][0], world) : chunkCount(moving[0]);
    return `every rank r sends ${what} to rank ${offset([...steps][0], world)}`;
  }
  const swaps = moving.every((a) => moving.some((b) => b.source === a.target && b.target === a.source));
  if (everyone && swaps) {
    const pairs = moving.filter((message) => message.source < message.target);
    const shown = pairs.slice(0, 4).map((message) => `${message.source} and ${message.target}`);
    return `ranks swap ${chunkCount(moving[0], scene)} in pairs: ${listed(shown, pairs.length)}`;
  }
  if (moving.length === world * (world - 1)) return `every rank sends ${chunkCount(moving[0], scene)} to every other`;
  const senders = new Set(from);
  if (senders.size === 1 && moving.length > 2) {
    return `rank ${from[0]} sends ${chunkCount(moving[0], scene)} to each of ${moving.length} ranks`;
  }
  const targets = new Set(moving.map((message) => message.target));
  if (targets.size === 1 && moving.length > 2) return `${plural(senders.size, "rank")} send to rank ${[...targets][0]}`;
  const shown = moving.slice(0, 4).map((message) => `${message.source} to ${message.target}`);
  return `${plural(moving.length, "message")}: ${listed(shown, moving.length)}`;
}

function listed(shown, all) {
  return shown.join(", ") + (all > shown.length ? ` and ${all - shown.length} more` : "");
}

const chunkCount = (message, scene) => (scene?.barrier ? "word" : plural(message.count, "chunk"));

function offset(step, world) {
  if (step === 0) return "r";
  return 2 * step <= world ? `r+${step}` : `r${MINUS}${world - step}`;
}

function chunksFromRank(first, count, world) {
  return count === 1 ? `chunk ${offset(first, world)}` : `${count} chunks from ${offset(first, world)} on`;
}

/** What a round makes of the chunks that arrive. */
function effectOf(scene, moment) {
  const verbs = new Set(scene.messages.filter((message) => message.begins === moment).map((message) => message.verb));
  if (scene.barrier || !verbs.size) return "";
  if (verbs.size > 1) return "; some receivers add it, others keep it";
  return verbs.has("reduce") ? "; the receiver adds it to its own" : "; the receiver keeps it";
}

/** Ranks that hold all that they were promised. */
function doneRanks(scene, moment) {
  const last = scene.frames.at(-1);
  const same = (a, b) => a === b || (a && b && a.origin === b.origin && a.ranks === b.ranks && a.tree === b.tree);
  return scene.schedule.outputs.filter(([first, count], rank) => {
    const chunks = scene.barrier ? [0] : Array.from({ length: count }, (_, i) => first + i);
    return chunks.every((chunk) => same(scene.frames[moment][rank][chunk], last[rank][chunk]));
  }).length;
}

/** The state after `moment` rounds and what comes next, as a sentence or two. */
function describe(scene, moment) {
  const { moments, schedule } = scene;
  const next = moment < moments ? `Next, round ${moment}: ${movesOf(scene, moment)}${effectOf(scene, moment)}.` : "";
  if (moment === 0) return `${titleOf(schedule.algorithm)}, at the start. ${next}`;
  const done = doneRanks(scene, moment);
  const word = scene.barrier ? "have heard of all" : "hold their result";
  const state = done === schedule.world ? `all ranks ${word}` : `${done} of ${schedule.world} ranks ${word}`;
  const where = moment === moments ? `done after ${plural(moments, "round")}` : `after ${moment} of ${plural(moments, "round")}`;
  return `${titleOf(schedule.algorithm)}, ${where}: ${state}. ${next}`;
}

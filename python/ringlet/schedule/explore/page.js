// The page: its state, which its address holds, and who draws what of it.

const byId = (id) => document.getElementById(id);
const SIDES = ["a", "b"];
const FIRST = {
  ...{ collective: "all_reduce", a: "", b: "", ranks: 8, hosts: "", root: 0, at: 0, clock: "rounds" },
  ...{ bytes: 2 ** 20, ...data.machine, rank: 0, box: -1, ...data.start },
};

let state = { ...FIRST };
let turn = 0; // of updates; an older one that still loads gives up
let shown = {}; // scenes: {a, b, all}

// --- the address

function fromAddress() {
  const found = { ...FIRST };
  for (const [name, text] of new URLSearchParams(location.hash.slice(1))) {
    const value = typeof FIRST[name] === "number" ? Number(text) : text;
    if (name in FIRST && !Number.isNaN(value)) found[name] = value;
  }
  return found;
}

function toAddress() {
  const words = new URLSearchParams();
  for (const [name, value] of Object.entries(state)) {
    const told = value !== FIRST[name] || ["collective", "a", "ranks"].includes(name);
    if (told) words.set(name, name === "at" ? Number(value.toFixed(3)) : value);
  }
  if (`#${words}` !== location.hash) history.replaceState(null, "", `#${words}`);
}

// --- what may be chosen

const named = (collective) => data.algorithms.filter((row) => row.collective === collective).map((row) => row.name);

/** The nearest state that the page has. */
function allowed(wanted) {
  const found = { ...wanted };
  const pick = (name, list, otherwise = list[0]) => (found[name] = list.includes(found[name]) ? found[name] : otherwise);
  const nearer = (best, world) => (Math.abs(world - found.ranks) < Math.abs(best - found.ranks) ? world : best);
  pick("collective", data.collectives);
  pick("a", named(found.collective));
  pick("b", named(found.collective), "");
  if (found.b === found.a) found.b = "";
  found.ranks = data.worlds.reduce(nearer);
  pick("hosts", data.hosts[found.ranks].map(([words]) => words));
  const isRoot = rooted(found.collective) && found.root >= 0 && found.root < found.ranks;
  found.root = isRoot ? Math.floor(found.root) : 0;
  pick("clock", ["rounds", "time"]);
  found.at = Math.max(0, found.at);
  found.bytes = clamp(found.bytes, 1, 2 ** 40);
  for (const name of Object.keys(LIMITS)) found[name] = clamp(found[name], ...LIMITS[name]);
  return found;
}

const sceneOf = (name) => load(rowOf(name, state.collective), state.ranks, state.hosts, state.root);

/** First the stage, then what stands below it. */
async function update(changes) {
  const mine = ++turn;
  state = allowed({ ...state, ...changes });
  fillChoices();
  const [a, b] = await Promise.all(SIDES.map((side) => (state[side] ? sceneOf(state[side]) : null)));
  if (mine !== turn) return;
  shown = { a, b, all: [] };
  chooseBox();
  showStages();
  loadPlayer(state.at);
  await new Promise((resolve) => setTimeout(resolve));
  const all = (await Promise.all(named(state.collective).map(sceneOf))).filter(Boolean);
  if (mine !== turn) return;
  shown.all = all;
  showPrediction();
  toAddress();
  document.body.dataset.ready = String(mine);
}

/** Chooses a chunk whose making is worth a look, where none is chosen or the old one is gone. */
function chooseBox() {
  const scene = shown.a ?? shown.b;
  const there = scene && state.rank >= 0 && state.rank < state.ranks && state.box >= 0 && state.box < boxesOf(scene);
  if (scene && !there) [state.rank, state.box] = scene.byRank ? [0, 0] : scene.first;
}

function options(id, pairs, value) {
  if (byId(id).dataset.options !== String(pairs)) {
    byId(id).replaceChildren(...pairs.map(([key, text]) => new Option(text, key)));
    byId(id).dataset.options = pairs;
  }
  byId(id).value = value;
}

const counted = (length) => Array.from({ length }, (_, i) => [i, i]);

function fillChoices() {
  const names = named(state.collective).map((name) => [name, titleOf(name)]);
  options("collective", data.collectives.map((name) => [name, titleOf(name)]), state.collective);
  options("a", names, state.a);
  options("b", [["", "nothing"], ...names.filter(([name]) => name !== state.a)], state.b);
  options("hosts", data.hosts[state.ranks].map(([words]) => [words, hostsText(words)]), state.hosts);
  options("root", counted(state.ranks), state.root);
  byId("root-choice").hidden = !rooted(state.collective);
  set(byId("ranks"), { min: 0, max: data.worlds.length - 1, "aria-valuetext": plural(state.ranks, "rank") });
  byId("ranks").value = data.worlds.indexOf(state.ranks);
  byId("clock").value = state.clock;
  byId("bytes").value = Math.log2(state.bytes);
  for (const name of Object.keys(LIMITS)) byId(name).value = 100 * log10(state[name]);
  const rate = (seconds) => `${significant(1e-9 / seconds)} GB/s`;
  const rates = { beta: rate(state.beta), gamma: rate(state.gamma) };
  const told = { ranks: state.ranks, bytes: bytesText(state.bytes), alpha: secondsText(state.alpha), ...rates };
  for (const [name, text] of Object.entries(told)) byId(`${name}-shown`).textContent = text;
}

function hostsText(words) {
  const [sizes, order] = words.split(":");
  return words ? `${sizes.replace("x", " × ")}${order ? ", round robin" : ""}` : "one host";
}

// --- the stages and the trees

const stages = Object.fromEntries(SIDES.map((side) => [side, new Stage(byId(`stage-${side}`), selectBox)]));
const treeViews = Object.fromEntries(SIDES.map((side) => [side, new TreeView(byId(`tree-${side}`))]));

function showStages() {
  const onHosts = state.hosts ? `, on ${hostsText(state.hosts)} hosts` : "";
  document.body.classList.toggle("compares", Boolean(state.b));
  byId("headline").replaceChildren();
  add(byId("headline"), "em", { class: "a" }, titleOf(state.a));
  if (state.b) {
    byId("headline").append(" beside ");
    add(byId("headline"), "em", { class: "b" }, titleOf(state.b));
  }
  byId("lead").textContent = `${TASKS[state.collective](state.ranks, state.root)}${onHosts}.`;
  document.title = `${byId("headline").textContent}, ${titleOf(state.collective)} of ${state.ranks} · ringlet`;
  for (const side of SIDES) {
    const scene = shown[side];
    const missing = `has no schedule for ${plural(state.ranks, "rank")}${onHosts}`;
    byId(`name-${side}`).textContent = titleOf(state[side]);
    byId(`facts-${side}`).textContent = scene ? factsOf(scene) : missing;
    byId(`stage-${side}`).hidden = !scene;
    const width = Math.max(300, byId(`stage-${side}`).closest("figure").clientWidth) - 2;
    if (scene) stages[side].show(scene, { width, height: clamp(innerHeight - 396, 380, 620) });
    byId(`links-${side}`).textContent = scene ? stages[side].told : "";
  }
  const unit = data.divided.includes(state.collective) ? "the buffer of one rank" : "all ranks' blocks together";
  byId("unit-told").textContent = `S is ${unit}; the best of a column is bold.`;
  showTrees();
}

function factsOf({ rounds, sent, unit, evenly, barrier, sums, seen }) {
  const facts = [plural(rounds, "round")];
  if (!barrier) facts.push(`${share(sent, unit)} sent per rank${evenly ? "" : " at most"}`);
  if (sums) facts.push(plural(seen, "summation tree"));
  return facts.join(" · ");
}

function selectBox(rank, box) {
  Object.assign(state, { rank, box });
  showTrees();
  showMoment();
  toAddress();
}

function showTrees() {
  const scenes = SIDES.map((side) => shown[side]).filter(Boolean);
  byId("trees").hidden = !scenes.some(({ sums }) => sums);
  if (!scenes.length) return;
  options("tree-rank", counted(state.ranks), state.rank);
  options("tree-box", counted(Math.max(...scenes.map(boxesOf))), state.box);
  for (const side of SIDES) {
    const scene = shown[side];
    const figure = byId(`tree-${side}`).closest("figure");
    figure.hidden = !scene;
    if (!scene) continue;
    const box = Math.min(state.box, boxesOf(scene) - 1);
    stages[side].choose(state.rank, box);
    if (scene.sums) treeViews[side].show(scene, state.rank, box, Math.max(280, figure.clientWidth) - 2);
  }
}

// --- time

const controls = Object.fromEntries(["scrub", "play", "back", "next"].map((id) => [id, byId(id)]));
const player = new Player(controls, showMoment, () => {
  state.at = player.position;
  showMoment();
  toAddress();
});

/** The player's positions are rounds, or percents of the predicted time of the slower one. */
function loadPlayer(position) {
  const scenes = SIDES.map((side) => shown[side]).filter(Boolean);
  for (const scene of scenes) scene.at = predict(scene, state.bytes, state).at;
  shown.seconds = Math.max(0, ...scenes.map((scene) => scene.at.at(-1))) || 1;
  const inTime = scenes.flatMap((scene) => scene.at.map((at) => (100 * at) / shown.seconds));
  const inRounds = counted(1 + Math.max(0, ...scenes.map((scene) => scene.moments))).map(([round]) => round);
  player.load(state.clock === "time" ? [...new Set([0, ...inTime])].sort((x, y) => x - y) : inRounds, position);
}

/** The player's time in rounds of a scene. */
function roundsAt({ at, moments }) {
  if (state.clock === "rounds") return Math.min(player.position, moments);
  const seconds = (player.position / 100) * shown.seconds * (1 + 1e-12);
  const moment = at.findLastIndex((reached) => reached <= seconds);
  return moment >= moments ? moments : moment + (seconds - at[moment]) / (at[moment + 1] - at[moment]);
}

function showMoment() {
  for (const side of SIDES) {
    const told = byId(`told-${side}`);
    const scene = shown[side];
    told.hidden = !scene;
    if (!scene) continue;
    const time = roundsAt(scene);
    const moment = Math.floor(time + 1e-9);
    stages[side].at(time);
    told.setAttribute("aria-live", player.playing ? "off" : "polite");
    setText(told, describe(scene, moment));
    if (!scene.sums) continue;
    treeViews[side].at(moment);
    setText(byId(`tree-text-${side}`), treeViews[side].text(moment));
  }
  const seconds = secondsText((player.position / 100) * (shown.seconds ?? 0));
  const rounds = `${Math.floor(player.position + 1e-9)} of ${plural(player.end, "round")}`;
  setText(byId("where"), state.clock === "rounds" ? rounds : seconds);
  byId("scrub").setAttribute("aria-valuetext", byId("where").textContent);
}

function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// --- prediction and numbers

const plot = new Plot(byId("plot"));
const sideOf = (name) => SIDES.find((side) => state[side] === name) ?? "";
const COLUMNS = [
  ["rounds", "of the rank that has most", (scene) => scene.rounds, String],
  ["sent per rank", "at most, in units of S", (scene) => scene.sent / scene.unit, (value, scene) => share(scene.sent, scene.unit)],
  ["busiest link", "of one pair of ranks, in one direction", (scene) => scene.link / scene.unit, (value, scene) => share(scene.link, scene.unit)],
  ["depth", "roundings between an input and the result", (scene) => scene.depth, (value) => value || "–"],
  ["trees", "different orders of summation", (scene) => scene.seen, (value) => value || "–"],
  ["time", "predicted for size S", (scene) => predict(scene, state.bytes, state).seconds, secondsText],
];

function showPrediction() {
  if (!shown.all?.length) return;
  const curves = shown.all.map((scene) => ({ name: scene.algorithm, scene, side: sideOf(scene.algorithm) }));
  plot.show(curves, state, state.bytes, Math.max(300, byId("plot").parentElement.clientWidth));
  byId("comparison").textContent = plot.comparison();
  byId("numbers").replaceChildren();
  const head = add(add(byId("numbers"), "thead"), "tr");
  add(head, "th", { scope: "col" }, "algorithm");
  for (const [name, title] of COLUMNS) add(head, "th", { scope: "col", title, class: "number" }, name);
  const body = add(byId("numbers"), "tbody");
  const values = COLUMNS.map(([, , value]) => shown.all.map(value));
  shown.all.forEach((scene, k) => {
    const row = add(body, "tr", { class: sideOf(scene.algorithm) });
    add(row, "th", { scope: "row", title: scene.row.summary }, titleOf(scene.algorithm));
    COLUMNS.forEach(([, , , text], i) => {
      const least = Math.min(...values[i]) * (1 + 1e-9);
      const best = values[i][k] <= least && values[i].some((value) => value > least);
      add(row, "td", { class: best ? "number best" : "number" }, text(values[i][k], scene));
    });
  });
}

function changeMachine(changes) {
  state = allowed({ ...state, ...changes });
  fillChoices();
  showPrediction();
  if (state.clock === "time") loadPlayer(player.position);
  toAddress();
}

// --- hands and keys

function listen(ids, event, heard) {
  for (const id of ids) byId(id).addEventListener(event, () => heard(byId(id).value, id));
}

const moreRanks = (step) => {
  const place = clamp(data.worlds.indexOf(state.ranks) + step, 0, data.worlds.length - 1);
  update({ ranks: data.worlds[place], at: 0 });
};
const KEYS = {
  " ": () => player.toggle(),
  ArrowRight: () => player.step(1),
  ArrowLeft: () => player.step(-1),
  Home: () => player.jump(0),
  End: () => player.jump(player.end),
  "+": () => moreRanks(1),
  "-": () => moreRanks(-1),
};

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || !KEYS[event.key]) return;
  const { tagName, id } = event.target;
  // A field's own keys stay its own; only the scrubber has the player's.
  if (tagName === "SELECT" || (tagName === "INPUT" && id !== "scrub") || (tagName === "BUTTON" && event.key === " ")) return;
  event.preventDefault();
  KEYS[event.key]();
}

listen(["collective", "a", "b", "hosts"], "change", (value, id) => update({ [id]: value, at: 0 }));
listen(["root"], "change", (value) => update({ root: Number(value), at: 0 }));
listen(["ranks"], "input", (value) => update({ ranks: data.worlds[value], at: 0 }));
listen(["clock"], "change", (clock) => update({ clock, at: 0 }));
listen(["tree-rank", "tree-box"], "change", () => selectBox(Number(byId("tree-rank").value), Number(byId("tree-box").value)));
listen(["bytes"], "input", (value) => changeMachine({ bytes: 2 ** value }));
listen(Object.keys(LIMITS), "input", (value, id) => changeMachine({ [id]: Number((10 ** (value / 100)).toPrecision(3)) }));
byId("choices").addEventListener("submit", (event) => event.preventDefault());
document.addEventListener("keydown", onKey);
addEventListener("hashchange", () => update(fromAddress()));
let width = innerWidth;
addEventListener("resize", () => {
  if (width !== innerWidth) update({ at: player.position });
  width = innerWidth;
});
byId("made").textContent = `Made by ringlet ${data.version}. The schedules in this page are those that ringlet's engines run.`;
update(fromAddress());
// For tests, and for whoever wants the data behind the pictures.
window.ringlet = { data, load, rowOf, predict, treeText, sumTree, state: () => state, player };

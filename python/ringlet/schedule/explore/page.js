// The page: its state, which its address holds, and who draws what of it.

const byId = (id) => document.getElementById(id);
const SIDES = ["a", "b"];
const FIRST = {
  ...{ collective: "all_reduce", a: "", b: "", ranks: 8, hosts: "", root: 0, at: 0 },
  ...{ rank: 0, box: -1, ...data.start },
};

let state = { ...FIRST };
let turn = 0; // of updates; an older one that still loads gives up
let shown = {}; // scenes: {a, b}

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
  found.at = Math.max(0, found.at);
  return found;
}

const sceneOf = (name) => load(rowOf(name, state.collective), state.ranks, state.hosts, state.root);

async function update(changes) {
  const mine = ++turn;
  state = allowed({ ...state, ...changes });
  fillChoices();
  const [a, b] = await Promise.all(SIDES.map((side) => (state[side] ? sceneOf(state[side]) : null)));
  if (mine !== turn) return;
  shown = { a, b };
  chooseBox();
  showStages();
  player.load(Math.max(0, ...[a, b].map((scene) => scene?.moments ?? 0)), state.at);
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
  byId("ranks-shown").textContent = state.ranks;
}

function hostsText(words) {
  const [sizes, order] = words.split(":");
  return words ? `${sizes.replace("x", " × ")}${order ? ", round robin" : ""}` : "one host";
}

// --- the stages

const stages = Object.fromEntries(SIDES.map((side) => [side, new Stage(byId(`stage-${side}`), selectBox)]));

function showStages() {
  const onHosts = state.hosts ? `, on ${hostsText(state.hosts)} hosts` : "";
  document.body.classList.toggle("compares", Boolean(state.b));
  byId("headline").textContent = [state.a, state.b].filter(Boolean).map(titleOf).join(" beside ");
  byId("lead").textContent = `${TASKS[state.collective](state.ranks, state.root)}${onHosts}.`;
  document.title = `${byId("headline").textContent}, ${titleOf(state.collective)} of ${state.ranks} · ringlet`;
  for (const side of SIDES) {
    const scene = shown[side];
    const missing = `has no schedule for ${plural(state.ranks, "rank")}${onHosts}`;
    byId(`name-${side}`).textContent = titleOf(state[side]);
    byId(`facts-${side}`).textContent = scene ? factsOf(scene) : missing;
    byId(`stage-${side}`).hidden = !scene;
    const width = Math.max(300, byId(`stage-${side}`).closest("figure").clientWidth) - 2;
    if (!scene) continue;
    stages[side].show(scene, { width, height: clamp(innerHeight - 396, 380, 620) });
    stages[side].choose(state.rank, Math.min(state.box, boxesOf(scene) - 1));
  }
}

function factsOf({ rounds, sent, unit, evenly, barrier, sums, orders }) {
  const facts = [plural(rounds, "round")];
  if (!barrier) facts.push(`${share(sent, unit)} sent per rank${evenly ? "" : " at most"}`);
  if (sums) facts.push(plural(orders, "summation tree"));
  return facts.join(" · ");
}

function selectBox(rank, box) {
  Object.assign(state, { rank, box });
  showStages();
  player.seek(player.position);
  toAddress();
}

// --- time

const controls = Object.fromEntries(["scrub", "play", "back", "next"].map((id) => [id, byId(id)]));
const player = new Player(controls, showMoment, () => {
  state.at = player.position;
  showMoment();
  toAddress();
});

function showMoment() {
  for (const side of SIDES) {
    const told = byId(`told-${side}`);
    const scene = shown[side];
    told.hidden = byId(`held-${side}`).hidden = !scene;
    if (!scene) continue;
    const time = Math.min(player.position, scene.moments);
    const moment = Math.floor(time + 1e-9);
    stages[side].at(time);
    told.setAttribute("aria-live", player.playing ? "off" : "polite");
    setText(told, describe(scene, moment));
    setText(byId(`held-${side}`), heldBy(scene, moment, state.rank, Math.min(state.box, boxesOf(scene) - 1)));
  }
  setText(byId("where"), `${Math.floor(player.position + 1e-9)} of ${plural(player.end, "round")}`);
  byId("scrub").setAttribute("aria-valuetext", byId("where").textContent);
}

function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// --- hands and keys

function listen(ids, event, heard) {
  for (const id of ids) byId(id).addEventListener(event, () => heard(byId(id).value, id));
}

const KEYS = {
  " ": () => player.toggle(),
  ArrowRight: () => player.step(1),
  ArrowLeft: () => player.step(-1),
  Home: () => player.jump(0),
  End: () => player.jump(player.end),
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
window.ringlet = { data, load, rowOf, heldBy, state: () => state, player };

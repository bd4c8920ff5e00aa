// The page: its state, which its address holds, and who draws what of it.

const byId = (id) => document.getElementById(id);
const SIDES = ["a", "b"];
const VIEWS = ["circle", "hosts", "torus"];
const FIRST = {
  ...{ collective: "all_reduce", a: "", b: "", ranks: 8, hosts: "", root: 0, view: "circle", at: 0, clock: "rounds" },
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
    if (value !== FIRST[name] || ["collective", "a", "ranks"].includes(name)) words.set(name, name === "at" ? Number(value.toFixed(3)) : value);
  }
  if (`#${words}` !== location.hash) history.replaceState(null, "", `#${words}`);
}

// --- what may be chosen

const named = (collective) => data.algorithms.filter((row) => row.collective === collective).map((row) => row.name);

/** The nearest state that the page has. */
function allowed(wanted) {
  const found = { ...wanted };
  const pick = (name, list, otherwise = list[0]) => (found[name] = list.includes(found[name]) ? found[name] : otherwise);
  pick("collective", data.collectives);
  pick("a", named(found.collective));
  pick("b", named(found.collective), "");
  if (found.b === found.a) found.b = "";
  found.ranks = data.worlds.reduce((best, world) => (Math.abs(world - found.ranks) < Math.abs(best - found.ranks) ? world : best));
  pick("hosts", data.hosts[found.ranks].map(([words]) => words));
  found.root = rooted(found.collective) && found.root >= 0 && found.root < found.ranks ? Math.floor(found.root) : 0;
  pick("view", VIEWS);
  pick("clock", ["rounds", "time"]);
  found.at = Math.max(0, found.at);
  found.bytes = clamp(found.bytes, 1, 2 ** 40);
  for (const name of Object.keys(LIMITS)) found[name] = clamp(found[name], ...LIMITS[name]);
  return found;
}

const sceneOf = (name) => load(rowOf(name, state.collective), state.ranks, state.hosts, state.root);

/** First the stage, then what stands below it. */
async function update(changes, { keepPosition = false } = {}) {
  const mine = ++turn;
  const before = state;
  state = allowed({ ...state, ...changes });
  fillChoices();
  const [a, b] = await Promise.all(SIDES.map((side) => (state[side] ? sceneOf(state[side]) : null)));
  if (mine !== turn) return;
  shown = { a, b, all: [] };
  chooseBox(before);
  showStages();
  loadPlayer(keepPosition ? player.position : state.at);
  await new Promise((resolve) => setTimeout(resolve));
  const all = (await Promise.all(named(state.collective).map(sceneOf))).filter(Boolean);
  if (mine !== turn) return;
  shown.all = all;
  showPrediction();
  toAddress();
  document.body.dataset.ready = String(mine);
}

/** Chooses a chunk whose making is worth a look, where none is chosen or the old one is gone. */
function chooseBox(before) {
  const scene = shown.a ?? shown.b;
  if (!scene) return;
  const moved = ["collective", "ranks", "root"].some((name) => before[name] !== state[name]) && before.box === state.box;
  const there = state.rank >= 0 && state.rank < state.ranks && state.box >= 0 && state.box < boxesOf(scene);
  if (moved || !there) [state.rank, state.box] = scene.byRank ? [0, 0] : scene.first;
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
  for (const radio of document.querySelectorAll("[name=view]")) radio.checked = radio.value === state.view;
  byId("clock").value = state.clock;
  byId("bytes").value = Math.log2(state.bytes);
  for (const name of Object.keys(LIMITS)) byId(name).value = 100 * log10(state[name]);
  const rate = (seconds) => `${significant(1e-9 / seconds)} GB/s`;
  const told = { ranks: state.ranks, bytes: bytesText(state.bytes), alpha: secondsText(state.alpha), beta: rate(state.beta), gamma: rate(state.gamma) };
  for (const [name, text] of Object.entries(told)) byId(`${name}-shown`).textContent = text;
}

function hostsText(words) {
  const [sizes, order] = words.split(":");
  return words ? `${sizes.replace("x", " × ")}${order ? ", round robin" : ""}` : "one host";
}

// --- the stages and the trees

const stages = Object.fromEntries(SIDES.map((side) => [side, new Stage(byId(`stage-${side}`), selectBox)]));
const treeViews = Object.fromEntries(SIDES.map((side) => [side, new TreeView(byId(`tree-${side}`))]));
const figureOf = (id) => byId(id).closest("figure");

function showStages() {
  const onHosts = state.hosts ? `, on ${hostsText(state.hosts)} hosts` : "";
  const titles = SIDES.map((side) => titleOf(state[side])).filter(Boolean);
  document.body.classList.toggle("compares", Boolean(state.b));
  byId("headline").replaceChildren();
  titles.forEach((title, i) => {
    if (i) byId("headline").append(" ", add(byId("headline"), "span", { className: "against" }, "beside"), " ");
    add(byId("headline"), "em", { className: SIDES[i] }, title);
  });
  byId("lead").textContent = `${TASKS[state.collective](state.ranks, state.root)}${onHosts}.`;
  document.title = `${titles.join(" and ")}, ${titleOf(state.collective)} of ${state.ranks} · ringlet`;
  for (const side of SIDES) {
    const scene = shown[side];
    const figure = figureOf(`stage-${side}`);
    figure.classList.toggle("absent", !scene);
    byId(`name-${side}`).textContent = titleOf(state[side]);
    byId(`facts-${side}`).textContent = scene ? factsOf(scene) : `has no schedule for ${plural(state.ranks, "rank")}${onHosts}`;
    const room = { width: Math.max(300, figure.clientWidth) - 2, height: clamp(innerHeight - 396, 380, 620) };
    if (scene) stages[side].show(scene, state.view, room);
    else byId(`stage-${side}`).replaceChildren();
    byId(`links-${side}`).textContent = scene ? linksText(stages[side]) : "";
  }
  showLegend();
  showTrees();
}

function factsOf({ rounds, sent, unit, evenly, barrier, sums, seen }) {
  const facts = [plural(rounds, "round")];
  if (!barrier) facts.push(`${share(sent, unit)} sent per rank${evenly ? "" : " at most"}`);
  if (sums) facts.push(plural(seen, "summation tree"));
  return facts.join(" · ");
}

function linksText(stage) {
  const { chunks, links, of } = stage.busiest;
  const { hosts, sides } = stage.placed;
  if (!of) return "No message moves.";
  if (hosts.length > 1 && !stage.scene.barrier) {
    const most = Math.max(...uplinksOf(stage.scene).flatMap(({ out, into }) => [out, into]));
    return `The busiest uplink of a host carries ${stage.load(most)} one way, over all rounds.`;
  }
  const kind = (count) => `link${count === 1 ? "" : "s"}${sides ? ` of the ${sides.join(" × ")} torus` : ""}`;
  const load = `${stage.load(chunks)}${links.length > 1 ? " each" : ""}, over all rounds.`;
  if (links.length === of) return of === 1 ? `The one ${kind(1)} in use carries ${load}` : `All ${of} ${kind(of)} in use carry ${load}`;
  return `${links.length === 1 ? `Busiest ${kind(1)}` : `Busiest of ${of} ${kind(of)}`}: ${listed(links.map((link) => `${link.source} → ${link.target}`), 3)}, ${load}`;
}

function showLegend() {
  byId("legend").replaceChildren();
  const scenes = SIDES.map((side) => shown[side]).filter(Boolean);
  const item = (kind, text) => {
    const made = add(byId("legend"), "span", { className: "legend-item" });
    add(made, "i", { className: `key ${kind}` });
    made.append(text);
  };
  if (!scenes.length) return;
  const [{ barrier, sums }] = scenes;
  if (barrier || scenes.some((scene) => scene.byRank)) item("stripe", barrier ? "a stripe: a rank that is known to have come" : "a stripe: one rank's contribution, in its colour");
  if (!barrier && scenes.some((scene) => !scene.byRank)) item("box", sums ? "a box: a chunk, filled by its share of contributions" : "a box: a chunk of the buffer");
  item("pale", "pale: nobody reads it again");
  item("line", "a grey line: a link, as wide as its load");
  if (SIDES.some((side) => shown[side] && stages[side].busiest.marked)) item("busy", "the busiest link");
  item("parcel-key", "a parcel: chunks on their way in this round");
  const unit = data.divided.includes(state.collective) ? "the buffer of one rank" : "all ranks' blocks together";
  byId("unit-told").textContent = `S is ${unit}; the best of a column is bold. Rounds, bytes, depth and trees are those of the schedules that the engines run.`;
}

function selectBox(rank, box) {
  Object.assign(state, { rank, box });
  showTrees();
  showMoment();
  toAddress();
}

function showTrees() {
  const scenes = SIDES.map((side) => shown[side]).filter(Boolean);
  if (!scenes.length) return;
  const [{ sums, barrier, byRank }] = scenes;
  byId("tree-title").textContent = sums ? "How one sum grows" : barrier ? "How word of one rank spreads" : "The way of one chunk";
  const told = sums ? "Leaves are the ranks' contributions; each + is one addition and one rounding." : "From the rank that has it first to the ranks that get it.";
  byId("tree-hint").textContent = `${told} Later parts are pale. Press a box in the picture to choose another one.`;
  options("tree-rank", counted(state.ranks), state.rank);
  options("tree-box", counted(Math.max(...scenes.map(boxesOf))), state.box);
  byId("tree-box-name").textContent = byRank ? "Contribution" : "Chunk";
  for (const side of SIDES) {
    const scene = shown[side];
    const figure = figureOf(`tree-${side}`);
    figure.hidden = !scene;
    if (!scene) continue;
    const box = Math.min(state.box, boxesOf(scene) - 1);
    stages[side].choose(state.rank, box);
    treeViews[side].show(scene, state.rank, box, Math.min(620, Math.max(280, figure.clientWidth) - 2));
  }
}

// --- time

const player = new Player(Object.fromEntries(["scrub", "play", "first", "back", "next", "last"].map((id) => [id, byId(id)])), showMoment, () => {
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
  const stops = state.clock === "time" ? [...new Set([0, ...inTime])].sort((x, y) => x - y) : inRounds;
  byId("marks").replaceChildren();
  for (const stop of stops.length <= 64 ? stops : []) add(byId("marks"), "i").style.left = `${(100 * stop) / (stops.at(-1) || 1)}%`;
  player.load(stops, position);
}

/** The player's time in rounds of a scene. */
function roundsAt({ at, moments }) {
  if (state.clock === "rounds") return Math.min(player.position, moments);
  const seconds = (player.position / 100) * shown.seconds * (1 + 1e-12);
  const moment = at.findLastIndex((reached) => reached <= seconds);
  return moment >= moments ? moments : moment + (seconds - at[moment]) / (at[moment + 1] - at[moment]);
}

function showMoment() {
  const texts = [];
  for (const side of SIDES) {
    const told = byId(`told-${side}`);
    const scene = shown[side];
    told.hidden = !scene;
    if (!scene) continue;
    const time = roundsAt(scene);
    const moment = Math.floor(time + 1e-9);
    stages[side].at(time);
    treeViews[side].at(moment);
    told.setAttribute("aria-live", player.playing ? "off" : "polite");
    setText(told, describe(scene, moment));
    setText(byId(`tree-text-${side}`), treeViews[side].text(moment));
    texts.push(`${moment} of ${scene.moments}`);
  }
  const where = state.clock === "rounds" ? `${Math.floor(player.position + 1e-9)} of ${plural(player.end, "round")}` : `${texts.join(" | ")} rounds · ${secondsText((player.position / 100) * shown.seconds)}`;
  setText(byId("where"), where);
  byId("scrub").setAttribute("aria-valuetext", where);
}

function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// --- prediction and numbers

const plot = new Plot(byId("plot"), changeMachine);
const sideOf = (name) => SIDES.find((side) => state[side] === name) ?? "";
const COLUMNS = [
  ["rounds", "of the rank that has most", (scene) => scene.rounds, String],
  ["sent per rank", "at most, in units of S", (scene) => scene.sent / scene.unit, (value, scene) => share(scene.sent, scene.unit)],
  ["busiest link", "of one pair of ranks, in one direction, over all rounds", (scene) => scene.link / scene.unit, (value, scene) => share(scene.link, scene.unit)],
  ["depth", "roundings between an input and the result", (scene) => scene.depth, (value) => value || "–"],
  ["trees", "different orders of summation; with one, bits do not depend on an element's place", (scene) => scene.seen, (value) => value || "–"],
  ["time", "predicted for size S", (scene) => predict(scene, state.bytes, state).seconds, secondsText],
];

function showPrediction() {
  if (!shown.all?.length) return;
  const width = Math.max(300, byId("plot").parentElement.clientWidth) - (innerWidth > 860 ? 292 : 0);
  plot.show(shown.all.map((scene) => ({ name: scene.algorithm, scene, side: sideOf(scene.algorithm) })), state, state.bytes, width);
  byId("comparison").textContent = plot.comparison();
  byId("numbers").replaceChildren();
  const head = add(add(byId("numbers"), "thead"), "tr");
  for (const name of ["on stage", "algorithm"]) add(head, "th", { scope: "col" }, name);
  for (const [name, title] of COLUMNS) add(head, "th", { scope: "col", title, className: "number" }, name === "time" ? `time, ${bytesText(state.bytes)}` : name);
  const body = add(byId("numbers"), "tbody");
  const values = COLUMNS.map(([, , value]) => shown.all.map(value));
  shown.all.forEach((scene, k) => {
    const side = sideOf(scene.algorithm);
    const row = add(body, "tr", { className: side });
    const picks = add(row, "td", { className: "picks" });
    for (const which of SIDES) {
      const button = add(picks, "button", { type: "button", className: `pick ${which}` }, which.toUpperCase());
      set(button, { "aria-pressed": side === which, "aria-label": `${titleOf(scene.algorithm)} as ${which.toUpperCase()}` });
      button.addEventListener("click", () => put(which, scene.algorithm));
    }
    add(row, "th", { scope: "row", title: scene.row.summary }, titleOf(scene.algorithm));
    COLUMNS.forEach(([, , , text], i) => {
      const least = Math.min(...values[i]) * (1 + 1e-9);
      const best = values[i][k] <= least && values[i].some((value) => value > least);
      add(row, "td", { className: best ? "number best" : "number" }, text(values[i][k], scene));
    });
  });
}

/** On stage as A or B; the other one steps aside, and a pressed B leaves. */
function put(side, name) {
  const other = side === "a" ? "b" : "a";
  if (state[side] === name) update(side === "b" ? { b: "" } : {});
  else if (state[other] === name) update({ a: state.b || state.a, b: state.b ? state.a : "" });
  else update({ [side]: name });
}

function changeMachine(changes, done) {
  state = allowed({ ...state, ...changes });
  fillChoices();
  showPrediction();
  if (state.clock === "time") loadPlayer(player.position);
  if (done) toAddress();
}

// --- hands and keys

function listen(ids, event, heard) {
  for (const id of ids) byId(id).addEventListener(event, () => heard(byId(id).value, id));
}

const next = (list, value) => list[(list.indexOf(value) + 1) % list.length];
const moreRanks = (step) => update({ ranks: data.worlds[clamp(data.worlds.indexOf(state.ranks) + step, 0, data.worlds.length - 1)], at: 0 });

const KEYS = {
  " ": () => player.toggle(),
  ArrowRight: () => player.step(1),
  ArrowLeft: () => player.step(-1),
  Home: () => player.jump(0),
  End: () => player.jump(player.end),
  "+": () => moreRanks(1),
  "=": () => moreRanks(1),
  "-": () => moreRanks(-1),
  a: () => update({ a: next(named(state.collective), state.a), at: 0 }),
  b: () => update({ b: next(["", ...named(state.collective).filter((name) => name !== state.a)], state.b), at: 0 }),
  v: () => update({ view: next(VIEWS, state.view) }, { keepPosition: true }),
  t: nextTheme,
  "?": toggleKeys,
};

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || !KEYS[event.key]) return;
  const { tagName, id } = event.target;
  // A field's own keys stay its own; only the scrubber has the player's.
  if (tagName === "SELECT" || (tagName === "INPUT" && id !== "scrub") || (tagName === "BUTTON" && event.key === " ")) return;
  event.preventDefault();
  KEYS[event.key]();
}

function toggleKeys() {
  byId("keys").hidden = !byId("keys").hidden;
  byId("help").setAttribute("aria-expanded", !byId("keys").hidden);
}

function nextTheme() {
  const theme = next(["system", "light", "dark"], document.documentElement.dataset.theme ?? "system");
  document.documentElement.dataset.theme = theme;
  byId("theme").textContent = `Theme: ${theme}`;
}

async function copyLink() {
  toAddress();
  const told = await navigator.clipboard.writeText(location.href).then(() => "Copied", () => "Copy it from the address bar");
  byId("copy").textContent = told;
  setTimeout(() => (byId("copy").textContent = "Copy link"), 1800);
}

listen(["collective", "a", "b", "hosts"], "change", (value, id) => update({ [id]: value, at: 0 }));
listen(["root"], "change", (value) => update({ root: Number(value), at: 0 }));
listen(["ranks"], "input", (value) => update({ ranks: data.worlds[value], at: 0 }));
listen(["clock"], "change", (clock) => update({ clock, at: 0 }));
listen(["tree-rank", "tree-box"], "change", () => selectBox(Number(byId("tree-rank").value), Number(byId("tree-box").value)));
listen(["bytes"], "input", (value) => changeMachine({ bytes: 2 ** value }, true));
listen(Object.keys(LIMITS), "input", (value, id) => changeMachine({ [id]: Number((10 ** (value / 100)).toPrecision(3)) }, true));
listen(["reset"], "click", () => changeMachine({ ...data.machine, bytes: FIRST.bytes }, true));
listen(["help"], "click", toggleKeys);
listen(["theme"], "click", nextTheme);
listen(["copy"], "click", copyLink);
byId("views").addEventListener("change", (event) => update({ view: event.target.value }, { keepPosition: true }));
byId("choices").addEventListener("submit", (event) => event.preventDefault());
document.addEventListener("keydown", onKey);
addEventListener("hashchange", () => update(fromAddress()));
let width = innerWidth;
addEventListener("resize", () => {
  if (width !== innerWidth) update({}, { keepPosition: true });
  width = innerWidth;
});
byId("made").textContent = `Made by ringlet ${data.version}: ${plural(data.algorithms.length, "schedule generator")}, ${data.worlds[0]} to ${data.worlds.at(-1)} ranks. The schedules in this page are those that ringlet's engines run.`;
update(fromAddress());
// For tests, and for whoever wants the data behind the pictures.
window.ringlet = { data, load, rowOf, predict, treeText, sumTree, state: () => state, player };

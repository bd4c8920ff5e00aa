// The page: its state, which its address holds, and who draws what of it.

const byId = (id) => document.getElementById(id);
const SIDES = ["a", "b"];
const VIEWS = ["circle", "hosts", "torus"];
const FIRST = {
  ...{ collective: "all_reduce", a: "", b: "", ranks: 8, hosts: "", root: 0, view: "circle", at: 0, clock: "rounds" },
  ...{ bytes: 2 ** 20, ...data.machine, rank: 0, box: -1, ...data.start },
};
const NUMBERS = Object.keys(FIRST).filter((name) => typeof FIRST[name] === "number");

let state = { ...FIRST };
let turn = 0; // of updates; an older one that still loads gives up
let place = null; // what is shown: {rows, a, b}
const scenes = new Map(); // "algorithm collective world hosts root" -> {scene, costs, measures, link}

// --- the address

function fromAddress() {
  const found = { ...FIRST };
  for (const [name, text] of new URLSearchParams(location.hash.slice(1))) {
    if (!(name in FIRST)) continue;
    const value = NUMBERS.includes(name) ? Number(text) : text;
    if (!Number.isNaN(value)) found[name] = value;
  }
  return found;
}

function toAddress() {
  const words = new URLSearchParams();
  for (const [name, value] of Object.entries(state)) {
    if (value !== FIRST[name] || ["collective", "a", "ranks"].includes(name)) words.set(name, name === "at" ? Number(value.toFixed(3)) : value);
  }
  const hash = `#${words}`;
  if (hash !== location.hash) history.replaceState(null, "", hash);
}

// --- what may be chosen

const named = (collective) => data.algorithms.filter((row) => row.collective === collective).map((row) => row.name);

/** The nearest state that the page has. */
function allowed(wanted) {
  const found = { ...wanted };
  const pick = (list, value, otherwise = list[0]) => (list.includes(value) ? value : otherwise);
  found.collective = pick(data.collectives, found.collective);
  const names = named(found.collective);
  found.a = pick(names, found.a);
  found.b = pick(names, found.b, "");
  found.ranks = data.worlds.reduce((best, world) => (Math.abs(world - found.ranks) < Math.abs(best - found.ranks) ? world : best));
  found.hosts = pick(data.hosts[found.ranks].map(([words]) => words), found.hosts);
  found.root = rooted(found.collective) && found.root >= 0 && found.root < found.ranks ? Math.floor(found.root) : 0;
  found.view = pick(VIEWS, found.view);
  found.clock = pick(["rounds", "time"], found.clock);
  found.at = Math.max(0, found.at);
  found.bytes = clamp(found.bytes, 1, 2 ** 40);
  for (const name of Object.keys(LIMITS)) found[name] = clamp(found[name], ...LIMITS[name]);
  return found;
}

async function resultOf(row, { ranks, hosts, root }) {
  const key = [row.name, row.collective, ranks, hosts, root].join(" ");
  if (!scenes.has(key)) {
    const schedule = await load(row, ranks, hosts, root);
    const scene = schedule && sceneOf(schedule);
    const links = scene && busiestOf(loadsOf(scene, { wires: [], route: () => ({ strokes: [] }) }));
    if (scenes.size > 200) scenes.clear();
    scenes.set(key, scene && { row, scene, costs: costsOf(scene), measures: measuresOf(scene), link: scene.barrier ? 0 : links.chunks });
  }
  return scenes.get(key);
}

// --- one update: first the stage, then what stands below it

async function update(changes, { keepPosition = false } = {}) {
  const mine = ++turn;
  const before = state;
  state = allowed({ ...state, ...changes });
  if (state.b === state.a) state.b = "";
  fillChoices();
  const [a, b] = await Promise.all(SIDES.map((side) => (state[side] ? resultOf(rowOf(state[side], state.collective), state) : null)));
  if (mine !== turn) return;
  place = { a, b, rows: [a, b].filter(Boolean) };
  chooseBox(before);
  showStages();
  loadPlayer(keepPosition ? player.position : state.at);
  await new Promise((resolve) => setTimeout(resolve));
  const rows = (await Promise.all(named(state.collective).map((name) => resultOf(rowOf(name, state.collective), state)))).filter(Boolean);
  if (mine !== turn) return;
  place.rows = rows;
  showPrediction();
  toAddress();
  document.body.dataset.ready = String(mine);
}

/** Chooses a chunk whose making is worth a look, where none is chosen or the old one is gone. */
function chooseBox(before) {
  const scene = (place.a ?? place.b)?.scene;
  if (!scene) return;
  const boxes = boxesOf(scene);
  const moved = ["collective", "ranks", "root"].some((name) => before[name] !== state[name]);
  if (state.rank >= state.ranks || state.rank < 0 || (moved && state.box >= 0 && before.box === state.box)) Object.assign(state, { rank: 0, box: -1 });
  if (state.box < boxes && state.box >= 0) return;
  [state.rank, state.box] = scene.byRank ? [0, 0] : firstMade(scene);
}

/** [rank, chunk] of the first result that its rank did not have from the start. */
function firstMade({ schedule, frames }) {
  for (let rank = 0; rank < schedule.world; rank++) {
    const [first, count] = schedule.outputs[rank];
    for (let chunk = first; chunk < first + count; chunk++) {
      const [before, after] = [frames[0][rank][chunk], frames.at(-1)[rank][chunk]];
      const owner = after && ranksIn(after.ranks).join() === String(rank);
      if (!owner && (!before || before.tree !== after.tree)) return [rank, chunk];
    }
  }
  return [0, 0];
}

const boxesOf = (scene) => (scene.byRank ? scene.schedule.world : scene.schedule.parts);

// --- the choices

function options(select, pairs, value) {
  const signature = JSON.stringify(pairs);
  if (select.dataset.options !== signature) {
    select.replaceChildren(...pairs.map(([key, text]) => new Option(text, key)));
    select.dataset.options = signature;
  }
  select.value = value;
}

function fillChoices() {
  const names = named(state.collective).map((name) => [name, titleOf(name)]);
  options(byId("collective"), data.collectives.map((name) => [name, titleOf(name)]), state.collective);
  options(byId("a"), names, state.a);
  options(byId("b"), [["", "nothing"], ...names.filter(([name]) => name !== state.a)], state.b);
  options(byId("hosts"), data.hosts[state.ranks].map(([words]) => [words, hostsText(words)]), state.hosts);
  options(byId("root"), Array.from({ length: state.ranks }, (_, rank) => [rank, rank]), state.root);
  byId("root-choice").hidden = !rooted(state.collective);
  set(byId("ranks"), { min: 0, max: data.worlds.length - 1, "aria-valuetext": plural(state.ranks, "rank") });
  byId("ranks").value = data.worlds.indexOf(state.ranks);
  byId("ranks-shown").textContent = state.ranks;
  for (const radio of document.querySelectorAll("[name=view]")) radio.checked = radio.value === state.view;
  byId("clock").value = state.clock;
  for (const [id, value] of [["bytes", Math.log2(state.bytes)], ...Object.keys(LIMITS).map((name) => [name, 100 * log10(state[name])])]) byId(id).value = value;
  byId("bytes-shown").textContent = bytesText(state.bytes);
  byId("alpha-shown").textContent = secondsText(state.alpha);
  byId("beta-shown").textContent = `${significant(1e-9 / state.beta)} GB/s`;
  byId("gamma-shown").textContent = `${significant(1e-9 / state.gamma)} GB/s`;
}

function hostsText(words) {
  if (!words) return "one host";
  const [sizes, order] = words.split(":");
  return `${sizes.replace("x", " × ")}${order ? ", round robin" : ""}`;
}

// --- the stages

const stages = Object.fromEntries(SIDES.map((side) => [side, new Stage(byId(`stage-${side}`), (rank, box) => selectBox(rank, box))]));
const treeViews = Object.fromEntries(SIDES.map((side) => [side, new TreeView(byId(`tree-${side}`))]));

const widthOf = (element, least) => Math.max(least, Math.floor(element.clientWidth));

function showStages() {
  document.body.classList.toggle("compares", Boolean(state.b));
  showHeadline();
  for (const side of SIDES) {
    const found = place[side];
    const figure = byId(`stage-${side}`).closest("figure");
    figure.classList.toggle("absent", !found);
    byId(`name-${side}`).textContent = titleOf(state[side]);
    byId(`facts-${side}`).textContent = found ? factsOf(found) : `has no schedule for ${placeText()}`;
    byId(`links-${side}`).textContent = "";
    if (!found) {
      byId(`stage-${side}`).replaceChildren();
      continue;
    }
    stages[side].show(found.scene, state.view, { width: widthOf(figure, 300) - 2, height: clamp(innerHeight - 396, 380, 620) });
    byId(`links-${side}`).textContent = linksText(stages[side], found.scene);
  }
  showLegend();
  showTrees();
}

function placeText() {
  const hosts = state.hosts ? ` on ${hostsText(state.hosts)} hosts` : "";
  return `${state.ranks} ranks${hosts}${rooted(state.collective) ? `, root ${state.root}` : ""}`;
}

function factsOf({ measures, scene }) {
  const facts = [plural(measures.rounds, "round")];
  if (!scene.barrier) facts.push(`${share(measures.sent, measures.unit)} sent per rank${evenly(scene) ? "" : " at most"}`);
  if (scene.sums) facts.push(plural(measures.trees, "summation tree"));
  return facts.join(" · ");
}

function evenly({ schedule, messages }) {
  const sent = schedule.ranks.map(() => 0);
  for (const message of messages) sent[message.source] += message.count;
  return new Set(sent).size === 1;
}

function linksText(stage, scene) {
  const { chunks, links, of } = stage.busiest;
  const load = scene.barrier ? plural(chunks, "word") : share(chunks, partsOfS(scene.schedule));
  const kind = state.view === "torus" ? `link of the ${stage.placed.sides.join(" × ")} torus` : "link";
  if (!of) return "No message moves.";
  if (stage.placed.hosts.length > 1 && !scene.barrier) {
    const most = Math.max(...uplinksOf(scene).flatMap(({ out, into }) => [out, into]));
    return `The busiest uplink of a host carries ${share(most, partsOfS(scene.schedule))} one way, over all rounds.`;
  }
  if (links.length === of) return `${of === 1 ? `The one ${kind}` : `All ${of} ${kind.replace("link", "links")} in use`} ${of === 1 ? "carries" : "carry"} ${load} each, over all rounds.`.replace(" each", of === 1 ? "" : " each");
  const which = links.slice(0, 3).map((link) => `${link.source} → ${link.target}`);
  const many = links.length === 1 ? `Busiest ${kind}` : `Busiest of ${of} ${kind.replace("link", "links")}`;
  return `${many}: ${listed(which, links.length)}, ${load}${links.length > 1 ? " each" : ""}, over all rounds.`;
}

function showHeadline() {
  const b = state.b ? ` <span class="against">beside</span> <em class="b"></em>` : "";
  byId("headline").innerHTML = `<em class="a"></em>${b}`;
  byId("headline").querySelector(".a").textContent = titleOf(state.a);
  if (state.b) byId("headline").querySelector(".b").textContent = titleOf(state.b);
  const task = taskOf({ collective: state.collective, world: state.ranks, root: state.root });
  byId("lead").textContent = `${task}${state.hosts ? `, on ${hostsText(state.hosts)} hosts` : ""}.`;
  document.title = `${titleOf(state.a)}${state.b ? ` and ${titleOf(state.b)}` : ""}, ${titleOf(state.collective)} of ${state.ranks} · ringlet`;
}

function showLegend() {
  const legend = byId("legend");
  legend.replaceChildren();
  const scene = (place.a ?? place.b)?.scene;
  if (!scene) return;
  const item = (kind, text) => {
    const made = add(legend, "span", { className: "legend-item" });
    add(made, "i", { className: `key ${kind}` });
    made.append(text);
  };
  if (scene.barrier) item("stripe", "a stripe: a rank that is known to have come");
  else if (SIDES.some((side) => place[side]?.scene.byRank)) item("stripe", "a stripe: one rank's contribution, in its colour");
  if (!scene.barrier && SIDES.some((side) => place[side] && !place[side].scene.byRank)) {
    item("box", scene.sums ? "a box: a chunk, filled by its share of contributions" : "a box: a chunk of the buffer");
  }
  item("pale", "pale: nobody reads it again");
  item("line", "a grey line: a link, as wide as its load");
  if (SIDES.some((side) => place[side] && stages[side].marksBusiest())) item("busy", "the busiest link");
  item("parcel-key", "a parcel: chunks on their way in this round");
  if (!scene.barrier) byId("unit-told").textContent = unitText();
}

const unitText = () =>
  `S is ${data.divided.includes(state.collective) ? "the buffer of one rank" : "all ranks' blocks together"}; the best of a column is bold. ` +
  "Rounds, bytes, depth and trees are counted in this page from the schedules that the engines run.";

// --- trees

function selectBox(rank, box) {
  Object.assign(state, { rank, box });
  showTrees();
  showMoment();
  toAddress();
}

function showTrees() {
  const scene = (place.a ?? place.b)?.scene;
  if (!scene) return;
  byId("tree-title").textContent = scene.sums ? "How one sum grows" : scene.barrier ? "How word of one rank spreads" : "The way of one chunk";
  byId("tree-hint").textContent = scene.sums
    ? "Leaves are the ranks' contributions; each + is one addition and one rounding. Later parts are pale. Press a box in the picture to choose another one."
    : "From the rank that has it first to the ranks that get it. Later parts are pale. Press a box in the picture to choose another one.";
  const boxes = Math.max(...SIDES.map((side) => (place[side] ? boxesOf(place[side].scene) : 0)));
  const counted = (length) => Array.from({ length }, (_, i) => [i, i]);
  options(byId("tree-rank"), counted(state.ranks), state.rank);
  options(byId("tree-box"), counted(boxes), state.box);
  byId("tree-box-name").textContent = scene.byRank ? "Contribution" : "Chunk";
  for (const side of SIDES) {
    const found = place[side];
    byId(`tree-${side}`).closest("figure").hidden = !found;
    if (!found) continue;
    const box = Math.min(state.box, boxesOf(found.scene) - 1);
    stages[side].choose(state.rank, box);
    treeViews[side].show(found.scene, state.rank, box, Math.min(620, widthOf(byId(`tree-${side}`).closest("figure"), 280) - 2));
  }
}

// --- time

const player = new Player(
  Object.fromEntries(["scrub", "play", "first", "back", "next", "last"].map((id) => [id, byId(id)])),
  () => showMoment(),
  () => {
    state.at = player.position;
    showMoment();
    toAddress();
  },
);

/** Seconds of both, and when each comes to its moments. */
const predicted = (side) => predict(place[side].costs, state.bytes, state);

function loadPlayer(position) {
  const shown = SIDES.filter((side) => place[side]);
  let stops = [0];
  if (state.clock === "rounds") {
    const most = Math.max(0, ...shown.map((side) => place[side].scene.moments));
    stops = Array.from({ length: most + 1 }, (_, i) => i);
  } else if (shown.length) {
    for (const side of shown) place[side].at = predicted(side).at;
    const whole = Math.max(...shown.map((side) => place[side].at.at(-1))) || 1;
    place.seconds = whole;
    stops = [...new Set(shown.flatMap((side) => place[side].at.map((at) => (100 * at) / whole)))].sort((x, y) => x - y);
  }
  const marks = byId("marks");
  marks.replaceChildren();
  if (stops.length <= 64) for (const stop of stops) add(marks, "i").style.left = `${(100 * stop) / (stops.at(-1) || 1)}%`;
  player.load(stops, position);
}

/** The time of one side in its rounds. */
function roundsAt(side) {
  const { scene, at } = place[side];
  if (state.clock === "rounds") return Math.min(player.position, scene.moments);
  const seconds = (player.position / 100) * place.seconds * (1 + 1e-12);
  const moment = at.findLastIndex((reached) => reached <= seconds);
  if (moment >= scene.moments) return scene.moments;
  return moment + (seconds - at[moment]) / (at[moment + 1] - at[moment]);
}

function showMoment() {
  const texts = [];
  for (const side of SIDES) {
    const told = byId(`told-${side}`);
    const found = place?.[side];
    told.hidden = !found;
    if (!found) continue;
    const time = roundsAt(side);
    const moment = Math.floor(time + 1e-9);
    stages[side].at(time);
    treeViews[side].at(time);
    told.setAttribute("aria-live", player.playing ? "off" : "polite");
    setText(told, describe(found.scene, moment));
    setText(byId(`tree-text-${side}`), treeViews[side].text(moment));
    texts.push(`${moment} of ${found.scene.moments}`);
  }
  const inTime = state.clock === "time" && place?.seconds ? ` · ${secondsText((player.position / 100) * place.seconds || 0)}` : "";
  const most = Math.floor(player.position + 1e-9);
  const where = state.clock === "rounds" ? `${most} of ${plural(player.end, "round")}` : `${texts.join(" | ")} rounds${inTime}`;
  setText(byId("where"), where);
  byId("scrub").setAttribute("aria-valuetext", where);
}

function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// --- prediction

const plot = new Plot(byId("plot"), (changes, done) => changeMachine(changes, done));
const table = new NumberTable(byId("numbers"), (side, name, pressed) => {
  const other = side === "a" ? "b" : "a";
  if (pressed) update(side === "b" ? { b: "" } : {});
  else if (state[other] === name) update({ a: state.b || state.a, b: state.b ? state.a : state.b });
  else update({ [side]: name });
});

function showPrediction() {
  const side = (name) => (name === state.a ? "a" : name === state.b ? "b" : "");
  const curves = place.rows.map(({ row, costs }) => ({ name: row.name, costs, side: side(row.name) }));
  if (!curves.length) return;
  plot.show(curves, state, state.bytes, widthOf(byId("plot").parentElement, 300) - (innerWidth > 860 ? 292 : 0));
  byId("comparison").textContent = plot.comparison();
  for (const found of place.rows) found.seconds = predict(found.costs, state.bytes, state).seconds;
  table.show(place.rows, state.a, state.b, state.bytes);
}

function changeMachine(changes, done) {
  state = allowed({ ...state, ...changes });
  fillChoices();
  showPrediction();
  if (state.clock === "time") loadPlayer(player.position);
  if (done) toAddress();
}

// --- hands and keys

function listen() {
  for (const id of ["collective", "a", "b", "hosts", "root"]) {
    byId(id).addEventListener("change", () => update({ [id]: id === "root" ? Number(byId(id).value) : byId(id).value, at: 0 }));
  }
  byId("ranks").addEventListener("input", () => update({ ranks: data.worlds[Number(byId("ranks").value)], at: 0 }));
  byId("views").addEventListener("change", (event) => update({ view: event.target.value }, { keepPosition: true }));
  byId("clock").addEventListener("change", () => update({ clock: byId("clock").value, at: 0 }));
  for (const id of ["tree-rank", "tree-box"]) byId(id).addEventListener("change", () => selectBox(Number(byId("tree-rank").value), Number(byId("tree-box").value)));
  byId("bytes").addEventListener("input", () => changeMachine({ bytes: 2 ** Number(byId("bytes").value) }, true));
  for (const id of Object.keys(LIMITS)) {
    byId(id).addEventListener("input", () => changeMachine({ [id]: Number((10 ** (Number(byId(id).value) / 100)).toPrecision(3)) }, true));
  }
  byId("reset").addEventListener("click", () => changeMachine({ ...data.machine, bytes: FIRST.bytes }, true));
  byId("choices").addEventListener("submit", (event) => event.preventDefault());
  byId("help").addEventListener("click", toggleKeys);
  byId("theme").addEventListener("click", nextTheme);
  byId("copy").addEventListener("click", copyLink);
  document.addEventListener("keydown", onKey);
  addEventListener("hashchange", () => {
    state = { ...FIRST };
    update(fromAddress());
  });
  let width = innerWidth;
  addEventListener("resize", () => {
    if (width !== innerWidth) update({}, { keepPosition: true });
    width = innerWidth;
  });
}

function next(list, value, step = 1) {
  return list[(list.indexOf(value) + step + list.length) % list.length];
}

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
  t: () => nextTheme(),
  "?": () => toggleKeys(),
};

function moreRanks(step) {
  const index = clamp(data.worlds.indexOf(state.ranks) + step, 0, data.worlds.length - 1);
  update({ ranks: data.worlds[index], at: 0 });
}

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || !KEYS[event.key]) return;
  const at = event.target;
  // A field's own keys stay its own; only the scrubber has the player's.
  const own = at.tagName === "SELECT" || (at.tagName === "INPUT" && at.id !== "scrub");
  if (own || (at.tagName === "BUTTON" && event.key === " ")) return;
  event.preventDefault();
  KEYS[event.key]();
}

function toggleKeys() {
  byId("keys").hidden = !byId("keys").hidden;
  byId("help").setAttribute("aria-expanded", !byId("keys").hidden);
}

const THEMES = ["system", "light", "dark"];

function nextTheme() {
  setTheme(next(THEMES, document.documentElement.dataset.theme ?? "system"));
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  byId("theme").textContent = `Theme: ${theme}`;
  try {
    localStorage.setItem("ringlet-theme", theme);
  } catch {
    // a page from a file may not keep anything: the choice lasts as long as the page
  }
}

function keptTheme() {
  try {
    return localStorage.getItem("ringlet-theme");
  } catch {
    return null;
  }
}

async function copyLink() {
  toAddress();
  const button = byId("copy");
  try {
    await navigator.clipboard.writeText(location.href);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Copy it from the address bar";
  }
  setTimeout(() => (button.textContent = "Copy link"), 1800);
}

byId("made").textContent = `Made by ringlet ${data.version}: ${plural(data.algorithms.length, "schedule generator")}, ${data.worlds[0]} to ${data.worlds.at(-1)} ranks. The schedules in this page are those that ringlet's engines run.`;
listen();
const kept = keptTheme();
if (THEMES.includes(kept)) setTheme(kept);
update(fromAddress());
// For tests, and for whoever wants the data behind the pictures.
window.ringlet = { data, load, rowOf, sceneOf, measuresOf, costsOf, predict, treeText, sumTree, state: () => state, player };

// One scene on the stage: ranks as cards, links by load, and what moves in the round.

const MOST_BLOCKS = 5; // of a parcel; more chunks are a number
const rankColour = (world, rank) => data.palettes[world][rank];

/** The colour of what a box holds, as in the drawings (ringlet/schedule/draw.py). */
function colourOf({ byRank, collective, world, parts }, rank, content) {
  if (byRank) return rankColour(world, rank);
  return collective === "all_to_all" ? rankColour(world, 31 - Math.clz32(content.ranks)) : data.palettes[parts][content.origin];
}

/** What leaves and enters each host, in chunks: [{out, into}]. */
function uplinksOf({ hosts, messages }) {
  const found = Array.from({ length: Math.max(...hosts) + 1 }, () => ({ out: 0, into: 0 }));
  for (const { source, target, count } of messages.filter(({ source, target }) => hosts[source] !== hosts[target])) {
    found[hosts[source]].out += count;
    found[hosts[target]].into += count;
  }
  return found;
}

class Stage {
  /** `chosen` is called with (rank, box) of a box that was clicked. */
  constructor(svg, chosen) {
    Object.assign(this, { svg, chosen });
  }

  show(scene, kind, room) {
    const placed = placesOf(kind, scene, room);
    Object.assign(this, { scene, placed, moment: -1, ...this.loadsOf(scene, placed) });
    set(this.svg, { viewBox: `0 0 ${round1(room.width)} ${round1(placed.height)}`, width: room.width, height: placed.height });
    this.svg.replaceChildren();
    for (const { x, y, w, h } of placed.hosts) draw(this.svg, "rect", { class: "host", x, y, width: w, height: h, rx: 12 });
    this.drawLinks();
    this.moving = draw(this.svg, "g");
    this.nameHosts();
    const parcels = () => (this.parcels = draw(this.svg, "g"));
    if (kind === "torus") parcels(); // on their way through other ranks they go behind these
    this.drawCards();
    if (kind !== "torus") parcels();
    this.drawBusiest();
  }

  /** Chunks that each link carries from first to last; a torus' links are its wires. A barrier's words count 1. */
  loadsOf(scene, placed) {
    const loads = new Map(placed.wires.map((wire) => [wire.wire, { ...wire, chunks: 0 }]));
    for (const { source, target, count } of scene.messages) {
      const { d, wires = [`${source} ${target}`] } = placed.route(source, target);
      for (const key of wires) {
        if (!loads.has(key)) loads.set(key, { source, target, d, chunks: 0 });
        loads.get(key).chunks += scene.barrier ? 1 : count;
      }
    }
    const used = [...loads.values()].filter((link) => link.chunks);
    const chunks = Math.max(0, ...used.map((link) => link.chunks));
    const links = used.filter((link) => link.chunks === chunks);
    // A mark on one or a few links tells something; on all of them nothing.
    return { loads: [...loads.values()], busiest: { chunks, links, of: used.length, marked: chunks > 0 && links.length * 2 <= used.length } };
  }

  load(chunks) {
    return this.scene.barrier ? plural(chunks, "word") : share(chunks, this.scene.unit);
  }

  nameHosts() {
    const uplinks = uplinksOf(this.scene);
    const most = Math.max(...uplinks.flatMap(({ out, into }) => [out, into]));
    for (const { host, x, y, w } of this.placed.hosts) {
      draw(this.svg, "text", { class: "host-name", x: x + 12, y: y + 19 }, `host ${host}`);
      if (this.placed.hosts.length === 1 || this.scene.barrier) continue;
      const { out, into } = uplinks[host];
      const text = draw(this.svg, "text", { class: "uplink", x: x + w - 12, y: y + 19, "text-anchor": "end" });
      draw(text, "tspan", { class: out === most ? "most" : "" }, `↑ ${this.load(out)}`);
      draw(text, "tspan", { class: into === most ? "most" : "", dx: 7 }, `↓ ${this.load(into)}`);
      draw(text, "title", {}, "what the host's uplink carries out and in");
    }
  }

  drawLinks() {
    const { chunks: most, links, of, marked } = this.busiest;
    for (const { chunks, source, target, d } of this.loads) {
      const width = !chunks ? 1 : links.length === of ? 1.6 : round1(0.8 + (3.2 * chunks) / most);
      const path = draw(this.svg, "path", { class: `link ${!chunks ? "idle" : marked && chunks === most ? "busiest" : ""}`, d, "stroke-width": width });
      draw(path, "title", {}, `${source} → ${target}: ${this.load(chunks)} in all`);
      if (marked && chunks === most) this.marked ??= { path, source, target };
    }
  }

  drawBusiest() {
    if (this.marked) {
      const { path, source, target } = this.marked;
      const { x, y } = wayOf(path, this.placed.nodes[source], this.placed.nodes[target])(0.5);
      const text = this.load(this.busiest.chunks);
      const width = 14 + text.length * 6.6;
      const label = draw(this.svg, "g", { class: "busiest-label", transform: `translate(${round1(x)} ${round1(y)})` });
      draw(label, "rect", { x: -width / 2, y: -9, width, height: 18, rx: 9 });
      draw(label, "text", { y: 4, "text-anchor": "middle" }, text);
    }
    this.marked = null;
  }

  drawCards() {
    const { world, root, collective } = this.scene;
    const { card, nodes } = this.placed;
    this.cells = nodes.map((node, rank) => {
      const group = draw(this.svg, "g", { class: "card", transform: `translate(${round1(node.x - card.w / 2)} ${round1(node.y - card.h / 2)})` });
      draw(group, "rect", { class: "card-face", width: round1(card.w), height: round1(card.h), rx: 7 });
      draw(group, "circle", { cx: PAD + 4, cy: 10, r: 4, fill: rankColour(world, rank) });
      draw(group, "text", { class: "card-rank", x: PAD + 12, y: 14 }, rank);
      if (rank === root && rooted(collective) && card.w > 56) draw(group, "text", { class: "card-root", x: round1(card.w - PAD), y: 14, "text-anchor": "end" }, "root");
      return Array.from({ length: card.boxes }, (_, box) => this.drawCell(group, rank, box));
    });
    this.ring = draw(this.svg, "rect", { class: "chosen", rx: 3 });
  }

  drawCell(group, rank, box) {
    const { card } = this.placed;
    const [column, row] = [box % card.columns, Math.floor(box / card.columns)];
    const left = (card.w - card.columns * (card.cell + card.gap) + card.gap) / 2 + column * (card.cell + card.gap);
    const place = { x: round1(left), y: round1(HEAD + PAD + row * (card.tall + 3 + card.labels)), width: round1(card.cell), height: round1(card.tall) };
    const cell = draw(group, "g", { class: "cell" });
    const size = { ...place, rx: this.scene.byRank ? 0 : Math.min(2, place.width / 4) };
    const frame = draw(cell, "rect", { class: place.width < 7 ? "cell-frame thin" : "cell-frame", ...size });
    const fill = draw(cell, "rect", { class: "cell-fill", ...size });
    if (card.labels) draw(cell, "text", { class: "cell-label", x: round1(place.x + place.width / 2), "text-anchor": "middle", y: place.y + place.height + 10 }, box);
    cell.addEventListener("click", () => this.chosen(rank, box));
    return { frame, fill, title: draw(cell, "title"), place };
  }

  choose(rank, box) {
    const { card, nodes } = this.placed;
    const { x, y, width, height } = this.cells[rank][box].place;
    set(this.ring, { x: round1(nodes[rank].x - card.w / 2 + x - 2), y: round1(nodes[rank].y - card.h / 2 + y - 2), width: width + 4, height: height + 4 });
  }

  /** The picture at a time in rounds: 2.5 is in the middle of round 2. */
  at(time) {
    const moment = Math.min(Math.floor(time + 1e-9), this.scene.moments);
    if (moment !== this.moment) {
      this.moment = moment;
      this.cells.forEach((cells, rank) => cells.forEach((cell, box) => this.fill(cell, rank, box)));
      this.startMessages();
    }
    for (const { group, way, begins, ends } of this.active) {
      const { x, y } = way(clamp((time - begins) / (ends - begins), 0, 1));
      set(group, { transform: `translate(${round1(x)} ${round1(y)})` });
    }
  }

  fill({ frame, fill, title, place }, rank, box) {
    const { byRank, world, whole, frames } = this.scene;
    const content = frames[this.moment][rank][byRank ? 0 : box];
    const ranks = content ? ranksIn(content.ranks) : [];
    const part = byRank ? Number(ranks.includes(box)) : ranks.length / whole;
    const colour = byRank ? rankColour(world, box) : content ? colourOf(this.scene, rank, content) : "none";
    Object.assign(fill.style, { fill: colour, opacity: content?.until <= this.moment ? 0.3 : 1, height: `${round1(place.height * part)}px`, y: `${round1(place.y + place.height * (1 - part))}px` });
    frame.style.stroke = content && !byRank ? colour : "";
    const held = whole === 1 ? `chunk ${content?.origin} of rank ${ranks}` : `${ranks.length} of ${world} contributions`;
    title.textContent = byRank ? `rank ${rank}, contribution of rank ${box}: ${part ? "here" : "not here"}` : `rank ${rank}, chunk ${box}: ${content ? held : "empty"}`;
  }

  startMessages() {
    const { messages, frames, world } = this.scene;
    const { route, nodes } = this.placed;
    this.moving.replaceChildren();
    this.parcels.replaceChildren();
    const active = messages.filter(({ begins, ends }) => begins <= this.moment && this.moment < ends);
    this.active = active.map(({ source, target, first, count, begins, ends }) => {
      const contents = frames[begins][source].slice(first, first + count);
      const colours = count ? contents.map((content) => colourOf(this.scene, source, content)) : [rankColour(world, source)];
      const path = draw(this.moving, "path", { class: "way", d: route(source, target).d, stroke: colours[0] });
      const way = wayOf(path, nodes[source], nodes[target]);
      const [before, tip] = [way(0.97), way(1)];
      const angle = (Math.atan2(tip.y - before.y, tip.x - before.x) * 180) / Math.PI;
      draw(this.moving, "path", { d: "M0 0L-8 4L-8 -4z", fill: colours[0], transform: `translate(${round1(tip.x)} ${round1(tip.y)}) rotate(${round1(angle)})` });
      return { way, begins, ends, group: this.parcel(colours, active.length) };
    });
  }

  /** A small train of the chunks that a message carries. */
  parcel(colours, others) {
    const group = draw(this.parcels, "g", { class: "parcel" });
    const [size, blocks] = others > 60 ? [6, 1] : [9, Math.min(colours.length, MOST_BLOCKS)];
    draw(group, "rect", { class: "parcel-back", x: (-blocks * size - 3) / 2, y: (-size - 3) / 2, width: blocks * size + 3, height: size + 3, rx: 3 });
    for (let i = 0; i < blocks; i++) draw(group, "rect", { x: (i - blocks / 2) * size, y: -size / 2, width: size, height: size, rx: 1.5, fill: colours[Math.floor((i * colours.length) / blocks)] });
    return group;
  }
}

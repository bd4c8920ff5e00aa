// One schedule on the stage: ranks as cards, links by load, and what moves in the round.

const MOST_BLOCKS = 5; // of a parcel; more chunks are a number

/** The colour of a chunk's content, as in the drawings (ringlet/schedule/draw.py). */
function colourOf(scene, rank, content) {
  const { schedule, byRank } = scene;
  if (byRank) return data.palettes[schedule.world][rank];
  if (schedule.collective === "all_to_all") return data.palettes[schedule.world][31 - Math.clz32(content.ranks)];
  return data.palettes[schedule.parts][content.origin];
}

const rankColour = (world, rank) => data.palettes[world][rank];

/** Chunks that each link carries from first to last; a torus' links are its wires. A barrier's words count 1. */
function loadsOf(scene, placed) {
  const loads = new Map(placed.wires.map((wire) => [wire.wire, { ...wire, chunks: 0 }]));
  for (const message of scene.messages) {
    const { source, target } = message;
    const route = placed.route(source, target);
    for (const key of route.wires ?? [`${source} ${target}`]) {
      if (!loads.has(key)) loads.set(key, { wire: key, source, target, strokes: route.strokes, chunks: 0 });
      loads.get(key).chunks += scene.barrier ? 1 : message.count;
    }
  }
  return [...loads.values()];
}

/** What leaves and enters each host, in chunks: [{out, into}]. */
function uplinksOf({ schedule, messages }) {
  const found = Array.from({ length: Math.max(...schedule.hosts) + 1 }, () => ({ out: 0, into: 0 }));
  for (const { source, target, count } of messages) {
    const [from, to] = [schedule.hosts[source], schedule.hosts[target]];
    if (from === to) continue;
    found[from].out += count;
    found[to].into += count;
  }
  return found;
}

/** {chunks, links, of}: the largest load, the links that have it, and how many carry anything. */
function busiestOf(loads) {
  const used = loads.filter((link) => link.chunks);
  const chunks = Math.max(0, ...used.map((link) => link.chunks));
  return { chunks, links: used.filter((link) => link.chunks === chunks), of: used.length };
}

class Stage {
  constructor(svg, chosen) {
    this.svg = svg;
    this.chosen = chosen; // called with (rank, box) of a box that was clicked
  }

  show(scene, kind, room) {
    this.scene = scene;
    const { width } = room;
    this.placed = placesOf(kind, scene, room);
    this.loads = loadsOf(scene, this.placed);
    this.busiest = busiestOf(this.loads);
    this.moment = -1;
    const { height } = this.placed;
    set(this.svg, { viewBox: `0 0 ${round1(width)} ${round1(height)}`, width, height });
    this.svg.replaceChildren();
    for (const { x, y, w, h } of this.placed.hosts) draw(this.svg, "rect", { class: "host", x, y, width: w, height: h, rx: 12 });
    this.drawLinks();
    this.moving = draw(this.svg, "g", { class: "moving" });
    this.nameHosts();
    const parcels = () => (this.parcels = draw(this.svg, "g", { class: "parcels" }));
    if (kind === "torus") parcels(); // on their way through other ranks they go behind these
    this.drawCards();
    if (kind !== "torus") parcels();
    this.drawBusiest();
  }

  nameHosts() {
    const uplinks = uplinksOf(this.scene);
    const unit = partsOfS(this.scene.schedule);
    const most = Math.max(...uplinks.flatMap(({ out, into }) => [out, into]));
    for (const { host, x, y, w } of this.placed.hosts) {
      draw(this.svg, "text", { class: "host-name", x: x + 12, y: y + 19 }, `host ${host}`);
      if (this.placed.hosts.length === 1 || this.scene.barrier) continue;
      const { out, into } = uplinks[host];
      const line = draw(this.svg, "text", { class: "uplink", x: x + w - 12, y: y + 19, "text-anchor": "end" });
      draw(line, "tspan", out === most ? { class: "most" } : {}, `↑ ${share(out, unit)}`);
      draw(line, "tspan", into === most ? { class: "most", dx: 7 } : { dx: 7 }, `↓ ${share(into, unit)}`);
      draw(line, "title", {}, "what the host's uplink carries out and in");
    }
  }

  drawLinks() {
    const links = draw(this.svg, "g", { class: "links" });
    const unit = partsOfS(this.scene.schedule);
    const alike = this.busiest.links.length === this.busiest.of;
    for (const link of this.loads) {
      const part = this.busiest.chunks ? link.chunks / this.busiest.chunks : 0;
      const busiest = part === 1 && this.marksBusiest();
      const path = draw(links, "path", {
        class: busiest ? "link busiest" : link.chunks ? "link" : "link idle",
        d: pathData(this.trimmed(link.strokes, link.source, link.target)),
        "stroke-width": round1(link.chunks ? (alike ? 1.6 : 0.8 + 3.2 * part) : 1),
      });
      const load = this.scene.barrier ? plural(link.chunks, "word") : share(link.chunks, unit);
      draw(path, "title", {}, `${link.source} → ${link.target}: ${load} in all`);
    }
  }

  /** A mark on one or a few links tells something; on all of them nothing. */
  marksBusiest() {
    return this.busiest.links.length * 2 <= this.busiest.of;
  }

  drawBusiest() {
    if (!this.marksBusiest() || !this.busiest.chunks) return;
    const link = this.busiest.links[0];
    const [x, y] = pointAt(this.trimmed(link.strokes, link.source, link.target), 0.5);
    const text = this.scene.barrier ? plural(this.busiest.chunks, "word") : share(this.busiest.chunks, partsOfS(this.scene.schedule));
    const label = draw(this.svg, "g", { class: "busiest-label" });
    const width = 14 + text.length * 6.6;
    draw(label, "rect", { x: round1(x - width / 2), y: round1(y - 9), width, height: 18, rx: 9 });
    draw(label, "text", { x: round1(x), y: round1(y + 4), "text-anchor": "middle" }, text);
  }

  trimmed(strokes, source, target) {
    return outside(strokes, this.placed.nodes[source], this.placed.nodes[target]);
  }

  drawCards() {
    const { schedule } = this.scene;
    const { card, nodes } = this.placed;
    this.cells = nodes.map((node, rank) => {
      const [left, top] = [round1(node.x - card.w / 2), round1(node.y - card.h / 2)];
      const group = draw(this.svg, "g", { class: "card", transform: `translate(${left} ${top})` });
      draw(group, "rect", { class: "card-face", width: round1(card.w), height: round1(card.h), rx: 7 });
      draw(group, "circle", { cx: PAD + 4, cy: 10, r: 4, fill: rankColour(schedule.world, rank) });
      draw(group, "text", { class: "card-rank", x: PAD + 12, y: 14 }, rank);
      if (rank === schedule.root && rooted(schedule.collective) && card.w > 56) {
        draw(group, "text", { class: "card-root", x: round1(card.w - PAD), y: 14, "text-anchor": "end" }, "root");
      }
      return Array.from({ length: card.boxes }, (_, box) => this.drawCell(group, rank, box));
    });
    this.ring = draw(this.svg, "rect", { class: "chosen", rx: 3 });
  }

  boxAt(box) {
    const { card } = this.placed;
    const [column, row] = [box % card.columns, Math.floor(box / card.columns)];
    const used = card.columns * (card.cell + card.gap) - card.gap;
    const x = (card.w - used) / 2 + column * (card.cell + card.gap);
    return { x, y: HEAD + PAD + row * (card.tall + 3 + card.labels), width: card.cell, height: card.tall };
  }

  drawCell(group, rank, box) {
    const place = this.boxAt(box);
    const cell = draw(group, "g", { class: "cell" });
    const rounded = this.scene.byRank ? 0 : Math.min(2, place.width / 4);
    const size = { x: round1(place.x), y: round1(place.y), width: round1(place.width), height: round1(place.height), rx: rounded };
    const frame = draw(cell, "rect", { class: place.width < 7 ? "cell-frame thin" : "cell-frame", ...size });
    const fill = draw(cell, "rect", { class: "cell-fill", ...size });
    const middle = { x: round1(place.x + place.width / 2), "text-anchor": "middle" };
    if (this.placed.card.labels) draw(cell, "text", { class: "cell-label", ...middle, y: round1(place.y + place.height + 10) }, box);
    const title = draw(cell, "title");
    cell.addEventListener("click", () => this.chosen(rank, box));
    return { frame, fill, title, place };
  }

  choose(rank, box) {
    const cell = this.cells[rank]?.[box];
    this.ring.style.display = cell ? "" : "none";
    if (!cell) return;
    const { card, nodes } = this.placed;
    const { x, y, width, height } = cell.place;
    const [left, top] = [nodes[rank].x - card.w / 2 + x - 2, nodes[rank].y - card.h / 2 + y - 2];
    set(this.ring, { x: round1(left), y: round1(top), width: round1(width + 4), height: round1(height + 4) });
  }

  /** The picture at a time in rounds: 2.5 is in the middle of round 2. */
  at(time) {
    const moment = Math.min(Math.floor(time + 1e-9), this.scene.moments);
    if (moment !== this.moment) {
      this.moment = moment;
      this.scene.schedule.ranks.forEach((_, rank) => this.fillCard(rank));
      this.startMessages(moment);
    }
    for (const { group, way, message } of this.active) {
      const fraction = (time - message.begins) / (message.ends - message.begins);
      const [x, y] = pointAt(way, Math.min(1, Math.max(0, fraction)));
      set(group, { transform: `translate(${round1(x)} ${round1(y)})` });
    }
  }

  fillCard(rank) {
    const frame = this.scene.frames[this.moment][rank];
    const { byRank, schedule, whole } = this.scene;
    this.cells[rank].forEach(({ frame: outline, fill, title, place }, box) => {
      const content = frame[byRank ? 0 : box];
      const spent = this.scene.spent[this.moment].has(`${rank} ${byRank ? 0 : box}`);
      const part = byRank ? Number(Boolean(content && (content.ranks >> box) & 1)) : content ? bitCount(content.ranks) / whole : 0;
      const colour = byRank ? rankColour(schedule.world, box) : content ? colourOf(this.scene, rank, content) : "";
      fill.style.fill = colour || "none";
      fill.style.opacity = spent ? 0.3 : 1;
      fill.style.height = `${round1(place.height * part)}px`;
      fill.style.y = `${round1(place.y + place.height * (1 - part))}px`;
      outline.style.stroke = content && !byRank ? colour : "";
      title.textContent = this.cellText(rank, box, content);
    });
  }

  cellText(rank, box, content) {
    const { byRank, whole, schedule } = this.scene;
    const name = byRank ? `rank ${rank}, contribution of rank ${box}` : `rank ${rank}, chunk ${box}`;
    if (byRank) return `${name}: ${content && (content.ranks >> box) & 1 ? "here" : "not here"}`;
    if (!content) return `${name}: empty`;
    if (whole === 1) return `${name}: chunk ${content.origin} of rank ${ranksIn(content.ranks).join()}`;
    return `${name}: ${bitCount(content.ranks)} of ${schedule.world} contributions`;
  }

  startMessages(moment) {
    this.moving.replaceChildren();
    this.parcels.replaceChildren();
    const active = this.scene.messages.filter(({ begins, ends }) => begins <= moment && moment < ends);
    this.active = active.map((message) => {
      const { source, target } = message;
      const way = this.trimmed(this.placed.route(source, target).strokes, source, target);
      const contents = Array.from({ length: message.count }, (_, i) => this.scene.frames[message.begins][source][message.first + i]);
      const colours = contents.map((content) => (content ? colourOf(this.scene, source, content) : rankColour(this.scene.schedule.world, source)));
      if (!colours.length) colours.push(rankColour(this.scene.schedule.world, source));
      draw(this.moving, "path", { class: "way", d: pathData(way), stroke: colours[0] });
      draw(this.moving, "path", { class: "head", d: arrowHead(way, 8), fill: colours[0] });
      return { message, way, group: this.parcel(colours, active.length) };
    });
  }

  /** A small train of the chunks that a message carries. */
  parcel(colours, others) {
    const group = draw(this.parcels, "g", { class: "parcel" });
    const size = others > 60 ? 6 : 9;
    const blocks = others > 60 ? 1 : Math.min(colours.length, MOST_BLOCKS);
    const width = blocks * size;
    draw(group, "rect", { class: "parcel-back", x: -width / 2 - 1.5, y: -size / 2 - 1.5, width: width + 3, height: size + 3, rx: 3 });
    for (let i = 0; i < blocks; i++) {
      const colour = colours[Math.floor((i * colours.length) / blocks)];
      draw(group, "rect", { x: round1(-width / 2 + i * size), y: -size / 2, width: size, height: size, rx: 1.5, fill: colour });
    }
    return group;
  }
}

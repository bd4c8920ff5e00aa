// One scene on the stage: ranks as cards, on a circle or on their hosts, links by load, and what moves in the round.

const HEAD = 17; // a card's line with the rank
const PAD = 5;
const MOST_BLOCKS = 5; // of a parcel
const rankColour = (world, rank) => data.palettes[world][rank];

/** The colour of what a box holds, as in the drawings (ringlet/schedule/draw.py). */
function colourOf({ byRank, collective, world, parts }, rank, content) {
  if (byRank) return rankColour(world, rank);
  if (collective === "all_to_all") return rankColour(world, 31 - Math.clz32(content.ranks));
  return data.palettes[parts][content.origin];
}

/** A card with all boxes, in at most so many pixels. */
function cardOf(scene, width, height) {
  const boxes = boxesOf(scene);
  const columns = scene.collective === "all_to_all" ? boxes / 2 : Math.ceil(boxes / Math.ceil(boxes / 16));
  const rows = Math.ceil(boxes / columns);
  const room = Math.max(width - 2 * PAD, 18);
  const gap = scene.byRank ? 0 : Math.min(2, room / columns / 5);
  const cell = Math.min(columns === 1 ? 40 : 17, room / columns - gap);
  const labels = cell >= 10.5 && gap > 0 && columns > 1 ? 11 : 0; // a line of chunk numbers below each row
  const tall = clamp((height - HEAD - 2 * PAD) / rows - 3 - labels, 7, 26);
  const w = Math.max(columns * (cell + gap) - gap + 2 * PAD, 30);
  return { boxes, columns, gap, cell, tall, labels, w, h: HEAD + rows * (tall + 3 + labels) - 3 + 2 * PAD };
}

/** {nodes: [{x, y}], card, height, hosts}: where ranks stand; the room is in pixels. */
function onCircle(scene, { width, height: most }) {
  const height = Math.max(320, Math.min(width * 0.9, most));
  const across = Math.min(width, height * 1.3);
  const stand = ({ w, h }) =>
    scene.hosts.map((_, rank) => {
      const angle = (2 * Math.PI * rank) / scene.world - Math.PI / 2;
      return {
        x: width / 2 + ((across - w) / 2 - 6) * Math.cos(angle),
        y: height / 2 + ((height - h) / 2 - 6) * Math.sin(angle),
      };
    });
  const touch = (nodes, { w, h }) =>
    nodes.some((a, i) => nodes.slice(0, i).some((b) => Math.abs(a.x - b.x) < w + 8 && Math.abs(a.y - b.y) < h + 8));
  let card;
  for (let scale = 1; !card || (scale > 0.1 && touch(stand(card), card)); scale *= 0.95)
    card = cardOf(scene, Math.min(190, across * 0.4) * scale, Math.max(34, 96 * scale));
  return { nodes: stand(card), card, height, hosts: [] };
}

function onHosts(scene, { width, height: room }) {
  const count = Math.max(...scene.hosts) + 1;
  const narrow = width < 440;
  const ranksOn = Array.from({ length: count }, (_, host) => scene.hosts.flatMap((h, rank) => (h === host ? [rank] : [])));
  const most = Math.max(...ranksOn.map((ranks) => ranks.length));
  const columns = Math.min(count, narrow || count <= 4 ? 2 : count <= 9 ? 3 : 4);
  const gapX = narrow ? 18 : 46;
  const w = (width - gapX * (columns - 1) - 8) / columns;
  const inside = Math.min(most, Math.max(1, Math.floor(w / (narrow ? 58 : 84))));
  const card = cardOf(scene, Math.min(150, (w - 16) / inside - (narrow ? 14 : 34)), 64);
  const h = 22 + Math.ceil(most / inside) * (card.h + 26);
  const lines = Math.ceil(count / columns);
  const gapY = clamp((room - lines * h - 14) / Math.max(lines - 1, 1), 48, 130);
  const nodes = [];
  const hosts = ranksOn.map((ranks, host) => {
    const [x, y] = [4 + (host % columns) * (w + gapX), 6 + Math.floor(host / columns) * (h + gapY)];
    ranks.forEach((rank, index) => {
      const row = Math.floor(index / inside);
      const here = Math.min(inside, ranks.length - row * inside);
      nodes[rank] = { x: x + (w / here) * ((index % inside) + 0.5), y: y + 34 + row * (card.h + 26) + card.h / 2 };
    });
    return { x, y, w, h };
  });
  return { nodes, card, height: hosts.at(-1).y + h + 8, hosts };
}

class Stage {
  /** `chosen` is called with (rank, box) of a box that was clicked. */
  constructor(svg, chosen) {
    Object.assign(this, { svg, chosen });
  }

  show(scene, room) {
    Object.assign(this, { scene, moment: -1, ...(scene.hosts.some(Boolean) ? onHosts : onCircle)(scene, room) });
    set(this.svg, { viewBox: `0 0 ${round1(room.width)} ${round1(this.height)}`, width: room.width, height: this.height });
    this.svg.replaceChildren();
    for (const { x, y, w, h } of this.hosts) draw(this.svg, "rect", { class: "host", x, y, width: w, height: h, rx: 12 });
    this.drawLinks();
    this.moving = draw(this.svg, "g");
    this.hosts.forEach(({ x, y }, host) => draw(this.svg, "text", { class: "host-name", x: x + 12, y: y + 19 }, `host ${host}`));
    this.cells = this.nodes.map((node, rank) => this.drawCard(node, rank));
    this.ring = draw(this.svg, "rect", { class: "chosen", rx: 3 });
    this.parcels = draw(this.svg, "g");
  }

  /** A link is as wide as what it carries from first to last. */
  drawLinks() {
    const { messages, barrier, unit } = this.scene;
    const loads = new Map();
    for (const { source, target, count } of messages) {
      const link = loads.get(`${source} ${target}`) ?? { source, target, chunks: 0 };
      loads.set(`${source} ${target}`, { ...link, chunks: link.chunks + (barrier ? 1 : count) });
    }
    const most = Math.max(0, ...[...loads.values()].map(({ chunks }) => chunks));
    for (const { source, target, chunks } of loads.values()) {
      const width = round1(0.8 + (2 * chunks) / most);
      const path = draw(this.svg, "path", { class: "link", d: bow(this.nodes[source], this.nodes[target]), "stroke-width": width });
      draw(path, "title", {}, `${source} → ${target}: ${barrier ? plural(chunks, "word") : share(chunks, unit)} in all`);
    }
  }

  drawCard({ x, y }, rank) {
    const { world, root, collective } = this.scene;
    const { card } = this;
    const group = draw(this.svg, "g", { class: "card", transform: `translate(${round1(x - card.w / 2)} ${round1(y - card.h / 2)})` });
    draw(group, "rect", { class: "card-face", width: round1(card.w), height: round1(card.h), rx: 7 });
    draw(group, "circle", { cx: PAD + 4, cy: 10, r: 4, fill: rankColour(world, rank) });
    draw(group, "text", { class: "card-rank", x: PAD + 12, y: 14 }, rank === root && rooted(collective) && card.w > 70 ? `${rank}, root` : rank);
    return Array.from({ length: card.boxes }, (_, box) => this.drawCell(group, rank, box));
  }

  drawCell(group, rank, box) {
    const { card } = this;
    const left = (card.w - card.columns * (card.cell + card.gap) + card.gap) / 2;
    const place = {
      x: round1(left + (box % card.columns) * (card.cell + card.gap)),
      y: round1(HEAD + PAD + Math.floor(box / card.columns) * (card.tall + 3 + card.labels)),
      width: round1(card.cell),
      height: round1(card.tall),
    };
    const cell = draw(group, "g", { class: "cell" });
    const frame = draw(cell, "rect", { class: "cell-frame", ...place });
    const fill = draw(cell, "rect", { class: "cell-fill", ...place });
    const middle = { x: round1(place.x + place.width / 2), y: place.y + place.height + 10, "text-anchor": "middle" };
    if (card.labels) draw(cell, "text", { class: "cell-label", ...middle }, box);
    cell.addEventListener("click", () => this.chosen(rank, box));
    return { frame, fill, title: draw(cell, "title"), place };
  }

  choose(rank, box) {
    const { x, y, width, height } = this.cells[rank][box].place;
    const [left, top] = [this.nodes[rank].x - this.card.w / 2 + x - 2, this.nodes[rank].y - this.card.h / 2 + y - 2];
    set(this.ring, { x: round1(left), y: round1(top), width: width + 4, height: height + 4 });
  }

  /** The picture at a time in rounds: 2.5 is in the middle of round 2. */
  at(time) {
    const moment = Math.min(Math.floor(time + 1e-9), this.scene.moments);
    if (moment !== this.moment) {
      this.moment = moment;
      this.cells.forEach((cells, rank) => cells.forEach((cell, box) => this.fill(cell, rank, box)));
      this.startMessages();
    }
    for (const { way, begins, ends, group } of this.active) {
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
    Object.assign(fill.style, {
      fill: colour,
      opacity: content?.until <= this.moment ? 0.3 : 1,
      height: `${round1(place.height * part)}px`,
      y: `${round1(place.y + place.height * (1 - part))}px`,
    });
    frame.style.stroke = content && !byRank ? colour : "";
    const held = whole === 1 ? `chunk ${content?.origin} of rank ${ranks}` : `${ranks.length} of ${world} contributions`;
    if (byRank) title.textContent = `rank ${rank}, contribution of rank ${box}: ${part ? "here" : "not here"}`;
    else title.textContent = `rank ${rank}, chunk ${box}: ${content ? held : "empty"}`;
  }

  startMessages() {
    const { messages, frames, world } = this.scene;
    this.moving.replaceChildren();
    this.parcels.replaceChildren();
    const active = messages.filter(({ begins, ends }) => begins <= this.moment && this.moment < ends);
    this.active = active.map(({ source, target, first, count, begins, ends }) => {
      const contents = frames[begins][source].slice(first, first + count);
      const colours = count ? contents.map((content) => colourOf(this.scene, source, content)) : [rankColour(world, source)];
      const [from, to] = [this.nodes[source], this.nodes[target]];
      const path = draw(this.moving, "path", { class: "way", d: bow(from, to), stroke: colours[0] });
      const way = wayOf(path, this.card);
      const [before, tip] = [way(0.97), way(1)];
      const angle = (Math.atan2(tip.y - before.y, tip.x - before.x) * 180) / Math.PI;
      const turned = `translate(${round1(tip.x)} ${round1(tip.y)}) rotate(${round1(angle)})`;
      draw(this.moving, "path", { d: "M0 0L-8 4L-8 -4z", fill: colours[0], transform: turned });
      return { way, begins, ends, group: this.parcel(colours) };
    });
  }

  /** A small train of the chunks that a message carries. */
  parcel(colours) {
    const group = draw(this.parcels, "g", { class: "parcel" });
    const blocks = Math.min(colours.length, MOST_BLOCKS);
    draw(group, "rect", { class: "parcel-back", x: -4.5 * blocks - 1.5, y: -6, width: 9 * blocks + 3, height: 12, rx: 3 });
    for (let i = 0; i < blocks; i++)
      draw(group, "rect", { x: 9 * i - 4.5 * blocks, y: -4.5, width: 9, height: 9, fill: colours[Math.floor((i * colours.length) / blocks)] });
    return group;
  }
}

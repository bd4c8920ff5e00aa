// Where ranks stand and which way messages go: on a circle, on hosts, on a torus.

const PLACES = { circle: onCircle, hosts: onHosts, torus: onTorus };
const HEAD = 17; // a card's line with the rank
const PAD = 5;

/** {nodes: [{x, y, w, h}], card, height, hosts, wires, route(source, target) -> {d, wires}}; `room` in pixels. */
function placesOf(kind, scene, room) {
  const boxes = boxesOf(scene);
  const columns = scene.collective === "all_to_all" ? boxes / 2 : Math.ceil(boxes / Math.ceil(boxes / 16));
  const card = { boxes, columns, rows: Math.ceil(boxes / columns), gap: scene.byRank ? 0 : 2 };
  const placed = { hosts: [], wires: [], ...PLACES[kind](scene, card, room) };
  for (const node of placed.nodes) Object.assign(node, { w: placed.card.w, h: placed.card.h });
  return placed;
}

/** The card in at most so many pixels. */
function fitted(card, width, height) {
  const { columns, rows } = card;
  const room = Math.max(width - 2 * PAD, 18);
  const gap = Math.min(card.gap, room / columns / 5);
  const cell = Math.min(columns === 1 ? 40 : 17, room / columns - gap);
  const labels = cell >= 10.5 && card.gap > 0 && columns > 1 ? 11 : 0; // a line of chunk numbers below each row
  const tall = clamp((height - HEAD - 2 * PAD) / rows - 3 - labels, 7, 26);
  const w = Math.max(columns * (cell + gap) - gap + 2 * PAD, 30);
  return { ...card, gap, cell, tall, labels, w, h: HEAD + rows * (tall + 3 + labels) - 3 + 2 * PAD };
}

function onCircle({ world }, card, { width, height: most }) {
  const height = Math.max(320, Math.min(width * 0.9, most));
  const across = Math.min(width, height * 1.3);
  const stand = ({ w, h }) =>
    Array.from({ length: world }, (_, rank) => {
      const angle = (2 * Math.PI * rank) / world - Math.PI / 2;
      return { x: width / 2 + ((across - w) / 2 - 6) * Math.cos(angle), y: height / 2 + ((height - h) / 2 - 6) * Math.sin(angle) };
    });
  const touch = (nodes, { w, h }) => nodes.some((a, i) => nodes.slice(0, i).some((b) => Math.abs(a.x - b.x) < w + 8 && Math.abs(a.y - b.y) < h + 8));
  let fit;
  for (let scale = 1; !fit || (scale > 0.1 && touch(stand(fit), fit)); scale *= 0.95) fit = fitted(card, Math.min(190, across * 0.4) * scale, Math.max(34, 96 * scale));
  const nodes = stand(fit);
  return { nodes, card: fit, height, route: (a, b) => ({ d: bow(nodes[a], nodes[b], { x: width / 2, y: height / 2 }) }) };
}

/** A bow to the right of its direction, so that there and back are two lines; a little towards the middle. */
function bow(from, to, middle) {
  const [dx, dy] = [to.x - from.x, to.y - from.y];
  const length = Math.hypot(dx, dy) || 1;
  const out = Math.min(0.16 * length, 34) / length;
  const [x, y] = [(from.x + to.x) / 2, (from.y + to.y) / 2];
  const pull = middle ? 0.12 : 0;
  const cx = x - dy * out + pull * ((middle?.x ?? x) - x);
  const cy = y + dx * out + pull * ((middle?.y ?? y) - y);
  return `M${round1(from.x)} ${round1(from.y)}Q${round1(cx)} ${round1(cy)} ${round1(to.x)} ${round1(to.y)}`;
}

function onHosts(scene, card, { width, height: room }) {
  const count = Math.max(...scene.hosts) + 1;
  const narrow = width < 440;
  const ranksOn = Array.from({ length: count }, (_, host) => scene.hosts.flatMap((h, rank) => (h === host ? [rank] : [])));
  const most = Math.max(...ranksOn.map((ranks) => ranks.length));
  const columns = Math.min(count, narrow || count <= 4 ? 2 : count <= 9 ? 3 : 4);
  const gapX = narrow ? 18 : 46;
  const w = (width - gapX * (columns - 1) - 8) / columns;
  const inside = Math.min(most, Math.max(1, Math.floor(w / (narrow ? 58 : 84))));
  const fit = fitted(card, Math.min(150, (w - 16) / inside - (narrow ? 14 : 34)), 64);
  const h = 22 + Math.ceil(most / inside) * (fit.h + 26);
  const lines = Math.ceil(count / columns);
  const gapY = clamp((room - lines * h - 14) / Math.max(lines - 1, 1), 48, 130);
  const nodes = [];
  const hosts = ranksOn.map((ranks, host) => {
    const [x, y] = [4 + (host % columns) * (w + gapX), 6 + Math.floor(host / columns) * (h + gapY)];
    ranks.forEach((rank, index) => {
      const row = Math.floor(index / inside);
      const here = Math.min(inside, ranks.length - row * inside);
      nodes[rank] = { x: x + (w / here) * ((index % inside) + 0.5), y: y + 34 + row * (fit.h + 26) + fit.h / 2 };
    });
    return { host, x, y, w, h };
  });
  return { nodes, card: fit, height: hosts.at(-1).y + h + 8, hosts, route: (a, b) => ({ d: bow(nodes[a], nodes[b]) }) };
}

function onTorus({ world }, card, { width, height: most }) {
  let rows = Math.floor(Math.sqrt(world)); // as square as the world allows
  while (world % rows) rows--;
  const columns = world / rows;
  const stub = width < 440 ? 12 : 30;
  const stepX = (width - 2 * stub) / columns;
  const fit = fitted(card, Math.min(150, stepX * 0.72), 66);
  const stepY = Math.max(fit.h + 34, Math.min(150, (most - 2 * stub) / rows));
  const nodes = Array.from({ length: world }, (_, rank) => ({ x: stub + stepX * ((rank % columns) + 0.5), y: stub + stepY * (Math.floor(rank / columns) + 0.5) }));
  /** The link from a rank along one axis by one, beside the middle by its direction. */
  const hop = (rank, axis, sign) => {
    const [row, column] = [Math.floor(rank / columns), rank % columns];
    const target = axis === "x" ? row * columns + ((column + sign + columns) % columns) : ((row + sign + rows) % rows) * columns + column;
    const [from, to] = [nodes[rank], nodes[target]];
    const along = to[axis] - from[axis];
    const wraps = (axis === "x" ? columns : rows) > 2 && along * sign < 0;
    const side = 5 * (wraps ? sign : Math.sign(along)); // of two ranks on an axis, neither goes round
    const shifted = ({ x, y }, far = 0) => (axis === "x" ? [x + far, y + side] : [x - side, y + far]);
    const far = sign * ((axis === "x" ? stepX : stepY) / 2 + stub * 0.8);
    const d = wraps ? line([shifted(from), shifted(from, far)]) + line([shifted(to, -far), shifted(to)]) : line([shifted(from), shifted(to)]);
    return { wire: `${rank} ${axis}${sign}`, source: rank, target, d };
  };
  const axes = [["x", columns], ["y", rows]];
  const wires = nodes.flatMap((_, rank) => axes.flatMap(([axis, size]) => [1, -1].slice(0, Math.min(2, size - 1)).map((sign) => hop(rank, axis, sign))));
  /** Along the row first, then along the column, each the shorter way round. */
  const route = (source, target) => {
    const hops = [];
    const distance = { x: (target % columns) - (source % columns), y: Math.floor(target / columns) - Math.floor(source / columns) };
    for (const [axis, size] of axes) {
      const steps = (distance[axis] + size) % size;
      const sign = 2 * steps <= size ? 1 : -1;
      for (let left = sign > 0 ? steps : size - steps; left > 0; left--) hops.push(hop(hops.at(-1)?.target ?? source, axis, sign));
    }
    return { d: hops.map(({ d }) => d).join(""), wires: hops.map(({ wire }) => wire) };
  };
  return { nodes, card: fit, height: rows * stepY + 2 * stub, wires, route, sides: [rows, columns] };
}

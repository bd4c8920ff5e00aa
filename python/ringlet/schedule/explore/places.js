// Where ranks stand and which way messages go: on a circle, on hosts, on a torus.

const PLACES = { circle: onCircle, hosts: onHosts, torus: onTorus };

/** {nodes: [{x, y, w, h}], card, height, hosts, wires, route(source, target) -> {strokes, wires}}; `room` in pixels. */
function placesOf(kind, scene, room) {
  const placed = PLACES[kind](scene.schedule, cardOf(scene), room);
  for (const node of placed.nodes) Object.assign(node, { w: placed.card.w, h: placed.card.h });
  return placed;
}

const HEAD = 17; // a card's line with the rank
const PAD = 5;

/** How a rank's boxes stand on its card, before it is known how wide the card may be. */
function cardOf({ schedule, byRank }) {
  const boxes = byRank ? schedule.world : schedule.parts;
  const pairs = schedule.collective === "all_to_all";
  const columns = pairs ? boxes / 2 : boxes <= 16 ? boxes : Math.ceil(boxes / Math.ceil(boxes / 16));
  return { boxes, columns, rows: Math.ceil(boxes / columns), gap: byRank ? 0 : 2, pairs };
}

/** The card in at most so many pixels. */
function fitted(card, width, height) {
  const { columns, rows } = card;
  const room = Math.max(width - 2 * PAD, 18);
  const gap = Math.min(card.gap, room / columns / 5);
  const cell = Math.min(columns === 1 ? 40 : 17, room / columns - gap);
  const labels = cell >= 10.5 && card.gap > 0 && columns > 1 ? 11 : 0; // a line of chunk numbers below each row
  const tall = Math.min(26, Math.max(7, (height - HEAD - 2 * PAD) / rows - 3 - labels));
  const w = Math.max(columns * (cell + gap) - gap + 2 * PAD, 30);
  return { ...card, gap, cell, tall, labels, w, h: HEAD + rows * (tall + 3 + labels) - 3 + 2 * PAD };
}

function onCircle(schedule, card, { width, height: most }) {
  const { world } = schedule;
  const height = Math.max(320, Math.min(width * 0.9, most));
  const across = Math.min(width, height * 1.3);
  const middle = { x: width / 2, y: height / 2 };
  const stand = (fit) =>
    Array.from({ length: world }, (_, rank) => {
      const angle = (2 * Math.PI * rank) / world - Math.PI / 2;
      const [rx, ry] = [(across - fit.w) / 2 - 6, (height - fit.h) / 2 - 6];
      return { x: middle.x + rx * Math.cos(angle), y: middle.y + ry * Math.sin(angle) };
    });
  const fit = widest(card, Math.min(190, across * 0.4), stand);
  const nodes = stand(fit);
  return { nodes, card: fit, height, hosts: [], wires: [], route: (a, b) => ({ strokes: [arc(nodes[a], nodes[b], middle)] }) };
}

/** The largest card with which no two of those that `stand` places touch. */
function widest(card, most, stand) {
  let best = null;
  for (const tall of [96, 66, 54, 46, 40, 34]) {
    for (let wide = most; wide > 26; wide -= 3) {
      const fit = fitted(card, wide, tall);
      const nodes = stand(fit);
      const free = nodes.every(({ x, y }, rank) =>
        [1, 2].every((step) => {
          const other = nodes[(rank + step) % nodes.length];
          return other === nodes[rank] || Math.abs(other.x - x) >= fit.w + 8 || Math.abs(other.y - y) >= fit.h + 8;
        }),
      );
      if (!free) continue;
      if (!best || fit.cell * fit.tall > best.cell * best.tall) best = fit;
      break;
    }
  }
  return best ?? fitted(card, 26, 30);
}

/** A bow to the right of its direction, so that there and back are two lines; a little towards the middle. */
function arc(from, to, middle) {
  const [dx, dy] = [to.x - from.x, to.y - from.y];
  const length = Math.hypot(dx, dy) || 1;
  const centre = { x: (from.x + to.x) / 2, y: (from.y + to.y) / 2 };
  const bow = Math.min(0.16 * length, 34);
  const pull = middle ? 0.12 : 0;
  const cx = centre.x - (dy / length) * bow + (middle ? (middle.x - centre.x) * pull : 0);
  const cy = centre.y + (dx / length) * bow + (middle ? (middle.y - centre.y) * pull : 0);
  return Array.from({ length: 25 }, (_, i) => {
    const t = i / 24;
    const [a, b, c] = [(1 - t) ** 2, 2 * t * (1 - t), t * t];
    return [a * from.x + b * cx + c * to.x, a * from.y + b * cy + c * to.y];
  });
}

function onHosts(schedule, card, { width, height: room }) {
  const count = Math.max(...schedule.hosts) + 1;
  const ranksOn = Array.from({ length: count }, (_, host) => schedule.hosts.flatMap((h, rank) => (h === host ? [rank] : [])));
  const most = Math.max(...ranksOn.map((ranks) => ranks.length));
  const columns = count === 1 ? 1 : width < 440 ? Math.min(2, count) : Math.min(count, count <= 4 ? 2 : count <= 9 ? 3 : 4);
  const gapX = width < 440 ? 18 : 46;
  const hostWidth = (width - gapX * (columns - 1) - 8) / columns;
  const inside = Math.min(most, Math.max(1, Math.floor(hostWidth / (width < 440 ? 58 : 84))));
  const fit = fitted(card, Math.min(150, (hostWidth - 16) / inside - (width < 440 ? 14 : 34)), 64);
  const rows = Math.ceil(most / inside);
  const hostHeight = 30 + rows * (fit.h + 26) - 8;
  const lines = Math.ceil(count / columns);
  const gapY = clamp((room - lines * hostHeight - 14) / Math.max(lines - 1, 1), 48, 130);
  const nodes = [];
  const hosts = ranksOn.map((ranks, host) => {
    const x = 4 + (host % columns) * (hostWidth + gapX);
    const y = 6 + Math.floor(host / columns) * (hostHeight + gapY);
    ranks.forEach((rank, index) => {
      const line = Math.floor(index / inside);
      const here = Math.min(inside, ranks.length - line * inside);
      const step = hostWidth / here;
      nodes[rank] = { x: x + step * ((index % inside) + 0.5), y: y + 34 + line * (fit.h + 26) + fit.h / 2 };
    });
    return { host, x, y, w: hostWidth, h: hostHeight };
  });
  const height = hosts.at(-1).y + hostHeight + 8;
  return { nodes, card: fit, height, hosts, wires: [], route: (a, b) => ({ strokes: [arc(nodes[a], nodes[b])] }) };
}

/** The torus' sides: as square as the world allows. */
function sidesOf(world) {
  let rows = Math.floor(Math.sqrt(world));
  while (world % rows) rows--;
  return [rows, world / rows];
}

function onTorus(schedule, card, { width, height: most }) {
  const [rows, columns] = sidesOf(schedule.world);
  const stub = width < 440 ? 12 : 30;
  const stepX = (width - 2 * stub) / columns;
  const fit = fitted(card, Math.min(150, stepX * 0.72), 66);
  const stepY = Math.max(fit.h + 34, Math.min(150, (most - 2 * stub) / rows));
  const nodes = Array.from({ length: schedule.world }, (_, rank) => ({
    x: stub + stepX * ((rank % columns) + 0.5),
    y: stub + stepY * (Math.floor(rank / columns) + 0.5),
  }));
  const grid = { rows, columns, stepX, stepY, nodes, edge: stub * 0.8 };
  const route = (source, target) => torusRoute(grid, source, target);
  return { nodes, card: fit, height: rows * stepY + 2 * stub, hosts: [], wires: torusWires(grid), route, sides: [rows, columns] };
}

/** The hop from a node along one axis by one: its strokes, beside the wire's middle by direction. */
function hop(grid, rank, axis, sign) {
  const { rows, columns, nodes, stepX, stepY, edge: stub } = grid;
  const [row, column] = [Math.floor(rank / columns), rank % columns];
  const next = axis === "x" ? row * columns + ((column + sign + columns) % columns) : ((row + sign + rows) % rows) * columns + column;
  const from = nodes[rank];
  const to = nodes[next];
  const along = axis === "x" ? to.x - from.x : to.y - from.y;
  const wraps = (axis === "x" ? columns : rows) > 2 && along * sign < 0;
  const side = wraps ? sign : Math.sign(along); // of two ranks on an axis, neither goes round
  const [sx, sy] = axis === "x" ? [0, side * 5] : [-side * 5, 0];
  const shift = (x, y) => [x + sx, y + sy];
  const [reachX, reachY] = [stepX / 2 + stub, stepY / 2 + stub];
  const [hx, hy] = axis === "x" ? [sign * reachX, 0] : [0, sign * reachY];
  const strokes = wraps
    ? [[shift(from.x, from.y), shift(from.x + hx, from.y + hy)], [shift(to.x - hx, to.y - hy), shift(to.x, to.y)]]
    : [[shift(from.x, from.y), shift(to.x, to.y)]];
  return { next, strokes, wire: `${rank} ${axis}${sign > 0 ? "+" : "-"}` };
}

/** Along the row first, then along the column, each the shorter way round. */
function torusRoute(grid, source, target) {
  const strokes = [];
  const wires = [];
  const walk = (axis, size, distance) => {
    const steps = (distance + size) % size;
    const sign = 2 * steps <= size ? 1 : -1;
    for (let left = sign > 0 ? steps : size - steps; left > 0; left--) {
      const { next, strokes: added, wire } = hop(grid, source, axis, sign);
      const joins = strokes.length && lengthOf([strokes.at(-1).at(-1), added[0][0]]) < 12;
      if (joins) strokes.at(-1).push(...added[0]);
      else strokes.push(added[0]);
      strokes.push(...added.slice(1));
      wires.push(wire);
      source = next;
    }
  };
  walk("x", grid.columns, (target % grid.columns) - (source % grid.columns));
  walk("y", grid.rows, Math.floor(target / grid.columns) - Math.floor(source / grid.columns));
  return { strokes, wires };
}

/** Every directed link of the torus: {wire, source, target, strokes}. */
function torusWires(grid) {
  const wires = [];
  for (let rank = 0; rank < grid.nodes.length; rank++) {
    for (const [axis, size] of [["x", grid.columns], ["y", grid.rows]]) {
      for (const sign of size > 2 ? [1, -1] : size > 1 ? [1] : []) {
        const { next, strokes, wire } = hop(grid, rank, axis, sign);
        wires.push({ wire, source: rank, target: next, strokes });
      }
    }
  }
  return wires;
}

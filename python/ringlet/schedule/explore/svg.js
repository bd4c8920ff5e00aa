// Elements and paths.

const SVG = "http://www.w3.org/2000/svg";

/** A new SVG element inside `parent`. */
function draw(parent, name, attributes = {}, text) {
  const made = document.createElementNS(SVG, name);
  set(made, attributes);
  if (text !== undefined) made.textContent = text;
  parent?.append(made);
  return made;
}

function set(element, attributes) {
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
}

/** A new HTML element inside `parent`. */
function add(parent, name, properties = {}, text) {
  const made = Object.assign(document.createElement(name), properties);
  if (text !== undefined) made.textContent = text;
  parent?.append(made);
  return made;
}

const clamp = (value, low, high) => Math.min(high, Math.max(low, value));
const round1 = (value) => Math.round(value * 10) / 10;

/** Polylines: a list of strokes, each a list of [x, y]; a stroke ends where a path leaves the picture to re-enter it. */
function pathData(strokes) {
  return strokes.map((points) => "M" + points.map(([x, y]) => `${round1(x)} ${round1(y)}`).join("L")).join("");
}

function lengthOf(points) {
  let length = 0;
  for (let i = 1; i < points.length; i++) length += Math.hypot(points[i][0] - points[i - 1][0], points[i][1] - points[i - 1][1]);
  return length;
}

/** The point that lies at a share of the way. */
function pointAt(strokes, fraction) {
  const lengths = strokes.map(lengthOf);
  let left = fraction * lengths.reduce((sum, length) => sum + length, 0);
  for (let s = 0; s < strokes.length; s++) {
    if (left > lengths[s] && s + 1 < strokes.length) {
      left -= lengths[s];
      continue;
    }
    const points = strokes[s];
    for (let i = 1; i < points.length; i++) {
      const [[x1, y1], [x2, y2]] = [points[i - 1], points[i]];
      const step = Math.hypot(x2 - x1, y2 - y1);
      if (left <= step || i === points.length - 1) {
        const part = step ? Math.min(1, left / step) : 1;
        return [x1 + (x2 - x1) * part, y1 + (y2 - y1) * part];
      }
      left -= step;
    }
  }
  return strokes.at(-1).at(-1);
}

/** The strokes without what lies inside the boxes at both ends. */
function outside(strokes, from, to) {
  const inside = (box, [x, y], gap) => Math.abs(x - box.x) < box.w / 2 + gap && Math.abs(y - box.y) < box.h / 2 + gap;
  const cut = strokes.map((points) => points.slice());
  while (cut[0].length > 2 && inside(from, cut[0][1], 2)) cut[0].shift();
  const last = cut.at(-1);
  while (last.length > 2 && inside(to, last.at(-2), 5)) last.pop();
  cut[0][0] = edge(cut[0][0], cut[0][1], (point) => inside(from, point, 2));
  last[last.length - 1] = edge(last.at(-1), last.at(-2), (point) => inside(to, point, 5));
  return cut;
}

/** Where the way from `start` to `end` leaves what `inside` tells. */
function edge(start, end, inside) {
  let [low, high] = [0, 1];
  const at = (part) => [start[0] + (end[0] - start[0]) * part, start[1] + (end[1] - start[1]) * part];
  if (!inside(start)) return start;
  for (let i = 0; i < 12; i++) {
    const middle = (low + high) / 2;
    if (inside(at(middle))) low = middle;
    else high = middle;
  }
  return at(high);
}

/** The triangle at the end of a path. */
function arrowHead(strokes, size) {
  const points = strokes.at(-1);
  const [x, y] = points.at(-1);
  const before = points.findLast(([px, py]) => Math.hypot(px - x, py - y) > 4) ?? points[0];
  const length = Math.hypot(x - before[0], y - before[1]) || 1;
  const [dx, dy] = [((x - before[0]) / length) * size, ((y - before[1]) / length) * size];
  const corner = (sign) => `${round1(x - dx - (sign * dy) / 2)} ${round1(y - dy + (sign * dx) / 2)}`;
  return `M${round1(x)} ${round1(y)}L${corner(1)}L${corner(-1)}z`;
}

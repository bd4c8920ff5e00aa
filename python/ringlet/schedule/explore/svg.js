// Elements, and the ways of messages.

/** A new SVG element inside `parent`. */
function draw(parent, name, attributes = {}, text) {
  return filled(parent, document.createElementNS("http://www.w3.org/2000/svg", name), attributes, text);
}

/** A new HTML element inside `parent`. */
function add(parent, name, attributes = {}, text) {
  return filled(parent, document.createElement(name), attributes, text);
}

function filled(parent, made, attributes, text) {
  set(made, attributes);
  if (text !== undefined) made.textContent = text;
  parent.append(made);
  return made;
}

function set(element, attributes) {
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
}

const clamp = (value, low, high) => Math.min(high, Math.max(low, value));
const round1 = (value) => Math.round(value * 10) / 10;
const line = (points) => "M" + points.map(([x, y]) => `${round1(x)} ${round1(y)}`).join("L");

/** A bow to the right of its direction, so that there and back are two lines. */
function bow(from, to) {
  const [dx, dy] = [to.x - from.x, to.y - from.y];
  const length = Math.hypot(dx, dy) || 1;
  const out = Math.min(0.16 * length, 34) / length;
  const [x, y] = [(from.x + to.x) / 2 - dy * out, (from.y + to.y) / 2 + dx * out];
  return `M${round1(from.x)} ${round1(from.y)}Q${round1(x)} ${round1(y)} ${round1(to.x)} ${round1(to.y)}`;
}

/** Points of a path by their share of what lies outside the cards {w, h} around its ends. */
function wayOf(path, source, target, { w, h }) {
  const whole = path.getTotalLength();
  const leave = (node, gap, inner, outer) => {
    for (let i = 0; i < 12; i++) {
      const middle = (inner + outer) / 2;
      const { x, y } = path.getPointAtLength(middle);
      if (Math.abs(x - node.x) < w / 2 + gap && Math.abs(y - node.y) < h / 2 + gap) inner = middle;
      else outer = middle;
    }
    return outer;
  };
  const [from, to] = [leave(source, 2, 0, whole / 2), leave(target, 5, whole, whole / 2)];
  return (share) => path.getPointAtLength(from + (to - from) * share);
}

// Elements, and the ways of messages.

/** A new SVG element inside `parent`. */
function draw(parent, name, attributes = {}, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
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

/** A bow to the right of its direction, so that there and back are two lines. */
function bow(from, to) {
  const [dx, dy] = [to.x - from.x, to.y - from.y];
  const length = Math.hypot(dx, dy) || 1;
  const out = Math.min(0.16 * length, 34) / length;
  const [x, y] = [(from.x + to.x) / 2 - dy * out, (from.y + to.y) / 2 + dx * out];
  return `M${round1(from.x)} ${round1(from.y)}Q${round1(x)} ${round1(y)} ${round1(to.x)} ${round1(to.y)}`;
}

/** Points of a path by their share of it, without what the cards {w, h} at its ends cover. */
function wayOf(path, { w, h }) {
  const whole = path.getTotalLength();
  const covered = Math.min(0.4 * whole, Math.hypot(w, h) / 2);
  return (share) => path.getPointAtLength(covered + (whole - 2 * covered) * share);
}

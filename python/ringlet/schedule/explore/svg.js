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

/** A new HTML element inside `parent`. */
function add(parent, name, properties = {}, text) {
  const made = Object.assign(document.createElement(name), properties);
  if (text !== undefined) made.textContent = text;
  parent.append(made);
  return made;
}

const clamp = (value, low, high) => Math.min(high, Math.max(low, value));
const round1 = (value) => Math.round(value * 10) / 10;
const line = (points) => "M" + points.map(([x, y]) => `${round1(x)} ${round1(y)}`).join("L");

/** Points of a path by their share of what lies outside the boxes {x, y, w, h} at its ends. */
function wayOf(path, source, target) {
  const whole = path.getTotalLength();
  const leave = (box, gap, inner, outer) => {
    for (let i = 0; i < 12; i++) {
      const middle = (inner + outer) / 2;
      const { x, y } = path.getPointAtLength(middle);
      if (Math.abs(x - box.x) < box.w / 2 + gap && Math.abs(y - box.y) < box.h / 2 + gap) inner = middle;
      else outer = middle;
    }
    return outer;
  };
  const [from, to] = [leave(source, 2, 0, whole / 2), leave(target, 5, whole, whole / 2)];
  return (share) => path.getPointAtLength(from + (to - from) * share);
}

// Predicted time over size: every algorithm of the collective, the two on stage in colour, and the machine to drag.

const SIZES = Array.from({ length: 55 }, (_, i) => 2 ** (3 + i / 2)); // 8 B to 1 GiB
const LIMITS = { alpha: [1e-8, 1e-3], beta: [1e-12, 1e-8], gamma: [1e-13, 1e-8] };
const EDGE = { left: 54, right: 16, top: 14, bottom: 66 };
const log10 = Math.log10;

class Plot {
  /** `changed` is called with what was dragged: {alpha}, {beta} or {bytes}, and whether the hand has let go. */
  constructor(svg, changed) {
    this.svg = svg;
    this.changed = changed;
    this.held = null;
    svg.addEventListener("pointerdown", (event) => this.grab(event));
    svg.addEventListener("pointermove", (event) => this.drag(event));
    for (const end of ["pointerup", "pointercancel"]) svg.addEventListener(end, () => this.release());
  }

  /** `curves`: [{name, costs, side}], side "a", "b" or "". */
  show(curves, machine, bytes, width) {
    this.curves = curves;
    Object.assign(this, { machine, bytes, width, height: width < 440 ? 300 : 340 });
    for (const curve of curves) curve.seconds = SIZES.map((size) => predict(curve.costs, size, machine).seconds);
    if (!this.held) this.scale();
    this.redraw();
  }

  scale() {
    const all = this.curves.flatMap((curve) => curve.seconds).filter((value) => value > 0);
    this.low = Math.floor(log10(Math.min(...all)) * 2) / 2 - 0.1;
    this.high = Math.ceil(log10(Math.max(...all)) * 2) / 2 + 0.1;
  }

  x(bytes) {
    return EDGE.left + ((Math.log2(bytes) - 3) / 27) * (this.width - EDGE.left - EDGE.right);
  }

  y(seconds) {
    return EDGE.top + ((this.high - log10(seconds)) / (this.high - this.low)) * (this.height - EDGE.top - EDGE.bottom);
  }

  redraw() {
    const { svg, width, height } = this;
    svg.replaceChildren();
    set(svg, { viewBox: `0 0 ${width} ${height}`, width, height });
    this.drawAxes();
    const clip = draw(svg, "clipPath", { id: "plot-area" });
    draw(clip, "rect", { x: EDGE.left, y: 0, width: width - EDGE.left - EDGE.right, height: height - EDGE.bottom });
    for (const side of ["", "b", "a"]) for (const curve of this.curves) if (curve.side === side) this.drawCurve(curve);
    this.drawFastest();
    this.drawSize();
    const held = this.curves.find((curve) => curve.side === "a");
    if (held) this.handles(held);
  }

  drawAxes() {
    const { svg, width, height } = this;
    const bottom = height - EDGE.bottom;
    for (let power = Math.ceil(this.low); power <= this.high; power++) {
      const y = round1(this.y(10 ** power));
      draw(svg, "path", { class: "grid", d: `M${EDGE.left} ${y}H${width - EDGE.right}` });
      draw(svg, "text", { class: "tick", x: EDGE.left - 8, y: y + 4, "text-anchor": "end" }, secondsText(10 ** power));
    }
    for (let power = 3; power <= 30; power++) {
      const x = round1(this.x(2 ** power));
      const labelled = width < 440 ? [5, 15, 25].includes(power) : power % 5 === 0;
      draw(svg, "path", { class: "grid", d: `M${x} ${bottom}v${labelled ? 6 : 3}` });
      if (labelled) draw(svg, "text", { class: "tick", x, y: bottom + 19, "text-anchor": power === 30 ? "end" : "middle" }, bytesText(2 ** power));
    }
    draw(svg, "path", { class: "axis", d: `M${EDGE.left} ${EDGE.top}V${bottom}H${width - EDGE.right}` });
  }

  drawCurve({ name, seconds, side }) {
    const points = SIZES.map((size, i) => [this.x(size), this.y(seconds[i])]);
    const path = draw(this.svg, "path", { class: `curve ${side}`, d: pathData([points]), "clip-path": "url(#plot-area)" });
    draw(path, "title", {}, titleOf(name));
    if (!side) return;
    const at = side === "a" ? 33 : 20;
    const [x, y] = points[at];
    draw(this.svg, "text", { class: `curve-name ${side}`, x: round1(x - 8), y: round1(clamp(y - 8, EDGE.top + 10, this.height)), "text-anchor": "end" }, titleOf(name));
  }

  /** A band below the axis: which algorithm is the fastest of all, size by size. */
  drawFastest() {
    const top = this.height - EDGE.bottom + 32;
    const best = SIZES.map((_, i) => this.curves.reduce((a, b) => (b.seconds[i] < a.seconds[i] * (1 - 1e-9) ? b : a)));
    this.fastest = [];
    for (let i = 0; i < best.length; ) {
      let end = i;
      while (end + 1 < best.length && best[end + 1] === best[i]) end++;
      const [x1, x2] = [i ? (this.x(SIZES[i - 1]) + this.x(SIZES[i])) / 2 : EDGE.left, end + 1 < SIZES.length ? (this.x(SIZES[end]) + this.x(SIZES[end + 1])) / 2 : this.width - EDGE.right];
      const { name, side } = best[i];
      const group = draw(this.svg, "g", { class: `fastest ${side}` });
      draw(group, "rect", { x: round1(x1 + 1), y: top, width: round1(Math.max(1, x2 - x1 - 2)), height: 22, rx: 4 });
      if (x2 - x1 > titleOf(name).length * 6.6 + 8) draw(group, "text", { x: round1((x1 + x2) / 2), y: top + 15, "text-anchor": "middle" }, titleOf(name));
      draw(group, "title", {}, `${titleOf(name)} is the fastest from ${bytesText(SIZES[i])} to ${bytesText(SIZES[end])}`);
      this.fastest.push({ name, from: SIZES[i], to: SIZES[end] });
      i = end + 1;
    }
    draw(this.svg, "text", { class: "tick", x: EDGE.left - 8, y: top + 15, "text-anchor": "end" }, "fastest");
  }

  drawSize() {
    const x = round1(this.x(clamp(this.bytes, 8, 2 ** 30)));
    const bottom = this.height - EDGE.bottom;
    const group = draw(this.svg, "g", { class: "size-line", "data-hold": "bytes" });
    draw(group, "path", { class: "size-grip", d: `M${x} ${EDGE.top}V${bottom}` });
    draw(group, "path", { class: "size-rule", d: `M${x} ${EDGE.top}V${bottom}` });
    const text = `S = ${bytesText(this.bytes)}`;
    const end = x > this.width - 110;
    draw(group, "text", { class: "size-name", x: end ? x - 6 : x + 6, y: bottom - 8, "text-anchor": end ? "end" : "start" }, text);
    for (const { costs, side } of this.curves) {
      if (side) draw(group, "circle", { class: `dot ${side}`, cx: x, cy: round1(this.y(predict(costs, this.bytes, this.machine).seconds)), r: 4.5 });
    }
  }

  handles({ seconds }) {
    for (const [hold, index, letter] of [["alpha", 2, "α"], ["beta", SIZES.length - 3, "β"]]) {
      const [x, y] = [round1(this.x(SIZES[index])), round1(clamp(this.y(seconds[index]), 12, this.height - EDGE.bottom - 12))];
      const group = draw(this.svg, "g", { class: "handle", "data-hold": hold, transform: `translate(${x} ${y})` });
      draw(group, "circle", { r: 12 });
      draw(group, "text", { y: 4.5, "text-anchor": "middle" }, letter);
      draw(group, "title", {}, `drag ${letter}`);
    }
  }

  grab(event) {
    const hold = event.target.closest("[data-hold]")?.dataset.hold ?? "bytes";
    this.held = { hold, y: event.offsetY, machine: { ...this.machine } };
    this.svg.setPointerCapture(event.pointerId);
    if (hold === "bytes") this.drag(event);
  }

  drag(event) {
    if (!this.held) return;
    const { hold, y, machine } = this.held;
    const box = this.svg.getBoundingClientRect();
    if (hold === "bytes") {
      const power = 3 + ((event.clientX - box.left - EDGE.left) / (this.width - EDGE.left - EDGE.right)) * 27;
      this.changed({ bytes: 2 ** clamp(Math.round(power), 3, 30) }, false);
      return;
    }
    const factor = 10 ** (((y - event.clientY + box.top) / (this.height - EDGE.top - EDGE.bottom)) * (this.high - this.low));
    this.changed({ [hold]: Number(clamp(machine[hold] * factor, ...LIMITS[hold]).toPrecision(3)) }, false);
  }

  release() {
    if (!this.held) return;
    this.held = null;
    this.scale();
    this.redraw();
    this.changed({}, true);
  }

  /** Where the two on stage cross, in words. */
  comparison() {
    const [a, b] = ["a", "b"].map((side) => this.curves.find((curve) => curve.side === side));
    if (!a || !b) return "";
    const faster = SIZES.map((_, i) => Math.sign(Math.round((b.seconds[i] / a.seconds[i] - 1) * 1e6)));
    const turns = [];
    faster.forEach((sign, i) => {
      if (!turns.length || turns.at(-1).sign !== sign) turns.push({ sign, from: i });
    });
    const name = (sign) => (sign ? `${titleOf(sign > 0 ? a.name : b.name)} is faster` : "both take the same time");
    const spans = turns.map(({ sign }, i) => {
      const to = turns[i + 1]?.from;
      return `${name(sign)} ${turns.length === 1 ? "at every size" : to ? `up to ${bytesText(this.crossing(a, b, to))}` : "above"}`;
    });
    return `Predicted: ${spans.join(", ")}.`;
  }

  /** The size between two samples at which both take the same time; the second sample where they do not cross. */
  crossing(a, b, index) {
    let [low, high] = [SIZES[index - 1], SIZES[index]];
    const sign = (bytes) => Math.sign(predict(b.costs, bytes, this.machine).seconds - predict(a.costs, bytes, this.machine).seconds);
    const before = sign(low);
    for (let i = 0; i < 20; i++) {
      const middle = Math.sqrt(low * high);
      if (sign(middle) === before) low = middle;
      else high = middle;
    }
    return high;
  }
}

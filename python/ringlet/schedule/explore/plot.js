// Predicted time over size: every algorithm of the collective, the two on stage in colour, and the machine to drag.

const SIZES = Array.from({ length: 55 }, (_, i) => 2 ** (3 + i / 2)); // 8 B to 1 GiB
const LIMITS = { alpha: [1e-8, 1e-3], beta: [1e-12, 1e-8], gamma: [1e-13, 1e-8] };
const EDGE = { left: 54, right: 16, top: 14, bottom: 66 };
const log10 = Math.log10;

class Plot {
  /** `changed` is called with what was dragged: {alpha}, {beta} or {bytes}, and whether the hand has let go. */
  constructor(svg, changed) {
    Object.assign(this, { svg, changed, held: null });
    svg.addEventListener("pointerdown", (event) => this.grab(event));
    svg.addEventListener("pointermove", (event) => this.drag(event));
    for (const end of ["pointerup", "pointercancel"]) svg.addEventListener(end, () => this.release());
  }

  /** `curves`: [{name, scene, side}], side "a", "b" or "". */
  show(curves, machine, bytes, width) {
    Object.assign(this, { curves, machine, bytes, width, height: width < 440 ? 300 : 340 });
    for (const curve of curves) curve.seconds = SIZES.map((size) => predict(curve.scene, size, machine).seconds);
    if (!this.held) {
      const all = curves.flatMap((curve) => curve.seconds).filter((value) => value > 0);
      this.low = Math.floor(log10(Math.min(...all)) * 2) / 2 - 0.1;
      this.high = Math.ceil(log10(Math.max(...all)) * 2) / 2 + 0.1;
    }
    this.svg.replaceChildren();
    set(this.svg, { viewBox: `0 0 ${width} ${this.height}`, width, height: this.height });
    this.drawAxes();
    for (const side of ["", "b", "a"]) for (const curve of curves) if (curve.side === side) this.drawCurve(curve);
    this.drawFastest();
    this.drawSize();
    for (const curve of curves) if (curve.side === "a") this.drawHandles(curve);
  }

  x(bytes) {
    return EDGE.left + ((Math.log2(bytes) - 3) / 27) * (this.width - EDGE.left - EDGE.right);
  }

  y(seconds) {
    return EDGE.top + ((this.high - log10(seconds)) / (this.high - this.low)) * (this.height - EDGE.top - EDGE.bottom);
  }

  text(name, x, y, anchor, text, parent = this.svg) {
    draw(parent, "text", { class: name, x: round1(x), y: round1(y), "text-anchor": anchor }, text);
  }

  drawAxes() {
    const [right, bottom] = [this.width - EDGE.right, this.height - EDGE.bottom];
    let lines = "";
    for (let power = Math.ceil(this.low); power <= this.high; power++) {
      const y = round1(this.y(10 ** power));
      lines += `M${EDGE.left} ${y}H${right}`;
      this.text("tick", EDGE.left - 8, y + 4, "end", secondsText(10 ** power));
    }
    for (let power = 3; power <= 30; power++) {
      const labelled = this.width < 440 ? [5, 15, 25].includes(power) : power % 5 === 0;
      lines += `M${round1(this.x(2 ** power))} ${bottom}v${labelled ? 6 : 3}`;
      if (labelled) this.text("tick", this.x(2 ** power), bottom + 19, power === 30 ? "end" : "middle", bytesText(2 ** power));
    }
    draw(this.svg, "path", { class: "grid", d: lines });
    draw(this.svg, "path", { class: "axis", d: `M${EDGE.left} ${EDGE.top}V${bottom}H${right}` });
    draw(draw(this.svg, "clipPath", { id: "plot-area" }), "rect", { x: EDGE.left, y: 0, width: right - EDGE.left, height: bottom });
  }

  drawCurve({ name, seconds, side }) {
    const points = SIZES.map((size, i) => [this.x(size), this.y(seconds[i])]);
    const path = draw(this.svg, "path", { class: `curve ${side}`, d: line(points), "clip-path": "url(#plot-area)" });
    draw(path, "title", {}, titleOf(name));
    const [x, y] = points[side === "a" ? 33 : 20];
    if (side) this.text(`curve-name ${side}`, x - 8, clamp(y - 8, EDGE.top + 10, this.height), "end", titleOf(name));
  }

  /** A band below the axis: which algorithm is the fastest of all, size by size. */
  drawFastest() {
    const top = this.height - EDGE.bottom + 32;
    const best = SIZES.map((_, i) => this.curves.reduce((a, b) => (b.seconds[i] < a.seconds[i] * (1 - 1e-9) ? b : a)));
    const between = (i) => clamp((this.x(SIZES[Math.max(i, 0)]) + this.x(SIZES[Math.min(i + 1, SIZES.length - 1)])) / 2, EDGE.left, this.width - EDGE.right);
    for (let i = 0, end; i < best.length; i = end + 1) {
      for (end = i; best[end + 1] === best[i]; ) end++;
      const { name, side } = best[i];
      const [x1, x2] = [i ? between(i - 1) : EDGE.left, end + 1 < SIZES.length ? between(end) : this.width - EDGE.right];
      const group = draw(this.svg, "g", { class: `fastest ${side}` });
      draw(group, "rect", { x: round1(x1 + 1), y: top, width: round1(Math.max(1, x2 - x1 - 2)), height: 22, rx: 4 });
      if (x2 - x1 > name.length * 6.6 + 8) this.text("", (x1 + x2) / 2, top + 15, "middle", titleOf(name), group);
      draw(group, "title", {}, `${titleOf(name)} is the fastest from ${bytesText(SIZES[i])} to ${bytesText(SIZES[end])}`);
    }
    this.text("tick", EDGE.left - 8, top + 15, "end", "fastest");
  }

  drawSize() {
    const x = round1(this.x(clamp(this.bytes, 8, 2 ** 30)));
    const bottom = this.height - EDGE.bottom;
    const group = draw(this.svg, "g", { "data-hold": "bytes" });
    for (const kind of ["size-grip", "size-rule"]) draw(group, "path", { class: kind, d: `M${x} ${EDGE.top}V${bottom}` });
    const last = x > this.width - 110;
    this.text("size-name", last ? x - 6 : x + 6, bottom - 8, last ? "end" : "start", `S = ${bytesText(this.bytes)}`, group);
    for (const { scene, side } of this.curves) {
      if (side) draw(group, "circle", { class: `dot ${side}`, cx: x, cy: round1(this.y(predict(scene, this.bytes, this.machine).seconds)), r: 4.5 });
    }
  }

  drawHandles({ seconds }) {
    for (const [hold, index, letter] of [["alpha", 2, "α"], ["beta", SIZES.length - 3, "β"]]) {
      const y = clamp(this.y(seconds[index]), 12, this.height - EDGE.bottom - 12);
      const group = draw(this.svg, "g", { class: "handle", "data-hold": hold, transform: `translate(${round1(this.x(SIZES[index]))} ${round1(y)})` });
      draw(group, "circle", { r: 12 });
      this.text("", 0, 4.5, "middle", letter, group);
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
      return this.changed({ bytes: 2 ** clamp(Math.round(power), 3, 30) }, false);
    }
    const factor = 10 ** (((y - event.clientY + box.top) / (this.height - EDGE.top - EDGE.bottom)) * (this.high - this.low));
    this.changed({ [hold]: Number(clamp(machine[hold] * factor, ...LIMITS[hold]).toPrecision(3)) }, false);
  }

  release() {
    if (!this.held) return;
    this.held = null;
    this.changed({}, true);
  }

  /** Where the two on stage cross, in words. */
  comparison() {
    const [a, b] = ["a", "b"].map((side) => this.curves.find((curve) => curve.side === side));
    if (!a || !b) return "";
    const ratio = (bytes) => predict(b.scene, bytes, this.machine).seconds / predict(a.scene, bytes, this.machine).seconds;
    const faster = (bytes) => Math.sign(Math.round((ratio(bytes) - 1) * 1e6));
    const turns = [0];
    for (let i = 1; i < SIZES.length; i++) if (faster(SIZES[i]) !== faster(SIZES[i - 1])) turns.push(i);
    const crossing = (i) => {
      let [low, high] = [SIZES[i - 1], SIZES[i]];
      for (let k = 0; k < 20; k++) {
        const middle = Math.sqrt(low * high);
        if (faster(middle) === faster(SIZES[i - 1])) low = middle;
        else high = middle;
      }
      return high;
    };
    const spans = turns.map((from, i) => {
      const sign = faster(SIZES[from]);
      const where = turns.length === 1 ? "at every size" : i + 1 < turns.length ? `up to ${bytesText(crossing(turns[i + 1]))}` : "above";
      return `${sign ? `${titleOf(sign > 0 ? a.name : b.name)} is faster` : "both take the same time"} ${where}`;
    });
    return `Predicted: ${spans.join(", ")}.`;
  }
}

// Predicted time over size: every algorithm of the collective, the two on stage in colour.

const SIZES = Array.from({ length: 55 }, (_, i) => 2 ** (3 + i / 2)); // 8 B to 1 GiB
const LIMITS = { alpha: [1e-8, 1e-3], beta: [1e-12, 1e-8], gamma: [1e-13, 1e-8] };
const EDGE = { left: 54, right: 16, top: 14, bottom: 34 };
const log10 = Math.log10;

class Plot {
  constructor(svg) {
    this.svg = svg;
  }

  /** `curves`: [{name, scene, side}], side "a", "b" or "". */
  show(curves, machine, bytes, width) {
    Object.assign(this, { curves, machine, bytes, width, height: width < 440 ? 280 : 320 });
    for (const curve of curves) curve.seconds = SIZES.map((size) => predict(curve.scene, size, machine).seconds);
    const all = curves.flatMap((curve) => curve.seconds).filter((value) => value > 0);
    [this.low, this.high] = [log10(Math.min(...all)) - 0.1, log10(Math.max(...all)) + 0.1];
    this.svg.replaceChildren();
    set(this.svg, { viewBox: `0 0 ${width} ${this.height}`, width, height: this.height });
    this.drawAxes();
    for (const side of ["", "b", "a"]) for (const curve of curves) if (curve.side === side) this.drawCurve(curve);
    const x = this.x(clamp(bytes, 8, 2 ** 30));
    const rule = draw(this.svg, "path", { class: "size-rule", d: `M${round1(x)} ${EDGE.top}V${this.height - EDGE.bottom}` });
    draw(rule, "title", {}, `S = ${bytesText(bytes)}`);
  }

  x(bytes) {
    return EDGE.left + ((Math.log2(bytes) - 3) / 27) * (this.width - EDGE.left - EDGE.right);
  }

  y(seconds) {
    return EDGE.top + ((this.high - log10(seconds)) / (this.high - this.low)) * (this.height - EDGE.top - EDGE.bottom);
  }

  text(name, x, y, anchor, text) {
    draw(this.svg, "text", { class: name, x: round1(x), y: round1(y), "text-anchor": anchor }, text);
  }

  drawAxes() {
    const [right, bottom] = [this.width - EDGE.right, this.height - EDGE.bottom];
    let lines = "";
    for (let power = Math.ceil(this.low); power <= this.high; power++) {
      const y = round1(this.y(10 ** power));
      lines += `M${EDGE.left} ${y}H${right}`;
      this.text("tick", EDGE.left - 8, y + 4, "end", secondsText(10 ** power));
    }
    for (const power of this.width < 440 ? [5, 15, 25] : [5, 10, 15, 20, 25, 30]) {
      lines += `M${round1(this.x(2 ** power))} ${bottom}v6`;
      this.text("tick", this.x(2 ** power), bottom + 19, power === 30 ? "end" : "middle", bytesText(2 ** power));
    }
    draw(this.svg, "path", { class: "grid", d: lines });
    draw(this.svg, "path", { class: "axis", d: `M${EDGE.left} ${EDGE.top}V${bottom}H${right}` });
  }

  drawCurve({ name, seconds, side }) {
    const points = SIZES.map((size, i) => [this.x(size), this.y(seconds[i])]);
    draw(draw(this.svg, "path", { class: `curve ${side}`, d: line(points) }), "title", {}, titleOf(name));
    const [x, y] = points[side === "a" ? 33 : 20];
    if (side) this.text(`curve-name ${side}`, x - 8, clamp(y - 8, EDGE.top + 10, this.height), "end", titleOf(name));
  }

  /** Which of the two on stage is faster at the chosen size, in words. */
  comparison() {
    const [a, b] = ["a", "b"].map((side) => this.curves.find((curve) => curve.side === side));
    if (!a || !b) return "";
    const [mine, other] = [a, b].map(({ scene }) => predict(scene, this.bytes, this.machine).seconds);
    const ratio = significant(Math.max(mine, other) / Math.min(mine, other));
    if (ratio === "1") return `Predicted: both take the same time at ${bytesText(this.bytes)}.`;
    return `Predicted: ${titleOf((mine < other ? a : b).name)} is ${ratio} times as fast at ${bytesText(this.bytes)}.`;
  }
}

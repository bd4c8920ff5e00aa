// The table of all algorithms of the collective at one place; a press on A or B puts one on stage.

const COLUMNS = [
  ["rounds", "of the rank that has most", (row) => row.measures.rounds, String],
  ["sent per rank", "at most, in units of S", (row) => row.measures.sent / row.measures.unit, (value, row) => share(row.measures.sent, row.measures.unit)],
  ["busiest link", "of one pair of ranks, in one direction, over all rounds", (row) => row.link / row.measures.unit, (value, row) => share(row.link, row.measures.unit)],
  ["depth", "roundings between an input and the result", (row) => row.measures.depth, (value) => value || "–"],
  ["trees", "different orders of summation; with one, bits do not depend on an element's place", (row) => row.measures.trees, (value) => value || "–"],
  ["time", "predicted for size S", (row) => row.seconds, secondsText],
];

class NumberTable {
  constructor(table, pick) {
    this.table = table;
    this.pick = pick;
  }

  /** `rows`: [{row, scene, costs, measures, link, seconds}] of the algorithms that have a schedule here. */
  show(rows, a, b, bytes) {
    this.table.replaceChildren();
    const head = add(add(this.table, "thead"), "tr");
    add(head, "th", { scope: "col" }, "on stage");
    add(head, "th", { scope: "col" }, "algorithm");
    for (const [name, title] of COLUMNS) {
      add(head, "th", { scope: "col", title, className: "number" }, name === "time" ? `time, ${bytesText(bytes)}` : name);
    }
    const body = add(this.table, "tbody");
    const least = COLUMNS.map(([, , value]) => Math.min(...rows.map(value)));
    for (const found of rows) {
      const side = found.row.name === a ? "a" : found.row.name === b ? "b" : "";
      const line = add(body, "tr", { className: side });
      const picks = add(line, "td", { className: "picks" });
      for (const which of ["a", "b"]) this.button(picks, which, found.row.name, side === which);
      const name = add(line, "th", { scope: "row" }, titleOf(found.row.name));
      name.title = found.row.summary;
      COLUMNS.forEach(([, , value, text], i) => {
        const number = value(found);
        const best = rows.length > 1 && number <= least[i] * (1 + 1e-9) && rows.some((other) => value(other) > number * (1 + 1e-9));
        add(line, "td", { className: best ? "number best" : "number" }, text(number, found));
      });
    }
  }

  button(cell, side, name, pressed) {
    const made = add(cell, "button", { type: "button", className: `pick ${side}` }, side.toUpperCase());
    made.setAttribute("aria-pressed", pressed);
    made.setAttribute("aria-label", `${titleOf(name)} as ${side.toUpperCase()}`);
    made.addEventListener("click", () => this.pick(side, name, pressed));
  }
}

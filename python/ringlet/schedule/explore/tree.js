// How a sum comes about: as an expression tree that grows.

const LEAF = 11; // radius

/** The tree of the sum that a rank's chunk ends with; a node is {rank, depth, children, moment, at}. */
function sumTree({ frames, trees }, rank, chunk) {
  const final = frames.at(-1)[rank][chunk];
  if (!final) return null;
  const formed = new Map(); // tree -> when and where a sum of this chunk stood first
  for (const value of frames.flat(2)) {
    if (value?.origin !== final.origin) continue;
    const made = formed.get(value.node);
    if (!made || value.moment < made.moment) formed.set(value.node, { moment: value.moment, at: [value.rank] });
    else if (value.moment === made.moment && !made.at.includes(value.rank)) made.at.push(value.rank);
  }
  const build = (tree) => {
    const children = trees[tree].terms.map(build);
    const own = children.length ? -1 : ranksIn(trees[tree].ranks)[0];
    return { rank: own, depth: trees[tree].depth, children, ...(formed.get(tree) ?? { moment: 0, at: [own] }) };
  };
  return build(final.node);
}

/** "((0+1)+(2+3))" */
const treeText = (node) => (node.children.length ? `(${node.children.map(treeText).join("+")})` : String(node.rank));
const everyNode = (node) => [node, ...node.children.flatMap(everyNode)];

class TreeView {
  constructor(svg) {
    this.svg = svg;
  }

  show(scene, rank, box, width) {
    this.svg.replaceChildren();
    this.root = sumTree(scene, rank, scene.byRank ? 0 : box);
    this.nodes = this.root ? everyNode(this.root) : [];
    let leaves = 0;
    const place = (node) => {
      node.children.forEach(place);
      const middle = node.children.reduce((sum, child) => sum + child.column, 0) / node.children.length;
      node.column = node.children.length ? middle : leaves++;
    };
    if (this.root) place(this.root);
    const deep = Math.max(0, ...this.nodes.map((node) => node.depth));
    const stepX = Math.min(46, (width - 3 * LEAF) / Math.max(leaves - 1, 1));
    const stepY = deep > 8 ? 25 : deep > 4 ? 34 : 46;
    const height = deep * stepY + 2 * LEAF + 22;
    set(this.svg, { viewBox: `0 0 ${width} ${height}`, width, height });
    for (const node of this.nodes) {
      node.x = round1((width - stepX * Math.max(leaves - 1, 0)) / 2 + node.column * stepX);
      node.y = LEAF + 4 + (deep - node.depth) * stepY;
      node.parts = [];
    }
    for (const node of this.nodes) for (const child of node.children) this.drawEdge(node, child);
    for (const node of this.nodes) this.drawNode(node, Math.min(LEAF, stepX * 0.46), scene.world);
  }

  drawEdge(node, child) {
    const middle = (node.y + child.y) / 2;
    const d = `M${node.x} ${node.y}C${node.x} ${middle} ${child.x} ${middle} ${child.x} ${child.y}`;
    node.parts.push(draw(this.svg, "path", { class: "tree-edge", d }));
  }

  drawNode(node, radius, world) {
    const { rank, moment, at } = node;
    const leaf = rank >= 0;
    const group = draw(this.svg, "g", { transform: `translate(${node.x} ${node.y})`, class: "tree-node" });
    draw(group, "circle", leaf ? { r: radius, fill: rankColour(world, rank) } : { r: Math.min(radius, 9), class: "tree-sum" });
    const kind = { class: leaf ? "tree-leaf" : "tree-plus", y: 4, "text-anchor": "middle", "font-size": radius < 9 ? 9 : 11 };
    draw(group, "text", kind, leaf ? rank : "+");
    draw(group, "title", {}, moment ? `summed in round ${moment - 1} on rank ${at.join(", ")}` : `rank ${rank}'s own`);
    node.parts.push(group);
  }

  at(moment) {
    for (const node of this.nodes) for (const part of node.parts) part.classList.toggle("ghost", node.moment > moment);
  }

  /** The sum in words. */
  text(moment) {
    if (!this.root) return "No rank is promised a sum in this chunk.";
    const sums = this.nodes.filter((node) => node.children.length);
    const done = sums.filter((node) => node.moment <= moment).length;
    const deep = plural(this.root.depth, "rounding");
    return `${done} of ${plural(sums.length, "addition")} done, ${deep} deep: ${treeText(this.root)}`;
  }
}

// How one chunk comes about: its sum as an expression tree that grows, or its way from rank to rank.

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

/** Who got a chunk, or in a barrier a rank's word, from whom, from its owner on. */
function wayTree({ barrier, frames, messages }, rank, box) {
  const content = barrier ? frames[0][box][0] : (frames.at(-1)[rank][box] ?? frames[0][rank][box]);
  if (!content) return null;
  const owner = ranksIn(content.ranks)[0];
  const holds = (value) => value && (barrier ? (value.ranks >> owner) & 1 : value.origin === content.origin && value.ranks === content.ranks);
  const nodes = new Map([[owner, { rank: owner, children: [], moment: 0, depth: 0 }]]);
  for (const { source, target, first, count, begins, ends } of messages.toSorted((a, b) => a.ends - b.ends)) {
    const sent = frames[begins][source].slice(first, first + (barrier ? 1 : count));
    const parent = nodes.get(source);
    if (!parent || nodes.has(target) || !sent.some(holds)) continue;
    nodes.set(target, { rank: target, children: [], moment: ends, depth: parent.depth + 1 });
    parent.children.push(nodes.get(target));
  }
  return nodes.get(owner);
}

/** "((0+1)+(2+3))" */
const treeText = (node) => (node.children.length ? `(${node.children.map(treeText).join("+")})` : String(node.rank));
const everyNode = (node) => [node, ...node.children.flatMap(everyNode)];

class TreeView {
  constructor(svg) {
    this.svg = svg;
  }

  show(scene, rank, box, width) {
    const { sums, world } = scene;
    this.svg.replaceChildren();
    this.sums = sums;
    this.root = sums ? sumTree(scene, rank, scene.byRank ? 0 : box) : wayTree(scene, rank, box);
    this.nodes = this.root ? everyNode(this.root) : [];
    let leaves = 0;
    const place = (node) => {
      node.children.forEach(place);
      node.x = node.children.length ? node.children.reduce((sum, child) => sum + child.x, 0) / node.children.length : leaves++;
    };
    if (this.root) place(this.root);
    const deep = Math.max(0, ...this.nodes.map((node) => node.depth));
    const stepX = Math.min(46, (width - 3 * LEAF) / Math.max(leaves - 1, 1));
    const stepY = deep > 8 ? 25 : deep > 4 ? 34 : 46;
    const radius = Math.min(LEAF, stepX * 0.46);
    const height = deep * stepY + 2 * LEAF + 22;
    set(this.svg, { viewBox: `0 0 ${width} ${height}`, width, height });
    for (const node of this.nodes) {
      Object.assign(node, { px: round1((width - stepX * Math.max(leaves - 1, 0)) / 2 + node.x * stepX), py: LEAF + 4 + (sums ? deep - node.depth : node.depth) * stepY, parts: node.parts ?? [] });
    }
    for (const node of this.nodes) for (const child of node.children) this.drawEdge(node, child);
    for (const node of this.nodes) this.drawNode(node, radius, world);
  }

  drawEdge(node, child) {
    const middle = (node.py + child.py) / 2;
    const d = `M${node.px} ${node.py}C${node.px} ${middle} ${child.px} ${middle} ${child.px} ${child.py}`;
    (this.sums ? node : child).parts.push(draw(this.svg, "path", { class: "tree-edge", d }));
  }

  drawNode(node, radius, world) {
    const { rank, moment, at } = node;
    const leaf = rank >= 0;
    const group = draw(this.svg, "g", { transform: `translate(${node.px} ${node.py})`, class: "tree-node" });
    draw(group, "circle", leaf ? { r: radius, fill: rankColour(world, rank) } : { r: Math.min(radius, 9), class: "tree-sum" });
    draw(group, "text", { class: leaf ? "tree-leaf" : "tree-plus", y: 4, "text-anchor": "middle", "font-size": radius < 9 ? 9 : 11 }, leaf ? rank : "+");
    const made = this.sums ? `summed in round ${moment - 1} on rank ${at.join(", ")}` : `arrives in round ${moment - 1}`;
    draw(group, "title", {}, moment ? made : `rank ${rank}'s own`);
    node.parts.push(group);
  }

  at(moment) {
    for (const node of this.nodes) for (const part of node.parts) part.classList.toggle("ghost", node.moment > moment);
  }

  /** In words: the sum as text, or who has it by now. */
  text(moment) {
    if (!this.root) return "Nothing arrives in this chunk, and no rank is promised it.";
    const counted = this.nodes.filter((node) => !this.sums || node.children.length);
    const there = counted.filter((node) => node.moment <= moment).length;
    if (!this.sums) return `${there} of the ${plural(counted.length, "rank")} that it is for ${there === 1 ? "has" : "have"} it.`;
    return `${there} of ${plural(counted.length, "addition")} done, ${plural(this.root.depth, "rounding")} deep: ${treeText(this.root)}`;
  }
}

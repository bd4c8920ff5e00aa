// How one chunk comes about: its sum as an expression tree that grows, or its way from rank to rank.

const LEAF = 11; // radius

/** Nodes of the tree that a chunk of a rank ends with: {label, rank, x, y, depth, children, moment}. */
function sumTree(scene, rank, chunk) {
  const final = scene.frames.at(-1)[rank][chunk];
  if (!final) return null;
  const formed = formedAt(scene, final.origin);
  let leaves = 0;
  const build = (tree) => {
    const children = scene.trees.terms[tree].map(build);
    const own = children.length ? -1 : ranksIn(scene.trees.ranks[tree])[0];
    const x = children.length ? children.reduce((sum, child) => sum + child.x, 0) / children.length : leaves++;
    const made = formed.get(tree) ?? { moment: 0, ranks: [own] };
    return { rank: own, x, depth: scene.trees.depth[tree], children, moment: made.moment, at: made.ranks };
  };
  return build(final.tree);
}

/** tree -> {moment, ranks}: when and where a sum of chunk `origin` stood first. */
function formedAt(scene, origin) {
  const formed = new Map();
  scene.frames.forEach((frame, moment) =>
    frame.forEach((chunks, rank) => {
      for (const value of chunks) {
        if (value?.origin !== origin) continue;
        if (!formed.has(value.tree)) formed.set(value.tree, { moment, ranks: [] });
        const made = formed.get(value.tree);
        if (made.moment === moment && !made.ranks.includes(rank)) made.ranks.push(rank);
      }
    }),
  );
  return formed;
}

/** Who got a chunk, or in a barrier a rank's word, from whom, from its owner on. */
function wayTree(scene, rank, box) {
  const content = scene.barrier ? null : scene.frames.at(-1)[rank][box] ?? scene.frames[0][rank][box];
  if (!scene.barrier && !content) return null;
  const owner = scene.barrier ? box : ranksIn(content.ranks)[0];
  const holds = (chunk) => chunk && (scene.barrier ? (chunk.ranks >> owner) & 1 : chunk.origin === content.origin && chunk.ranks === content.ranks);
  const nodes = new Map([[owner, { rank: owner, children: [], moment: 0, at: [owner], depth: 0 }]]);
  for (const message of [...scene.messages].sort((a, b) => a.ends - b.ends)) {
    const sent = scene.barrier ? [scene.frames[message.begins][message.source][0]]
      : scene.frames[message.begins][message.source].slice(message.first, message.first + message.count);
    const parent = nodes.get(message.source);
    if (!parent || nodes.has(message.target) || !sent.some(holds)) continue;
    const child = { rank: message.target, children: [], moment: message.ends, at: [message.target] };
    parent.children.push(child);
    nodes.set(message.target, child);
  }
  let leaves = 0;
  const place = (node, depth) => {
    node.depth = depth;
    node.children.forEach((child) => place(child, depth + 1));
    node.x = node.children.length ? node.children.reduce((sum, child) => sum + child.x, 0) / node.children.length : leaves++;
  };
  place(nodes.get(owner), 0);
  return nodes.get(owner);
}

/** "((0+1)+(2+3))" */
function treeText(node) {
  return node.children.length ? `(${node.children.map(treeText).join("+")})` : String(node.rank);
}

function everyNode(node) {
  return [node, ...node.children.flatMap(everyNode)];
}

class TreeView {
  constructor(svg) {
    this.svg = svg;
  }

  show(scene, rank, box, width) {
    this.scene = scene;
    this.svg.replaceChildren();
    this.root = scene.sums ? sumTree(scene, rank, scene.byRank ? 0 : box) : wayTree(scene, rank, box);
    this.nodes = [];
    if (!this.root) {
      set(this.svg, { viewBox: `0 0 ${width} 24`, width, height: 24 });
      return;
    }
    const nodes = everyNode(this.root);
    const [wide, deep] = [Math.max(...nodes.map((node) => node.x)), Math.max(...nodes.map((node) => node.depth))];
    const stepX = Math.min(46, (width - 3 * LEAF) / Math.max(wide, 1));
    const stepY = deep > 8 ? 25 : deep > 4 ? 34 : 46;
    const radius = Math.min(LEAF, stepX * 0.46);
    const left = (width - stepX * wide) / 2;
    const height = deep * stepY + 2 * LEAF + 22;
    set(this.svg, { viewBox: `0 0 ${width} ${height}`, width, height });
    const y = (node) => LEAF + 4 + (scene.sums ? deep - node.depth : node.depth) * stepY;
    this.place = (node) => [left + node.x * stepX, y(node)];
    nodes.forEach((node) => this.drawEdges(node));
    nodes.forEach((node) => this.nodes.push({ node, parts: [...(node.edges ?? []), this.drawNode(node, radius)] }));
  }

  drawEdges(node) {
    const [x, y] = this.place(node);
    for (const child of node.children) {
      const [cx, cy] = this.place(child);
      const line = draw(this.svg, "path", { class: "tree-edge", d: `M${round1(x)} ${round1(y)}C${round1(x)} ${round1((y + cy) / 2)} ${round1(cx)} ${round1((y + cy) / 2)} ${round1(cx)} ${round1(cy)}` });
      const owner = this.scene.sums ? node : child;
      owner.edges = [...(owner.edges ?? []), line];
    }
  }

  drawNode(node, radius) {
    const [x, y] = this.place(node);
    const { sums, schedule } = this.scene;
    const group = draw(this.svg, "g", { transform: `translate(${round1(x)} ${round1(y)})`, class: "tree-node" });
    const leaf = node.rank >= 0;
    draw(group, "circle", leaf ? { r: radius, fill: rankColour(schedule.world, node.rank) } : { r: Math.min(radius, 9), class: "tree-sum" });
    draw(group, "text", { class: leaf ? "tree-leaf" : "tree-plus", y: 4, "text-anchor": "middle", "font-size": radius < 9 ? 9 : 11 }, leaf ? node.rank : "+");
    const where = `${sums ? "summed" : "arrives"} in round ${node.moment - 1}${sums ? ` on rank ${node.at.join(", ")}` : ""}`;
    draw(group, "title", {}, node.moment ? where : `rank ${node.rank}'s own`);
    return group;
  }

  at(time) {
    for (const { node, parts } of this.nodes) {
      const there = node.moment <= Math.floor(time + 1e-9);
      for (const part of parts) part.classList.toggle("ghost", !there);
    }
  }

  /** In words: the sum as text, or who has it by now. */
  text(moment) {
    if (!this.root) return "Nothing arrives in this chunk, and no rank is promised it.";
    const there = everyNode(this.root).filter((node) => node.moment <= moment);
    if (!this.scene.sums) return `${there.length} of the ${plural(everyNode(this.root).length, "rank")} that it is for ${there.length === 1 ? "has" : "have"} it.`;
    const sums = there.filter((node) => node.children.length).length;
    const all = everyNode(this.root).filter((node) => node.children.length).length;
    return `${sums} of ${plural(all, "addition")} done, ${plural(this.root.depth, "rounding")} deep: ${treeText(this.root)}`;
  }
}

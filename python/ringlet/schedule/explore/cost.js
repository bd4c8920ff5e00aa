// Seconds under the alpha-beta-gamma model, as ringlet/schedule/cost.py.

/** What `seconds` needs of a scene, in the order in which rounds complete. */
function costsOf(scene) {
  const { schedule, messages, order, ends } = scene;
  const met = schedule.ranks.map((rounds, rank) => rounds.map((_, round) => [[rank, round]]));
  for (const { source, sourceRound, target, targetRound } of messages) {
    met[source][sourceRound].push([target, targetRound]);
    met[target][targetRound].push([source, sourceRound]);
  }
  const total = (steps, ...verbs) =>
    steps.reduce((sum, step) => sum + (verbs.includes(step.verb) ? step.count : 0), 0);
  const port = schedule.ranks.map((rounds) =>
    rounds.map((steps) => Math.max(total(steps, "send"), total(steps, "recv", "reduce"))),
  );
  const steps = order.map(([rank, round]) => ({
    ...{ rank, met: met[rank][round], moment: ends[rank][round] },
    port: Math.max(...met[rank][round].map(([r, i]) => port[r][i])),
    reduced: total(schedule.ranks[rank][round], "reduce"),
  }));
  return { world: schedule.world, unit: partsOfS(schedule), moments: scene.moments, steps };
}

/** {seconds, at}: until the last rank is done, and at[m] when the last rank has come to moment m. */
function predict(costs, bytes, { alpha, beta, gamma }) {
  const chunk = bytes / costs.unit;
  const ends = Array.from({ length: costs.world }, () => [0]);
  const at = new Array(costs.moments + 1).fill(0);
  for (const { rank, met, moment, port, reduced } of costs.steps) {
    let start = 0;
    for (const [r, i] of met) if (ends[r][i] > start) start = ends[r][i];
    const end = start + alpha + beta * port * chunk + gamma * chunk * reduced;
    ends[rank].push(end);
    if (end > at[moment]) at[moment] = end;
  }
  for (let moment = 1; moment < at.length; moment++) at[moment] = Math.max(at[moment], at[moment - 1]);
  return { seconds: Math.max(...ends.map((list) => list.at(-1))), at };
}

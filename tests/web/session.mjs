// Runs the page's modules in node: a line of JSON with a call comes in, a line with its result goes out.
import { readFileSync } from "node:fs";
import { createInterface } from "node:readline";

const modules = process.argv[2];
const load = (name) => import(`${modules}/${name}.js`);
const [{ Session }, { readCheckpoint, encode }, sampling, tiling, formulas, caches, costs, state, writer, { commandFor }] =
  await Promise.all(
    ["session", "checkpoint", "sampling", "tiling", "formulas", "caches", "costs", "state", "writer", "command"].map(load),
  );
const { build } = await load("kernels");
const session = new Session();
const bytes = (path) => {
  const b = readFileSync(path);
  return b.buffer.slice(b.byteOffset, b.byteOffset + b.length);
};
const json = (path) => JSON.parse(readFileSync(path, "utf8"));
const files = ({ directory, weights }) => ({
  config: json(`${directory}/config.json`),
  characters: json(`${directory}/meta.json`).characters,
  weights: bytes(weights ?? `${directory}/model.safetensors`),
});

const range = (from, to) => Array.from({ length: Math.max(0, to - from) }, (_, n) => from + n);

const calls = {
  async load(a) {
    await session.compile({ wasm: readFileSync(a.wasm) });
    await session.load({ precision: a.precision, ...files(a) });
  },
  // The text of a request, whose prompt is text.
  text({ prompt, length, stop = [], ...request }) {
    const { characters } = session.checkpoint;
    const sampled = { temperature: 0.8, topK: 200, topP: 1, ...request.sampling };
    session.begin({
      part: "part4",
      context: "slide",
      useCache: true,
      capacity: session.checkpoint.config.block_size,
      ...request,
      seed: BigInt(request.seed ?? 1),
      sampling: sampled,
      ids: encode(prompt, characters),
    });
    let text = "";
    for (let n = 0; n < length;) {
      const { tokens } = session.more({ most: length - n });
      n += tokens.length;
      const from = text.length;
      text += tokens.map((token) => characters[token]).join("");
      const whole = writer.stopped(text, stop, from);
      if (whole !== null) return whole;
    }
    return text;
  },
  observe: (a) => session.observe({ ids: encode(a.text, session.checkpoint.characters) }),
  weights: (a) => Array.from(session.weights(a)),
  maps: (a) => session.maps(a).maps.map((map) => Array.from(map)),
  telling: () => session.maps({ size: 1 }).telling,
  heads: (a) => {
    const { q, k, v } = session.heads(a);
    return [q, k, v].map((x) => Array.from(x));
  },
  build: () => build(),
  block: () => session.block(),
  scratch: (a) => session.scratch(a),
  attention: (a) => session.attention(a),
  peak: () => session.peak({ ms: 20 }),
  bandwidth: (a) => session.bandwidth({ ms: 20, ...a }),
  distribution: ({ logits, ...settings }) => [sampling.before(logits), sampling.after(logits, settings)],
  parts: () => session.kernels.parts,
  // 'fine', or why a checkpoint is refused.
  check(a) {
    readCheckpoint(files(a));
    return "fine";
  },
  traffic: ({ part, problem, block, cache }) =>
    costs.traffic(part, problem, block, cache).map(({ bytes }) => bytes),
  flops: (problem) => costs.flops(problem),
  anchors: ({ part, sizes }) => [...new Set(tiling.steps(part, sizes).map(({ anchor }) => anchor))],
  walk({ part, sizes, l1, l2 }) {
    const steps = tiling.steps(part, sizes),
      { after } = caches.simulate(steps, tiling.matrices(part, sizes), l1, l2);
    const covered = { scores: new Set(), written: new Set() };
    for (const { scores, boxes } of steps) {
      if (scores)
        for (let i = scores[0]; i < scores[1]; i++)
          for (let j = scores[2]; j < Math.min(scores[3], i + 1); j++) covered.scores.add(i * 1000 + j);
      for (const { m, r, w } of boxes)
        if (m === "O" && w) for (let i = r[0]; i < r[1]; i++) covered.written.add(i);
    }
    return {
      steps: steps.length,
      scores: covered.scores.size,
      rows: covered.written.size,
      bytes: after.map((a) => a.bytes),
    };
  },
  // For each step: the matrices that its loops touch, those that have boxes, and how many scores S has elsewhere.
  boxes({ part, sizes }) {
    return tiling.steps(part, sizes).map(({ title, touch, boxes, scores }) => {
      const all = [...touch()],
        [i0, i1, j0, j1] = scores ?? [0, 0, 0, 0],
        made = new Set(all.flatMap(({ m, i, c0, c1 }) => (m === "S" ? range(c0, c1).map((c) => `${i} ${c}`) : [])));
      let lost = 0;
      for (const i of range(i0, i1))
        for (const j of range(j0, Math.min(j1, i + 1)))
          if (!made.has(tiling.scoreAt(part, sizes, i, j).join(" "))) lost++;
      const names = (list) => [...new Set(list.map(({ m }) => m))].sort();
      return { title, touched: names(all), drawn: names(boxes), lost };
    });
  },
  online({ layer, head, T, d, i, bc }) {
    const { S, P, O } = formulas.results(session.heads({ layer, head }), T, d);
    return { history: formulas.online(S, T, i, bc), S: Array.from(S), P: Array.from(P), O: Array.from(O) };
  },
  parse: ({ fragment }) => state.parse(fragment),
  command: ({ choices, own }) => commandFor({ ...state.DEFAULTS, ...choices }, own),
  format: ({ view, choices }) => state.format(view, choices),
};

for await (const line of createInterface({ input: process.stdin })) {
  const { method, argument } = JSON.parse(line);
  let answer;
  try {
    answer = { result: await calls[method](argument ?? {}) };
  } catch (error) {
    answer = { error: error.message, kind: error.constructor.name };
    if (["Refused", "RuntimeError"].includes(answer.kind)) await session.restart();
  }
  process.stdout.write(`${JSON.stringify(answer)}\n`);
}

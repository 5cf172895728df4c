// Runs the page's modules in node: a line of JSON with a call comes in, a line with its result goes out.
import { readFileSync } from "node:fs";
import { createInterface } from "node:readline";

const modules = process.argv[2];
const load = (name) => import(`${modules}/${name}.js`);
const [{ Session }, { readCheckpoint, encode }, { PartNest }, formulas, board, traffic, state, writer] =
  await Promise.all(["session", "checkpoint", "part_nests", "formulas", "draw_tiles", "traffic", "state", "writer"].map(load));
const { build } = await load("kernels");
const { Training } = await load("training");
const session = new Session(),
  compiled = {};
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
    compiled[a.wasm] ??= await WebAssembly.compile(readFileSync(a.wasm));
    await session.load({ precision: a.precision, module: compiled[a.wasm], ...files(a) });
  },
  // A whole run: its record, and a sample.
  async train({ wasm, text, recipe }) {
    const training = await Training.of({ module: await WebAssembly.compile(readFileSync(wasm)), text, recipe });
    const { sample } = await training.more({ ms: 1e9 });
    return { record: training.record, sample };
  },
  // The text of a request, whose prompt is text.
  async text({ prompt, length, stop, ...request }) {
    const { characters } = session.checkpoint;
    const sampled = { temperature: 0.8, top_k: 200, ...request.sampling };
    session.begin({
      part: "part4",
      context: "slide",
      useCache: true,
      capacity: session.checkpoint.config.block_size,
      ...request,
      seed: request.seed ?? 1,
      sampling: sampled,
      ids: encode(prompt, characters),
    });
    let text = "";
    for (let n = 0; n < length;) {
      const { tokens, isEnd } = await session.more({ most: length - n });
      n += tokens.length;
      const from = text.length;
      text += tokens.map((token) => characters[token]).join("");
      const whole = stop ? writer.stopped(text, stop, from) : null;
      if (whole !== null) return whole;
      if (isEnd) break;
    }
    return text;
  },
  observe({ text, size }) {
    const { maps, ...seen } = session.observe({ ids: encode(text, session.checkpoint.characters), size });
    return { ...seen, maps: maps.map((map) => Array.from(map)) };
  },
  weights: (a) => Array.from(session.weights(a)),
  heads: (a) => {
    const { q, k, v } = session.heads(a);
    return [q, k, v].map((x) => Array.from(x));
  },
  build: () => build(),
  block: () => session.block(),
  distribution: (a) => [formulas.softmax(a.logits), session.distribution(a)].map((p) => Array.from(p)),
  // 'fine', or why a checkpoint is refused.
  check(a) {
    readCheckpoint(files(a));
    return "fine";
  },
  traffic: ({ part, call, cache }) => traffic.traffic(traffic.streams(part, call), cache),
  anchors: ({ part, sizes }) => [...new Set([...new PartNest(part, sizes).frames()].flatMap(({ anchors }) => anchors))],
  script({ script, sizes }) {
    const { frames, ...made } = session.tiles({ part: "script", script, sizes, l1: 2048, l2: 8192 });
    return { ...made, titles: frames?.map(({ title }) => title), bytes: frames?.at(-1).bytes };
  },
  walk(a) {
    const { frames, computed } = session.tiles(a);
    return { computed, bytes: frames.map(({ bytes }) => bytes) };
  },
  // For each frame how many of the scores that it makes S has elsewhere.
  lost({ part, sizes }) {
    const nest = new PartNest(part, sizes),
      frames = [...nest.frames()];
    return frames.map(({ title, touched, makes, area, base }) => {
      const ofS = touched.filter(({ m }) => m === "S"),
        made = new Set(ofS.flatMap(({ i, c0, c1 }) => range(c0, c1).map((c) => `${i} ${c}`))),
        [i0, i1, j0, j1] = makes ? area : [0, 0, 0, 0];
      const all = range(i0, i1).flatMap((i) => range(Math.max(j0, i - (sizes.left ?? i)), Math.min(j1, i + 1)).map((j) => [i, j]));
      const at = (i, j) => board.scoreAt(nest.matrices.S, nest.isTurned, base, i, j).join(" ");
      const lost = all.filter(([i, j]) => !made.has(at(i, j)));
      return { title, lost: lost.length };
    });
  },
  online({ layer, head, T, d, i, ...sizes }) {
    const { S, P, O } = formulas.results(session.heads({ layer, head }), T, d, sizes.left);
    return { history: formulas.online(S, i, { N: T, ...sizes }), S: Array.from(S), P: Array.from(P), O: Array.from(O) };
  },
  command: ({ choices, own }) => state.commandFor(choices, own),
};

for await (const line of createInterface({ input: process.stdin })) {
  const { method, argument } = JSON.parse(line);
  let answer;
  try {
    answer = { result: await calls[method](argument ?? {}) };
  } catch (error) {
    answer = { error: error.message, kind: error.constructor.name };
    if (["Problem", "RuntimeError"].includes(answer.kind) && session.module) await session.restart();
  }
  process.stdout.write(`${JSON.stringify(answer)}\n`);
}

// @ts-check
// The page's checkpoints, and workers that have loaded one.
import { Engine } from "./engine.js";
import { MODELS } from "./facts.js";
import { file, KERNELS, weightsOf } from "./files.js";
import { unzipped } from "./zip.js";

// All workers share one module: Firefox on two cores may compile no further one while it optimizes several.
export const module = file(KERNELS).then((wasm) => WebAssembly.compile(wasm));
module.catch(() => {}); // it is awaited with a model

// A worker with a model of the page, and what its load() returns.
/** @param {string} name @param {string} precision @returns {Promise<Engine>} */
export function openModel(name, precision) {
  const { config, characters } = MODELS[name];
  return opened(config, characters, file(weightsOf(name, precision)).then(joined), precision);
}

// A worker with the checkpoint of the reader's files. Raises Error with a sentence.
/** @param {File[]} files @returns {Promise<Engine>} */
export async function openFiles(files) {
  if (files.length === 1 && files[0].name.endsWith(".zip")) files = await unzipped(files[0]);
  const ends = [".safetensors", "config.json", "meta.json"],
    [weights, config, meta] = ends.map((end) => files.find(({ name }) => name.endsWith(end)));
  if (!weights || !config || !meta) throw new Error("choose model.safetensors with its config.json and meta.json, or a .zip of them");
  const { characters } = (await parsed(meta)) ?? {};
  return opened(await parsed(config), characters, weights.arrayBuffer(), "fp32");
}

// weights: a promise. The worker starts while they load.
async function opened(config, characters, weights, precision) {
  weights.catch(() => {}); // it is awaited below
  const engine = Engine.open();
  try {
    const files = { config, characters, weights: await weights, precision, module: await module };
    return Object.assign(engine, await engine.call("load", files));
  } catch (error) {
    engine.close();
    throw error;
  }
}

async function parsed(file) {
  try {
    return JSON.parse(await file.text());
  } catch (error) {
    throw new Error(`${file.name} is not JSON: ${error.message}`);
  }
}

// Restores the order of bytes that planes() in web/build.py changed.
function joined(bytes) {
  const count = Math.floor(bytes.byteLength / 4),
    [a, b, c, d] = [0, 1, 2, 3].map((plane) => new Uint8Array(bytes, plane * count, count)),
    whole = new Uint8Array(bytes.slice(0)),
    words = new Uint32Array(whole.buffer, 0, count);
  for (let i = 0; i < count; i++) words[i] = a[i] | (b[i] << 8) | (c[i] << 16) | (d[i] << 24);
  return whole.buffer;
}

// The page's checkpoints, and workers that have loaded one.
import { asset, Engine, json } from "./engine.js";
import { BUILDS, PIECE } from "./facts.js";
import { build } from "./kernels.js";

// {name: {config, characters, files: {precision: {path}}}}
export class Models {
  static async open() {
    const models = new Models();
    models.index = await json("models/models.json");
    models.files = new Map(); // promises of bytes, by the path of weights
    models.module = asset("kernels.wasm.gz").then(chosen).then(compiled);
    models.module.catch(() => {}); // it is awaited with a model
    return models;
  }

  weights({ path }) {
    if (!this.files.has(path)) {
      const loading = asset(path).then(joined);
      this.files.set(path, loading);
      loading.catch(() => this.files.delete(path)); // the next attempt requests it again
    }
    return this.files.get(path);
  }

  // A worker with a model, and what its load() returns.
  async engine(name, precision) {
    const { config, characters, files } = this.index[name];
    return this.engineOf(config, characters, this.weights(files[precision]), precision);
  }

  // weights: a promise. The worker starts while they load.
  async engineOf(config, characters, weights, precision) {
    weights.catch(() => {}); // it is awaited below
    const engine = await Engine.open();
    try {
      const files = { config, characters, weights: await weights, precision, module: await this.module };
      return Object.assign(engine, await engine.call("load", files));
    } catch (error) {
      engine.close();
      throw error;
    }
  }

  // A worker with the checkpoint of the reader's files. Raises Error with a sentence.
  async engineOfFiles(files) {
    const ends = [".safetensors", "config.json", "meta.json"],
      [weights, config, meta] = ends.map((end) => files.find(({ name }) => name.endsWith(end)));
    if (!weights || !config || !meta) throw new Error("choose model.safetensors with its config.json and meta.json");
    const { characters } = (await parsed(meta)) ?? {};
    return this.engineOf(await parsed(config), characters, weights.arrayBuffer(), "fp32");
  }
}

async function parsed(file) {
  try {
    return JSON.parse(await file.text());
  } catch (error) {
    throw new Error(`${file.name} is not JSON: ${error.message}`);
  }
}

// This browser's build of those that mixed() in web/build.py put together.
export function chosen(bytes) {
  const mine = BUILDS.indexOf(build());
  return new Uint8Array(bytes).filter((_, i) => Math.floor(i / PIECE) % BUILDS.length === mine).buffer;
}

// All workers share one module: Firefox on two cores may compile no further one while it optimizes several.
async function compiled(wasm) {
  try {
    return await WebAssembly.compile(wasm);
  } catch {
    throw new Error("this browser cannot run the kernels: it lacks SIMD");
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

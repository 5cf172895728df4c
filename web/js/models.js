// The page's checkpoints, and workers that have loaded one.
import { asset, Engine, json } from "./engine.js";
import { build } from "./kernels.js";
import { joined } from "./planes.js";

// {name: {config, characters, files: {precision: {path, bytes}}}}
export class Models {
  static async open() {
    const models = new Models();
    models.index = await json("models/models.json");
    models.files = new Map(); // promises of bytes, by path
    models.wasm = asset(`kernels-${build()}.wasm.gz`);
    return models;
  }

  // The precisions in which the page has a model.
  precisions(name) {
    return Object.keys(this.index[name].files);
  }

  // The paths of the weights that were requested.
  loaded() {
    return [...this.files.keys()];
  }

  bytes(name, precision, progress) {
    const { path, bytes } = this.index[name].files[precision];
    if (!this.files.has(path)) {
      const loading = asset(path, (done) => progress(Math.min(1, done / bytes))).then(joined);
      this.files.set(path, loading);
      loading.catch(() => this.files.delete(path)); // the next attempt requests it again
    }
    return this.files.get(path);
  }

  // A worker with a model, and what its load() returns; progress(share of the bytes).
  async engine(name, precision, progress = () => {}) {
    const { config, characters } = this.index[name];
    const files = this.bytes(name, precision, progress);
    return this.engineOf(files.then((weights) => ({ config, characters, weights, precision })));
  }

  // files: a promise. The worker starts and compiles the kernels while they load.
  async engineOf(files) {
    const engine = new Engine();
    files.catch(() => {}); // it is awaited below
    try {
      await engine.call("compile", { wasm: await this.wasm });
      return Object.assign(engine, await engine.call("load", await files));
    } catch (error) {
      engine.close();
      throw error;
    }
  }

  // A worker with the checkpoint of the reader's files. Raises Error with a sentence.
  async engineOfFiles(files) {
    const find = (name) =>
      files.find((file) => file.name === name || file.name.endsWith(name.replace(/^model/, "")));
    const read = async (name) => {
      const file = files.find((each) => each.name === name);
      if (!file)
        throw new Error(`${name} is missing; a checkpoint has model.safetensors, config.json and meta.json`);
      try {
        return JSON.parse(await file.text());
      } catch (error) {
        throw new Error(`${name} is not JSON: ${error.message}`);
      }
    };
    const weights = find("model.safetensors");
    if (!weights) throw new Error("choose model.safetensors with its config.json and meta.json");
    const [config, meta] = [await read("config.json"), await read("meta.json")];
    return this.engineOf(
      weights
        .arrayBuffer()
        .then((buffer) => ({ config, characters: meta?.characters, weights: buffer, precision: "fp32" })),
    );
  }
}

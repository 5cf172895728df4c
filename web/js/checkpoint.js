// A checkpoint: configuration, tensors and vocabulary, checked as model/checkpoint.py checks them.
import { CheckpointError, readSafetensors } from "./safetensors.js";

const SIZES = ["block_size", "vocab_size", "n_layer", "n_head", "n_embd"];
const MOST_PARAMETERS = 2 ** 28; // a gigabyte; WebAssembly has four

// files: {config, characters} as parsed JSON, weights: an ArrayBuffer. Raises CheckpointError.
export function readCheckpoint({ config, characters, weights }) {
  checkConfig(config);
  const tensors = readSafetensors(weights);
  assemble(config, tensors);
  checkCharacters(characters, config.vocab_size);
  return { config, characters, tensors };
}

function checkConfig(config) {
  if (typeof config !== "object" || config === null || Array.isArray(config)) {
    throw new CheckpointError("config.json must hold an object");
  }
  for (const name of SIZES) {
    if (!Number.isInteger(config[name]) || config[name] < 1) {
      throw new CheckpointError(
        `${name} is ${JSON.stringify(config[name])}; it must be a whole number of at least 1`,
      );
    }
  }
  if (config.n_embd % config.n_head) {
    throw new CheckpointError(`n_embd is ${config.n_embd}; it must be a multiple of n_head=${config.n_head}`);
  }
  if (config.bias !== undefined && typeof config.bias !== "boolean") {
    throw new CheckpointError(`bias is ${JSON.stringify(config.bias)}; it must be true or false`);
  }
}

// The names and shapes of a model's tensors.
export function* expectedTensors({ block_size, vocab_size, n_layer, n_embd: C, bias = true }) {
  yield ["transformer.wte.weight", [vocab_size, C]];
  yield ["transformer.wpe.weight", [block_size, C]];
  const layer = function* (name, ...shape) {
    yield [`${name}.weight`, shape];
    if (bias) yield [`${name}.bias`, [shape[0]]];
  };
  for (let l = 0; l < n_layer; l++) {
    const block = `transformer.h.${l}`;
    yield* layer(`${block}.ln_1`, C);
    yield* layer(`${block}.attn.c_attn`, 3 * C, C);
    yield* layer(`${block}.attn.c_proj`, C, C);
    yield* layer(`${block}.ln_2`, C);
    yield* layer(`${block}.mlp.c_fc`, 4 * C, C);
    yield* layer(`${block}.mlp.c_proj`, C, 4 * C);
  }
  yield* layer("transformer.ln_f", C);
}

function assemble(config, tensors) {
  if (config.n_layer > tensors.size) {
    throw new CheckpointError(`n_layer is ${config.n_layer}, but there are ${tensors.size} tensors`);
  }
  const { block_size, vocab_size, n_layer, n_embd } = config;
  if ((block_size + vocab_size + 12 * n_layer * n_embd) * n_embd > MOST_PARAMETERS) {
    throw new CheckpointError("the model is too large for a page");
  }
  const expected = new Map(expectedTensors(config));
  const head = tensors.get("lm_head.weight"),
    embedding = tensors.get("transformer.wte.weight");
  if (head) expected.set("lm_head.weight", [vocab_size, n_embd]);
  const missing = [...expected.keys()].filter((name) => !tensors.has(name)).sort();
  if (missing.length) {
    throw new CheckpointError(`${missing.length} tensors are missing, the first is ${missing[0]}`);
  }
  const surplus = [...tensors.keys()].filter((name) => !expected.has(name)).sort();
  if (surplus.length) {
    throw new CheckpointError(`${surplus.length} tensors are unexpected, the first is ${surplus[0]}`);
  }
  for (const [name, shape] of expected) {
    const tensor = tensors.get(name);
    if (tensor.shape.join() !== shape.join()) {
      throw new CheckpointError(
        `${name} has shape (${tensor.shape.join(", ")}); it must be (${shape.join(", ")})`,
      );
    }
    if (!tensor.data.every(Number.isFinite)) throw new CheckpointError(`${name} holds NaN or infinity`);
  }
  if (head && !head.data.every((x, i) => x === embedding.data[i])) {
    throw new CheckpointError("lm_head.weight differs from transformer.wte.weight");
  }
  tensors.delete("lm_head.weight"); // tied
}

function checkCharacters(characters, vocabSize) {
  if (!Array.isArray(characters)) throw new CheckpointError("meta.json must have a list 'characters'");
  characters.forEach((c, i) => {
    if (typeof c !== "string" || [...c].length !== 1) {
      throw new CheckpointError(`meta.json: token ${i} is ${JSON.stringify(c)}; it must be one character`);
    }
    // The page counts the characters of a text in UTF-16 units.
    if (c.length !== 1) {
      throw new CheckpointError(`meta.json: token ${i} is ${c}; the page takes characters up to U+FFFF only`);
    }
  });
  if (new Set(characters).size !== characters.length) {
    throw new CheckpointError("meta.json: there must be at least one character, all different");
  }
  if (characters.length !== vocabSize) {
    throw new CheckpointError(
      `the vocabulary meta.json has ${characters.length} tokens; it must have vocab_size=${vocabSize}`,
    );
  }
}

// The ids of a text's characters. Raises CheckpointError naming the characters that the model does not know.
export function encode(text, characters) {
  const ids = new Map(characters.map((c, i) => [c, i]));
  const unknown = [...new Set(text)].filter((c) => !ids.has(c)).sort();
  if (unknown.length) {
    const shown = unknown
      .slice(0, 10)
      .map((c) => JSON.stringify(c))
      .join(" ");
    throw new CheckpointError(`the model does not know ${unknown.length} of the text's characters: ${shown}`);
  }
  return [...text].map((c) => ids.get(c));
}

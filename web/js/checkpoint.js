// @ts-check
// A checkpoint: configuration, tensors and vocabulary, checked as model/checkpoint.py checks them.
import { check, isObject, readSafetensors } from "./safetensors.js";

const SIZES = ["block_size", "vocab_size", "n_layer", "n_head", "n_embd"];
const KNOWN = [...SIZES, "dropout", "bias", "dataset", "positions", "window", "eos_token_id"];
const AROUND = /^.*?(?=transformer\.|lm_head\.)|\b(module|_orig_mod|_(fsdp|checkpoint)_wrapped_module)\./g;
const [EMBEDDING, HEAD] = ["transformer.wte.weight", "lm_head.weight"];
const MOST_PARAMETERS = 2 ** 28; // a gigabyte; WebAssembly has four

// files: {config, characters} as parsed JSON, weights: an ArrayBuffer. Raises CheckpointError.
/** @param {{ config: any, characters: any, weights: ArrayBuffer }} files */
export function readCheckpoint({ config, characters, weights }) {
  checkConfig(config);
  const tensors = named(readSafetensors(weights));
  assemble(config, tensors);
  checkCharacters(characters, config.vocab_size);
  const vocab_size = characters.length, // rows of the embedding beyond it only pad it
    { data } = tensors.get(EMBEDDING),
    shape = [vocab_size, config.n_embd];
  tensors.set(EMBEDDING, { shape, data: data.subarray(0, vocab_size * config.n_embd) });
  const eos_token_id = [config.eos_token_id ?? []].flat();
  return { config: { ...config, vocab_size, eos_token_id }, characters, tensors };
}

// The tensors by nanoGPT's names, without causal masks.
function named(stored) {
  const found = new Map();
  for (const [key, tensor] of stored) {
    const name = key.replace(AROUND, "");
    check(!found.has(name), `model.safetensors has ${name} twice, once as ${key}; it must have each tensor once`);
    if (!/\.attn\.(masked_)?bias$/.test(name)) found.set(name, tensor);
  }
  if (!found.has(EMBEDDING) && found.has(HEAD)) found.set(EMBEDDING, found.get(HEAD)); // stored by one name
  return found;
}

function checkConfig(config) {
  check(isObject(config), "config.json must hold an object");
  const { n_embd, n_head, bias = true, positions = "table", window = null } = config,
    isEndless = positions === "alibi";
  for (const name of isEndless ? [...SIZES, "window"] : SIZES) {
    const most = { window: 2 ** 20, n_layer: 4096 }[name] ?? 2 ** 31,
      isSize = Number.isInteger(config[name]) && config[name] >= 1 && config[name] <= most,
      must = `a whole number of at least 1 and at most ${most}`;
    check(isSize, `${name} is ${JSON.stringify(config[name])}; it must be ${must}`);
  }
  check(isEndless || positions === "table", `positions is ${JSON.stringify(positions)}; it must be "table" or "alibi"`);
  check(isEndless || window === null, `window is ${JSON.stringify(window)}; it must be null with positions "table"`);
  const ends = [config.eos_token_id ?? []].flat();
  check(ends.every(Number.isInteger), `eos_token_id is ${JSON.stringify(ends)}; it must be a whole number, or several`);
  check(n_embd % n_head === 0, `n_embd is ${n_embd}; it must be a multiple of n_head=${n_head}`);
  const isOn = (name) => config[name] && !["[]", "{}"].includes(JSON.stringify(config[name])),
    unknown = Object.keys(config).filter((name) => !KNOWN.includes(name) && isOn(name));
  check(!unknown.length, `it has the unknown fields ${unknown.sort().join(", ")}; remove those that change no result`);
  check([true, false, 1, 0, null].includes(bias), `bias is ${JSON.stringify(bias)}; it must be true or false`);
}

/**
 * In the order of the training step's parameters.
 * @returns {Iterable<any>} [name, shape] of each tensor
 */
export function* expectedTensors({ block_size, vocab_size, n_layer, n_embd: C, bias = true, window }) {
  yield [EMBEDDING, [vocab_size, C]];
  if (!window) yield ["transformer.wpe.weight", [block_size, C]];
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
  const { block_size, vocab_size, n_layer, n_embd, window } = config,
    parameters = (block_size + (window ?? 0) + vocab_size + 12 * n_layer * n_embd) * n_embd;
  check(n_layer <= tensors.size, `n_layer is ${n_layer}, but there are ${tensors.size} tensors`);
  check(parameters <= MOST_PARAMETERS, "the model is too large for a page");
  const expected = new Map(expectedTensors(config)),
    head = tensors.get(HEAD),
    embedding = tensors.get(EMBEDDING);
  if (head) expected.set(HEAD, [vocab_size, n_embd]);
  const without = (names, others) => [...names.keys()].filter((name) => !others.has(name)).sort();
  const missing = without(expected, tensors),
    surplus = without(tensors, expected);
  check(!missing.length, `${missing.length} tensors are missing, the first is ${missing[0]}`);
  check(!surplus.length, `${surplus.length} tensors are unexpected, the first is ${surplus[0]}`);
  for (const [name, wanted] of expected) {
    const { shape, data } = tensors.get(name),
      isRight = shape.join() === wanted.join();
    check(isRight, `${name} has shape (${shape.join(", ")}); it must be (${wanted.join(", ")})`);
    check(data.every(Number.isFinite), `${name} holds NaN or infinity`);
  }
  const isTied = !head || head.data.every((x, i) => x === embedding.data[i]);
  check(isTied, `${HEAD} differs from ${EMBEDDING}`);
  tensors.delete(HEAD);
}

function checkCharacters(characters, vocabSize) {
  check(Array.isArray(characters), "meta.json must have a list 'characters'");
  characters.forEach((c, i) => {
    const isOne = typeof c === "string" && [...c].length === 1;
    check(isOne, `meta.json: token ${i} is ${JSON.stringify(c)}; it must be one character`);
    // The page counts the characters of a text in UTF-16 units.
    check(c.length === 1, `meta.json: token ${i} is ${c}; the page takes characters up to U+FFFF only`);
  });
  const count = characters.length;
  check(new Set(characters).size === count, "meta.json: there must be at least one character, all different");
  check(count > 0 && count <= vocabSize, `the vocabulary meta.json has ${count} tokens; it must have vocab_size=${vocabSize}`);
}

// The ids of a text's characters. Raises CheckpointError with those that the model does not know.
/** @param {string} text @param {string[]} characters @returns {number[]} */
export function encode(text, characters) {
  const ids = new Map(characters.map((c, i) => [c, i]));
  const unknown = [...new Set(text)].filter((c) => !ids.has(c)).sort();
  const shown = unknown.slice(0, 10).map((c) => JSON.stringify(c));
  check(!unknown.length, `the model does not know ${unknown.length} of the text's characters: ${shown.join(" ")}`);
  return [...text].map((c) => ids.get(c));
}

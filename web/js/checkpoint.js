// @ts-check
// A checkpoint: configuration, tensors and vocabulary, checked as model/checkpoint.py checks them.
import { SIZES } from "./facts.js";
import { check } from "./problem.js";
import { isObject, readSafetensors } from "./safetensors.js";

const KNOWN = [...Object.keys(SIZES), "dropout", "bias", "dataset", "positions", "alibi_window", "eos_token_id"];
const AROUND = /^.*?(?=transformer\.|lm_head\.)|\b(module|_orig_mod|_(fsdp|checkpoint)_wrapped_module)\./g;
export const [EMBEDDING, PLACES] = ["transformer.wte.weight", "transformer.wpe.weight"];
const HEAD = "lm_head.weight";
const MOST_PARAMETERS = 2 ** 28; // a gigabyte; WebAssembly has four

const is = (name, value, holds, must) => check(holds, `${name} is ${JSON.stringify(value)}; it must be ${must}`);

// files: {config, characters} as parsed JSON, weights: an ArrayBuffer. Raises Problem.
/** @param {{ config: any, characters: any, weights: ArrayBuffer }} files */
export function readCheckpoint({ config, characters, weights }) {
  checkConfig(config);
  const tensors = named(readSafetensors(weights));
  checkTensors(config, tensors);
  checkCharacters(characters, config.vocab_size);
  const vocab_size = characters.length, // rows of the embedding beyond it only pad it
    { data } = tensors.get(EMBEDDING),
    shape = [vocab_size, config.n_embd];
  tensors.set(EMBEDDING, { shape, data: data.subarray(0, vocab_size * config.n_embd) });
  return { config: { ...config, vocab_size, eos_token_id: endsOf(config) }, characters, tensors };
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

const endsOf = ({ eos_token_id: ends }) => [ends ?? []].flat();

function checkConfig(config) {
  check(isObject(config), "config.json must hold an object");
  const { n_embd, n_head, bias = true, positions = "table", window = null, alibi_window: sloped = 256 } = config,
    isEndless = positions === "alibi";
  for (const [name, most] of Object.entries(SIZES)) {
    const size = config[name],
      isSize = (Number.isInteger(size) && size >= 1 && size <= most) || (name === "window" && !isEndless);
    is(name, size, isSize, `a whole number of at least 1 and at most ${most}`);
  }
  is("positions", positions, isEndless || positions === "table", '"table" or "alibi"');
  is("window", window, isEndless || window === null, 'null with positions "table"');
  is("alibi_window", sloped, window === null || sloped === window, `window=${window}: train the model again`);
  is("eos_token_id", endsOf(config), endsOf(config).every(Number.isInteger), "a whole number, or several");
  is("n_embd", n_embd, n_embd % n_head === 0, `a multiple of n_head=${n_head}`);
  is("bias", bias, [true, false, 1, 0, null].includes(bias), "true or false");
  const isOn = (name) => config[name] && !["[]", "{}"].includes(JSON.stringify(config[name])),
    unknown = Object.keys(config).filter((name) => !KNOWN.includes(name) && isOn(name));
  check(!unknown.length, `it has the unknown fields ${unknown.sort().join(", ")}; remove those that change no result`);
}

/**
 * [name, shape] of each tensor, in the order of the training step's parameters.
 * @returns {[string, number[]][]}
 */
export function shapes({ block_size, vocab_size, n_layer, n_embd: C, bias = true, window }) {
  const layer = {
    ...{ ln_1: [C], "attn.c_attn": [3 * C, C], "attn.c_proj": [C, C] },
    ...{ ln_2: [C], "mlp.c_fc": [4 * C, C], "mlp.c_proj": [C, 4 * C] },
  };
  const made = new Map([[EMBEDDING, [vocab_size, C]]]),
    add = (name, shape) => {
      made.set(`${name}.weight`, shape);
      if (bias) made.set(`${name}.bias`, shape.slice(0, 1));
    };
  if (!window) made.set(PLACES, [block_size, C]);
  for (let l = 0; l < n_layer; l++) for (const name in layer) add(`transformer.h.${l}.${name}`, layer[name]);
  add("transformer.ln_f", [C]);
  return [...made];
}

function checkTensors(config, tensors) {
  const { block_size, vocab_size, n_layer, n_embd, window } = config,
    parameters = (block_size + (window ?? 0) + vocab_size + 12 * n_layer * n_embd) * n_embd,
    head = tensors.get(HEAD);
  check(n_layer <= tensors.size, `n_layer is ${n_layer}, but there are ${tensors.size} tensors`);
  check(parameters <= MOST_PARAMETERS, "the model is too large for a page");
  const expected = new Map(shapes(config));
  if (head) expected.set(HEAD, [vocab_size, n_embd]);
  for (const [name, wanted] of expected) {
    const tensor = tensors.get(name);
    check(tensor, `the tensor ${name} is missing`);
    const shape = tensor.shape.join(", ");
    check(shape === wanted.join(", "), `${name} has shape (${shape}); it must be (${wanted.join(", ")})`);
    check(tensor.data.every(Number.isFinite), `${name} holds NaN or infinity`);
  }
  const surplus = [...tensors.keys()].filter((name) => !expected.has(name)).sort();
  check(!surplus.length, `${surplus.length} tensors are unexpected, the first is ${surplus[0]}`);
  const { data } = tensors.get(EMBEDDING);
  check(!head || head.data.every((x, i) => x === data[i]), `${HEAD} differs from ${EMBEDDING}`);
  tensors.delete(HEAD);
}

function checkCharacters(characters, vocabSize) {
  check(Array.isArray(characters), "meta.json must have a list 'characters'");
  characters.forEach((c, i) => {
    is(`meta.json: token ${i}`, c, typeof c === "string" && [...c].length === 1, "one character");
    // The page counts the characters of a text in UTF-16 units.
    check(c.length === 1, `meta.json: token ${i} is ${c}; the page takes characters up to U+FFFF only`);
  });
  const count = characters.length;
  check(new Set(characters).size === count, "meta.json: there must be at least one character, all different");
  check(count > 0 && count <= vocabSize, `the vocabulary meta.json has ${count} tokens; it must have vocab_size=${vocabSize}`);
}

// The ids of a text's characters. Raises Problem with those that the model does not know.
/** @param {string} text @param {string[]} characters @returns {number[]} */
export function encode(text, characters) {
  const ids = new Map(characters.map((c, i) => [c, i]));
  const unknown = [...new Set(text)].filter((c) => !ids.has(c)).sort();
  const shown = unknown.slice(0, 10).map((c) => JSON.stringify(c));
  check(!unknown.length, `the model does not know ${unknown.length} of the text's characters: ${shown.join(" ")}`);
  return [...text].map((c) => ids.get(c));
}

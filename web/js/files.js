// @ts-check
// The page's files, each requested once: the kernels and the weights of the address at once, before the other modules,
// because they are most of a first visit's bytes.
import { MODEL, MODELS } from "./facts.js";
import { build } from "./kernels.js";

export const KERNELS = `kernels-${build()}.wasm`; // this browser's
/** @type {(model: string, precision: string) => string} */
export const weightsOf = (model, precision) => MODELS[model].weights[precision];

const requested = new Map(); // promises of bytes, by path

// The bytes of a file, unpacked.
/** @param {string} path @returns {Promise<ArrayBuffer>} */
export function file(path) {
  const known = requested.get(path);
  if (known) return known;
  const loading = loaded(path);
  requested.set(path, loading);
  loading.catch(() => requested.delete(path)); // the next attempt requests it again
  return loading;
}

/** @type {(path: string) => Promise<string>} */
export const text = async (path) => new TextDecoder().decode(await file(path));

export const paths = () => [...requested.keys()];

async function loaded(path) {
  const answer = await fetch(path);
  if (!answer.ok) throw new Error(`${path} was not found (${answer.status})`);
  const bytes = await answer.arrayBuffer(),
    [first, second] = new Uint8Array(bytes);
  if (first !== 0x1f || second !== 0x8b) return bytes; // it is not packed, or the server has unpacked it
  return passed(new Blob([bytes]), new DecompressionStream("gzip"));
}

/** @type {(content: Blob, through: any) => Promise<ArrayBuffer>} */
export const passed = (content, through) => new Response(content.stream().pipeThrough(through)).arrayBuffer();

const chosen = new URLSearchParams(location.hash.split("?")[1]); // its fields may not be there yet
const row = (table, name, usual) => table[Object.hasOwn(table, chosen.get(name)) ? chosen.get(name) : usual];
file(KERNELS);
file(row(row(MODELS, "model", MODEL).weights, "weights", "bf16"));

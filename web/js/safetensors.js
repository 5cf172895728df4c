// @ts-check
// Reads an untrusted safetensors file. It refuses what the Rust library refuses; the browser parses the JSON.

import { check } from "./problem.js";

const BYTES = { F64: 8, F32: 4, F16: 2, BF16: 2 }; // of the types that a model may have

export const isObject = (x) => typeof x === "object" && x !== null && !Array.isArray(x);
const areSizes = (list) => Array.isArray(list) && list.every((x) => Number.isSafeInteger(x) && x >= 0);

const checkFile = (holds, why) => check(holds, `model.safetensors cannot be read: ${why}`);

// The tensors of a file by name: Map of {shape, data: Float32Array}.
/** @param {ArrayBuffer} buffer @returns {Map<string, { shape: number[], data: Float32Array }>} */
export function readSafetensors(buffer) {
  const size = buffer.byteLength;
  checkFile(size >= 8, "it has no header");
  const start = 8 + Number(new DataView(buffer).getBigUint64(0, true)); // of the tensors' bytes
  checkFile(start <= size, `its header claims ${start - 8} bytes`);
  const { __metadata__: metadata, ...described } = json(buffer.slice(8, start)),
    values = isObject(metadata ?? {}) ? Object.values(metadata ?? {}) : [metadata];
  checkFile(values.every((value) => typeof value === "string"), "its metadata must be strings");
  const entries = Object.entries(described).map(([name, entry]) => checked(name, entry));
  let at = 0;
  for (const { name, begin, end } of entries.sort((a, b) => a.begin - b.begin || a.end - b.end)) {
    checkFile(begin === at, `${name} begins at ${begin}; it must begin where the tensor before it ends, ${at}`);
    at = end;
  }
  checkFile(start + at === size, `it has ${size - start} bytes of tensors; its header says ${at}`);
  const data = ({ begin, end, dtype }) => floats(buffer.slice(start + begin, start + end), dtype);
  return new Map(entries.map((entry) => [entry.name, { shape: entry.shape, data: data(entry) }]));
}

function json(bytes) {
  try {
    const parsed = JSON.parse(new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(bytes));
    if (isObject(parsed)) return parsed;
  } catch {
    // the same sentence
  }
  return checkFile(false, "its header is not an object in JSON");
}

function checked(name, entry) {
  const { dtype, shape, data_offsets: offsets } = isObject(entry) ? entry : {},
    isKnown = typeof dtype === "string" && Object.hasOwn(BYTES, dtype);
  checkFile(isKnown, `${name} has the type ${JSON.stringify(dtype)}; it must be one of ${Object.keys(BYTES)}`);
  checkFile(areSizes(shape) && areSizes(offsets) && offsets.length === 2, `${name} has no shape, or no offsets`);
  const needed = shape.reduce((product, n) => product * n, BYTES[dtype]),
    [begin, end] = offsets;
  checkFile(end - begin === needed, `${name} has ${end - begin} bytes; its shape needs ${needed}`);
  return { name, dtype, shape, begin, end };
}

function floats(bytes, dtype) {
  if (dtype === "F32") return new Float32Array(bytes);
  if (dtype === "F64") return Float32Array.from(new Float64Array(bytes));
  if (dtype === "F16") return Float32Array.from(new Float16Array(bytes));
  return new Float32Array(Uint32Array.from(new Uint16Array(bytes), (x) => x << 16).buffer); // bfloat16 is the upper half
}

// A file of tensors, Map of {shape, data: Float32Array}, as readSafetensors() reads it.
export function writeSafetensors(tensors) {
  const header = {};
  let end = 0;
  for (const [name, { shape, data }] of tensors) {
    const begin = end;
    end += data.byteLength;
    header[name] = { dtype: "F32", shape, data_offsets: [begin, end] };
  }
  const text = JSON.stringify(header), // names are in ASCII
    head = text.padEnd(Math.ceil(text.length / 8) * 8);
  return new Blob([BigUint64Array.of(BigInt(head.length)), head, ...[...tensors.values()].map(({ data }) => data)]);
}

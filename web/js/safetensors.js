// @ts-check
// Reads an untrusted safetensors file. It refuses what the Rust library refuses; the browser parses the JSON.

// The message says what is wrong with a checkpoint.
export class CheckpointError extends Error {}

export function check(holds, message) { if (!holds) throw new CheckpointError(message); }

const MOST_HEADER_BYTES = 100_000_000;
const BYTES = { F64: 8, F32: 4, F16: 2, BF16: 2 }; // bytes of the types that a model may have
const OTHER_TYPES = ["BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "I16", "U16", "I32", "U32", "I64", "U64"];

export const isObject = (x) => typeof x === "object" && x !== null && !Array.isArray(x);
const areSizes = (list) => Array.isArray(list) && list.every((x) => Number.isSafeInteger(x) && x >= 0);

const checkFile = (holds, why) => check(holds, `model.safetensors cannot be read: ${why}`);

// The tensors of a file by name: Map of {shape, data: Float32Array}.
/** @param {ArrayBuffer} buffer @returns {Map<string, { shape: number[], data: Float32Array }>} */
export function readSafetensors(buffer) {
  const { entries, start } = header(buffer);
  const data = ({ begin, end, dtype }) => floats(buffer.slice(start + begin, start + end), dtype);
  return new Map(entries.map((entry) => [entry.name, { shape: entry.shape, data: data(entry) }]));
}

// The header's tensors in the order of their bytes, and where the bytes start.
function header(buffer) {
  const size = buffer.byteLength;
  checkFile(size >= 8, "it has no header");
  const length = Number(new DataView(buffer).getBigUint64(0, true));
  checkFile(length <= MOST_HEADER_BYTES, `its header claims ${length} bytes`);
  checkFile(8 + length <= size, "it ends inside its header");
  let parsed;
  try {
    parsed = JSON.parse(new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(new Uint8Array(buffer, 8, length)));
  } catch (error) {
    checkFile(false, `its header is not JSON (${error.message})`);
  }
  checkFile(isObject(parsed), "its header is not an object");
  const { __metadata__: metadata, ...described } = parsed;
  const values = isObject(metadata ?? {}) ? Object.values(metadata ?? {}) : [metadata];
  checkFile(values.every((value) => typeof value === "string"), "its metadata must be strings");
  const entries = Object.entries(described).map(([name, entry]) => checked(name, entry));
  entries.sort((a, b) => a.begin - b.begin || a.end - b.end);
  let at = 0;
  for (const { name, begin, end } of entries) {
    checkFile(begin === at, `${name} begins at ${begin}; it must begin where the tensor before it ends, ${at}`);
    at = end;
  }
  checkFile(8 + length + at === size, `it has ${size - 8 - length} bytes of tensors; its header says ${at}`);
  return { entries, start: 8 + length };
}

function checked(name, entry) {
  const { dtype, shape, data_offsets: offsets } = isObject(entry) ? entry : {};
  check(!OTHER_TYPES.includes(dtype), `${name} must be a dense tensor of floats`);
  const isKnown = typeof dtype === "string" && Object.hasOwn(BYTES, dtype);
  checkFile(isKnown, `${name} has the type ${JSON.stringify(dtype)}`);
  checkFile(areSizes(shape), `${name} has no shape`);
  checkFile(areSizes(offsets) && offsets.length === 2, `${name} has no offsets`);
  const needed = shape.reduce((product, n) => product * n, BYTES[dtype]),
    [begin, end] = offsets;
  checkFile(end - begin === needed, `${name} has ${end - begin} bytes; its shape needs ${needed}`);
  return { name, dtype, shape, begin, end };
}

function floats(bytes, dtype) {
  if (dtype === "F32") return new Float32Array(bytes);
  if (dtype === "F64") return Float32Array.from(new Float64Array(bytes));
  const halves = new Uint16Array(bytes);
  if (dtype === "F16") return Float32Array.from(halves, fromHalf);
  const wide = new Uint32Array(halves.length);
  for (let i = 0; i < halves.length; i++) wide[i] = halves[i] << 16; // bfloat16 is the upper half of a float
  return new Float32Array(wide.buffer);
}

function fromHalf(bits) {
  const sign = bits & 0x8000 ? -1 : 1,
    exponent = (bits >> 10) & 31,
    fraction = bits & 1023;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return sign * (exponent ? 2 ** (exponent - 15) * (1 + fraction / 1024) : 2 ** -14 * (fraction / 1024));
}

// A file of tensors, Map of {shape, data: Float32Array}, as readSafetensors() reads it.
export function writeSafetensors(tensors) {
  let end = 0;
  const entries = [...tensors].map(([name, { shape, data }]) => {
    const begin = end;
    end += data.byteLength;
    return [name, { dtype: "F32", shape, data_offsets: [begin, end] }];
  });
  const text = JSON.stringify(Object.fromEntries(entries)),
    head = new TextEncoder().encode(text.padEnd(Math.ceil(text.length / 8) * 8)), // names are in ASCII
    file = new Uint8Array(8 + head.length + end);
  new DataView(file.buffer).setBigUint64(0, BigInt(head.length), true);
  file.set(head, 8);
  let at = 8 + head.length;
  for (const { data } of tensors.values()) {
    file.set(new Uint8Array(data.buffer, data.byteOffset, data.byteLength), at);
    at += data.byteLength;
  }
  return file;
}

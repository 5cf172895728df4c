// Reads a safetensors file. The file is not trusted: all that the Rust library refuses is refused here too.

// The message says what is wrong with a checkpoint.
export class CheckpointError extends Error {}

const MOST_HEADER_BYTES = 100_000_000;
const BYTES = { F64: 8, F32: 4, F16: 2, BF16: 2 }; // bytes of the types that a model may have
const OTHER_TYPES = ["BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "I16", "U16", "I32", "U32", "I64", "U64"];

const TOKEN = /("(?:[^"\\]|\\.)*")(\s*:)?|-?\d[\d.eE+-]*|[{}]/g;
const NUMBER = /^-?\d/;
const WHOLE = /^\d+$/; // sizes; 1.0, 1e0 and -0 are refused

const isObject = (x) => typeof x === "object" && x !== null && !Array.isArray(x);
const isSize = (x) => Number.isSafeInteger(x) && x >= 0;

function refuse(why) {
  throw new CheckpointError(`model.safetensors cannot be read: ${why}`);
}

// The tensors of a file by name: Map of {shape, data: Float32Array}.
export function readSafetensors(buffer) {
  const tensors = new Map();
  const { entries, start } = header(buffer);
  for (const { name, dtype, shape, begin, end } of entries) {
    tensors.set(name, { shape, data: floats(buffer.slice(start + begin, start + end), dtype) });
  }
  return tensors;
}

// The header's tensors in the order of their bytes, and where the bytes start.
function header(buffer) {
  if (buffer.byteLength < 8) refuse("it has no header");
  const length = Number(new DataView(buffer).getBigUint64(0, true));
  if (length > MOST_HEADER_BYTES) refuse(`its header claims ${length} bytes`);
  if (8 + length > buffer.byteLength) refuse("it ends inside its header");
  const parsed = strictJson(new Uint8Array(buffer, 8, length));
  if (!isObject(parsed)) refuse("its header is not an object");
  const { __metadata__: metadata, ...described } = parsed;
  const values = isObject(metadata ?? {}) ? Object.values(metadata ?? {}) : [metadata];
  if (!values.every((value) => typeof value === "string")) {
    refuse("its metadata must be strings");
  }
  const entries = Object.entries(described).map(([name, entry]) => checked(name, entry));
  entries.sort((a, b) => a.begin - b.begin || a.end - b.end);
  let at = 0;
  for (const { name, begin, end } of entries) {
    if (begin !== at)
      refuse(`${name} begins at ${begin}; it must begin where the tensor before it ends, ${at}`);
    at = end;
  }
  if (8 + length + at !== buffer.byteLength) {
    refuse(`it has ${buffer.byteLength - 8 - length} bytes of tensors; its header says ${at}`);
  }
  return { entries, start: 8 + length };
}

// JSON as the Rust library reads it, which is stricter than JSON.parse().
function strictJson(bytes) {
  try {
    const text = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(bytes);
    JSON.parse(text); // so the loop below meets tokens of JSON only
    checkNames(text);
    return JSON.parse(text.replace(TOKEN, (token) => (NUMBER.test(token) && !WHOLE.test(token) ? "null" : token)));
  } catch (error) {
    refuse(`its header is not JSON (${error.message})`);
  }
}

// Throws if a string has half of a surrogate pair, or if a tensor has a field twice. A tensor may be given twice.
function checkNames(text) {
  const open = []; // the names of each object around a token
  for (const [token, string, colon] of text.matchAll(TOKEN)) {
    if (token === "{") open.push(new Set());
    else if (token === "}") open.pop();
    if (string === undefined) continue;
    const name = JSON.parse(string),
      names = open.at(-1);
    if (/\p{Surrogate}/u.test(name)) throw new Error(`${string} has half of a surrogate pair`);
    if (!colon) continue;
    if (names.has(name) && (open.length > 1 || name === "__metadata__")) throw new Error(`${string} is there twice`);
    names.add(name);
  }
}

function checked(name, entry) {
  const { dtype, shape, data_offsets: offsets } = isObject(entry) ? entry : {};
  if (typeof dtype !== "string" || !Object.hasOwn(BYTES, dtype)) {
    if (OTHER_TYPES.includes(dtype)) throw new CheckpointError(`${name} must be a dense tensor of floats`);
    refuse(`${name} has the type ${JSON.stringify(dtype)}`);
  }
  if (!Array.isArray(shape) || !shape.every(isSize)) refuse(`${name} has no shape`);
  if (!Array.isArray(offsets) || offsets.length !== 2 || !offsets.every(isSize))
    refuse(`${name} has no offsets`);
  const bytes = shape.reduce((product, n) => product * n, BYTES[dtype]);
  const [begin, end] = offsets;
  if (end - begin !== bytes) refuse(`${name} has ${end - begin} bytes; its shape needs ${bytes}`);
  return { name, dtype, shape, begin, end };
}

// Converts numbers of a type to float32.
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

// The choices in the fragment of the address: #view?name=value&... Defaults are left out.

export const DEFAULTS = {
  model: "shakes256",
  weights: "bf16",
  where: "browser", // who writes: the browser, or the server that the page comes from
  prompt: "ROMEO:",
  seed: "1337",
  length: 250,
  context: "slide",
  stop: "",
  temperature: 0.8,
  topk: 65,
  topp: 1,
  endless: 0,
  pace: 150,
  branches: "", // 'position:character code' of each, with commas
  layer: -1, // the head that looks back furthest: Session.maps()
  head: -1,
  query: -1, // the last query
  key: -1, // the key with the largest weight
  part: "part4",
  step: 0,
  tempo: "normal", // pace of Tiles; `pace` is that of a text
  n: 32,
  br: 8,
  bc: 8,
  l1: 11, // log2 of the bytes
  l2: 13,
  window: 1024,
  count: 16,
};
// The values that an address may have: [least, most, multiple of], where 0 admits fractions, or a list.
const ANY = 0;
const ADMITTED = {
  weights: ["bf16", "fp32"],
  where: ["browser", "server"],
  context: ["slide", "reset"],
  tempo: ["slow", "normal", "fast"],
  length: [1, 20000, 1],
  temperature: [0, 2, ANY],
  topk: [1, 100000, 1],
  topp: [0.05, 1, ANY],
  endless: [0, 1, 1],
  pace: [0, 1000, 1],
  layer: [-1, 1000, 1],
  head: [-1, 1000, 1],
  query: [-1, 100000, 1],
  key: [-1, 100000, 1],
  step: [0, 1e6, 1],
  n: [16, 48, 16],
  br: [1, 48, 1],
  bc: [1, 48, 1],
  l1: [9, 14, 1],
  l2: [11, 17, 1],
  window: [256, 1024, 256],
  count: [8, 64, 8],
};
export const VIEWS = ["write", "race", "attention", "tiles", "measure"];

// Whether a value may stand in the address.
function admits(name, value) {
  if (name === "seed") return isSeed(value);
  if (name === "part") return /^part[0-9]{1,2}$/.test(value); // the kernels' table decides which exist
  const limits = ADMITTED[name];
  if (!limits || typeof DEFAULTS[name] === "string") return !limits || limits.includes(value);
  const [least, most, step] = limits;
  return value >= least && value <= most && (step === ANY || value % step === 0);
}

export const isSeed = (text) => /^[0-9]{1,20}$/.test(text) && BigInt(text) < 2n ** 64n;

// Whether a fragment names a view, or is empty; #main does not.
export function namesView(fragment) {
  const name = fragment.replace(/^#/, "").split("?")[0];
  return name === "" || VIEWS.includes(name);
}

// {view, choices} of a fragment. Unknown names and values out of their range are ignored.
export function parse(fragment) {
  const [view, query = ""] = fragment.replace(/^#/, "").split(/\?(.*)/s);
  const choices = { ...DEFAULTS };
  for (const [name, value] of new URLSearchParams(query)) {
    if (!Object.hasOwn(DEFAULTS, name)) continue;
    let meant = typeof DEFAULTS[name] === "string" ? value : value === "" ? NaN : Number(value);
    if (name === "branches") meant = formatBranches(parseBranches(value));
    if (admits(name, meant)) choices[name] = meant;
  }
  return { view: VIEWS.includes(view) ? view : "write", choices };
}

export function format(view, choices) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(DEFAULTS)) {
    if (choices[name] !== value) query.set(name, choices[name]);
  }
  const text = query.toString();
  return `#${view}${text ? `?${text}` : ""}`;
}

// 'position:code,...' <-> [[position, character], ...]
export function parseBranches(text) {
  return text
    .split(",")
    .map((pair) => pair.split(":").map(Number))
    .filter(([at, code]) => [at, code].every(Number.isInteger) && at >= 0 && code > 0 && code < 0x110000)
    .map(([at, code]) => [at, String.fromCodePoint(code)]);
}

export const formatBranches = (branches) => branches.map(([at, c]) => `${at}:${c.codePointAt(0)}`).join(",");

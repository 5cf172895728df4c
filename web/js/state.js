// The choices, in the fragment of the address: #view?name=value&... Defaults are left out.

export const DEFAULTS = {
  model: "shakes256",
  weights: "bf16",
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
  layer: 0,
  head: 0,
  query: -1, // the last one
  part: "part4",
  n: 32,
  br: 8,
  bc: 8,
  l1: 11, // logarithms
  l2: 13,
  window: 1024,
  count: 16,
};
export const VIEWS = ["write", "race", "attention", "tiles", "measure"];

// {view, choices} of a fragment. Unknown names and values that are no numbers are ignored.
export function parse(fragment) {
  const [view, query = ""] = fragment.replace(/^#/, "").split(/\?(.*)/s);
  const choices = { ...DEFAULTS };
  for (const [name, value] of new URLSearchParams(query)) {
    if (!Object.hasOwn(DEFAULTS, name)) continue;
    if (typeof DEFAULTS[name] === "string") choices[name] = value;
    else if (value !== "" && Number.isFinite(Number(value))) choices[name] = Number(value);
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
  return text.split(",").map((pair) => pair.split(":").map(Number))
    .filter(([at, code]) => Number.isInteger(at) && at >= 0 && code > 0 && code < 0x110000)
    .map(([at, code]) => [at, String.fromCodePoint(code)]);
}

export const formatBranches = (branches) => branches.map(([at, c]) => `${at}:${c.codePointAt(0)}`).join(",");

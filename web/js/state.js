// @ts-check
// The choices, as the address's fragment #view?name=value&... without defaults, and as a command.
import { MODEL, MODELS, RECIPE, SLIDERS, WEIGHTS } from "./facts.js";

const text = (value, admits = () => true) => ({ value, admits });
// by: the values are multiples of it; 0 admits fractions.
const number = (value, least, most, by = 1) => ({
  ...{ value, least, most, by },
  admits: (x) => x >= least && x <= most && (by === 0 || x % by === 0),
});
// of: the values, or {value: how a field shows it}.
function oneOf(of, value) {
  const [values, labels] = Array.isArray(of) ? [of, {}] : [Object.keys(of), of];
  return { value: value ?? values[0], values, labels, admits: (x) => values.includes(x) };
}
export const MOST_SCRIPT = 4000; // characters
export const randomSeed = () => String(Math.floor(Math.random() * 2 ** 32));
export const isSeed = (digits) => /^[0-9]{1,20}$/.test(digits) && BigInt(digits) < 2n ** 64n;

// Settings of sampling with a field: {name, choice: name here, default, whole, slider: [least, most, step]}.
export const SETTINGS = SLIDERS.map((setting) => ({
  ...setting,
  choice: setting.name.replaceAll("_", ""),
  whole: Number.isInteger(setting.slider[2]),
}));

export const CHOICES = {
  model: text(MODEL, (name) => Object.hasOwn(MODELS, name)),
  weights: oneOf(WEIGHTS),
  where: oneOf({ browser: "this browser", gpu: "its GPU", server: "the server" }), // the server that the page comes from
  prompt: text("ROMEO:"),
  seed: text("1337", isSeed),
  length: number(250, 1, 20000),
  context: oneOf({ slide: "slide", reset: "restart, faster" }),
  stop: text(""),
  ...Object.fromEntries(
    SETTINGS.map(({ choice, default: value, whole, slider: [least, most] }) => [
      choice,
      number(value, least, most ?? Infinity, whole ? 1 : 0),
    ]),
  ),
  pace: oneOf({ 40: "40 a second", 150: "150 a second", 0: "as fast as it can" }, "150"), // characters
  branches: text(""), // 'position:character code' of each, with commas
  layer: number(-1, -1, 1000), // -1: of the head that looks back furthest, Session.observe()
  head: number(-1, -1, 1000),
  query: number(-1, -1, 100000), // -1: the last one
  key: number(-1, -1, 100000), // -1: the one with the largest weight
  part: text("part4", (name) => /^(part[0-9]{1,2}|script)$/.test(name)), // the kernels' table decides which exist
  script: text("", (script) => script.length <= MOST_SCRIPT), // a loop nest for Tiles
  frame: number(0, 0, 1e6), // of Tiles
  n: oneOf([16, 32, 48], 32),
  br: number(8, 1, 48),
  bc: number(8, 1, 48),
  left: number(47, 0, 47), // keys before its own that a query sees in Tiles
  l1: number(11, 9, 14), // log2 of the bytes
  l2: number(13, 11, 17),
  window: oneOf([256, 512, 1024], 1024),
  count: oneOf([8, 16, 32, 64], 16),
  width: oneOf([32, 64, 96, 128, 192], 64), // of Train; a minute of a browser suits a small model
  layers: number(2, 1, 6),
  block: number(64, 16, 256, 8),
  budget: oneOf({
    ...{ "1min": "1 minute", "3min": "3 minutes", "10min": "10 minutes", "60min": "an hour" },
    ...{ "100steps": "100 training steps", "1000steps": "1,000 training steps", "5000steps": "5,000 training steps" },
  }),
  trainseed: number(RECIPE.seed, 0, 2 ** 32 - 1),
};
const DEFAULTS = Object.fromEntries(Object.entries(CHOICES).map(([name, { value }]) => [name, value]));
const VIEWS = ["write", "wall", "race", "attention", "tiles", "measure", "train"];

// The value that a text means for a choice; undefined if there is none.
/** @param {string} name @param {string} given */
export function admitted(name, given) {
  const { value, admits } = CHOICES[name];
  let meant = typeof value === "string" ? given : given === "" ? NaN : Number(given);
  if (name === "seed" && given === "-1") meant = randomSeed();
  if (name === "branches") meant = formatBranches(parseBranches(given));
  return admits(meant) ? meant : undefined;
}

// Whether a fragment names a view, or is empty; #main does not.
export function namesView(fragment) {
  const name = fragment.replace(/^#/, "").split("?")[0];
  return name === "" || VIEWS.includes(name);
}

// {view, choices} of a fragment. Unknown names and values out of their range are ignored.
/** @param {string} fragment @returns {{ view: string, choices: Record<string, any> }} */
export function parse(fragment) {
  const [view, query = ""] = fragment.replace(/^#/, "").split(/\?(.*)/s);
  const choices = { ...DEFAULTS };
  for (const [name, given] of new URLSearchParams(query))
    if (Object.hasOwn(CHOICES, name)) choices[name] = admitted(name, given) ?? choices[name];
  return { view: VIEWS.includes(view) ? view : "write", choices };
}

/** @param {string} view @param {Record<string, any>} choices @returns {string} */
export function format(view, choices) {
  const chosen = Object.entries(DEFAULTS).filter(([name, value]) => choices[name] !== value);
  const query = new URLSearchParams(chosen.map(([name]) => [name, choices[name]])).toString();
  return `#${view}${query ? `?${query}` : ""}`;
}

// The settings of sampling by their own names.
export const sampling = (choices) => Object.fromEntries(SETTINGS.map(({ name, choice }) => [name, choices[choice]]));

// 'position:code,...' <-> [[position, character], ...]
export function parseBranches(text) {
  return text
    .split(",")
    .map((pair) => pair.split(":").map(Number))
    .filter(([at, code]) => [at, code].every(Number.isInteger) && at >= 0 && code > 0 && code < 0x110000)
    .map(([at, code]) => [at, String.fromCodePoint(code)]);
}

export const formatBranches = (branches) => branches.map(([at, c]) => `${at}:${c.codePointAt(0)}`).join(",");

const MOST_SEED = 2n ** 63n - 1n; // the command line's limit

const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

// Returns {command}, or {why}: a sentence. own: whether the checkpoint is the reader's.
/** @param {Record<string, any>} choices @param {boolean} own @returns {{ command?: string, why?: string }} */
export function commandFor(choices, own = false) {
  const why = withoutCommand(choices, own);
  return why ? { why } : { command: words(choices).join(" ") };
}

function withoutCommand(choices, own) {
  if (own) return "No command is shown: the checkpoint is your own.";
  if (choices.where === "server") return "No command is shown: the server chooses its engine and weights.";
  if (choices.branches) return "No command writes the same text: it has a branch.";
  if (BigInt(choices.seed) > MOST_SEED) return `No command writes the same text: its seeds end at ${MOST_SEED}.`;
  return "";
}

function words(choices) {
  const settings = SETTINGS.filter(({ choice, default: value }) => choices[choice] !== value);
  const all = [
    "python gpt.py part4 --inference --num-samples 1",
    `-m ${choices.model}`,
    `--prompt=${quoted(choices.prompt || "\n")}`,
    `--seed ${choices.seed}`,
    `--max-new-tokens ${choices.length}`,
    ...settings.map(({ name, choice }) => `--${name.replaceAll("_", "-")} ${choices[choice]}`),
  ];
  if (choices.weights !== "fp32") all.push(`--weights ${choices.weights}`);
  if (choices.stop) all.push(`--stop=${quoted(choices.stop)}`);
  if (choices.context === "reset") all.push("--context reset");
  return all;
}

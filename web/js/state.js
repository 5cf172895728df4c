// @ts-check
// What the choices mean: the settings of sampling, branches, the command that writes the same text.
import { SLIDERS } from "./facts.js";

export const MOST_SEED = 2n ** 64n; // seeds are below it

// Settings of sampling with a field: {name, choice: name here, default, whole, slider: [least, most, step]}.
export const SETTINGS = SLIDERS.map((setting) => ({
  ...setting,
  choice: setting.name.replaceAll("_", ""),
  whole: Number.isInteger(setting.slider[2]),
}));

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

const MOST_OF_COMMAND = 2n ** 63n - 1n; // the command line's largest seed

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
  if (BigInt(choices.seed) > MOST_OF_COMMAND) return `No command writes the same text: its seeds end at ${MOST_OF_COMMAND}.`;
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

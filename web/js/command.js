// The command that writes the same text as the page, or the reason why there is none.
import { SETTINGS } from "./state.js";

const MOST_SEED = 2n ** 63n - 1n; // the command line's limit

const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

// Returns {command}, or {why}: a sentence. own: whether the checkpoint is the reader's.
export function commandFor(choices, own = false) {
  const why = withoutCommand(choices, own);
  return why ? { why } : { command: words(choices).join(" ") };
}

function withoutCommand(choices, own) {
  if (own) return "No command is shown: the checkpoint is your own.";
  if (choices.where === "server") return "No command is shown: the server chooses its engine and weights.";
  if (choices.branches) return "No command writes the same text: it has a branch.";
  if (choices.endless) return "No command writes the same text: it has no end.";
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

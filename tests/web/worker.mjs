// Runs worker.js in node: the messages of the argument's `calls`, one after the other. The output is JSON: the answer to
// each, and how many instances of the kernels there were after it.
import { readFileSync } from "node:fs";

const { modules, wasm, directory, calls } = JSON.parse(process.argv[2]);
const bytes = (name) => {
  const b = readFileSync(name);
  return b.buffer.slice(b.byteOffset, b.byteOffset + b.length);
};
const json = (name) => JSON.parse(readFileSync(`${directory}/${name}`, "utf8"));

let instances = 0;
const instantiate = WebAssembly.instantiate;
WebAssembly.instantiate = (...given) => {
  instances++;
  return instantiate(...given);
};
const answers = [];
globalThis.self = { postMessage: (answer) => answers.push(answer) };
await import(`${modules}/worker.js`);

const load = {
  config: json("config.json"),
  characters: json("meta.json").characters,
  weights: bytes(`${directory}/model.safetensors`),
  precision: "fp32",
};
const all = [["compile", { wasm: bytes(wasm) }], ["load", load], ...calls];
const made = [];
for (const [id, [method, argument]] of all.entries()) {
  if (argument?.seed) argument.seed = BigInt(argument.seed);
  await self.onmessage({ data: { id, method, argument } });
  const { result, error } = answers.at(-1);
  made.push({ error, tokens: result?.tokens && [...result.tokens], instances });
}
console.log(JSON.stringify(made.slice(2)));

// The page in Chromium, for benchmarks/web.py: a line of JSON {seed} comes in, a line {ids, seconds} goes out.
import { createRequire } from "node:module";
import { createInterface } from "node:readline";

const { chromium } = createRequire(new URL("../tests/web/package.json", import.meta.url))("playwright-core");
const { home, program, model, weights } = JSON.parse(process.argv[2]);
const browser = await chromium.launch({ executablePath: program, args: ["--no-sandbox"] });

const page = await browser.newPage();
await page.goto(`${home}#write?length=1&pace=0`);
const build = await page.evaluate(
  async ([name, precision]) => {
    const { Models } = await import("/js/models.js");
    globalThis.engine = await (await Models.open()).engine(name, precision);
    return (await import("/js/kernels.js")).build();
  },
  [model, weights],
);
console.log(JSON.stringify({ build, browser: `Chromium ${browser.version()}` }));

// As Write does it: calls of the worker, each of which sends tokens and logits; without drawing them.
const write = async (seed) => {
  const { engine } = globalThis,
    { block_size } = engine.config,
    ids = [],
    start = performance.now();
  const text = { part: "part4", ids: [0], seed, context: "slide", useCache: true, capacity: block_size };
  await engine.call("begin", { ...text, sampling: { temperature: 0.8 } });
  while (ids.length < block_size - 1) {
    ids.push(...(await engine.call("more", { most: block_size - 1 - ids.length })).tokens);
  }
  return { ids, seconds: (performance.now() - start) / 1e3 };
};

for await (const line of createInterface({ input: process.stdin })) {
  console.log(JSON.stringify(await page.evaluate(write, JSON.parse(line).seed)));
}
await browser.close();

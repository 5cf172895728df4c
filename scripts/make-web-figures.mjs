// Makes docs/figures/web.png: the view Tiles, as Chromium shows the one file.
//
//   make web && npm install --prefix tests/web && node scripts/make-web-figures.mjs
import { createRequire } from "node:module";
import { fileURLToPath, pathToFileURL } from "node:url";

const root = fileURLToPath(new URL("..", import.meta.url));
const { chromium } = createRequire(`${root}tests/web/package.json`)("playwright-core");
const address = `${pathToFileURL(`${root}out/page/shakespeare.html`)}#tiles?pace=0&layer=1&head=2`;

const browser = await chromium.launch({
  executablePath: process.env.CHROMIUM ?? "/usr/bin/chromium",
  args: ["--no-sandbox"],
});
const page = await browser.newPage({ viewport: { width: 1280, height: 900 }, colorScheme: "light" });
await page.goto(address);
await page.waitForFunction(() => document.getElementById("tiles-at").max > 0);
await page.evaluate(() => {
  const at = document.getElementById("tiles-at");
  at.value = 25;
  at.dispatchEvent(new Event("input"));
});
// From the page's bar to the end of the board, its key and its sliders, whatever their height is.
const clip = await page.evaluate(() => {
  const place = (query) => document.querySelector(query).getBoundingClientRect();
  const y = place("nav").top + scrollY;
  return { x: 0, y, width: innerWidth, height: place("#tiles .pair").bottom + scrollY + 16 - y };
});
await page.screenshot({ path: `${root}docs/figures/web.png`, fullPage: true, clip });
await browser.close();

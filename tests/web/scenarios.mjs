// Scenarios of the page in a browser; the last line of the output is what a scenario returns, as JSON.
//
// Each fails if the page logs an error or asks another host for anything. Firefox is Debian's own, over WebDriver BiDi,
// where Playwright evaluates with eval(): there the page is served without its policy, but for the scenario `policy`, which
// evaluates nothing.
import { createServer } from "node:http";
import { readFile, writeFile } from "node:fs/promises";
import { createRequire } from "node:module";
import { extname, join } from "node:path";
import playwright from "playwright-core";

const { browser: kind, program, folder, scenario, argument } = JSON.parse(process.argv[2]);
const TYPES = { ".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".json": "application/json" };
const POLICY = /<meta http-equiv="Content-Security-Policy"[^>]*>/;
const complaints = [];
const answered = []; // paths
const PATIENCE = 60_000; // milliseconds without a change of the page: ends what hangs, on any machine
const pages = { edit: (html) => (kind === "firefox" ? html.replace(POLICY, "") : html) }; // what the server makes of them
const slow = new Map(); // what the server does with a path: {status, ms, until: what must hold first}

const server = createServer(async ({ url }, answer) => {
  const path = new URL(url, "http://localhost").pathname.replace(/\/$/, "/index.html");
  const { status = 200, ms = 0, until: holds } = slow.get(path) ?? {};
  do await new Promise((done) => setTimeout(done, ms));
  while (holds && !holds());
  answered.push(path);
  try {
    if (status !== 200) throw new Error("as the scenario wants it");
    let content = await readFile(join(folder, path));
    if (path.endsWith(".html")) content = pages.edit(String(content));
    answer.writeHead(200, { "Content-Type": TYPES[extname(path)] ?? "application/octet-stream" }).end(content);
  } catch {
    answer.writeHead(404).end();
  }
});
await new Promise((done) => server.listen(0, "127.0.0.1", done));
const home = argument.home ?? `http://127.0.0.1:${server.address().port}/`;

const launch = {
  chromium: () => playwright.chromium.launch({ executablePath: program, timeout: PATIENCE, args: ["--no-sandbox", ...(argument.flags ?? [])] }),
  firefox: () =>
    playwright._bidiFirefox.launch({
      channel: "moz-firefox",
      executablePath: program,
      timeout: PATIENCE,
      firefoxUserPrefs: { "layout.css.prefers-color-scheme.content-override": argument.scheme === "dark" ? 0 : 1 },
    }),
};
const browser = await launch[kind]();
const context = await browser.newContext({
  viewport: { width: argument.width ?? 1200, height: 900 },
  colorScheme: argument.scheme ?? "light",
});
context.setDefaultTimeout(PATIENCE);
const page = await context.newPage();
page.on("console", (message) => {
  if (message.type() === "error") complaints.push(message.text());
});
page.on("pageerror", (error) => complaints.push(error.message));
page.on("request", (request) => {
  if (!request.url().startsWith(home) && !/^(data|blob|file|about):/.test(request.url()))
    complaints.push(`asked for ${request.url()}`);
});

// Polls: waitForFunction() needs more of a browser.
async function until(what, condition, given) {
  let before, end;
  do {
    // Playwright takes a change of the address for another page, at times.
    const evaluated = (call, of) =>
      page.evaluate(call, of).catch((error) => {
        if (!/context was destroyed/.test(error.message)) throw error;
      });
    if (await evaluated(condition, given)) return;
    const now = answered.length + (await evaluated(() => location.hash + document.body.textContent));
    if (now !== before) [before, end] = [now, Date.now() + PATIENCE];
    await new Promise((done) => setTimeout(done, 50));
  } while (Date.now() < end);
  throw new Error(`waited in vain for ${what}`);
}
const written = (count) =>
  until("the text", (n) => document.documentElement.dataset.written === String(n), count);
const textOf = (id) => page.evaluate((name) => document.getElementById(name).textContent, id);
const textsOf = (selector) => page.$$eval(selector, (all) => all.map(({ textContent }) => textContent));
const numberOf = (selector) => page.locator(selector).count();
const set = (id, value) =>
  page.evaluate(
    ([name, to]) => {
      const field = document.getElementById(name);
      field.value = to;
      field.dispatchEvent(new Event("input", { bubbles: true }));
      field.dispatchEvent(new Event("change", { bubbles: true }));
    },
    [id, value],
  );
const show = async (view) => {
  await page.click(`nav a[href="#${view}"]`);
  await until(view, (name) => !document.getElementById(name).hidden, view);
};
const open = async (query, count) => {
  await page.goto(`${home}#write?pace=0&${new URLSearchParams(query)}`);
  if (count) await written(count);
};
const fresh = async (query, count) => {
  await page.goto("about:blank");
  await open(query, count);
};
const says = (id, part) => until(part, ([name, text]) => document.getElementById(name).textContent.includes(text), [id, part]);
const changes = (id, before) => until(`a change of ${id}`, ([name, text]) => document.getElementById(name).textContent !== text, [id, before]);
const framesAreThere = () => until("the frames", () => document.getElementById("tiles-at").max > 0);
const wallOf = async (count) => {
  await until("the number", () => document.getElementById("wall-count").value !== "");
  if (count) await set("wall-count", count);
  await page.click("#wall-form button");
  await says("wall-status", " texts by ");
};
const VIEWS = ["write", "wall", "race", "attention", "tiles", "script", "measure", "train"];
const showAny = async (view) => {
  if (view !== "script") return show(view);
  await page.click("#as-script");
  await says("script-status", "It computes");
};
const raced = async () => {
  await show("race");
  await page.click("#race-form button");
  await says("race-status", "Attention alone");
  return textsOf(".lane .written");
};
const barsAreShown = () => until("the bars", () => document.getElementById("bars").ariaBusy === "false");
const problem = () =>
  until("a problem", () => !document.getElementById("problem").hidden).then(() => textOf("problem"));

const scenarios = {
  // The files that the page gets, in their order, where the modules come after the weights.
  async early({ query, weights }) {
    slow.set("/js/main.js", { until: () => answered.includes(weights) });
    await open(query, query.length);
    return answered;
  },

  // With the page's policy, less what it `lacks`: whether the page asks for its service worker, which it does after the
  // first text. Nothing is evaluated, so this works in Firefox too. The address names a member that every object has.
  async policy({ lacks }) {
    pages.edit = (html) => html.replace(lacks, "");
    await page.goto(`${home}#write?pace=0&length=5&model=constructor`);
    for (let i = lacks ? 50 : PATIENCE / 100; i > 0 && !answered.includes("/sw.js"); i--) await new Promise((done) => setTimeout(done, 100));
    if (lacks) complaints.length = 0; // browsers log what a policy forbids
    return answered.includes("/sw.js");
  },

  // What a link shows of the views Attention and Tiles, what the address says after a frame on, and what another link
  // shows that is followed in the open page.
  async link({ query, other }) {
    await open(query, query.length);
    await show("attention");
    await changes("heat-status", "");
    const said = await textOf("heat-status");
    await show("tiles");
    await framesAreThere();
    const frame = await textOf("tiles-status");
    await page.click("#tiles-on");
    await until("the frame in the address", (now) => location.hash.includes(now), `frame=${query.frame + 1}`);
    const address = page.url(),
      next = await textOf("tiles-status");
    await page.evaluate((hash) => {
      location.hash = hash;
    }, other);
    await changes("tiles-status", next);
    const title = await page.title();
    await until("the other text", () => document.documentElement.dataset.written === "60");
    return { said, frame, address, title, other: await textOf("tiles-status") };
  },

  // A model that cannot be loaded, a model that is slow, and another seed meanwhile.
  async models({ query, broken, late }) {
    await open(query, query.length);
    const before = await textOf("text-new");
    slow.set(`/models/${broken}-bf16.planes.gz`, { status: 404 });
    await page.selectOption("#model", broken);
    const said = await problem();
    complaints.length = 0; // the browser logs the 404
    await new Promise((done) => setTimeout(done, 500));
    const after = [await textOf("text-new"), await page.isVisible("#problem"), await page.isDisabled("#halt")];
    slow.set(`/models/${late}-bf16.planes.gz`, { ms: 1500 });
    await page.selectOption("#model", late);
    await set("seed", query.seed + 1);
    await written(query.length);
    return { before, said, after, text: await textOf("text-new"), command: await textOf("command") };
  },

  async left({ query }) {
    await open(query, query.length);
    await show("race");
    await page.selectOption("#count", "64");
    await page.click("#race-form button");
    await says("race-status", "writes");
    await show("write");
    await until("the end", () => !document.querySelector("#race-form button").disabled);
    return textOf("race-status");
  },

  // A text by the server that the page comes from, and the same one by the browser.
  async server({ query }) {
    const made = {};
    for (const where of ["server", "browser"]) {
      await fresh({ ...query, where }, query.length);
      made[where] = await textOf("text-new");
      made[`${where} status`] = await textOf("write-status");
      made[`${where} bars`] = await page.isVisible("#bars");
    }
    await page.selectOption("#where", "server");
    await page.click("#another");
    await until("another text", () => document.documentElement.dataset.written !== undefined);
    made.choice = await page.inputValue("#where");
    return made;
  },

  // Texts by the GPU: those of addresses, with who wrote them; one whose device is lost meanwhile; a wall of texts.
  async gpu({ queries, lost, wall }) {
    await open(queries[0], queries[0].length);
    const made = { note: await textOf("gpu-note"), texts: [], by: [] };
    if (await page.evaluate(() => document.querySelector('#where option[value="gpu"]').disabled)) return made;
    for (const query of queries) {
      await fresh({ ...query, where: "gpu" }, query.length);
      made.texts.push(await textOf("text-new"));
      made.by.push(await textOf("write-status"));
    }
    await fresh({ ...lost, where: "gpu" });
    await changes("text-new", "");
    await page.workers().at(-1).evaluate(() => { // the next text's device is lost, as by a reset of its driver
      const create = GPUDevice.prototype.createCommandEncoder;
      GPUDevice.prototype.createCommandEncoder = function () {
        GPUDevice.prototype.createCommandEncoder = create;
        this.destroy();
        return create.call(this);
      };
    });
    await written(lost.length);
    made.lost = { text: await textOf("text-new"), status: await textOf("write-status") };
    await show("wall");
    await wallOf(wall);
    made.wall = { texts: await textsOf("#texts a") };
    await page.click("#texts a:nth-child(2)");
    await written(100);
    made.wall.opened = await textOf("text-new");
    return made;
  },

  async texts({ queries }) {
    const made = [];
    for (const query of queries) {
      await fresh(query, query.length);
      made.push(await textOf("text-new"));
    }
    return made;
  },

  // Another character at a position: the text, the address, and the text of that address.
  async branch({ query, at }) {
    await open(query, query.length);
    const plain = await textOf("text-new");
    await set("position", at);
    await barsAreShown();
    const bars = page.locator("#bars button");
    const chosen = await bars.evaluateAll((all) => all.findIndex((bar) => bar.ariaCurrent !== "true"));
    await bars.nth(chosen).click();
    await until("the branch", () => location.hash.includes("branches"));
    await changes("text-new", plain);
    await until("its end", () => document.getElementById("halt").disabled);
    const text = await textOf("text-new"),
      address = page.url();
    await page.goto("about:blank");
    await page.goto(address);
    await written(query.length);
    const again = await textOf("text-new");
    await page.click("#unbranch");
    await says("text-new", plain);
    return { plain, text, address, again };
  },

  async race({ window, count }) {
    await open({ length: 5, window, count }, 5);
    const [texts, times] = [await raced(), await textsOf(".lane > p")];
    return { texts, times, bars: await numberOf("#alone tr"), status: await textOf("race-status") };
  },

  // The sentences on a query and a key, chosen by sliders and by the pointer.
  async attention({ query, i, j }) {
    await open(query, query.length);
    await show("attention");
    await until("the maps", () => document.querySelectorAll("#maps button").length > 0);
    await changes("heat-status", "");
    await set("query", i);
    await set("key", j);
    const bySliders = await textOf("heat-status");
    await set("query", 0);
    const { x, y, width, height, T } = await page.evaluate(() => {
      const canvas = document.getElementById("heat");
      canvas.scrollIntoView();
      const box = canvas.getBoundingClientRect();
      return { x: box.x, y: box.y, width: box.width, height: box.height, T: canvas.width };
    });
    await page.mouse.move(x + ((j + 0.5) / T) * width, y + ((i + 0.5) / T) * height);
    await says("heat-status", bySliders);
    return { said: bySliders, maps: await numberOf("#maps canvas") };
  },

  // What the page leaves of addresses: of good choices, of each wrong value, and of a random seed.
  async address({ choices, wrong }) {
    const left = async (query) => {
      await page.goto("about:blank");
      await page.goto(`${home}#race?${query}`);
      await until("the choices", () => document.getElementById("length").value !== "" && document.title.startsWith("Race"));
      return Object.fromEntries(new URLSearchParams(new URL(page.url()).hash.split("?")[1]));
    };
    const made = { kept: await left(new URLSearchParams(choices)), left: [] };
    for (const query of wrong) made.left.push(await left(query));
    made.random = (await left("seed=-1")).seed;
    return made;
  },

  // Every part's frames, to the end; where the canvas is drawn.
  async tiles() {
    await open({ length: 60 }, 60);
    await show("tiles");
    const made = {};
    await framesAreThere();
    for (const part of await page.$$eval("#tiles-part option", (all) => all.map(({ value }) => value).slice(0, -1))) { // without the script
      await page.selectOption("#tiles-part", part);
      await says("source-title", part);
      const titles = [],
        last = await page.getAttribute("#tiles-at", "max");
      for (const share of [0, 0.4, 0.8, 1]) {
        await set("tiles-at", Math.round(share * last));
        titles.push(await textOf("frame-title"));
      }
      await until("the nest's line", () => document.querySelector("#nest .now"));
      const online = (await page.isVisible("#online")) ? await textOf("ml-text") : "";
      made[part] = { titles, online, lines: await numberOf("#source .now"), bytes: await textsOf("#bytes td") };
    }
    await page.selectOption("#tiles-part", "part4"); // others need no window
    await says("source-title", "part4");
    await framesAreThere();
    const before = await page.getAttribute("#tiles-at", "max");
    await set("left", 4);
    await until("the window", (max) => document.getElementById("tiles-at").max !== max, before);
    made.part4.ruled = await textsOf("#bytes td");
    await set("tiles-at", 0);
    await page.click("#tiles-play");
    await until("the next frames", () => document.getElementById("tiles-at").value > 1);
    return made;
  },

  // A part as a script, then another part's over it and undone, a wrong line, the link to all that, and another link.
  async script({ part, other, line, link }) {
    const bytes = () =>
      page.$$eval("#bytes tr", (rows) =>
        Object.fromEntries(rows.map(({ firstChild, lastChild }) => [firstChild.textContent, lastChild.textContent])),
      );
    const said = (start) =>
      until(start, (text) => document.getElementById("script-status").textContent.startsWith(text), start);
    await open({ length: 60, part }, 60);
    await show("tiles");
    await says("source-title", part);
    const made = { part: await bytes() };
    await page.click("#as-script");
    await said("It computes");
    made.own = await bytes();
    made.first = await page.inputValue("#script");
    await page.selectOption("#tiles-part", other);
    await says("source-title", other);
    await page.click("#as-script");
    await says("source-title", "Your loop nest");
    made.second = await page.inputValue("#script");
    await page.keyboard.press("Control+z");
    made.undone = await page.inputValue("#script");
    await page.keyboard.press("Control+End");
    await page.keyboard.insertText(line); // at once: a part of the line is wrong in another way
    await said("Line");
    made.why = await textOf("script-status");
    await until("the script in the address", (text) => decodeURIComponent(location.hash.replaceAll("+", " ")).includes(text), line);
    const address = page.url();
    for (const [name, to] of Object.entries({ again: address, linked: `${home}#tiles?${new URLSearchParams(link)}` })) {
      await page.goto("about:blank");
      await page.goto(to);
      await said("Line");
      made[name] = [await page.inputValue("#script"), await textOf("script-status")];
    }
    return made;
  },

  async measure() {
    await open({ length: 5 }, 5);
    await show("measure");
    await page.click("#measure-go");
    await says("measure-status", "The GPU ");
    const rows = await page.$$eval("#figures tbody tr", (all) => all.map((row) => row.innerText.split("\t")));
    return { points: await numberOf("#roofline circle"), rows, status: await textOf("measure-status") };
  },

  // One visit, and a second one without the server. On the origin are also another cache and another file.
  async offline({ query, other }) {
    await context.addInitScript(() => {
      if (location.protocol === "http:") caches.open("another page's");
    });
    await open(query, query.length);
    const first = await textOf("text-new");
    await until("the weights", () => caches.match("models/shakes256-bf16.planes.gz").then(Boolean));
    const kept = await page.evaluate(async (name) => {
      await (await fetch(name)).text();
      return { other: await caches.has("another page's"), file: Boolean(await caches.match(name)) };
    }, other);
    server.closeAllConnections();
    await new Promise((done) => server.close(done));
    await fresh(query, query.length);
    return { texts: [first, await textOf("text-new")], kept };
  },

  // What the page says of files that someone chooses.
  async files({ cases, fine }) {
    await open({ length: 5 }, 5);
    await set("prompt", "abc");
    const said = [];
    for (const files of cases) {
      await page.setInputFiles("#file", files);
      said.push(await problem());
      await page.evaluate(() => {
        document.getElementById("problem").hidden = true;
        document.getElementById("file").value = "";
      });
    }
    await page.setInputFiles("#file", fine);
    await says("text-prompt", "abc");
    await written(5);
    const text = await textOf("text-new"),
      note = await textOf("gpu-note");
    await page.selectOption("#model", "shakes128");
    await changes("text-new", text);
    await written(5);
    return { said, text, note, other: await textOf("text-new") };
  },

  // A run with a pause and a stop, its download, the model in Write, Race and Tiles, and the download dropped in again; before that
  // what the page says of wrong texts.
  async train({ wrong, files, text, choices, zip }) {
    await open({ ...choices, length: 20, count: 8 }, 20);
    await show("train");
    const made = { said: [] };
    for (const given of wrong) {
      await set("corpus", given);
      await page.click("#train-start");
      made.said.push(await problem());
    }
    for (const path of files) {
      await page.setInputFiles("#corpus-file", path);
      made.said.push(await problem());
    }
    await set("corpus", text);
    await page.click("#train-start");
    await says("train-status", "Training step");
    await page.click("#train-pause");
    await says("train-status", "Paused.");
    const paused = await textOf("train-status");
    await new Promise((done) => setTimeout(done, 1000));
    made.waits = paused === (await textOf("train-status"));
    await page.click("#train-pause");
    await until("two evaluations", () => document.querySelectorAll("#losses circle").length > 1);
    await page.click("#train-stop");
    await until("the end", () => !document.getElementById("train-save").disabled);
    Object.assign(made, { status: await textOf("train-status"), losses: await textOf("losses-text"), sample: await textOf("sample") });
    made.points = await numberOf("#losses circle");
    const saved = await page.evaluate(() => // Firefox reports no download over BiDi
      new Promise((done) => {
        const make = URL.createObjectURL;
        URL.createObjectURL = (blob) => {
          blob.arrayBuffer().then((content) => done([...new Uint8Array(content)]));
          return make.call(URL, blob);
        };
        document.getElementById("train-save").click();
      }),
    );
    await writeFile(zip, Buffer.from(saved));
    const before = await textOf("text-new");
    await page.click("#train-use");
    await changes("text-new", before);
    await written(20);
    made.text = await textOf("text-new");
    made.raced = await raced();
    await show("tiles");
    await framesAreThere();
    await show("write");
    await page.selectOption("#model", "shakes128");
    await changes("text-new", made.text);
    await written(20);
    await page.setInputFiles("#file", zip);
    await says("text-new", made.text);
    return made;
  },

  async axe() {
    const source = await readFile(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");
    await open({ length: 40 }, 40);
    const found = [];
    for (const view of VIEWS) {
      await showAny(view);
      if (view === "wall") await wallOf();
      await page.evaluate(source);
      const { violations } = await page.evaluate(() => globalThis.axe.run());
      found.push(...violations.map(({ id, nodes }) => `${view}: ${id}: ${nodes[0].html}`));
      const untold = await page.$$eval("main canvas, main svg", (all) =>
        all
          .filter((picture) => picture.checkVisibility() && !picture.closest("button[aria-label]"))
          .filter(({ ariaLabel, role, attributes }) => role !== "img" || !ariaLabel || !attributes["aria-describedby"])
          .map(({ id }) => id),
      );
      found.push(...untold.map((id) => `${view}: the picture ${id} has no text`));
      const wide = await page.evaluate(() => document.documentElement.scrollWidth - document.documentElement.clientWidth);
      if (wide > 0) found.push(`${view}: ${wide} pixels too wide`);
    }
    return found;
  },

  // For each view the number of controls that can be used, and those that Tab does not reach.
  async tabs() {
    await open({ length: 40 }, 40);
    const made = {};
    for (const view of VIEWS) {
      await showAny(view);
      if (view === "attention") await changes("heat-status", "");
      if (view === "tiles") await framesAreThere();
      const count = await page.evaluate(() => {
        const all = [...document.querySelectorAll("a[href], button, input, select, textarea, summary")];
        globalThis.left = new Set(all.filter((one) => one.checkVisibility() && !one.disabled));
        document.addEventListener("focusin", ({ target }) => globalThis.left.delete(target));
        document.querySelector(".skip").focus(); // Tab goes on from there
        return globalThis.left.size;
      });
      for (let i = 0; i < count + 15 && (await page.evaluate(() => globalThis.left.size)); i++) await page.keyboard.press("Tab");
      made[view] = [count, await page.evaluate(() => [...globalThis.left].map(({ id, textContent }) => id || textContent))];
    }
    return made;
  },

  // The keyboard alone: to the prompt, a text, a letter, a branch.
  async keyboard({ query }) {
    await open(query, query.length);
    const focus = () => page.evaluate(() => document.activeElement.id || document.activeElement.textContent);
    const tabTo = async (wanted) => {
      for (let i = 0; i < 60; i++) {
        await page.keyboard.press("Tab");
        if ((await focus()) === wanted) return;
      }
      throw new Error(`Tab does not reach ${wanted}`);
    };
    await tabTo("prompt");
    await page.keyboard.press("Control+Enter");
    await written(query.length);
    await tabTo("position");
    for (let i = 0; i < 3; i++) await page.keyboard.press("ArrowLeft");
    const position = await textOf("position-out");
    await barsAreShown();
    await page.keyboard.press("Tab");
    if (await page.evaluate(() => document.activeElement.getAttribute("aria-current") === "true"))
      await page.keyboard.press("Tab");
    await page.keyboard.press("Enter");
    await until("a branch", () => location.hash.includes("branches"));
    return position;
  },
};

try {
  const result = await scenarios[scenario](argument);
  if (complaints.length) throw new Error(`the page complained: ${complaints.join("; ")}`);
  console.log(JSON.stringify(result));
} catch (error) {
  const state = await page
    .evaluate(() => [location.href, document.getElementById("problem")?.textContent])
    .catch(() => "");
  console.error(error, state, complaints);
  process.exitCode = 1;
}
await browser.close();
process.exit(); // an answer may still wait

// Scenarios of a first visit as the server sees it, of links, and of what fails or is left, for scenarios.mjs, which gives
// its tools.
export const visits = ({
  page, home, pages, slow, answered, complaints, open, written, until, textOf, set, show, problem,
}) => ({
  // The files that the page gets, in their order, where the modules come after the weights.
  async early({ query, weights }) {
    slow.set("/js/main.js", { until: () => answered.includes(weights) });
    await open(query, query.length);
    return answered;
  },

  // With the page's policy, less what it `lacks`: whether the page asks for its service worker, which it does after the
  // first text. Nothing is evaluated, so this works in Firefox too.
  async policy({ lacks }) {
    pages.edit = (html) => html.replace(lacks, "");
    await page.goto(`${home}#write?pace=0&length=5`);
    for (let i = lacks ? 50 : Infinity; i > 0 && !answered.includes("/sw.js"); i--) await new Promise((done) => setTimeout(done, 100));
    if (lacks) complaints.length = 0; // browsers log what a policy forbids
    return answered.includes("/sw.js");
  },

  // What a link shows of the views Attention and Tiles, what the address says after a frame on, and what another link
  // shows that is followed in the open page.
  async link({ query, other }) {
    await open(query, query.length);
    await show("attention");
    await until("the map", () => document.getElementById("heat-status").textContent !== "");
    const said = await textOf("heat-status");
    await show("tiles");
    await until("the frames", () => document.getElementById("tiles-at").max > 0);
    const frame = await textOf("tiles-status");
    await page.click("#tiles-on");
    await until("the frame in the address", (now) => location.hash.includes(now), `frame=${query.frame + 1}`);
    const address = page.url(),
      next = await textOf("tiles-status");
    await page.evaluate((hash) => {
      location.hash = hash;
    }, other);
    await until("the other frame", (before) => document.getElementById("tiles-status").textContent !== before, next);
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

  // A race that is left.
  async left({ query }) {
    await open(query, query.length);
    await show("race");
    await page.selectOption("#count", "64");
    await page.click("#race-form button");
    await until("a part", () => document.getElementById("race-status").textContent.includes("writes"));
    await show("write");
    await until("the end", () => !document.querySelector("#race-form button").disabled);
    return textOf("race-status");
  },
});

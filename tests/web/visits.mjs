// Scenarios of a first visit as the server sees it, for scenarios.mjs, which gives its tools.
export const visits = ({ page, home, pages, slow, answered, complaints, open, until, textOf, show }) => ({
  // The files that the page gets, in their order, where the modules are late.
  async early({ query }) {
    slow.set("/js/main.js", { ms: 1500 });
    await open(query, query.length);
    return answered;
  },

  // With the page's policy, less what it `lacks`: whether the page asks for its service worker, which it does after the
  // first text. Nothing is evaluated, so this works in Firefox too.
  async policy({ lacks }) {
    pages.edit = (html) => html.replace(lacks, "");
    await page.goto(`${home}#write?pace=0&length=5`);
    for (let i = 0; i < 50 && !answered.includes("/sw.js"); i++) await new Promise((done) => setTimeout(done, 100));
    if (lacks) complaints.length = 0; // browsers log what a policy forbids
    return answered.includes("/sw.js");
  },

  // What a link shows of the views Attention and Tiles, what the address says after a step on, and what another link
  // shows that is followed in the open page.
  async link({ query, other }) {
    await open(query, query.length);
    await show("attention");
    await until("the map", () => document.getElementById("heat-status").textContent !== "");
    const said = await textOf("heat-status");
    await show("tiles");
    await until("the steps", () => document.getElementById("tiles-at").max > 0);
    const step = await textOf("tiles-status");
    await page.click("#tiles-on");
    await until("the step in the address", (now) => location.hash.includes(now), `step=${query.step + 1}`);
    const address = page.url(),
      next = await textOf("tiles-status");
    await page.evaluate((hash) => {
      location.hash = hash;
    }, other);
    await until("the other step", (before) => document.getElementById("tiles-status").textContent !== before, next);
    const title = await page.title();
    await until("the other text", () => document.documentElement.dataset.written === "60");
    return { said, step, address, title, other: await textOf("tiles-status") };
  },
});

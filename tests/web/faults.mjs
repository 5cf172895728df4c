// Scenarios where something fails, comes late, or is given up, for scenarios.mjs, which gives its tools.
export const faults = ({ page, slow, complaints, open, written, until, textOf, set, show, problem }) => ({
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

  // The link to the page's text, from another view.
  async skip() {
    await open({ length: 5 }, 5);
    await show("race");
    await page.focus("a.skip");
    await page.keyboard.press("Enter");
    await until("the address of the view", () => location.hash.startsWith("#race"));
    return page.evaluate(() => [document.getElementById("race").hidden, document.activeElement.id]);
  },

  // From Attention to Tiles, whose sources are late, and back: what Attention says of a head that is clicked.
  async both({ query, head, i, j }) {
    slow.set("/sources.json", { ms: 1500 });
    await open(query, query.length);
    await show("attention");
    await until("the map", () => document.getElementById("heat-status").textContent !== "");
    await show("tiles");
    await show("attention");
    await show("tiles"); // its steps are not made yet
    await show("attention");
    await until("the steps", () => document.getElementById("tiles-at").max > 0);
    await page.locator("#maps button").nth(head).click();
    await until("the head", (n) => document.getElementById("heat-status").textContent.includes(`Layer 1, head ${n}`), head + 1);
    await set("query", i);
    await set("key", j);
    return textOf("heat-status");
  },

  // A text of many characters.
  async long({ query }) {
    await open(query, query.length);
    const text = await textOf("text-new");
    await set("position", 0);
    return [text, await textOf("write-status"), await textOf("position-out")];
  },

  // What fields show of a link, and what stays of it after another choice.
  async fields({ query, names }) {
    await open(query, query.length);
    const values = () =>
      page.evaluate((ids) => Object.fromEntries(ids.map((id) => [id, document.getElementById(id).value])), names);
    const shown = await values(),
      temperature = await textOf("temperature-out"),
      topk = await textOf("topk-out");
    const text = await textOf("text-new");
    await page.selectOption("#pace", "0");
    await written(query.length);
    const kept = [await textOf("text-new"), await page.isVisible("#unbranch")];
    await page.click("#write-form button.primary");
    await written(query.length);
    await until("the address", () => !location.hash.includes("branches") && !location.hash.includes("pace=10"));
    const [command, address] = [await textOf("command"), page.url()];
    await page.focus("#stop");
    await page.keyboard.press("End");
    await page.keyboard.press("Enter");
    return { shown, temperature, topk, text, kept, command, address, stop: await page.inputValue("#stop") };
  },

  // An endless text and a race that are left.
  async left({ query }) {
    await open({ ...query, endless: 1 });
    await until("a text", () => document.getElementById("text-new").textContent.length > 100);
    await show("race");
    await until("the end", () => document.getElementById("halt").disabled);
    await page.selectOption("#count", "64");
    await page.click("#race-form button");
    await until("a part", () => document.getElementById("race-status").textContent.includes("writes"));
    await show("write");
    await until("the end", () => !document.querySelector("#race-form button").disabled);
    return [await textOf("race-status"), await textOf("write-status")];
  },
});

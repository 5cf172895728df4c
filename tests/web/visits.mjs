// Scenarios of a first visit as the server sees it, for scenarios.mjs, which gives its tools.
export const visits = ({ page, home, pages, slow, answered, complaints, open }) => ({
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
});

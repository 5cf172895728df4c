// Keeps the page's files, with the kernels and weights that it has loaded, so that it opens without a network. Nothing
// else is kept: other pages may share the origin, and a server may follow at this address.
const OWN = `shakespeare-attention ${registration.scope} `, // all pages of an origin share its caches
  CACHE = `${OWN}VERSION`, // web/build.py fills it in
  isChosen = (name) => /\.(wasm|planes\.gz)$/.test(name); // a browser needs one of several

// Revalidates with the server: the browser's own cache may have files of another version.
const fresh = (path) => new Request(new URL(path, registration.scope), { cache: "no-cache" });

const on = (type, work) => self.addEventListener(type, (event) => event.waitUntil(work(event)));

on("install", async () => {
  const { files } = await (await fetch(fresh("shakespeare-page.json"))).json(),
    kept = files.filter((name) => !isChosen(name) && name !== "sw.js");
  await (await caches.open(CACHE)).addAll(["./", ...kept].map(fresh));
  await self.skipWaiting();
});

on("activate", async () => {
  const old = (await caches.keys()).filter((name) => name.startsWith(OWN) && name !== CACHE);
  await Promise.all(old.map((name) => caches.delete(name)));
  await self.clients.claim();
});

self.addEventListener("fetch", (event) => {
  const { request } = event,
    { origin, pathname } = new URL(request.url),
    name = origin + pathname;
  if (request.method !== "GET" || !name.startsWith(registration.scope)) return;
  event.respondWith(
    caches.open(CACHE).then(async (cache) => {
      const kept = await cache.match(name);
      if (kept) return kept;
      const answer = await fetch(request);
      if (answer.ok && isChosen(name)) await cache.put(name, answer.clone());
      return answer;
    }),
  );
});

// Keeps the page's files, so that it opens without a network after the first time. web/build.py fills in the names.
// Nothing else is kept: other pages may share the origin, and a server may follow at this address.
const OWN = `shakespeare-attention ${registration.scope} `, // all pages of an origin share its caches
  CACHE = `${OWN}VERSION`,
  absolute = (path) => new URL(path, registration.scope).href,
  files = ["./", ..."FILES"].map(absolute),
  weights = "WEIGHTS".map(absolute);

// Revalidates with the server: the browser's own cache may have files of another version.
const fresh = (url) => new Request(url, { cache: "no-cache" });

const on = (type, work) => self.addEventListener(type, (event) => event.waitUntil(work(event)));

on("install", async () => {
  await (await caches.open(CACHE)).addAll(files.map(fresh));
  await self.skipWaiting();
});

on("activate", async () => {
  const old = (await caches.keys()).filter((name) => name.startsWith(OWN) && name !== CACHE);
  await Promise.all(old.map((name) => caches.delete(name)));
  await self.clients.claim();
});

// The paths of weights that the page has loaded, perhaps before this worker started.
on("message", async ({ data }) => {
  const cache = await caches.open(CACHE),
    wanted = data.map(absolute).filter((url) => weights.includes(url));
  await Promise.all(wanted.map(async (url) => (await cache.match(url)) ?? cache.add(fresh(url))));
});

self.addEventListener("fetch", (event) => {
  const { request } = event,
    url = new URL(request.url),
    name = url.origin + url.pathname;
  if (request.method !== "GET" || !(files.includes(name) || weights.includes(name))) return;
  event.respondWith(
    caches.open(CACHE).then(async (cache) => {
      const kept = await cache.match(name);
      if (kept) return kept;
      const answer = await fetch(request);
      if (answer.ok) await cache.put(name, answer.clone());
      return answer;
    }),
  );
});

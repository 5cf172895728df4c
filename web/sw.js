// Keeps the page's files, so that it opens without a network after the first time. web/build.py fills in the names.
// Nothing else is kept: other pages may share the origin, and a server may follow at this address.
const OWN = `shakespeare-attention ${registration.scope} `, // all pages of an origin share its caches
  CACHE = `${OWN}VERSION`,
  absolute = (path) => new URL(path, registration.scope).href,
  files = ["./", ..."FILES"].map(absolute),
  weights = "WEIGHTS".map(absolute);

// Revalidates with the server: the browser's own cache may have files of another version.
const fresh = (url) => new Request(url, { cache: "no-cache" });

self.addEventListener("install", (event) => {
  event.waitUntil(
    caches
      .open(CACHE)
      .then((cache) => cache.addAll(files.map(fresh)))
      .then(() => self.skipWaiting()),
  );
});

self.addEventListener("activate", (event) => {
  const old = caches
    .keys()
    .then((names) => names.filter((name) => name.startsWith(OWN) && name !== CACHE))
    .then((names) => Promise.all(names.map((name) => caches.delete(name))));
  event.waitUntil(old.then(() => self.clients.claim()));
});

// The paths of weights that the page has loaded, perhaps before this worker started.
self.addEventListener("message", (event) => {
  const wanted = event.data.map(absolute).filter((url) => weights.includes(url));
  const keep = async (cache, url) => (await cache.match(url)) ?? cache.add(fresh(url));
  event.waitUntil(caches.open(CACHE).then((cache) => Promise.all(wanted.map((url) => keep(cache, url)))));
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

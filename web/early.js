// Stands in the page itself, where web/build.py fills in the files: most of what a first visit loads is the weights,
// so they are asked for before any module is there.
{
  const asked = new URLSearchParams(location.hash.replace(/^[^?]*/, "")),
    wanted = `${asked.get("model") ?? "shakes256"}-${asked.get("weights") ?? "bf16"}`,
    path = "WEIGHTS".find((name) => name === `models/${wanted}.planes.gz`),
    link = { rel: "preload", as: "fetch", crossOrigin: "anonymous", href: path };
  if (path) document.head.append(Object.assign(document.createElement("link"), link));
}

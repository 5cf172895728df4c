// Requests the weights, most of a first visit's bytes, before the modules. web/build.py fills in the files.
{
  const asked = new URLSearchParams(location.hash.replace(/^[^?]*/, "")),
    wanted = `${asked.get("model") ?? "MODEL"}-${asked.get("weights") ?? "PRECISION"}`,
    path = "WEIGHTS".find((name) => name === `models/${wanted}.planes.gz`),
    link = { rel: "preload", as: "fetch", crossOrigin: "anonymous", href: path };
  if (path) document.head.append(Object.assign(document.createElement("link"), link));
}

// The worker as the page sees it, and the files that it needs: beside the page, or inside of it.

const inside = (name) => document.getElementById(`asset:${name}`);

// A file's bytes, unpacked if they are packed. progress(bytes so far) is called as they come in.
export async function asset(name, progress = () => {}) {
  const file = await packed(name, progress),
    start = new Uint8Array(await file.slice(0, 2).arrayBuffer());
  if (start[0] !== 0x1f || start[1] !== 0x8b) return file.arrayBuffer(); // the server may have unpacked it
  return new Response(file.stream().pipeThrough(new DecompressionStream("gzip"))).arrayBuffer();
}

async function packed(name, progress) {
  const element = inside(name);
  if (element) return new Blob([Uint8Array.from(atob(element.textContent.trim()), (c) => c.charCodeAt(0))]);
  const answer = await fetch(name);
  if (!answer.ok) throw new Error(`${name} was not found (${answer.status})`);
  const parts = [];
  let size = 0;
  for (const reader = answer.body.getReader(); ;) {
    const { done, value } = await reader.read();
    if (done) break;
    parts.push(value);
    progress((size += value.length));
  }
  return new Blob(parts);
}

export async function json(name) {
  return JSON.parse(new TextDecoder().decode(await asset(name)));
}

function newWorker() {
  const element = inside("worker.js");
  if (!element) return new Worker(new URL("./worker.js", import.meta.url), { type: "module" });
  return new Worker(URL.createObjectURL(new Blob([element.textContent], { type: "text/javascript" })));
}

// What calls of a closed Engine end with.
export class Closed extends Error {}

// A Session in a worker: its methods are calls that return promises.
export class Engine {
  constructor() {
    this.worker = newWorker();
    this.waiting = new Map();
    this.calls = 0;
    this.worker.onmessage = ({ data: { id, result, error } }) => {
      const { resolve, reject } = this.waiting.get(id);
      this.waiting.delete(id);
      if (error === undefined) resolve(result);
      else reject(new Error(error));
    };
    this.worker.onerror = (event) => {
      this.fail(new Error(event.message || "the worker did not start"));
    };
  }

  fail(error) {
    for (const { reject } of this.waiting.values()) reject(error);
    this.waiting.clear();
  }

  call(method, argument) {
    if (this.closed) return Promise.reject(new Closed("the engine is closed"));
    const id = this.calls++;
    return new Promise((resolve, reject) => {
      this.waiting.set(id, { resolve, reject });
      this.worker.postMessage({ id, method, argument });
    });
  }

  close() {
    this.closed = true;
    this.worker.terminate();
    this.fail(new Closed("the engine is closed"));
  }
}

// @ts-check
// The worker: calls of a Session by messages {id, method, argument}.
import { Session } from "./session.js";
import { Problem } from "./problem.js";

const session = new Session();

// A sentence for the page.
function sentence(error) {
  if (error instanceof Problem) return error.message;
  if (error instanceof WebAssembly.RuntimeError || error instanceof RangeError) {
    return `the kernels stopped, probably for want of memory (${error.message})`;
  }
  return String(error);
}

async function answer({ id, method, argument }) {
  try {
    const result = await session[method](argument);
    const arrays = [result, ...Object.values(ArrayBuffer.isView(result) ? {} : (result ?? {}))];
    const transfer = arrays.filter(ArrayBuffer.isView).map(({ buffer }) => buffer);
    self.postMessage({ id, result }, { transfer });
  } catch (error) {
    const spoilt = error instanceof Problem || error instanceof WebAssembly.RuntimeError;
    if (spoilt && session.checkpoint) await session.restart().catch(() => {}); // the next call reports the reason
    self.postMessage({ id, error: sentence(error) });
  }
}

let last = Promise.resolve(); // calls that wait for the GPU do not overlap
self.onmessage = ({ data }) => { last = last.then(() => answer(data)); };

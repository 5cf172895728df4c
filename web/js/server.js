// @ts-check
// A text by `gpt.py serve`, if the page comes from there.
import { sampling } from "./state.js";

// The server {api: its address, models}, or null if the page does not come from such a server.
export async function openServer() {
  /** @type {HTMLMetaElement} */
  const meta = document.querySelector('meta[name="server"]');
  if (!meta) return null;
  const answer = await fetch(`${meta.content}/models`);
  if (!answer.ok) throw new Error(`the server's models cannot be read (${answer.status})`);
  const models = (await answer.json()).data.map((model) => model.id);
  return { api: meta.content, models };
}

// A source of Writing in text.js, without logits.
export class Server {
  isPaced = false;
  /** @type {{ api: string, models: string[] }} */ server;
  /** @type {AbortController} */ stopped;
  by = "by the server";

  constructor(server) { Object.assign(this, { server, stopped: new AbortController() }); }

  halt() { this.stopped.abort(); }

  async begin({ model, prompt, seed, length, context, stop, ...choices }) {
    const { rawJSON } = /** @type {any} */ (JSON), // the seed may exceed 2^53
      text = { model, prompt: prompt || "\n", seed: rawJSON(seed), max_tokens: length, context, ...(stop && { stop }) },
      body = { ...text, ...sampling(choices), stream: true };
    this.last = performance.now();
    const answer = await fetch(`${this.server.api}/completions`, {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(body),
      signal: this.stopped.signal,
    });
    if (!answer.ok) {
      const refusal = await answer.json().catch(() => null);
      throw new Error(refusal?.error?.message ?? `the server answered ${answer.status}`);
    }
    this.pieces = pieces(answer.body);
  }

  async more() {
    const { done, value: piece } = await this.pieces.next();
    const before = this.last;
    this.last = performance.now();
    return done ? null : { piece, logits: null, elapsed: this.last - before };
  }
}

// The pieces of text in a stream of server-sent events.
async function* pieces(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const events = (held + value).split("\n\n");
    held = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const { choices, error } = JSON.parse(data);
      if (error) throw new Error(error.message);
      if (choices[0]?.text) yield choices[0].text;
    }
  }
}

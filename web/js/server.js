// A text by `gpt.py serve`, if the page comes from there.
import { frame } from "./dom.js";

const MOST = 65536; // characters of an endless text: the server's limit

// The server's models, or null if the page does not come from such a server.
export async function openServer() {
  const meta = document.querySelector('meta[name="server"]');
  if (!meta) return null;
  const answer = await fetch(`${meta.content}/models`);
  if (!answer.ok) throw new Error(`the server's models cannot be read (${answer.status})`);
  return { api: meta.content, models: (await answer.json()).data.map((model) => model.id) };
}

// Has the members of Text in text.js that the view Write uses, without logits.
export class ServerText {
  constructor(server, choices) {
    Object.assign(this, { server, choices, prompt: choices.prompt, text: "", logits: null, dropped: 0 });
    this.milliseconds = 0;
    this.running = true;
    this.by = "the server";
    this.stopped = new AbortController();
  }

  get written() {
    return this.text.length;
  }
  get speed() {
    return this.written / (this.milliseconds / 1e3);
  }

  halt() {
    this.running = false;
    this.stopped.abort();
  }

  async run(show) {
    const { choices } = this,
      endless = choices.endless === 1;
    const body = {
      model: choices.model,
      prompt: choices.prompt || "\n",
      seed: "SEED",
      max_tokens: endless ? MOST : choices.length,
      context: endless ? "reset" : choices.context,
      temperature: choices.temperature,
      top_k: choices.topk,
      top_p: choices.topp,
      stream: true,
    };
    if (choices.stop) body.stop = choices.stop;
    const start = performance.now();
    try {
      for await (const piece of this.pieces(body)) {
        this.text += piece;
        this.milliseconds = performance.now() - start;
        show(piece, false);
      }
    } catch (error) {
      if (this.running) throw error;
    } finally {
      this.running = false;
    }
    await frame();
  }

  // The pieces of a stream of server-sent events.
  async *pieces(body) {
    const answer = await fetch(`${this.server.api}/completions`, {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(body).replace('"seed":"SEED"', `"seed":${this.choices.seed}`), // it may exceed 2^53
      signal: this.stopped.signal,
    });
    if (!answer.ok) throw new Error(await refusal(answer));
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
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
}

// A sentence with the reason why a server refused a request.
async function refusal(answer) {
  try {
    return (await answer.json()).error.message;
  } catch {
    return `the server answered ${answer.status}`;
  }
}

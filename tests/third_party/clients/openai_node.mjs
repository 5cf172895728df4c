// OpenAI's library for Node.js.
import OpenAI from "openai";

const given = JSON.parse(process.env.CASE);
const { model, seed, prompt, messages } = given;
const text = { model, prompt, seed, max_tokens: given.tokens };
const chat = { model, messages, seed, max_completion_tokens: given.tokens };
const client = new OpenAI({ maxRetries: 0 }); // the address and the key are in the environment
const shown = (usage) => [usage.prompt_tokens, usage.completion_tokens];

async function refused(call) {
  try {
    await call();
  } catch (error) {
    return { type: error.constructor.name, status: error.status, param: error.param };
  }
  return {};
}

async function all(stream) {
  const events = [];
  for await (const event of await stream) events.push(event);
  return events;
}

const whole = await client.completions.create(text);
const talk = await client.chat.completions.create(chat);
const turns = [...messages, talk.choices[0].message, ...messages];
const second = await client.chat.completions.create({ ...chat, messages: turns });
const streaming = { stream: true, stream_options: { include_usage: true } };
const events = await all(client.completions.create({ ...text, ...streaming }));
const deltas = await all(client.chat.completions.create({ ...chat, ...streaming }));
console.log(JSON.stringify({
  text: whole.choices[0].text,
  usage: shown(whole.usage),
  stream: events.filter((e) => e.choices.length).map((e) => e.choices[0].text),
  stream_usage: shown(events.at(-1).usage),
  chat: talk.choices[0].message.content,
  second: second.choices[0].message.content,
  chat_stream: deltas.filter((e) => e.choices.length).map((e) => e.choices[0].delta.content ?? ""),
  chat_stream_usage: shown(deltas.at(-1).usage),
  models: (await all(client.models.list())).map((each) => each.id),
  model: (await client.models.retrieve(model)).id,
  errors: {
    400: await refused(() => client.completions.create({ ...text, temperature: 9 })),
    401: await refused(() => client.withOptions({ apiKey: "wrong" }).completions.create(text)),
    404: await refused(() => client.completions.create({ ...text, model: "nothing" })),
    429: await refused(() => client.withOptions({ baseURL: given.full }).completions.create(text)),
  },
}));

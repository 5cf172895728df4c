"""OpenAI's Python library, its asynchronous client: many texts at once, and a stream that is left."""

import asyncio
import json
import os

import openai

CASE = json.loads(os.environ["CASE"])
AT_ONCE = 24
model, seed, tokens = CASE["model"], CASE["seed"], CASE["tokens"]
text = {"model": model, "prompt": CASE["prompt"], "max_tokens": tokens}
chat = {"model": model, "messages": CASE["messages"], "seed": seed, "max_completion_tokens": tokens}


async def refused(client: openai.AsyncOpenAI, **fields) -> dict:
    """What a call raises."""
    try:
        await client.completions.create(**fields)
    except openai.APIStatusError as error:
        return {"type": type(error).__name__, "status": error.status_code, "param": error.param}
    return {}


async def streamed(client: openai.AsyncOpenAI, number: int) -> list[str]:
    stream = await client.completions.create(**text, seed=number, stream=True)
    return [event.choices[0].text async for event in stream if event.choices]


async def main() -> dict:
    client = openai.AsyncOpenAI(max_retries=0)
    whole = await client.completions.create(**text, seed=seed)
    talk = await client.chat.completions.create(**chat)
    left = await client.completions.create(**text | {"max_tokens": 60_000}, stream=True)
    async for _ in left:
        break
    await left.close()
    streams = await asyncio.gather(*(streamed(client, seed + i) for i in range(AT_ONCE)))
    stream = await client.chat.completions.create(**chat, stream=True)
    deltas = [event async for event in stream]
    return {
        "text": whole.choices[0].text,
        "usage": [whole.usage.prompt_tokens, whole.usage.completion_tokens],
        "stream": streams[0],
        "chat": talk.choices[0].message.content,
        "chat_stream": [event.choices[0].delta.content or "" for event in deltas],
        "together": ["".join(pieces) for pieces in streams],
        "models": [each.id async for each in client.models.list()],
        "errors": {
            "400": await refused(client, **text, logprobs=6),
            "401": await refused(client.with_options(api_key="wrong"), **text),
            "404": await refused(client, **text | {"model": "nothing"}),
            "429": await refused(client.with_options(base_url=CASE["full"]), **text),
        },
    }


print(json.dumps(asyncio.run(main())))

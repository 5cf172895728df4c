"""OpenAI's Python library, its synchronous client."""

import json
import os

import openai

CASE = json.loads(os.environ["CASE"])
model, seed, tokens = CASE["model"], CASE["seed"], CASE["tokens"]
client = openai.OpenAI(max_retries=0)  # the address and the key are in the environment
text = {"model": model, "prompt": CASE["prompt"], "seed": seed, "max_tokens": tokens}
chat = {"model": model, "messages": CASE["messages"], "seed": seed, "max_completion_tokens": tokens}


def refused(call, **fields) -> dict:
    try:
        call(**fields)
    except openai.APIStatusError as error:
        return {"type": type(error).__name__, "status": error.status_code, "param": error.param}
    return {}


whole = client.completions.create(**text)
talk = client.chat.completions.create(**chat)
messages = [*CASE["messages"], talk.choices[0].message, *CASE["messages"]]  # as messages.append() makes them
second = client.chat.completions.create(**chat | {"messages": messages})
usage = {"stream": True, "stream_options": {"include_usage": True}}
events = list(client.completions.create(**text, **usage))
deltas = list(client.chat.completions.create(**chat, **usage))
create = client.completions.create
others = {"base_url": CASE["full"], "max_retries": 0}
found = {
    "text": whole.choices[0].text,
    "usage": [whole.usage.prompt_tokens, whole.usage.completion_tokens],
    "stream": [event.choices[0].text for event in events if event.choices],
    "stream_usage": [events[-1].usage.prompt_tokens, events[-1].usage.completion_tokens],
    "chat": talk.choices[0].message.content,
    "second": second.choices[0].message.content,
    "chat_stream": [event.choices[0].delta.content or "" for event in deltas if event.choices],
    "chat_stream_usage": [deltas[-1].usage.prompt_tokens, deltas[-1].usage.completion_tokens],
    "models": [each.id for each in client.models.list()],
    "model": client.models.retrieve(model).id,
    "errors": {
        "400": refused(create, **text, temperature=9),
        "401": refused(client.with_options(api_key="wrong").completions.create, **text),
        "404": refused(create, **text | {"model": "nothing"}),
        "429": refused(client.with_options(**others).completions.create, **text),
    },
}
print(json.dumps(found))

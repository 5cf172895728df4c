"""LiteLLM, as its users call a server of this kind."""

import json
import os

import litellm

CASE = json.loads(os.environ["CASE"])
seed, tokens = CASE["seed"], CASE["tokens"]
server = dict(api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"], num_retries=0)
text = {"model": f"text-completion-openai/{CASE['model']}", "prompt": CASE["prompt"], "max_tokens": tokens}
text |= {"seed": seed, "max_retries": 0} | server
chat = {"model": f"openai/{CASE['model']}", "messages": CASE["messages"], "seed": seed, "max_retries": 0}
chat |= {"max_completion_tokens": tokens} | server


def refused(**fields) -> dict:
    try:
        litellm.completion(**chat | fields)
    except litellm.exceptions.APIError as error:
        return {"type": type(error).__name__, "status": error.status_code}
    except Exception as error:  # LiteLLM's exceptions have no common base but OpenAI's
        return {"type": type(error).__name__, "status": getattr(error, "status_code", None)}
    return {}


whole = litellm.text_completion(**text)
talk = litellm.completion(**chat)
messages = [*CASE["messages"], talk.choices[0].message, *CASE["messages"]]
second = litellm.completion(**chat | {"messages": messages})
usage = {"stream": True, "stream_options": {"include_usage": True}}
events = list(litellm.text_completion(**text, **usage))
deltas = list(litellm.completion(**chat, **usage))
found = {
    "text": whole.choices[0].text,
    "usage": [whole.usage.prompt_tokens, whole.usage.completion_tokens],
    "stream": [event.choices[0].text or "" for event in events if event.choices],
    "chat": talk.choices[0].message.content,
    "second": second.choices[0].message.content,
    "chat_stream": [event.choices[0].delta.content or "" for event in deltas if event.choices],
    "chat_stream_usage": [deltas[-1].usage.prompt_tokens, deltas[-1].usage.completion_tokens],
    "errors": {
        "400": refused(temperature=9),
        "401": refused(api_key="wrong"),
        "404": refused(model="openai/nothing"),
        "429": refused(api_base=CASE["full"]),
    },
}
print(json.dumps(found))

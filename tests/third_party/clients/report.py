"""What the clients in Python share: the case, and how they print what their library made of the answers."""

import json
import os
from collections.abc import Callable
from typing import Any

CASE = json.loads(os.environ["CASE"])
TEXT = {"model": CASE["model"], "prompt": CASE["prompt"], "seed": CASE["seed"], "max_tokens": CASE["tokens"]}
CHAT = {"model": CASE["model"], "messages": CASE["messages"], "seed": CASE["seed"]}
CHAT |= {"max_completion_tokens": CASE["tokens"]}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}


def report(
    complete: Callable, chat: Callable, refused: Callable[..., dict], base_url: str, **more: Any
) -> None:
    """Print the answers to calls that have OpenAI's form. base_url: the name of the server's address."""
    whole, talk = complete(), chat()
    # as messages.append() makes them
    second = chat(messages=[*CASE["messages"], talk.choices[0].message, *CASE["messages"]])
    events, deltas = list(complete(**USAGE)), list(chat(**USAGE))
    found = {
        "text": whole.choices[0].text,
        "usage": [whole.usage.prompt_tokens, whole.usage.completion_tokens],
        "stream": [event.choices[0].text or "" for event in events if event.choices],
        "chat": talk.choices[0].message.content,
        "second": second.choices[0].message.content,
        "chat_stream": [event.choices[0].delta.content or "" for event in deltas if event.choices],
        "chat_stream_usage": [deltas[-1].usage.prompt_tokens, deltas[-1].usage.completion_tokens],
        "errors": errors(refused, base_url),
    }
    print(json.dumps(found | more))


def errors(refused: Callable[..., dict], base_url: str) -> dict[str, dict]:
    """What refused() says of a wrong setting, key and model, and of a server that is full."""
    return {
        "400": refused(temperature=9),
        "401": refused(api_key="wrong"),
        "404": refused(model="nothing"),
        "429": refused(**{base_url: CASE["full"]}),
    }

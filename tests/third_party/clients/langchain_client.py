"""LangChain's models for OpenAI's API."""

import json

import openai
from langchain_openai import ChatOpenAI, OpenAI
from report import CASE, errors

model, seed, tokens = CASE["model"], CASE["seed"], CASE["tokens"]
ROLES = {"system": "system", "user": "human", "assistant": "ai"}
messages = [(ROLES[each["role"]], each["content"]) for each in CASE["messages"]]


def texts(**fields) -> OpenAI:
    return OpenAI(**dict(model=model, seed=seed, max_tokens=tokens, temperature=1, max_retries=0) | fields)


def chats(**fields) -> ChatOpenAI:
    return ChatOpenAI(**dict(model=model, seed=seed, max_completion_tokens=tokens, max_retries=0) | fields)


def refused(**fields) -> dict:
    try:
        chats(**fields).invoke(messages)
    except openai.APIStatusError as error:
        # its own exceptions are subclasses of OpenAI's
        kind = next(each for each in type(error).__mro__ if each.__module__.startswith("openai"))
        return {"type": kind.__name__, "status": error.status_code, "param": error.param}
    return {}


whole = texts().generate([CASE["prompt"]])
talk = chats().invoke(messages)
deltas = list(chats(stream_usage=True).stream(messages))
usage = next(each.usage_metadata for each in deltas if each.usage_metadata)
found = {
    "text": whole.generations[0][0].text,
    "usage": [whole.llm_output["token_usage"][f"{kind}_tokens"] for kind in ("prompt", "completion")],
    "stream": list(texts().stream(CASE["prompt"])),
    "chat": talk.content,
    "second": chats(service_tier="auto", store=False).invoke([*messages, talk, *messages]).content,
    "chat_stream": [delta.content for delta in deltas],
    "chat_stream_usage": [usage["input_tokens"], usage["output_tokens"]],
    "errors": errors(refused, "base_url"),
}
print(json.dumps(found))

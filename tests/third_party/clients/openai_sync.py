"""OpenAI's Python library, its synchronous client."""

from functools import partial

import openai
from report import CHAT, TEXT, report

client = openai.OpenAI(max_retries=0)  # the address and the key are in the environment


def refused(api_key=None, base_url=None, **fields) -> dict:
    other = client.with_options(api_key=api_key or client.api_key, base_url=base_url or client.base_url)
    try:
        other.completions.create(**TEXT | fields)
    except openai.APIStatusError as error:
        return {"type": type(error).__name__, "status": error.status_code, "param": error.param}
    return {}


models = [each.id for each in client.models.list()]
report(
    partial(client.completions.create, **TEXT),
    partial(client.chat.completions.create, **CHAT),
    refused,
    "base_url",
    models=models,
    model=client.models.retrieve(TEXT["model"]).id,
)

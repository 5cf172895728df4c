"""LiteLLM, as its users call a server of this kind."""

import os
from functools import partial

import litellm
from report import CHAT, TEXT, report

server = {"api_base": os.environ["OPENAI_BASE_URL"], "api_key": os.environ["OPENAI_API_KEY"]}
server |= {"num_retries": 0, "max_retries": 0}
text = TEXT | server | {"model": f"text-completion-openai/{TEXT['model']}"}
chat = CHAT | server | {"model": f"openai/{TEXT['model']}"}


def refused(**fields) -> dict:
    if "model" in fields:
        fields["model"] = f"openai/{fields['model']}"
    try:
        litellm.completion(**chat | fields)
    except Exception as error:  # LiteLLM's exceptions have no common base but OpenAI's
        return {"type": type(error).__name__, "status": getattr(error, "status_code", None)}
    return {}


report(partial(litellm.text_completion, **text), partial(litellm.completion, **chat), refused, "api_base")

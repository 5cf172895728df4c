"""Hooks of schemathesis: what schemas cannot say. A body stays as valid or invalid as it was."""

import os

import schemathesis

MODEL = os.environ["MODEL"]
VOCABULARY = os.environ["VOCABULARY"]
MOST = {"max_tokens": 40, "max_completion_tokens": 40, "n": 4, "best_of": 4}
LIMITS = {"max_tokens": 65_536, "max_completion_tokens": 65_536, "n": 128, "best_of": 128}
TEXTS = ("prompt", "content", "stop", "name", "speaker")


def known(value):
    """The same with other characters: the model's."""
    if isinstance(value, str):
        return "".join(c if c in VOCABULARY else VOCABULARY[ord(c) % len(VOCABULARY)] for c in value)
    return [known(each) for each in value] if isinstance(value, list) else value


@schemathesis.hook
def map_body(context, body):
    """Ask for the served model, with its characters, for few tokens."""
    if not isinstance(body, dict):
        return body
    mapped = dict(body)
    if isinstance(body.get("model"), str):
        mapped["model"] = MODEL
    for name, most in MOST.items():
        # a larger number than the schema admits stays as it is
        if type(body.get(name)) in (int, float) and most < body[name] <= LIMITS[name]:
            mapped[name] = most
    for name in TEXTS:
        if name in body:
            mapped[name] = known(body[name])
    if isinstance(body.get("messages"), list):
        mapped["messages"] = [
            each | {name: known(each[name]) for name in TEXTS if name in each}
            if isinstance(each, dict)
            else each
            for each in body["messages"]
        ]
    return mapped

"""A chat as a play: each message is a speech, and the model writes the next one.

    ROMEO:
    Good morrow, cousin.

    ASSISTANT:

The models learned plays and nothing else. A speech ends at a blank line, the default of `stop`.
"""

from __future__ import annotations

from app.server.requests import ChatBody, Message

STOP = ("\n\n",)
SPEAKER = "ASSISTANT"


def play(body: ChatBody) -> str:
    """The messages as speeches, then a line with the name of the next speaker."""
    speeches = "".join(f"{speaker(message)}:\n{spoken(message)}\n\n" for message in body.messages)
    return f"{speeches}{answering(body)}:\n"


def speaker(message: Message) -> str:
    """The speaker: the message's name, or its role in capitals."""
    return message.name or message.role.upper()


def spoken(message: Message) -> str:
    """A message's text."""
    if isinstance(message.content, str):
        return message.content
    return "".join(part.text for part in message.content)


def answering(body: ChatBody) -> str:
    """The next speaker: `speaker`, else the name in the assistant's last message with a name."""
    named = (m.name for m in reversed(body.messages) if m.role == "assistant" and m.name)
    return body.speaker or next(named, SPEAKER)

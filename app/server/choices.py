"""A growing text of a request: the part of it that may be sent, with its log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from app.server.plan import Plan
from generation.texts import Completion, Growing, StopFilter
from generation.writer import Text, TokenLogprob
from model.tokenizer import Tokenizer


@dataclass(slots=True)
class Score:
    """A token's text, its log-probability and the likeliest tokens in its place.

    logprob: None for a token of a prompt that nothing predicts. top: likeliest first. start: characters
    before the token.
    """

    token: str
    start: int
    logprob: float | None = None
    top: tuple[tuple[str, float], ...] = ()


@dataclass(slots=True)
class Piece:
    """The text of a choice since its last piece. finish: its finish_reason, in the last piece.

    new_tokens: number of tokens of the whole text. mean_logprob: their mean, if it was requested.
    """

    number: int
    text: str
    scores: list[Score] | None
    finish: str | None = None
    new_tokens: int = 0
    mean_logprob: float = 0.0

    @property
    def bytes(self) -> int:
        """Roughly the bytes of its event in a stream."""
        return 200 + len(self.text) + sum(80 + 60 * len(score.top) for score in self.scores or ())


class Choice:
    """The text of one of a plan's requests. Only the scheduler's thread uses it after it was submitted."""

    def __init__(self, plan: Plan, number: int) -> None:
        self.plan, self.number = plan, number
        self.request = plan.requests[number]
        completion = Completion(self.request, number)
        self.growing = Growing(completion, plan.tokenizer.decoder(), StopFilter(self.request.stop))
        self.text: Text | None = None  # None until it joins a batch
        self.delivered_at = 0.0  # 0 before the first piece
        self._scores = Scores(plan.tokenizer) if self.request.logprobs is not None else None
        self._sum = 0.0  # sum of its log-probabilities
        self._started = self._echoed = False

    @property
    def ended(self) -> bool:
        """Whether the text is complete."""
        return self.growing.ended or self.plan.unwritten and self._started

    def add(self, tokens: Sequence[int]) -> None:
        """Append tokens that the writer has written."""
        self._started = True
        if self._scores and self.text and self.request.prompt_logprobs and not self._scores.begun:
            self._scores.prompt(self.request.ids, self.text.prompt_logprobs or [])
        if self.plan.unwritten:
            return
        before = self.growing.completion.new_tokens
        self.growing.add(tokens)
        if self._scores and self.text:
            fresh = self.text.logprobs[: self.growing.completion.new_tokens - before]
            self.text.logprobs.clear()
            self._sum += sum(each.logprob for each in fresh)
            self._scores.add(fresh)

    def take(self) -> Piece | None:
        """The piece that may be sent now, or None. After the end it is the last piece."""
        finish = None
        if self.ended:
            self.growing.finish()
            finish = self.growing.completion.finish_reason or "length"
        done = self.growing.completion
        text = done.text
        done.pieces.clear()
        if self.plan.echo and not self._echoed:
            self._echoed = True
            text = self.plan.prompts[self.number // self.plan.candidates] + text
        if not text and finish is None:
            return None
        scores = None
        if self._scores and self.plan.logprobs is not None:
            scores = self._scores.release(len(text), finish == "length")
        new_tokens = 0 if self.plan.unwritten else done.new_tokens
        mean = self._sum / new_tokens if new_tokens else 0.0
        return Piece(self.number, text, scores, finish, new_tokens, mean)


@dataclass
class Scores:
    """The scores of a text's tokens. Each is held until its text is sent."""

    tokenizer: Tokenizer
    begun: bool = False
    _waiting: list[Score] = field(default_factory=list)
    _read: int = 0  # characters of all tokens so far
    _released: int = 0  # characters sent

    def __post_init__(self) -> None:
        self._decoder = self.tokenizer.decoder()
        self._texts: dict[int, str] = {}

    def prompt(self, ids: Sequence[int], known: Sequence[TokenLogprob | None]) -> None:
        """Append the prompt's tokens. Only the last ones were read, so only they have log-probabilities."""
        self.begun = True
        unread = len(ids) - len(known)
        for i, token in enumerate(ids):
            self._take(token, known[i - unread] if i >= unread else None)

    def add(self, tokens: Sequence[TokenLogprob]) -> None:
        """Append new tokens."""
        self.begun = True
        for each in tokens:
            self._take(each.token, each)

    def release(self, characters: int, everything: bool) -> list[Score]:
        """The scores of the tokens that begin in the next characters of the text."""
        self._released += characters
        count = next((i for i, s in enumerate(self._waiting) if s.start >= self._released), None)
        count = len(self._waiting) if everything or count is None else count
        released, self._waiting = self._waiting[:count], self._waiting[count:]
        return released

    def _take(self, token: int, known: TokenLogprob | None) -> None:
        score = Score(self.text_of(token), self._read)
        if known is not None:
            score.logprob = known.logprob
            score.top = tuple((self.text_of(other), logprob) for other, logprob in known.top)
        self._waiting.append(score)
        self._read += len(self._decoder.feed(token))

    def text_of(self, token: int) -> str:
        """The text of one token. The replacement character stands for bytes that are not a character."""
        text = self._texts.get(token)
        if text is None:
            decoder = self.tokenizer.decoder()
            text = self._texts[token] = decoder.feed(token) + decoder.end()
        return text

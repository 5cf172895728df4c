"""The metrics at /metrics, in Prometheus' text format."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)
TOKEN_SECONDS = tuple(m * 10.0**e for e in range(-6, 0) for m in (1, 2, 5)) + (1.0,)
TEXTS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 128, 256)
LANE = ("model", "part")
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """The counters of one server."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.running = Gauge("attention_texts_running", "Texts being written.", LANE, registry=registry)
        self.queued = Gauge("attention_texts_queued", "Texts that wait for a slot.", LANE, registry=registry)
        self.occupancy = Histogram(
            "attention_batch_texts", "Texts written by a step.", LANE, registry=registry, buckets=TEXTS
        )
        self.first_token = Histogram(
            "attention_time_to_first_token_seconds",
            "From a request's arrival to a text's first token.",
            LANE,
            registry=registry,
            buckets=SECONDS,
        )
        self.token_seconds = Histogram(
            "attention_time_per_token_seconds",
            "A text's mean time for a token, without its prompt's.",
            LANE,
            registry=registry,
            buckets=TOKEN_SECONDS,
        )
        self.prompt_tokens = Counter(
            "attention_prompt_tokens", "Tokens of the prompts of texts that began.", LANE, registry=registry
        )
        self.new_tokens = Counter("attention_new_tokens", "Tokens written.", LANE, registry=registry)
        self.finished = Counter(
            "attention_texts_finished", "Texts written to their end.", LANE, registry=registry
        )
        self.cancelled = Counter(
            "attention_texts_cancelled", "Texts ended because their client left.", LANE, registry=registry
        )
        self.dropped = Counter("attention_streams_dropped", "Readers dropped as too slow.", registry=registry)
        self.refused = Counter(
            "attention_requests_refused", "Requests answered by an error.", ("status",), registry=registry
        )

    def text(self) -> bytes:
        """The page."""
        return generate_latest(self.registry)

"""Each field of the requests: what is right, and that what is wrong gets 400 with its name in `param`."""

import json
from dataclasses import replace

import pytest
import tiny

pytest.importorskip("pydantic", reason="pip install -e '.[serve]'")

import pydantic

from shakespeare.app.server import Settings
from shakespeare.app.server.requests import IDLE_IN_REQUESTS, ApiError, Body, ChatBody, CompletionBody, parse
from shakespeare.generation.request import Request
from shakespeare.model.tokenizer import CharTokenizer

CHARACTERS = sorted(set("\n :ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefgh"))
CHECKPOINT = replace(tiny.checkpoint(vocab_size=len(CHARACTERS)), tokenizer=CharTokenizer(CHARACTERS))
MESSAGES = [{"role": "user", "content": "a"}]
FLOATS = ["1", True, [], {}, "nan"]
INTS = [*FLOATS, 1.5]
COMMON = {  # field: (good values, bad values)
    "temperature": ([0, 0.0, 1, 2, None], [-0.1, 2.1, *FLOATS]),
    "top_p": ([1e-9, 0.5, 1, None], [0, -1, 1.01, *FLOATS]),
    "n": ([1, 3.0, 128, None], [0, -1, 129, 10**30, *INTS]),
    "seed": ([-1, 0, 7, 2**63 - 1, None], [-2, 2**63, 10**30, *INTS]),
    "stop": (["a", ["a", "b", "c", "d"], [], None], ["", [""], "a" * 257, list("abcde"), 1, [1], {}]),
    "presence_penalty": ([-2, 0, 2, 0.5, None], [-2.1, 2.1, *FLOATS]),
    "frequency_penalty": ([-2, 0, 2, 0.5, None], [-2.1, 2.1, *FLOATS]),
    "logit_bias": (
        [{}, {"0": 100, "3": -100.0, "4": None}, None],
        [{"a": 1}, {"0": 101}, {"0": "1"}, {"99": 1}, 3],
    ),
    **{
        name: ([*of, None], ["other", 7, [7]])
        for name, of in IDLE_IN_REQUESTS.items()
        if isinstance(of, list)
    },
    **dict.fromkeys(["user", "safety_identifier", "prompt_cache_key"], (["a", "", None], [1, [], {}, True])),
    **dict.fromkeys(["metadata", "prompt_cache_options"], ([{}, {"a": "b", "c": None}], [{"a": 1}, [], ""])),
    "parallel_tool_calls": ([True, False, None], [1, "true"]),
    "store": ([False, None], [True, 0, "false"]),
    "stream": ([True, False, None], ["true", 1, 0, []]),
    "ignore_eos": ([True, False, None], ["true", 1]),
    "top_k": ([1, 200, 0, -1, None], [-2, 2**63, *INTS]),
    "typical_p": ([0.5, 1, None], [0, 1.1, *FLOATS]),
    "min_p": ([0, 0.5, 1, None], [-0.1, 1.1, *FLOATS]),
    "repetition_penalty": ([0.01, 1, 100, None], [0, 1e-37, 101, *FLOATS]),
    "part": (["part0", "part4", None], ["part9", "", 4, True]),
    "context": (["slide", "reset", None], ["other", 1]),
    "model": ([], [1, None, [], True]),
}
COMPLETION = COMMON | {
    "prompt": (
        ["a", ["a", "b"], [1, 2.0], [[1], [2, 3.0]], "", ["", "a"], None],
        [1, True, {}, [], [[]], [1, "a"], [[1], "a"], [-1], [[1], [99]], [1.5], "é"],
    ),
    "max_tokens": ([-1, 0, 1.0, 65_536, None], [-2, 65_537, 10**30, *INTS]),
    "best_of": ([1, 5, None], [0, 129, *INTS]),
    "echo": ([True, False, None], ["true", 1]),
    "logprobs": ([0, 5, None], [-1, 6, *INTS]),
}
CHAT = COMMON | {
    "max_tokens": ([-1, 0, 1, None], [-2, 65_537, *INTS]),
    "max_completion_tokens": ([-1, 0, 1, None], [-2, 65_537, *INTS]),
    "logprobs": ([True, False, None], [0, 1, "true"]),
    "top_logprobs": ([0, None], [-1, 21, *INTS]),
    "speaker": (["ROMEO", None], ["", 1, "a" * 65]),
}
UNSUPPORTED = [*"audio moderation prediction web_search_options temperatur Ä __class__".split(), "a b", ""]


def asked(kind, **fields) -> tuple[Body, list[Request]]:
    """A body and the texts that it asks for."""
    body = parse(kind, json.dumps(fields).encode())
    return body, body.requests(CHECKPOINT, Settings())


def refused(kind, **fields) -> ApiError:
    with pytest.raises(ApiError) as caught:
        asked(kind, **fields)
    assert caught.value.status == 400
    return caught.value


BASES = {CompletionBody: {"model": "m", "prompt": "a"}, ChatBody: {"model": "m", "messages": MESSAGES}}
FIELDS = {CompletionBody: COMPLETION, ChatBody: CHAT}
NAMES = [(kind, name) for kind, fields in FIELDS.items() for name in fields]


@pytest.mark.parametrize("kind, name", NAMES, ids=[f"{kind.__name__}.{name}" for kind, name in NAMES])
def test_each_field(kind, name):
    good, bad = FIELDS[kind][name]
    for value in good:
        asked(kind, **BASES[kind] | {name: value})
    for value in bad:
        error = refused(kind, **BASES[kind] | {name: value})
        assert (error.param or "").startswith(name), (value, error)
        assert name in error.message, (value, error.message)


@pytest.mark.parametrize("kind", BASES)
def test_the_tables_have_all_fields_and_unsupported_ones_are_named(kind):
    assert kind.model_fields.keys() - FIELDS[kind] <= {"stream_options", "messages"}
    for name in UNSUPPORTED:
        for value in (1, [], "a", {}, False):
            error = refused(kind, **BASES[kind] | {name: value})
            assert error.param == name and repr(name) in error.message
        asked(kind, **BASES[kind] | {name: None})


@pytest.mark.parametrize("kind", BASES)
def test_a_byte_order_mark_and_bodies_that_are_no_object(kind):
    assert parse(kind, b"\xef\xbb\xbf" + json.dumps(BASES[kind]).encode()) == asked(kind, **BASES[kind])[0]
    for data in (*b"""|{|[]|1|null|"a"|\xff|{]|{"model": NaN}|"\\ud800\"""".split(b"|"), b"[" * 10_000):
        with pytest.raises(ApiError) as caught:
            parse(kind, data)
        assert caught.value.status == 400 and "Traceback" not in caught.value.message


@pytest.mark.parametrize("items", [[{}] * 4097, [[]] * 4097, {str(i): "a" for i in range(1025)}])
def test_what_takes_long_to_check_is_refused(items):
    for kind in (CompletionBody, ChatBody):
        for field in ("prompt", "messages", "user", "logit_bias"):
            with pytest.raises(ApiError, match="at most 4096 lists and objects, each of at most 1024 fields"):
                parse(kind, json.dumps({field: items}).encode())


def test_the_first_wrong_item_ends_the_check_of_a_list():
    wrong = [7] * 9_000
    for kind, field, value in (
        (CompletionBody, "prompt", [*"ab", *wrong]),
        (CompletionBody, "prompt", [wrong, *"ab" * 999]),
        (CompletionBody, "stop", wrong),
        (ChatBody, "messages", wrong),
        (ChatBody, "messages", [{"role": "user", "content": wrong}]),
    ):
        with pytest.raises(pydantic.ValidationError) as error:
            kind.model_validate(BASES[kind] | {field: value})
        assert error.value.error_count() < 9


def test_options_of_streams():
    assert asked(CompletionBody, model="m", prompt="a", stream=True)[0].options.interval_ms == 16
    options = {"include_usage": True, "interval_ms": 0}
    body, _ = asked(CompletionBody, model="m", prompt="a", stream=True, stream_options=options)
    assert body.options.include_usage and body.options.interval_ms == 0
    options = {"include_usage": None, "include_obfuscation": False, "x": None}
    body, _ = asked(CompletionBody, model="m", prompt="a", stream=True, stream_options=options)
    assert not body.options.include_usage
    assert refused(CompletionBody, model="m", prompt="a", stream_options={}).param == "stream_options"
    for wrong in (
        *({"interval_ms": -1}, {"interval_ms": 1.5}, {"include_usage": 1}, {"x": 1}),
        *({"include_obfuscation": True}, {"includeUsage": True}),
    ):
        (name,) = wrong
        error = refused(CompletionBody, model="m", prompt="a", stream=True, stream_options=wrong)
        assert error.param == f"stream_options.{name}"


def test_messages():
    for wrong, param in (
        ([], "messages"),
        ("a", "messages"),
        ([1], "messages[0]"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"content": "a"}], "messages[0].role"),
        ([{"role": "tool", "content": "a"}], "messages[0].role"),
        ([*MESSAGES, {"role": "user", "content": 1}], "messages[1].content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content"),
        ([{"role": "user", "content": "a", "name": 1}], "messages[0].name"),
        ([{"role": "assistant", "content": "a", "tool_calls": [{}]}], "messages[0].tool_calls"),
        ([{"role": "assistant", "content": "a", "refusal": "No"}], "messages[0].refusal"),
        ([{"role": "assistant", "content": "a", "audio": {"id": "a"}}], "messages[0].audio"),
        ([{"role": "assistant", "content": None, "tool_calls": []}], "messages[0].content"),
        *(([MESSAGES[0] | {x: "a"}], f"messages[0].{x}") for x in ("contents", "toolCalls", "str", "é 1")),
        ([{"role": "user", "content": "a#b"}], "messages"),
    ):
        assert refused(ChatBody, model="m", messages=wrong).param == param, wrong
    assert "'#'" in refused(ChatBody, model="m", messages=[{"role": "user", "content": "#"}]).message
    part = {"type": "text", "text": "a", "image_url": None, "prompt_cache_breakpoint": {"mode": "explicit"}}
    none = dict.fromkeys("refusal annotations audio function_call tool_calls name x".split())
    for more in (
        *(none, none | {"refusal": "", "annotations": [], "tool_calls": []}),
        none | {"provider_specific_fields": {"refusal": None}},  # LiteLLM's
        *({"content": content} for content in ([part], [], "")),
    ):
        asked(ChatBody, model="m", messages=[{"role": "assistant", "content": "a"} | more, *MESSAGES])


def test_what_goes_together():
    chat = {"model": "m", "messages": MESSAGES}
    assert refused(ChatBody, **chat, top_logprobs=2).param == "top_logprobs"
    assert asked(ChatBody, **chat, top_logprobs=20, logprobs=True)[1][0].logprobs == 20
    assert asked(ChatBody, **chat, top_logprobs=0)[1][0].logprobs is None
    assert refused(ChatBody, **chat, max_tokens=1, max_completion_tokens=2).param == "max_tokens"
    text = {"model": "m", "prompt": "a"}
    assert refused(CompletionBody, **text, n=3, best_of=2).param == "best_of"
    assert refused(CompletionBody, **text, best_of=2, stream=True).param == "best_of"
    assert refused(CompletionBody, **text, n=2, seed=2**63 - 1).param == "seed"
    assert refused(CompletionBody, model="m", prompt=["a"] * 129).param == "prompt"
    assert refused(CompletionBody, model="m", prompt=["a"] * 2, n=65).param == "n"


def test_large_answers_and_hours_are_refused():
    assert asked(CompletionBody, model="m", n=4, max_tokens=65_536)
    error = refused(CompletionBody, model="m", n=5, max_tokens=65_536)
    assert error.param == "max_tokens" and "327680 tokens; at most 262144" in error.message
    text = {"model": "m", "prompt": "a"}
    assert asked(CompletionBody, **text, logprobs=0, max_tokens=4_096)
    assert refused(CompletionBody, **text, logprobs=0, max_tokens=4_097).param == "logprobs"
    assert refused(CompletionBody, **text, logprobs=0, max_tokens=200, n=100).param == "logprobs"
    long = {"model": "m", "prompt": "a" * 20_000, "max_tokens": 1, "echo": True}
    assert asked(CompletionBody, **long)
    assert refused(CompletionBody, **long, logprobs=0).param == "logprobs"
    assert refused(CompletionBody, **long, n=20).param == "echo"


def test_the_defaults_are_openais():
    request = asked(CompletionBody, model="m", prompt="a")[1][0]
    assert request.max_new_tokens == 16 and request.context == "slide" and request.stop == ()
    assert not request.ignore_eos
    assert asked(CompletionBody, model="m", prompt="a", ignore_eos=True)[1][0].ignore_eos
    assert (request.sampling.temperature, request.sampling.top_k, request.sampling.top_p) == (1.0, None, 1.0)
    chat = asked(ChatBody, model="m", messages=MESSAGES)[1][0]
    free = asked(CompletionBody, model="m", prompt="", seed=-1, max_tokens=-1, top_k=-1)[1][0]
    assert (free.sampling, free.max_new_tokens) == (request.sampling, chat.max_new_tokens)
    assert free.seed >= 0 and free.ids == CHECKPOINT.tokenizer.encode("\n")
    assert chat.max_new_tokens == CHECKPOINT.config.block_size and chat.stop == ("\n\n",)


def test_a_chat_is_a_play():
    messages = [
        {"role": "system", "content": "Be bad"},
        {"role": "user", "content": [{"type": "text", "text": each} for each in "ab"], "name": "ROMEO"},
        {"role": "assistant", "content": "c", "name": "JULIET"},
        {"role": "user", "content": "d"},
    ]
    expected = "SYSTEM:\nBe bad\n\nROMEO:\nab\n\nJULIET:\nc\n\nUSER:\nd\n\n"
    for more, play in (
        ({"messages": messages}, expected + "JULIET:\n"),
        ({"messages": messages, "speaker": "A"}, expected + "A:\n"),
        ({"messages": MESSAGES}, "USER:\na\n\nASSISTANT:\n"),
        *(
            ({"messages": [MESSAGES[0] | {"content": text}], "speaker": "\ufeffA"}, f"USER:\n{same}\n\nA:\n")
            for text, same in (("\ufeffa\r\nb\r", "a\nb\n"), ("\ufeff", ""), ("\r\n", "\n"))
        ),
    ):
        assert asked(ChatBody, model="m", **more)[0].play(CHECKPOINT.tokenizer) == play


def test_what_the_client_did_not_send_is_left_out_of_a_play_if_the_model_lacks_its_letters():
    named = [{"role": "assistant", "content": "ab", "name": "b"}, {"role": "user", "content": "a"}]
    for characters, messages, play in (
        ("ab\n:", named, "b:\nab\n\na\n\nb:\n"),
        ("ab\n:USER", MESSAGES, "USER:\na\n\n"),
        ("ab\n", named, "b\nab\n\na\n\nb\n"),
        ("ab", named, "babab"),
        ("аб\n:", [{"role": "user", "content": "ба"}], "ба\n\n"),
    ):
        tokenizer = CharTokenizer(characters)
        body = parse(ChatBody, json.dumps({"model": "m", "messages": messages}).encode())
        assert body.play(tokenizer) == play and body.ids(tokenizer) == [tokenizer.encode(play)]
    empty = parse(ChatBody, b'{"model": "m", "messages": [{"role": "user", "content": ""}]}')
    with pytest.raises(ApiError, match="messages"):
        empty.ids(CharTokenizer("a"))
    unknown = [*MESSAGES, {"role": "assistant", "content": "a", "name": "É"}]
    assert refused(ChatBody, model="m", messages=unknown).param == "messages[1].name"
    assert refused(ChatBody, model="m", messages=MESSAGES, speaker="É").param == "speaker"

"""attn_implementation="shakespeare" in tiny random models of transformers, beside their eager attention."""

from __future__ import annotations

import runpy

import pytest
import torch
from support import ROOT, full, naming, or_skip

from shakespeare.attention_ext import extension
from shakespeare.attention_ext.parts import PARTS

transformers = pytest.importorskip("transformers", minversion="5.23", reason="transformers 5.23 is missing")
from shakespeare import transformers as door  # noqa: E402

SMALL = dict(
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    intermediate_size=48,
    vocab_size=96,
    max_position_embeddings=64,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=None,
    initializer_range=0.3,
)
FAMILIES = {
    "llama": {},
    "qwen3": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "mistral": {"sliding_window": 6},
    "gemma2": {"sliding_window": 5, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0},
    "gemma3_text": {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
    "gpt_oss": {"sliding_window": 5, "num_local_experts": 2, "num_experts_per_tok": 1},
    "phi3": {"sliding_window": 7, "original_max_position_embeddings": 64},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "attn_pdrop": 0.0},
    "gpt_neox": {"rotary_pct": 0.5},
    "nanochat": {},
    "smollm3": {
        "use_sliding_window": True,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "olmo2": {},
}
IDS = torch.randint(2, 96, (2, 14), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module", autouse=True)
def _compiled():
    with or_skip():
        extension.load()


def made(family: str, **more):
    """A tiny random model."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **SMALL | FAMILIES[family] | more)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


def both(model, work, *names):
    """What some work on a model gives by eager attention and by others, "shakespeare" unless named."""
    results = []
    for name in ("eager", *(names or ["shakespeare"])):
        model.set_attn_implementation(name)
        results.append(work())
    return results


def padded(side: str) -> torch.Tensor:
    mask = torch.ones_like(IDS)
    mask[0, slice(0, 5) if side == "left" else slice(9, None)] = 0
    return mask


@pytest.mark.parametrize(
    "family", ["llama", "gemma2", "gpt_oss", *map(full, sorted({*FAMILIES} - {"llama", "gemma2", "gpt_oss"}))]
)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_logits_texts_and_gradients_are_eagers(family, device, request):
    if device == "cuda":
        request.getfixturevalue("gpu")
    model = made(family).to(device)
    ids = IDS.to(device)
    left, right = (padded(side).to(device) for side in ("left", "right"))
    for mask in (None, torch.ones_like(ids), left, right):
        with torch.no_grad():
            logits = both(model, lambda: model(ids, attention_mask=mask).logits)
        real = torch.ones_like(ids) if mask is None else mask
        torch.testing.assert_close(*(t[real.bool()] for t in logits), rtol=1e-4, atol=1e-4)
    for cache in ("dynamic", "static"):
        with naming(cache):
            work = lambda: model.generate(  # noqa: E731
                ids,
                attention_mask=left,
                do_sample=False,
                max_new_tokens=9,
                cache_implementation=cache,
                disable_compile=True,
            )
            assert torch.equal(*both(model, work))

    packed = torch.cat((torch.arange(6), torch.arange(8))).expand(2, -1).to(device)

    def gradients():
        logits = model(ids, position_ids=packed, use_cache=False).logits
        return torch.autograd.grad(logits.logsumexp(-1).sum(), [*model.parameters()], allow_unused=True)

    for got, expected in zip(*both(model, gradients)):
        if expected is not None:
            torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)


def test_encoders_and_decoders_that_look_at_them_are_eagers():
    small = dict(
        hidden_size=32, num_attention_heads=4, num_hidden_layers=2, intermediate_size=48, vocab_size=96
    )
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model("bert", **small)
    bert = transformers.AutoModel.from_config(config, attn_implementation="eager").eval()
    modern = transformers.AutoConfig.for_model("modernbert", **small, local_attention=6, pad_token_id=0)
    modern = transformers.AutoModel.from_config(modern, attn_implementation="eager").eval()
    for model in (bert, modern):
        for mask in (torch.ones_like(IDS), padded("left"), padded("right")):
            got = both(model, lambda: model(IDS, attention_mask=mask).last_hidden_state[mask.bool()])
            torch.testing.assert_close(*got, rtol=1e-4, atol=1e-4)
    config = transformers.AutoConfig.for_model(
        "t5", d_model=32, d_kv=8, d_ff=48, num_heads=4, num_layers=2, vocab_size=96, decoder_start_token_id=0
    )
    t5 = transformers.AutoModelForSeq2SeqLM.from_config(config, attn_implementation="eager").eval()
    for mask in (torch.ones_like(IDS), padded("right")):
        got = both(t5, lambda: t5(IDS, attention_mask=mask, decoder_input_ids=IDS[:, :5]).logits)
        torch.testing.assert_close(*got, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_windows_padding_and_packed_texts_are_no_matrix(monkeypatch):
    seen = []
    attend = door.attend
    monkeypatch.setattr(door, "attend", lambda *a, **rules: seen.append(rules) or attend(*a, **rules))
    model = made("gemma2", attn_implementation="shakespeare")
    model.set_attn_implementation("shakespeare")
    packed = torch.cat((torch.arange(6), torch.arange(8))).expand(2, -1)
    model(IDS, attention_mask=padded("left"))
    model(IDS, position_ids=packed, use_cache=False)
    model.generate(IDS, attention_mask=padded("left"), max_new_tokens=9)
    assert {rules["window"] for rules in seen} == {(4, 0), (None, 0)} and all(
        rules["causal"] for rules in seen
    )
    assert all(rules["bias"] is None for rules in seen)
    assert all(rules["documents"].shape == (2, 14) for rules in seen[:6])
    two_ways = transformers.masking_utils.create_causal_mask(
        model.config,
        torch.empty(2, 14, 32),
        None,
        None,
        or_mask_function=lambda b, h, i, j: (i < 4) & (j < 4),
    )
    assert two_ways.shape == (2, 1, 14, 14) and two_ways.dtype == torch.bool and two_ways[0, 0, 0].sum() == 4
    plain = [
        model(IDS, attention_mask={"full_attention": m, "sliding_attention": m}).logits
        for m in (two_ways, torch.where(two_ways, 0.0, -torch.inf))
    ]
    torch.testing.assert_close(*plain)


@torch.no_grad()
def test_each_part_each_dtype_and_a_kernel_of_ones_own(tmp_path):
    model = made("llama")
    torch.testing.assert_close(
        *both(model, lambda: model(IDS).logits, *(f"shakespeare-{part}" for part in PARTS))[:2]
    )
    for part in PARTS:
        torch.testing.assert_close(
            *both(model, lambda: model(IDS).logits, f"shakespeare-{part}"), rtol=1e-4, atol=1e-4
        )
    (tmp_path / "other").mkdir()
    names = []
    for folder in (tmp_path, tmp_path / "other", tmp_path):
        mine = folder / "my_flash.cpp"
        mine.write_text((ROOT / "judge" / "starts" / "start.cpp").read_text())
        names.append(door.register(mine))
    assert names[0] == names[2] != names[1] and not any("/" in name for name in names)
    torch.testing.assert_close(*both(model, lambda: model(IDS).logits, names[0]), rtol=1e-4, atol=1e-4)
    assert torch.equal(*both(model, lambda: model.generate(IDS, max_new_tokens=5), names[0]))
    for dtype in (torch.bfloat16, torch.float16):
        for family in ("llama", "gpt_oss"):
            model = made(family).to(dtype)
            close = dict(rtol=0.1, atol=0.2)  # of logits up to 8
            torch.testing.assert_close(
                *both(model, lambda: model(IDS, attention_mask=padded("left"))[0][1]), **close
            )


def test_the_example_runs_a_model_on_a_kernel_of_ones_own(capsys):
    example = runpy.run_path(str(ROOT / "docs" / "use" / "transformers_with_own_attention.py"))
    example["main"](str(ROOT / "judge" / "starts" / "start.cpp"))
    assert float(capsys.readouterr().out.split()[-1]) < 1e-4


def test_what_is_not_taken_names_the_models_argument(tmp_path):
    mine = tmp_path / "mine.cpp"
    mine.write_text((ROOT / "judge" / "starts" / "start.cpp").read_text())
    own = door.register(mine)
    for family, name, inputs, words in (
        ("gpt2", "shakespeare", {}, "dropout is 0.1; config.attention_dropout must be 0"),
        ("mistral", own, {}, "sliding_window is given; it must be left out with .*mine.cpp"),
        ("gpt_oss", own, {}, "is given; it must be left out with .*mine.cpp"),
        (
            "llama",
            own,
            {"attention_mask": padded("left")},
            "attention_mask or position_ids is given; it must be left out",
        ),
    ):
        model = made(family, **({"attn_pdrop": 0.1} if family == "gpt2" else {})).train()
        model.set_attn_implementation(name)
        with pytest.raises(ValueError, match=words), torch.no_grad():
            model(IDS, **inputs)
    model = made("llama")
    model.set_attn_implementation("shakespeare-part2")
    with pytest.raises(ValueError, match="part is 'part2'; it must be part0 or part4 for gradients"):
        model(IDS)
    for wrong in (tmp_path / "none.cpp", tmp_path / "mine.txt"):
        with pytest.raises(ValueError, match="part is '.*'; "):
            door.register(wrong)


@pytest.mark.full
@pytest.mark.parametrize("family", ["llama", "gemma2"])
@torch.no_grad()
def test_torch_compile_takes_a_model_without_a_graph_break(family):
    model = made(family)
    model.set_attn_implementation("shakespeare")
    logits = lambda ids, mask: model(ids, attention_mask=mask, use_cache=False).logits  # noqa: E731
    fast = torch.compile(logits, backend="aot_eager", fullgraph=True, dynamic=True)
    for n in (9, 14):
        inputs = IDS[:, :n], padded("left")[:, :n]
        real = inputs[1].bool()
        must = logits(*inputs)
        torch.testing.assert_close(fast(*inputs)[real], must[real], rtol=1e-4, atol=1e-4)

"""A model small enough for tests. Its weights are large, so that its logits differ clearly."""

import json
from functools import partial
from pathlib import Path

import numpy as np
import safetensors.numpy
import torch

from shakespeare.attention_ext import attention
from shakespeare.model import huggingface
from shakespeare.model.checkpoint import Checkpoint
from shakespeare.model.config import GPTConfig
from shakespeare.model.gpt import GPT, Attend
from shakespeare.model.tokenizer import CharTokenizer

CHARACTERS = list("\n abcdefghi")
VOCABULARY = CharTokenizer(CHARACTERS)
attend: Attend = partial(attention, "part0", causal=True)


def gpt(attend: Attend = attend, **change) -> GPT:
    """A GPT of two layers in evaluation mode, with the same random weights each time."""
    fields = dict(block_size=16, vocab_size=len(CHARACTERS), n_layer=2, n_head=2, n_embd=16) | change
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        model = GPT(GPTConfig(**fields), attend)
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn(parameter.shape)
    return model.eval()


def scaled(**change) -> GPT:
    """gpt() with logits a few units large, like those of trained models."""
    model = gpt(**change)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter *= min(1, 4 / parameter.shape[1] ** 0.5)
    return model


def checkpoint(**change) -> Checkpoint:
    """The checkpoint of gpt(), which has no file."""
    model = gpt(**change)
    return Checkpoint(model.config, model.weights, VOCABULARY)


def nanogpt_file(path, *, config=None, **change):
    """A ckpt.pt as nanoGPT's train.py writes it."""
    model = gpt(bias=change.pop("bias", False))
    args = {n: getattr(model.config, n) for n in ("n_layer", "n_head", "n_embd", "block_size", "bias")}
    args |= dict(vocab_size=model.config.vocab_size, dropout=0.2)
    state = dict(model.state_dict())
    state["transformer.h.0.attn.bias"] = torch.ones(1, 1, 16, 16)  # nanoGPT's causal mask
    values = dict(model=state, model_args=args, optimizer={"state": {}}, iter_num=5)
    values |= dict(best_val_loss=torch.tensor(1.5), config=config or {"dataset": "letters"})
    torch.save(values | change, path)
    return model


def huggingface_directory(directory, model, shards=1, prefix="transformer.", pickled=False, **change):
    """A directory as transformers writes it, of a model with biases. pickled: as old versions wrote it."""
    c, tensors = model.config, {}
    for name, tensor in model.weights.items():
        tensor = tensor.T if huggingface.TRANSPOSED.search(name) else tensor
        tensors[name.replace("transformer.", prefix)] = np.ascontiguousarray(tensor)
    directory.mkdir(exist_ok=True)
    whole = huggingface.PICKLED if pickled else huggingface.WEIGHTS
    index = {name: f"model-{i % shards}{Path(whole).suffix}" for i, name in enumerate(tensors)}
    for file in {*index.values()}:
        held = {name: tensor for name, tensor in tensors.items() if index[name] == file}
        path = directory / (file if shards > 1 else whole)
        if pickled:
            torch.save({name: torch.tensor(tensor) for name, tensor in held.items()}, path)
        else:
            safetensors.numpy.save_file(held, path)
    if shards > 1:
        (directory / huggingface.FILES[whole]).write_text(json.dumps({"weight_map": index}))
    config = dict(model_type="gpt2", n_positions=c.block_size, layer_norm_epsilon=1e-5, n_inner=None)
    config |= dict(activation_function="gelu_new" if c.tanh_gelu else "gelu")
    config |= dict(tie_word_embeddings=not c.untied_head, resid_pdrop=0.1)
    config |= {name: getattr(c, name) for name in ("vocab_size", "n_embd", "n_layer", "n_head")} | change
    (directory / "config.json").write_text(json.dumps(config))
    VOCABULARY.write_meta_json(directory / "meta.json")

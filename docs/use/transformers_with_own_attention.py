"""A transformers model whose attention is a file of your own, beside its eager attention:

python docs/use/transformers_with_own_attention.py mine.cpp [MODEL]

MODEL is a name or a folder for AutoModelForCausalLM; without one the model is small and random.
"""

import sys

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import shakespeare.transformers


@torch.no_grad()
def main(file: str, name: str = "") -> None:
    torch.manual_seed(0)
    if name:
        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    else:
        config = AutoConfig.for_model("gpt2", n_embd=64, n_layer=2, n_head=4, vocab_size=256)
        model = AutoModelForCausalLM.from_config(config)
    ids = torch.randint(model.config.vocab_size, (1, 32))
    logits = {}
    for attention in ("eager", shakespeare.transformers.register(file)):
        model.set_attn_implementation(attention)
        logits[attention] = model.eval()(ids).logits
    eager, mine = logits.values()
    print(f"the largest difference of a logit is {(eager - mine).abs().max():.1e}")


if __name__ == "__main__":
    main(*sys.argv[1:])

"""CTranslate2, in float32 and int8."""

import tempfile
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.peers import Peer, Texts
from benchmarks.peers.pytorch import gpt2
from shakespeare.model.gpt import GPT


class CTranslate2(Peer):
    """CTranslate2's Generator.generate_batch: the decoding loop is C++, one call writes the whole text.

    The prompt is read at once (include_prompt_in_result=False). Decoding is greedy. Token i is named "i".
    """

    precision = "float32"

    def __init__(self, model: GPT, threads: int) -> None:
        import ctranslate2

        rounded = "" if self.precision == "float32" else f", {self.precision}"
        self.name = f"CTranslate2 {ctranslate2.__version__}{rounded}"
        with tempfile.TemporaryDirectory() as directory:
            spec = self.specification(model)
            spec.validate()
            spec.optimize(quantization=self.precision)
            spec.save(directory)
            settings = {"compute_type": self.precision, "inter_threads": 1, "intra_threads": threads}
            self.generator = ctranslate2.Generator(directory, device="cpu", **settings)

    def specification(self, model: GPT) -> Any:
        """The library's description of transformers' model, without the biases that the checkpoint lacks."""
        from ctranslate2.converters import transformers
        from ctranslate2.specs.model_spec import OPTIONAL

        spec = transformers.GPT2Loader().get_model_spec(gpt2(model))
        for layer in spec.decoder.layer if not model.config.bias else ():
            for linear in (*layer.self_attention.linear, layer.ffn.linear_0, layer.ffn.linear_1):
                linear.bias = OPTIONAL
        spec.register_vocabulary([str(token) for token in range(model.config.vocab_size)])
        spec.config.bos_token = spec.config.eos_token = spec.config.unk_token = "0"
        return spec

    def every_logits(self, ids: list[int]) -> Tensor:
        return torch.from_numpy(np.array(self.generator.forward_batch([ids])))[0]

    def greedy_batch(self, prompts: Texts, count: int) -> Texts:
        named = [[str(token) for token in prompt] for prompt in prompts]
        settings = {"max_length": count, "end_token": [], "include_prompt_in_result": False}
        return [result.sequences_ids[0] for result in self.generator.generate_batch(named, **settings)]


class CTranslate2Int8(CTranslate2):
    """The same with int8: a scale for each output, and activations of each row rounded to 8 bits."""

    precision = "int8"
    rounded = True
    most_error = 1.0

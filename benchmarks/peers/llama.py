"""llama.cpp through llama-cpp-python."""

import ctypes
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.peers import Peer, Texts
from shakespeare.model.gguf_file import write_gguf
from shakespeare.model.gpt import GPT


class LlamaCpp(Peer):
    """llama.cpp through llama-cpp-python's C interface; Llama.generate() would copy logits for each token.

    Weights, keys and values are F32; flash attention only reads prefill()'s prompt, where it is faster. GELU
    is the tanh approximation from a table in F16, so logits differ by some thousandths. Biases are zeros.
    """

    precision = "F32"  # the matrices' type, by gguf's name
    most_error = 1e-2  # its GELU is the tanh approximation in half precision

    def __init__(self, model: GPT, threads: int) -> None:
        import llama_cpp

        rounded = "" if self.precision == "F32" else f", {self.precision}"
        self.name = f"llama.cpp (llama-cpp-python {llama_cpp.__version__}){rounded}"
        self.api = llama_cpp
        self.config = model.config
        self.threads = threads
        self.silence = llama_cpp.llama_log_callback(lambda level, text, data: None)  # must outlive its use
        llama_cpp.llama_log_set(self.silence, ctypes.c_void_p(0))
        parameters = llama_cpp.llama_model_default_params()
        parameters.n_gpu_layers = 0
        parameters.use_mmap = False  # the file is removed
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "model.gguf"
            write_gguf(path, model.config, model.weights, self.precision, None)
            self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), parameters)
        if not self.model:
            raise RuntimeError(f"{self.name} did not load the model")
        self.contexts: dict[tuple[int, bool], tuple[Any, Any]] = {}

    def __del__(self) -> None:
        for context, batch in getattr(self, "contexts", {}).values():
            self.api.llama_batch_free(batch)
            self.api.llama_free(context)
        if getattr(self, "model", None):
            self.api.llama_model_free(self.model)

    def context(self, B: int, flash: bool) -> tuple[Any, Any]:
        """A context for B sequences, and a batch whose entry i belongs to sequence i % B."""
        if (B, flash) not in self.contexts:
            api = self.api
            parameters = api.llama_context_default_params()
            parameters.n_ctx = parameters.n_batch = B * self.config.block_size
            parameters.n_seq_max = B
            parameters.n_threads = parameters.n_threads_batch = self.threads
            parameters.type_k = parameters.type_v = api.GGML_TYPE_F32
            kinds = api.LLAMA_FLASH_ATTN_TYPE_DISABLED, api.LLAMA_FLASH_ATTN_TYPE_ENABLED
            parameters.flash_attn_type = kinds[flash]
            context = api.llama_init_from_model(self.model, parameters)
            if not context:
                raise RuntimeError(f"{self.name} made no context for {B} sequences")
            batch = api.llama_batch_init(B * self.config.block_size, 0, 1)
            for i in range(B * self.config.block_size):
                batch.n_seq_id[i] = 1
                batch.seq_id[i][0] = i % B
            self.contexts[B, flash] = context, batch
        return self.contexts[B, flash]

    def run(
        self, prompts: Texts, count: int, flash: bool = False, every: bool = False
    ) -> tuple[np.ndarray, np.ndarray]:
        """The tokens (B, count) after the prompts, and last logits (B, V). every: (T, V) of one prompt."""
        api = self.api
        B = len(prompts)
        T = len(prompts[0])
        context, batch = self.context(B, flash)
        size = B * self.config.block_size
        fields = batch.token, batch.pos, batch.logits
        token, position, wanted = (np.ctypeslib.as_array(field, (size,)) for field in fields)
        api.llama_memory_clear(api.llama_get_memory(context), False)
        token[: T * B] = np.array(prompts).T.reshape(-1)  # position by position, so that i % B holds
        position[: T * B] = np.repeat(np.arange(T), B)
        wanted[: T * B] = every or np.arange(T * B) >= (T - 1) * B
        batch.n_tokens = T * B
        tokens = np.empty((B, count), dtype=np.int64)
        for i in range(count):
            if status := api.llama_decode(context, batch):
                raise RuntimeError(f"{self.name} failed with status {status}")
            rows = (T if every else B, self.config.vocab_size)
            logits = np.ctypeslib.as_array(api.llama_get_logits(context), rows)
            tokens[:, i] = token[:B] = logits[-B:].argmax(-1)
            position[:B] = T + i
            wanted[:B] = 1
            batch.n_tokens = B
        return tokens, logits

    def logits(self, ids: list[int]) -> Tensor:
        return torch.tensor(self.run([ids], 1)[1][0])

    def every_logits(self, ids: list[int]) -> Tensor:
        return torch.tensor(self.run([ids], 1, every=True)[1])

    def greedy_batch(self, prompts: Texts, count: int) -> Texts:
        return self.run(prompts, count)[0].tolist()

    def prefill(self, ids: list[int]) -> None:
        self.run([ids], 1, flash=True)


class LlamaCppQ8(LlamaCpp):
    """The same with Q8_0: 8 bits, and a half-precision scale for 32 numbers. Positions stay F32."""

    precision = "Q8_0"
    rounded = True
    most_error = 1.0

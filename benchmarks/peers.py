"""Other engines that run a checkpoint's own weights on the CPU, in float32 or int8, behind one interface.

Each engine is one class. Its docstring names the path through the engine that is taken, and the reason. An
engine whose package is not installed is left out.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from model.gpt import GPT

Weights = dict[str, Tensor]


class Peer(Protocol):
    """An engine that holds a model's weights; the first call with a batch size may allocate its buffers.

    Prompts have at least one token, and prompt and count together at most block_size + 1: the last
    token is returned but not read.
    """

    @property
    def name(self) -> str:
        """The engine and its version."""

    def logits(self, ids: list[int]) -> Tensor:
        """Logits (V,) of the token after `ids`."""

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """The `count` likeliest tokens that follow `prompt`, each given those before it."""

    def greedy_batch(self, prompts: list[list[int]], count: int) -> list[list[int]]:
        """The same for several prompts of equal length at once."""

    def prefill(self, ids: list[int]) -> None:
        """Read `ids` at once and find the first token that follows."""


class RoundedPeer(Peer, Protocol):
    """One whose weights are rounded, so that its loss is of interest."""

    def every_logits(self, ids: list[int]) -> Tensor:
        """Logits (T, V) of the token after each of `ids` (T,), given those before."""


def named_weights(model: GPT) -> Weights:
    """The state dict without nanoGPT's prefix: wte.weight, h.0.attn.c_attn.weight (out, in) and so on."""
    return {
        name.removeprefix("transformer."): tensor.detach().float().contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"  # tied to wte.weight
    }


def bias_or_zeros(weights: Weights, layer: str) -> Tensor:
    """A layer's bias, for the engines that must have one."""
    return weights.get(f"{layer}.bias", torch.zeros(len(weights[f"{layer}.weight"])))


class UncachedPyTorch:
    """nanoGPT's generate(): the whole window through the module for each token, here with SDPA.

    This is what nanoGPT's users run. It keeps no cache, and applies the head to the last position only.
    """

    name = f"PyTorch {torch.__version__}, no cache"

    def __init__(self, model: GPT, threads: int) -> None:
        torch.set_num_threads(threads)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

        self.gpt = GPT(model.config, attend).eval()
        self.gpt.load_state_dict(model.state_dict())

    @torch.inference_mode()
    def logits(self, ids: list[int]) -> Tensor:
        return self.gpt(torch.tensor([ids]), last_only=True)[0, -1]

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        return self.greedy_batch([prompt], count)[0]

    @torch.inference_mode()
    def greedy_batch(self, prompts: list[list[int]], count: int) -> list[list[int]]:
        ids = torch.tensor(prompts)  # (B, T)
        for _ in range(count):
            token = self.gpt(ids, last_only=True).argmax(-1)  # (B, 1)
            ids = torch.cat([ids, token], dim=1)
        return ids[:, -count:].tolist()

    def prefill(self, ids: list[int]) -> None:
        self.greedy(ids, 1)


class CachedPyTorch:
    """A plain decoding loop: functions on bare tensors, SDPA over a slice of a preallocated cache.

    It uses no modules, because at batch 1 their calls cost more than the arithmetic. The cache is sliced, not
    masked, so that a step reads only the keys that exist. It runs eagerly and needs no compiler.
    """

    name = f"PyTorch {torch.__version__}, cached"

    def __init__(self, model: GPT, threads: int) -> None:
        torch.set_num_threads(threads)
        self.config = model.config
        weights = named_weights(model)
        self.wte, self.wpe = weights["wte.weight"], weights["wpe.weight"]
        self.layers = [
            tuple(
                (weights[f"h.{layer}.{name}.weight"], weights.get(f"h.{layer}.{name}.bias"))
                for name in ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")
            )
            for layer in range(model.config.n_layer)
        ]
        self.ln_f = weights["ln_f.weight"], weights.get("ln_f.bias")
        self.caches: dict[int, list[Tensor]] = {}

    def forward(self, ids: Tensor, start: int) -> Tensor:
        """Logits (B, V) after `ids` (B, T), which continue the `start` tokens in the cache."""
        c = self.config
        (B, T), C, stop = ids.shape, c.n_embd, start + ids.shape[1]
        x = (F.embedding(ids, self.wte) + self.wpe[start:stop]).view(B * T, C)
        for (ln_1, c_attn, c_proj, ln_2, c_fc, down), cache in zip(self.layers, self.cache(B)):
            qkv = F.linear(F.layer_norm(x, (C,), *ln_1), *c_attn)  # (B T, 3 C)
            qkv = qkv.view(B, T, 3, c.n_head, c.head_dim).permute(2, 0, 3, 1, 4)  # (3, B, H, T, d)
            cache[:, :, :, start:stop] = qkv[1:]
            k, v = cache[:, :, :, :stop].unbind()
            y = F.scaled_dot_product_attention(qkv[0], k, v, is_causal=T > 1)  # (B, H, T, d)
            x = x + F.linear(y.transpose(1, 2).reshape(B * T, C), *c_proj)
            x = x + F.linear(F.gelu(F.linear(F.layer_norm(x, (C,), *ln_2), *c_fc)), *down)
        last = x.view(B, T, C)[:, -1]
        return F.linear(F.layer_norm(last, (C,), *self.ln_f), self.wte)

    def cache(self, B: int) -> list[Tensor]:
        """Keys and values (2, B, H, block_size, d) of each layer, for every text of this batch size."""
        if B not in self.caches:
            c = self.config
            self.caches[B] = [torch.zeros(2, B, c.n_head, c.block_size, c.head_dim) for _ in self.layers]
        return self.caches[B]

    @torch.inference_mode()
    def logits(self, ids: list[int]) -> Tensor:
        return self.forward(torch.tensor([ids]), 0)[0]

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        return self.greedy_batch([prompt], count)[0]

    @torch.inference_mode()
    def greedy_batch(self, prompts: list[list[int]], count: int) -> list[list[int]]:
        ids, start = torch.tensor(prompts), 0  # (B, T)
        tokens = []
        for _ in range(count):
            token = self.forward(ids, start).argmax(-1, keepdim=True)  # (B, 1)
            start += ids.shape[1]
            ids = token
            tokens.append(token)
        return torch.cat(tokens, dim=1).tolist()

    def prefill(self, ids: list[int]) -> None:
        self.greedy(ids, 1)


class Transformers:
    """transformers' GPT2LMHeadModel and its generate(), with their defaults: a growing cache, and SDPA.

    This is the library's one path for this architecture; its static cache was slower here. Its linear layers
    are (in, out) and have biases, which are zero here; its "gelu" is exact.
    """

    def __init__(self, model: GPT, threads: int) -> None:
        import transformers

        self.name = f"transformers {transformers.__version__}"
        torch.set_num_threads(threads)
        c = model.config
        config = transformers.GPT2Config(
            vocab_size=c.vocab_size,
            n_positions=c.block_size,
            n_embd=c.n_embd,
            n_layer=c.n_layer,
            n_head=c.n_head,
            activation_function="gelu",
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )
        self.gpt = transformers.GPT2LMHeadModel(config).eval()
        weights = named_weights(model)
        layers = [name.removesuffix(".weight") for name in weights if name.endswith(".weight")]
        state = {f"transformer.{name}": tensor for name, tensor in weights.items()}
        for layer in layers:
            if ".c_" in layer:
                state[f"transformer.{layer}.weight"] = weights[f"{layer}.weight"].T
            if "wte" not in layer and "wpe" not in layer:
                state[f"transformer.{layer}.bias"] = bias_or_zeros(weights, layer)
        state["lm_head.weight"] = weights["wte.weight"]
        self.gpt.load_state_dict(state)

    @torch.inference_mode()
    def logits(self, ids: list[int]) -> Tensor:
        return self.gpt(torch.tensor([ids]), logits_to_keep=1).logits[0, -1]

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        return self.greedy_batch([prompt], count)[0]

    @torch.inference_mode()
    def greedy_batch(self, prompts: list[list[int]], count: int) -> list[list[int]]:
        ids = torch.tensor(prompts)
        mask = torch.ones_like(ids)
        out = self.gpt.generate(
            ids, attention_mask=mask, max_new_tokens=count, do_sample=False, use_cache=True
        )
        return out[:, -count:].tolist()

    def prefill(self, ids: list[int]) -> None:
        self.greedy(ids, 1)


class CTranslate2:
    """CTranslate2's Generator.generate_batch: the decoding loop is C++, one call writes the whole text.

    The prompt is read at once (include_prompt_in_result=False). Decoding is greedy, and no token ends a text.
    Token i is named "i".
    """

    precision = "float32"

    def __init__(self, model: GPT, threads: int) -> None:
        import ctranslate2

        rounded = "" if self.precision == "float32" else f", {self.precision}"
        self.name = f"CTranslate2 {ctranslate2.__version__}{rounded}"
        self.ctranslate2 = ctranslate2
        with tempfile.TemporaryDirectory() as directory:
            spec = self.specification(model)
            spec.validate()
            spec.optimize(quantization=self.precision)
            spec.save(directory)
            self.generator = ctranslate2.Generator(
                directory,
                device="cpu",
                compute_type=self.precision,
                inter_threads=1,
                intra_threads=threads,
            )

    def specification(self, model: GPT) -> Any:
        """The library's description of a pre-norm decoder, filled with the weights."""
        specs, weights = self.ctranslate2.specs, named_weights(model)
        spec = specs.TransformerDecoderModelSpec.from_config(
            model.config.n_layer, model.config.n_head, activation=specs.Activation.GELU
        )

        def linear(target: Any, layer: str) -> None:
            target.weight = weights[f"{layer}.weight"].numpy()
            if f"{layer}.bias" in weights:
                target.bias = weights[f"{layer}.bias"].numpy()

        def norm(target: Any, layer: str) -> None:
            target.gamma = weights[f"{layer}.weight"].numpy()
            target.beta = bias_or_zeros(weights, layer).numpy()

        decoder = spec.decoder
        decoder.scale_embeddings = False
        decoder.embeddings.weight = weights["wte.weight"].numpy()
        decoder.position_encodings.encodings = weights["wpe.weight"].numpy()
        decoder.projection.weight = weights["wte.weight"].numpy()
        norm(decoder.layer_norm, "ln_f")
        for i, layer in enumerate(decoder.layer):
            norm(layer.self_attention.layer_norm, f"h.{i}.ln_1")
            linear(layer.self_attention.linear[0], f"h.{i}.attn.c_attn")
            linear(layer.self_attention.linear[1], f"h.{i}.attn.c_proj")
            norm(layer.ffn.layer_norm, f"h.{i}.ln_2")
            linear(layer.ffn.linear_0, f"h.{i}.mlp.c_fc")
            linear(layer.ffn.linear_1, f"h.{i}.mlp.c_proj")
        spec.register_vocabulary([str(token) for token in range(model.config.vocab_size)])
        spec.config.bos_token = spec.config.eos_token = spec.config.unk_token = "0"
        return spec

    def logits(self, ids: list[int]) -> Tensor:
        return self.every_logits(ids)[-1]

    def every_logits(self, ids: list[int]) -> Tensor:
        return torch.from_numpy(np.array(self.generator.forward_batch([ids])))[0]

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        return self.greedy_batch([prompt], count)[0]

    def greedy_batch(self, prompts: list[list[int]], count: int) -> list[list[int]]:
        results = self.generator.generate_batch(
            [[str(token) for token in prompt] for prompt in prompts],
            max_length=count,
            end_token=[],
            include_prompt_in_result=False,
        )
        return [result.sequences_ids[0] for result in results]

    def prefill(self, ids: list[int]) -> None:
        self.greedy(ids, 1)


class CTranslate2Int8(CTranslate2):
    """The same with int8: a scale for each output, and activations of each row rounded to 8 bits."""

    precision = "int8"


class OnnxRuntime:
    """ONNX Runtime on a graph of its own fused operators, like its exported generative models.

    GroupQueryAttention appends to its cache in place, as past and present are bound to one buffer;
    SkipLayerNormalization adds the residual. With IO binding on fixed buffers, a token is one call: ArgMax,
    in the graph, writes the token into the buffer that the next call reads. Its flash attention is switched
    off, because it is slower for so narrow a model; ORT_GQA_DISABLE_FLASH_ATTENTION=0 keeps it on.
    """

    def __init__(self, model: GPT, threads: int) -> None:
        import onnxruntime

        self.name = f"ONNX Runtime {onnxruntime.__version__}"
        self.config = model.config
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
        os.environ.setdefault("ORT_GQA_DISABLE_FLASH_ATTENTION", "1")  # read when a session is made
        graph = onnx_decoder(model)
        self.session = onnxruntime.InferenceSession(graph, options, ["CPUExecutionProvider"])
        self.buffers: dict[int, dict[str, Tensor]] = {}

    def buffer(self, B: int) -> dict[str, Tensor]:
        """The tensors that one batch size reads and writes, by the graph's names."""
        if B not in self.buffers:
            c = self.config
            shape = (B, c.n_head, c.block_size, c.head_dim)
            self.buffers[B] = {
                "token": torch.zeros(B, 1, dtype=torch.int64),
                "positions": torch.zeros(1, dtype=torch.int64),
                "seqlens_k": torch.zeros(B, dtype=torch.int32),
                "total_sequence_length": torch.zeros((), dtype=torch.int32),
                "logits": torch.zeros(B, 1, c.vocab_size),
            } | {f"{part}_{i}": torch.zeros(shape) for i in range(c.n_layer) for part in ("key", "value")}
        return self.buffers[B]

    def bind(self, buffer: dict[str, Tensor], ids: Tensor, positions: Tensor) -> Any:
        """A binding that reads `ids` (B, T) at `positions` (T,) and writes token, logits and the cache."""
        binding = self.session.io_binding()

        def bind(call: Callable[..., None], name: str, tensor: Tensor) -> None:
            kind = {torch.int64: np.int64, torch.int32: np.int32, torch.float32: np.float32}[tensor.dtype]
            call(name, "cpu", 0, kind, tuple(tensor.shape), tensor.data_ptr())

        bind(binding.bind_input, "ids", ids)
        bind(binding.bind_input, "positions", positions)
        for name in ("seqlens_k", "total_sequence_length"):
            bind(binding.bind_input, name, buffer[name])
        for name in ("token", "logits"):
            bind(binding.bind_output, name, buffer[name])
        for name in buffer:
            if name.startswith(("key_", "value_")):
                bind(binding.bind_input, f"past_{name}", buffer[name])
                bind(binding.bind_output, f"present_{name}", buffer[name])
        return binding

    def read(self, prompts: list[list[int]]) -> dict[str, Tensor]:
        """Read the prompts at once; return the buffers."""
        ids = torch.tensor(prompts)  # (B, T)
        B, T = ids.shape
        buffer = self.buffer(B)
        buffer["seqlens_k"].fill_(T - 1)
        buffer["total_sequence_length"].fill_(T)
        positions = torch.arange(T)
        self.session.run_with_iobinding(self.bind(buffer, ids, positions))
        return buffer

    def logits(self, ids: list[int]) -> Tensor:
        return self.read([ids])["logits"][0, 0].clone()

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        return self.greedy_batch([prompt], count)[0]

    def greedy_batch(self, prompts: list[list[int]], count: int) -> list[list[int]]:
        buffer = self.read(prompts)
        binding = self.bind(buffer, buffer["token"], buffer["positions"])
        # views of the same memory, because NumPy assigns faster than PyTorch
        token, position, last, total = (
            buffer[name].numpy() for name in ("token", "positions", "seqlens_k", "total_sequence_length")
        )
        tokens = np.empty((len(prompts), count), dtype=np.int64)
        tokens[:, :1] = token
        start = len(prompts[0])
        for i in range(1, count):
            position[0] = start + i - 1
            last[:] = start + i - 1
            total[...] = start + i
            self.session.run_with_iobinding(binding)
            tokens[:, i : i + 1] = token
        return tokens.tolist()

    def prefill(self, ids: list[int]) -> None:
        self.read([ids])


def onnx_decoder(model: GPT) -> bytes:
    """An ONNX graph from ids (B, T), positions and the cache to the next token and its logits."""
    from onnx import TensorProto, helper, numpy_helper

    c, weights = model.config, named_weights(model)
    nodes: list[Any] = []
    constants: list[Any] = []

    def constant(name: str, value: np.ndarray) -> str:
        constants.append(numpy_helper.from_array(np.ascontiguousarray(value), name))
        return name

    def node(kind: str, inputs: Sequence[str], outputs: Sequence[str], **attributes: Any) -> str:
        own = kind in ("GroupQueryAttention", "SkipLayerNormalization", "Gelu")
        domain = "com.microsoft" if own else ""
        nodes.append(helper.make_node(kind, inputs, outputs, domain=domain, **attributes))
        return outputs[0]

    def linear(x: str, layer: str) -> str:
        weight = constant(f"{layer}.weight", weights[f"{layer}.weight"].T.numpy())  # (in, out)
        x = node("MatMul", [x, weight], [f"{layer}.product"])
        if f"{layer}.bias" not in weights:
            return x
        return node("Add", [x, constant(f"{layer}.bias", weights[f"{layer}.bias"].numpy())], [f"{layer}.sum"])

    def norm_of_sum(x: str, y: str, layer: str) -> tuple[str, str]:
        """LayerNorm(x + y), and x + y."""
        parameters = [
            constant(f"{layer}.{name}", weights[f"{layer}.{name}"].numpy())
            for name in ("weight", "bias")
            if f"{layer}.{name}" in weights
        ]
        outputs = [f"{layer}.out", "", "", f"{layer}.residual"]
        node("SkipLayerNormalization", [x, y, *parameters], outputs, epsilon=1e-5)
        return outputs[0], outputs[3]

    x = node("Gather", [constant("wte", weights["wte.weight"].numpy()), "ids"], ["tokens"])  # (B, T, C)
    y = node("Gather", [constant("wpe", weights["wpe.weight"].numpy()), "positions"], ["places"])  # (T, C)
    x = node("Add", [x, y], ["embedded"])
    normed = ""
    for i in range(c.n_layer):
        h = f"h.{i}"
        if i == 0:
            names = ["weight", "bias"] if c.bias else ["weight"]
            parameters = [constant(f"{h}.ln_1.{n}", weights[f"{h}.ln_1.{n}"].numpy()) for n in names]
            normed = node("LayerNormalization", [x, *parameters], [f"{h}.ln_1.out"], axis=-1, epsilon=1e-5)
        else:
            normed, x = norm_of_sum(x, y, f"{h}.ln_1")
        qkv = linear(normed, f"{h}.attn.c_attn")
        y = node(
            "GroupQueryAttention",
            [qkv, "", "", f"past_key_{i}", f"past_value_{i}", "seqlens_k", "total_sequence_length"],
            [f"{h}.attn.out", f"present_key_{i}", f"present_value_{i}"],
            num_heads=c.n_head,
            kv_num_heads=c.n_head,
        )
        y = linear(y, f"{h}.attn.c_proj")
        normed, x = norm_of_sum(x, y, f"{h}.ln_2")
        y = linear(node("Gelu", [linear(normed, f"{h}.mlp.c_fc")], [f"{h}.mlp.gelu"]), f"{h}.mlp.c_proj")
    normed, _ = norm_of_sum(x, y, "ln_f")
    last = node("Gather", [normed, constant("last", np.array([-1]))], ["last_position"], axis=1)  # (B, 1, C)
    node("MatMul", [last, constant("head", weights["wte.weight"].T.numpy())], ["logits"])
    node("ArgMax", ["logits"], ["token"], axis=-1, keepdims=0)  # (B, 1)

    def value(name: str, kind: int, *shape: int | str) -> Any:
        return helper.make_tensor_value_info(name, kind, shape)

    def cache(prefix: str) -> list[Any]:
        shape = ("batch", c.n_head, c.block_size, c.head_dim)
        names = [f"{prefix}_{part}_{i}" for i in range(c.n_layer) for part in ("key", "value")]
        return [value(name, TensorProto.FLOAT, *shape) for name in names]

    inputs = [
        value("ids", TensorProto.INT64, "batch", "sequence"),
        value("positions", TensorProto.INT64, "sequence"),
        value("seqlens_k", TensorProto.INT32, "batch"),
        value("total_sequence_length", TensorProto.INT32),
    ]
    outputs = [
        value("token", TensorProto.INT64, "batch", 1),
        value("logits", TensorProto.FLOAT, "batch", 1, c.vocab_size),
    ]
    graph = helper.make_graph(nodes, "decoder", inputs + cache("past"), outputs + cache("present"), constants)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9).SerializeToString()


class LlamaCpp:
    """llama.cpp through llama-cpp-python's C interface; Llama.generate() would copy logits for each token.

    Weights, keys and values are F32. Flash attention reads the prompt of prefill() and is off elsewhere:
    on this CPU path it takes a third of the time over a long prompt, and several times as much for one
    token. The gpt2 graph has the tanh approximation of GELU, from a table in F16: the logits differ by
    some thousandths, and the text may differ too. Its biases are zeros here.
    """

    precision = "F32"  # of the matrices, by the names of gguf's types

    def __init__(self, model: GPT, threads: int) -> None:
        import llama_cpp

        rounded = "" if self.precision == "F32" else f", {self.precision}"
        self.name = f"llama.cpp (llama-cpp-python {llama_cpp.__version__}){rounded}"
        self.api = llama_cpp
        self.config, self.threads = model.config, threads
        self.silence = llama_cpp.llama_log_callback(lambda level, text, data: None)  # must outlive its use
        llama_cpp.llama_log_set(self.silence, ctypes.c_void_p(0))
        parameters = llama_cpp.llama_model_default_params()
        parameters.n_gpu_layers = 0
        parameters.use_mmap = False  # the file is removed
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "model.gguf"
            write_gguf(path, model, self.precision)
            self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), parameters)
        if not self.model:
            raise RuntimeError(f"{self.name} did not load the model")
        self.contexts: dict[tuple[int, bool], tuple[Any, Any]] = {}

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

    def run(self, prompts: list[list[int]], count: int, flash: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """The `count` tokens (B, count) after the prompts, and the logits (B, V) of the last of them."""
        api, (B, T) = self.api, (len(prompts), len(prompts[0]))
        context, batch = self.context(B, flash)
        size = B * self.config.block_size
        token, position, wanted = (
            np.ctypeslib.as_array(field, (size,)) for field in (batch.token, batch.pos, batch.logits)
        )
        api.llama_memory_clear(api.llama_get_memory(context), False)
        token[: T * B] = np.array(prompts).T.reshape(-1)  # position by position, so that i % B holds
        position[: T * B] = np.repeat(np.arange(T), B)
        wanted[: T * B] = np.arange(T * B) >= (T - 1) * B
        batch.n_tokens = T * B
        tokens = np.empty((B, count), dtype=np.int64)
        for i in range(count):
            if status := api.llama_decode(context, batch):
                raise RuntimeError(f"{self.name} failed with status {status}")
            logits = np.ctypeslib.as_array(api.llama_get_logits(context), (B, self.config.vocab_size))
            tokens[:, i] = token[:B] = logits.argmax(-1)
            position[:B] = T + i
            wanted[:B] = 1
            batch.n_tokens = B
        return tokens, logits

    def logits(self, ids: list[int]) -> Tensor:
        return torch.tensor(self.run([ids], 1)[1][0])

    def every_logits(self, ids: list[int]) -> Tensor:
        api, T = self.api, len(ids)
        context, batch = self.context(1, False)
        api.llama_memory_clear(api.llama_get_memory(context), False)
        for i, token in enumerate(ids):
            batch.token[i], batch.pos[i], batch.logits[i] = token, i, 1
        batch.n_tokens = T
        if status := api.llama_decode(context, batch):
            raise RuntimeError(f"{self.name} failed with status {status}")
        return torch.tensor(np.ctypeslib.as_array(api.llama_get_logits(context), (T, self.config.vocab_size)))

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        return self.greedy_batch([prompt], count)[0]

    def greedy_batch(self, prompts: list[list[int]], count: int) -> list[list[int]]:
        return self.run(prompts, count)[0].tolist()

    def prefill(self, ids: list[int]) -> None:
        self.run([ids], 1, flash=True)


class LlamaCppQ8(LlamaCpp):
    """The same with Q8_0: 8 bits, and a scale in half precision for 32 weights or activations.

    All matrices but that of the positions are quantised; the head is the token embedding.
    """

    precision = "Q8_0"


def write_gguf(path: Path, model: GPT, precision: str = "F32", tokens: Sequence[str] = ()) -> None:
    """Write the weights as llama.cpp's gpt2; the matrices in this of gguf's types.

    tokens: texts of the ids, for a program that takes text; none of them ends a text.
    """
    import gguf

    kind = gguf.GGMLQuantizationType[precision]
    whole = gguf.LlamaFileType.ALL_F32 if precision == "F32" else gguf.LlamaFileType[f"MOSTLY_{precision}"]

    c, weights = model.config, named_weights(model)
    writer = gguf.GGUFWriter(path, "gpt2")
    writer.add_context_length(c.block_size)
    writer.add_embedding_length(c.n_embd)
    writer.add_feed_forward_length(4 * c.n_embd)
    writer.add_block_count(c.n_layer)
    writer.add_head_count(c.n_head)
    writer.add_layer_norm_eps(1e-5)
    writer.add_file_type(whole)
    writer.add_vocab_size(c.vocab_size)
    # RWKV's takes the longest token that matches, without merges, and needs no id for the end.
    writer.add_tokenizer_model("rwkv" if tokens else "none")
    if tokens:
        writer.add_token_list([token.replace("\\", "\\\\").replace("\n", "\\n") for token in tokens])
        writer.add_token_types([gguf.TokenType.NORMAL] * len(tokens))
        writer.add_token_scores([0.0] * len(tokens))

    def add_matrix(name: str, tensor: Tensor) -> None:
        writer.add_tensor(name, gguf.quantize(tensor.numpy(), kind), raw_dtype=kind)

    add_matrix("token_embd.weight", weights["wte.weight"])
    writer.add_tensor("position_embd.weight", weights["wpe.weight"].numpy())
    layers = {"ln_f": "output_norm"}
    for i in range(c.n_layer):
        layers |= {
            f"h.{i}.ln_1": f"blk.{i}.attn_norm",
            f"h.{i}.attn.c_attn": f"blk.{i}.attn_qkv",
            f"h.{i}.attn.c_proj": f"blk.{i}.attn_output",
            f"h.{i}.ln_2": f"blk.{i}.ffn_norm",
            f"h.{i}.mlp.c_fc": f"blk.{i}.ffn_up",
            f"h.{i}.mlp.c_proj": f"blk.{i}.ffn_down",
        }
    for layer, name in layers.items():
        if "norm" in name:
            writer.add_tensor(f"{name}.weight", weights[f"{layer}.weight"].numpy())
        else:
            add_matrix(f"{name}.weight", weights[f"{layer}.weight"])
        writer.add_tensor(f"{name}.bias", bias_or_zeros(weights, layer).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


PEERS: dict[str, Callable[[GPT, int], Peer]] = {
    engine.__name__: engine
    for engine in (
        UncachedPyTorch,
        CachedPyTorch,
        Transformers,
        CTranslate2,
        CTranslate2Int8,
        OnnxRuntime,
        LlamaCpp,
        LlamaCppQ8,
    )
}
ROUNDED_PEERS: dict[str, Callable[[GPT, int], RoundedPeer]] = {
    engine.__name__: engine for engine in (CTranslate2Int8, LlamaCppQ8)
}

"""ONNX Runtime, and the decoder that is exported for it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.peers.peer import Peer, named_weights
from model.gpt import GPT


class OnnxRuntime(Peer):
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

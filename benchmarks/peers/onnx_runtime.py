"""ONNX Runtime, and the decoder that is exported for it."""

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.peers import Peer, named_weights
from shakespeare.model.gpt import GPT


class OnnxRuntime(Peer):
    """ONNX Runtime on a graph of its own fused operators, like its exported generative models.

    GroupQueryAttention appends to its cache in place, as past and present are bound to one buffer;
    SkipLayerNormalization adds the residual. With IO binding on fixed buffers, a token is one call: ArgMax,
    in the graph, writes the token into the buffer that the next call reads. Its flash attention is switched
    off, because it is slower for so narrow a model; ORT_GQA_DISABLE_FLASH_ATTENTION=0 keeps it on.
    """

    packages = ("onnxruntime", "onnx")

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
    from onnx import numpy_helper, parser

    c = model.config
    weights = {name.replace(".", "_"): tensor.numpy() for name, tensor in named_weights(model).items()}
    # MatMul's are (in, out)
    weights = {name: w.T if "_c_" in name and name.endswith("weight") else w for name, w in weights.items()}
    weights |= {"head": weights["wte_weight"].T, "last": np.array([-1])}
    own, norm = "com.microsoft", "<epsilon=1e-5>"

    def norm_of_sum(x: str, y: str, layer: str) -> str:
        """The line that makes {layer}, LayerNorm(x + y), and {layer}_sum, x + y."""
        inputs = ", ".join([x, y, *parameters(layer)])
        return f'{layer}, "", "", {layer}_sum = {own}.SkipLayerNormalization{norm}({inputs})'

    def parameters(layer: str) -> list[str]:
        return [name for name in (f"{layer}_weight", f"{layer}_bias") if name in weights]

    def linear(x: str, layer: str) -> str:
        """The lines that make {layer} of x."""
        product = f"MatMul({x}, {layer}_weight)"
        if f"{layer}_bias" not in weights:
            return f"{layer} = {product}"
        return f"{layer}_product = {product}\n{layer} = Add({layer}_product, {layer}_bias)"

    lines = [
        "tokens = Gather(wte_weight, ids)",
        "places = Gather(wpe_weight, positions)",
    ]  # (B, T, C), (T, C)
    lines.append("x = Add(tokens, places)")
    x, y = "x", ""
    for i in range(c.n_layer):
        h, past = f"h_{i}", f"past_key_{i}, past_value_{i}, seqlens_k, total_sequence_length"
        if i == 0:
            inputs = ", ".join([x, *parameters("h_0_ln_1")])
            lines.append(f"h_0_ln_1 = LayerNormalization<axis=-1, epsilon=1e-5>({inputs})")
        else:
            lines.append(norm_of_sum(x, y, f"{h}_ln_1"))
            x = f"{h}_ln_1_sum"
        lines += [
            linear(f"{h}_ln_1", f"{h}_attn_c_attn"),
            f"{h}_attn, present_key_{i}, present_value_{i} = {own}.GroupQueryAttention"
            f'<num_heads={c.n_head}, kv_num_heads={c.n_head}>({h}_attn_c_attn, "", "", {past})',
            linear(f"{h}_attn", f"{h}_attn_c_proj"),
            norm_of_sum(x, f"{h}_attn_c_proj", f"{h}_ln_2"),
            linear(f"{h}_ln_2", f"{h}_mlp_c_fc"),
            f"{h}_gelu = {own}.Gelu({h}_mlp_c_fc)",
            linear(f"{h}_gelu", f"{h}_mlp_c_proj"),
        ]
        x, y = f"{h}_ln_2_sum", f"{h}_mlp_c_proj"
    lines += [norm_of_sum(x, y, "ln_f"), "last_position = Gather<axis=1>(ln_f, last)"]  # (B, 1, C)
    lines += ["logits = MatMul(last_position, head)", "token = ArgMax<axis=-1, keepdims=0>(logits)"]  # (B, 1)

    def cache(prefix: str) -> str:
        kind = f"float[batch, {c.n_head}, {c.block_size}, {c.head_dim}]"
        return ", ".join(f"{kind} {prefix}_{part}_{i}" for i in range(c.n_layer) for part in ("key", "value"))

    inputs = "int64[batch, sequence] ids, int64[sequence] positions, int32[batch] seqlens_k"
    inputs = f"{inputs}, int32[] total_sequence_length, {cache('past')}"
    outputs = f"int64[batch, 1] token, float[batch, 1, {c.vocab_size}] logits, {cache('present')}"
    head = f'<ir_version: 9, opset_import: ["" : 17, "{own}" : 1]>'
    decoder = parser.parse_model("\n".join([head, f"decoder ({inputs}) => ({outputs}) {{", *lines, "}"]))
    used = {name for node in decoder.graph.node for name in node.input} & weights.keys()
    for name in sorted(used):
        constant = numpy_helper.from_array(np.ascontiguousarray(weights[name]), name)
        decoder.graph.initializer.append(constant)
    return decoder.SerializeToString()

"""llm.c's train_gpt2.c as a contender of benchmarks.training: the same model, trained on the CPU.

The folder is a clone of github.com/karpathy/llm.c. Its own Makefile builds the program with OpenMP, from a
copy in which only the batch (4, 64) is changed. It reads a checkpoint with our weights and a corpus of a
single batch, so that its first loss can be compared with PyTorch's. Its model has biases, which begin at 0,
and the tanh approximation of GELU.
"""

import os
import re
import shutil
import subprocess
from pathlib import Path

import click
import numpy as np
import torch
from torch import Tensor

from benchmarks.peers import bias_or_zeros, named_weights
from model.gpt import GPT
from model.loss import evaluate_windows

MODEL, DATA, TOKENIZER = (20240326, 3), (20240520, 1), (20240328, 2)  # magic numbers and versions
GELU = 2e-3  # nats between the losses of the exact GELU and of its approximation by tanh
HEADER = 256  # whole numbers
# In the file's order; the layers' tensors are stacked as (layers, ...).
FIRST, LAST = ("wte.weight", "wpe.weight"), ("ln_f.weight", "ln_f.bias")
LAYER = tuple(
    f"{layer}.{tensor}"
    for layer in ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")
    for tensor in ("weight", "bias")
)
STEP = re.compile(r"step (\d+): train loss (\S+) \(took (\S+) ms\)")


class LlmC:
    """The built program with its files.

    folder: the clone. work: an empty folder. model: the weights to begin with. batch: ids (B, T + 1).
    Raises ValueError if the source is not the expected one, CalledProcessError if it does not compile.
    """

    def __init__(self, folder: Path, work: Path, model: GPT, batch: Tensor) -> None:
        B, T = batch.shape[0], batch.shape[1] - 1
        for name in ("Makefile", "llmc"):
            source = folder / name
            shutil.copytree(source, work / name) if source.is_dir() else shutil.copy(source, work)
        source_text = (folder / "train_gpt2.c").read_text()
        for was, now in (("int B = 4;", f"int B = {B};"), ("int T = 64;", f"int T = {T};")):
            if source_text.count(was) != 1:
                raise ValueError(f"{folder}/train_gpt2.c must have the line {was!r} once")
            source_text = source_text.replace(was, now)
        (work / "train_gpt2.c").write_text(source_text)
        subprocess.run(["make", "train_gpt2"], cwd=work, check=True, capture_output=True)
        self.work, self.loss = work, evaluate_windows(model, batch)
        write_model(work / "gpt2_124M.bin", model)
        data = work / "dev" / "data" / "tinyshakespeare"
        data.mkdir(parents=True)
        # llm.c's sequences are consecutive: the last target of one is the first input of the next.
        ids = torch.cat([batch[:, :-1].flatten(), batch[-1, -1:]])
        for part in ("train", "val"):
            write_ids(data / f"tiny_shakespeare_{part}.bin", ids)
        write_tokenizer(work / "gpt2_tokenizer.bin", model.config.vocab_size)

    def seconds(self, threads: int) -> list[float]:
        """Run the program's 41 steps: the seconds of each but the first.

        Raises ClickException if the loss of the first is not PyTorch's.
        """
        environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
        run = subprocess.run(
            ["./train_gpt2"], cwd=self.work, env=environment, check=True, capture_output=True, text=True
        )
        found = STEP.findall(run.stdout)
        if not abs(float(found[0][1]) - self.loss) < GELU:
            raise click.ClickException(f"llm.c's loss is {found[0][1]}; ours is {self.loss:.4f}")
        return [float(ms) / 1e3 for _, _, ms in found[1:]]


def write_model(path: Path, model: GPT) -> None:
    """A checkpoint of version 3; biases that the model lacks are 0."""
    c = model.config
    header = (*MODEL, c.block_size, c.vocab_size, c.n_layer, c.n_head, c.n_embd, c.vocab_size)
    weights = named_weights(model)
    names = [*FIRST, *(f"h.{i}.{name}" for name in LAYER for i in range(c.n_layer)), *LAST]
    with open(path, "wb") as file:
        file.write(_header(header))
        for name in names:
            layer, _, kind = name.rpartition(".")
            tensor = weights[name] if kind == "weight" else bias_or_zeros(weights, layer)
            file.write(tensor.numpy().tobytes())


def write_ids(path: Path, ids: Tensor) -> None:
    """A shard of tokens, (N,)."""
    path.write_bytes(_header((*DATA, len(ids))) + ids.numpy().astype(np.uint16).tobytes())


def write_tokenizer(path: Path, size: int) -> None:
    """A vocabulary of `size` characters; the program writes a text now and then."""
    path.write_bytes(_header((*TOKENIZER, size, 0)) + b"\x01x" * size)


def _header(numbers: tuple[int, ...]) -> bytes:
    words = np.zeros(HEADER, np.int32)
    words[: len(numbers)] = numbers
    return words.tobytes()

"""Other engines that run a checkpoint's own weights on the CPU, in float32 or int8, behind one interface.

Each engine is one class. Its docstring names the path taken through the engine, and the reason. An engine
whose package is not installed is left out.
"""

from __future__ import annotations

from benchmarks.peers.ctranslate import CTranslate2, CTranslate2Int8
from benchmarks.peers.llama import LlamaCpp, LlamaCppQ8
from benchmarks.peers.onnx_runtime import OnnxRuntime
from benchmarks.peers.peer import Peer
from benchmarks.peers.pytorch import CachedPyTorch, Transformers, UncachedPyTorch

PEERS: dict[str, type[Peer]] = {
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

"""Part 4 on any GPU through WebGPU, without PyTorch: the ladder in WGSL and how it is compiled and run."""

from shakespeare.attention_ext.webgpu.calls import attention as attention

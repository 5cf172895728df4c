"""Part 4 on any GPU through WebGPU, without PyTorch: the ladder in WGSL and how it is compiled and run."""

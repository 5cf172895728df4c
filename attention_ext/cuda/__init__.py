"""Part 4 on a GPU: the kernels of the ladder, how they are compiled and launched."""

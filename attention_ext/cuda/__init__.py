"""Part 4 on a GPU: the steps of the ladder, how they are compiled and launched, and kernels in Numba."""

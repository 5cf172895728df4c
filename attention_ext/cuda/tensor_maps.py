"""Tensor maps: what Hopper's copy engine is told of q, k and v (kernel 6)."""

import functools

import torch
from cuda.bindings import driver

KINDS = {
    torch.bfloat16: driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
    torch.float16: driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
}


def tensor_map(t: torch.Tensor, rows: int, columns: int) -> driver.CUtensorMap:
    """The map of `t` (B, H, N, d) for copies of `rows` rows and `columns` columns, 64 or 32.

    Its address and its strides must be multiples of 16 bytes, and its rows contiguous and apart from each
    other. An expanded batch or head, of stride 0, needs no copy.

    Encoding runs on the CPU alone: it neither synchronises nor touches the stream. A launch copies the map,
    so a captured graph keeps its own.
    """
    return _encode(t.data_ptr(), t.dtype, tuple(t.shape), t.stride(), (columns, rows, 1, 1))


@functools.lru_cache(maxsize=1024)
def _encode(address, dtype, shape, strides, box):
    B, H, N, d = shape
    batch, head, row, _ = (2 * stride for stride in strides)
    # A dimension of stride 0 has one entry, which the kernel asks for. The stride of a dimension with one
    # entry is never used, but must be valid.
    batches, heads = (B if batch else 1), (H if head else 1)
    integers, words = driver.cuuint64_t, driver.cuuint32_t
    swizzles = driver.CUtensorMapSwizzle
    swizzle = swizzles.CU_TENSOR_MAP_SWIZZLE_128B if box[0] == 64 else swizzles.CU_TENSOR_MAP_SWIZZLE_64B
    error, encoded = driver.cuTensorMapEncodeTiled(
        KINDS[dtype],
        4,
        address,
        [integers(n) for n in (d, N, heads, batches)],
        [integers(stride if n > 1 and stride else 16) for n, stride in ((N, row), (H, head), (B, batch))],
        [words(n) for n in box],
        [words(1)] * 4,
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        swizzle,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if error != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"cuTensorMapEncodeTiled: {error.name} for {shape} with strides {strides}")
    return encoded

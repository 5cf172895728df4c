"""What is particular to attention() in bfloat16. test_attention.py holds it to the contract of float32."""

from functools import partial

import oracle
import pytest
import torch

from shakespeare.attention_ext import attention, extension, operator
from shakespeare.attention_ext.parts import Dtype, check_compatible

pytestmark = pytest.mark.usefixtures("extension")
qkv = partial(oracle.qkv, dtype=torch.bfloat16)


def test_other_parts_and_mixed_types_are_refused():
    q, k, v = qkv(1, 1, 4, 4, 8)
    for part in ("part1", "part2", "part3"):
        with pytest.raises(TypeError, match=f"q is torch.bfloat16; it must be torch.float32 in {part}"):
            attention(part, q, k, v)
    with pytest.raises(TypeError, match="k is torch.float32; it must be q's torch.bfloat16"):
        attention("part4", q, k.float(), v)
    with pytest.raises(TypeError, match="v is torch.float16; it must be torch.float32 or torch.bfloat16"):
        attention("part4", q, k, v.half())
    with pytest.raises(RuntimeError, match="k must be bfloat16 on the CPU"):
        operator("part4")(q, k.float(), v, False, 1.0, False, 8, 8)
    with pytest.raises(ValueError, match="dtype is 'fp8'; it must be one of fp32, bf16"):
        check_compatible("part4", dtype="fp8")


def test_the_scratch_of_expanded_keys_is_counted():
    """AMX would copy V: 2^69 numbers here, which a signed 64-bit size cannot hold."""
    size = extension.scratch("part4", (2**10, 2**10, 32, 2**44, 32), br=32, bc=32, dtype=Dtype.BF16)
    assert 0 < size < 2**40
    # The size of a copied tile of 2^42 keys of 2^20 features would not fit either.
    size = extension.scratch("part4", (1, 1, 1, 2**42, 2**20), bc=2**42, threads=2, dtype=Dtype.BF16)
    assert 2**20 < size < 2**40

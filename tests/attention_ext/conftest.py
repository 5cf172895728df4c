"""What the tests of attention() share: each part, over each implementation of the SIMD helpers."""

from dataclasses import dataclass

import oracle
import pytest
import torch
from support import KERNELS, or_skip

from shakespeare.attention_ext import SIMD, attention, extension
from shakespeare.attention_ext.parts import Dtype, able


@dataclass(frozen=True)
class Attend:
    """attention() by a part, over one of the SIMD helpers, and its inputs in a dtype."""

    part: str
    simd: str = "portable"
    dtype: torch.dtype = torch.float32

    def __call__(self, q, k, v, **options):
        return attention(self.part, q, k, v, simd=self.simd, **options)

    def qkv(self, *shape: int) -> list[torch.Tensor]:
        return oracle.qkv(*shape, self.dtype)

    def assert_same(self, got, expected) -> None:
        """Equal to the last bit for our kernels; PyTorch's sums may depend on shapes and alignment."""
        exact = dict(rtol=0, atol=0) if self.part in KERNELS else {}
        torch.testing.assert_close(got, expected, **exact)


OTHERS = [Attend(part, simd) for simd in SIMD if simd not in ("auto", "portable") for part in KERNELS]


@pytest.fixture(
    params=[
        *map(Attend, ["part0", *KERNELS]),
        *(Attend(part, dtype=torch.bfloat16) for part in able(dtype=Dtype.BF16)),
        *(pytest.param(each, marks=pytest.mark.full) for each in OTHERS),
    ],
    ids=lambda attend: f"{attend.part}-{attend.simd}-{attend.dtype}".replace("torch.", ""),
)
def attend(request) -> Attend:
    """Run the test with each part, over each SIMD helper and in each dtype."""
    if request.param.part in KERNELS:
        request.getfixturevalue("extension")
        with or_skip():
            extension.load(request.param.simd)
    return request.param

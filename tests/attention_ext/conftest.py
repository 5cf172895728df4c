"""What the tests of attention() share: each part, over each implementation of the SIMD helpers."""

from __future__ import annotations

from functools import partial

import pytest

from attention_ext import PARTS, SIMD, BuildError, attention, extension

KERNELS = [name for name, part in PARTS.items() if part.operator]
OTHERS = [simd for simd in SIMD if simd not in ("auto", "portable")]


def over(parts: list[str], simd: str) -> list:
    """Parameters of `attend`: these parts over these helpers. Only the portable ones are tried by default."""
    marks = [] if simd == "portable" else [pytest.mark.full]
    return [pytest.param((part, simd), id=f"{part}-{simd}", marks=marks) for part in parts]


@pytest.fixture(
    params=[
        *over(["part0", *KERNELS], "portable"),
        *(each for simd in OTHERS for each in over(KERNELS, simd)),
    ]
)
def attend(request) -> partial:
    """Run the test with attention() by each part, the kernels over each SIMD helper."""
    part, simd = request.param
    if part in KERNELS:
        request.getfixturevalue("extension")
        try:
            extension.load(simd)
        except BuildError as error:  # no ispc
            pytest.skip(str(error))
    return partial(attention, part, simd=simd)

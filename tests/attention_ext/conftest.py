"""What the tests of attention() share."""

from __future__ import annotations

from functools import partial

import pytest

import attention_ext
from attention_ext import SIMD, BuildError, extension

ALL = [name if name == "portable" else pytest.param(name, marks=pytest.mark.full) for name in SIMD[1:]]


@pytest.fixture(params=ALL)
def simd(request, monkeypatch):
    """The module's attention() over each implementation of the SIMD helpers."""
    request.getfixturevalue("extension")
    try:
        extension.load(request.param)
    except BuildError as error:
        pytest.skip(str(error))
    monkeypatch.setattr(request.module, "attention", partial(attention_ext.attention, simd=request.param))

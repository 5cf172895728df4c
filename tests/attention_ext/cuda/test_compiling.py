"""Without a GPU: each kernel compiles, its registers and spills are read, and it gets its arguments."""

import functools
import itertools
import math
import sys

import pytest
import torch
from support import ROOT, naming, printed

from shakespeare.attention_ext.build import nvrtc
from shakespeare.attention_ext.cuda import gpu as driver
from shakespeare.attention_ext.cuda.kernels import (
    BACKWARD,
    FASTEST,
    KERNELS,
    WIDEST,
    Gpu,
    choose,
    choose_backward,
    queries_of,
)
from shakespeare.attention_ext.cuda.launches import Sizes

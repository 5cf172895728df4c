"""The KV cache: keys and values of earlier tokens, so that a new token costs one position."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor


class KVCache:
    """One layer's keys and values in two preallocated buffers (B, H, T_max, d), rounded to `dtype`.

    endless: only the last T_max are kept, so that a text may have any length.
    """

    def __init__(
        self,
        batch: int,
        n_head: int,
        length_max: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
        endless: bool = False,
    ) -> None:
        self.endless = endless
        self.k = torch.zeros(batch, n_head, length_max, head_dim, dtype=dtype, device=device)
        self.v = torch.zeros_like(self.k)
        self.length = 0

    def slots(self, start: int, end: int, length: int) -> KVCache:
        """The cache of texts start .. end - 1 with `length` tokens each. It shares this cache's memory."""
        part = copy.copy(self)
        part.k = self.k[start:end]
        part.v = self.v[start:end]
        part.length = length
        return part

    def positions(self, count: int) -> Tensor:
        """The positions (count,) of the next tokens."""
        return torch.arange(self.length, self.length + count, device=self.k.device)

    def attend(self, attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Append k and v, and let q (B, H, T, d) attend to all keys and values so far."""
        return attend(q, *self.update(k, v))

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append k and v, (B, H, T, d); return all keys and values so far, (B, H, length, d), in their type.

        Views if the buffers have this type. Raises ValueError if the buffers are too short.
        """
        start = self.length
        end = self.length + k.shape[2]
        if self.endless:
            cached = min(start, self.k.shape[2])
            filled = min(end, self.k.shape[2])
            self.length = end
            found = []
            for buffer, new in ((self.k, k), (self.v, v)):
                every = torch.cat([buffer[:, :, :cached], new.to(buffer.dtype)], 2)
                buffer[:, :, :filled] = every[:, :, every.shape[2] - filled :]
                found.append(every.to(new.dtype))
            return found[0], found[1]
        if end > self.k.shape[2]:
            must = f"together they must be at most {self.k.shape[2]}"
            raise ValueError(f"k has {k.shape[2]} positions after {start} in the cache; {must}")
        self.k[:, :, start:end] = k
        self.v[:, :, start:end] = v
        self.length = end
        return self.k[:, :, :end].to(k.dtype), self.v[:, :, :end].to(v.dtype)

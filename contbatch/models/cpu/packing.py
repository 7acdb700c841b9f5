"""Weights in the order in which the kernels read them.

The one idea: a product is computed in panels of columns (two vectors wide), so the weights of a panel lie together:
for each input k, in bf16 for each pair of inputs, the panel's columns side by side. A panel is one stretch of memory,
and the next panel follows it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def pack(weight: Tensor, lanes: int) -> Tensor:
    """[columns, inner] -> [panels, inner, 2 * lanes]; bf16: [panels, inner / 2, 2 * lanes, 2]. Padded with zeros."""
    panel = 2 * lanes
    weight = pad_rows(weight, panel)
    if weight.dtype == torch.float32:
        return weight.view(-1, panel, weight.shape[1]).transpose(1, 2).contiguous()
    weight = F.pad(weight, (0, weight.shape[1] % 2))
    return weight.view(-1, panel, weight.shape[1] // 2, 2).transpose(1, 2).contiguous()


def interleave(gate: Tensor, up: Tensor, lanes: int) -> Tensor:
    """Two weights or biases as one: each panel gets `lanes` columns of the gate, then the same columns of the other."""
    pieces = [pad_rows(part, lanes).view(-1, lanes, *part.shape[1:]) for part in (gate, up)]
    return torch.stack(pieces, dim=1).flatten(0, 2)


def pad_rows(tensor: Tensor, multiple: int) -> Tensor:
    """Zeros added to the first axis up to a multiple."""
    missing = -len(tensor) % multiple
    return tensor if not missing else torch.cat((tensor, tensor.new_zeros(missing, *tensor.shape[1:])))

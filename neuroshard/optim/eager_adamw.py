"""AdamW without PyTorch's compiler, which torch.optim loads at its first call: 85 MB and seconds for nothing."""

from __future__ import annotations

from inspect import unwrap

import torch
from torch.optim import AdamW, Optimizer


class EagerAdamW(AdamW):
    """torch.optim.AdamW whose methods are the plain functions under the decorators that load the compiler."""

    add_param_group = unwrap(Optimizer.add_param_group)
    load_state_dict = unwrap(Optimizer.load_state_dict)
    state_dict = unwrap(Optimizer.state_dict)
    step = torch.no_grad()(unwrap(AdamW.step))  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
    zero_grad = unwrap(Optimizer.zero_grad)

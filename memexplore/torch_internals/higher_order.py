"""Private names of higher-order operators: `torch.cond`, `while_loop`, `scan` and flex_attention."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from memexplore.torch_internals.table import TABLE, Internal, replaceable

HIGHER_ORDER_CALL = replaceable(
    "torch._ops.HigherOrderOperator.__call__",
    "operators that take functions run them, as on a GPU; torch has no rule for other dispatch modes",
    "torch.cond, while_loop, scan and flex_attention on a virtual GPU",
)
_FLEX = "torch._higher_order_ops.flex_attention"


def unfused_flex_attention() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the forward and backward of flex_attention without torch.compile. Imports them at first use."""
    module = importlib.import_module(_FLEX)
    return module.sdpa_dense, module.sdpa_dense_backward


TABLE.append(
    Internal(
        f"{_FLEX}.sdpa_dense",
        "flex_attention that is not compiled makes the requests of torch's own unfused functions",
        "flex_attention without torch.compile on a virtual GPU",
        lambda: len(unfused_flex_attention()) == 2,
    )
)

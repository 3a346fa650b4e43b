"""Plans distributed training of a PyTorch model, and runs the plan.

    document = autoplan.plan(model, "8x8xh100-sxm", batch)     # offline: no GPU, no weights
    step = autoplan.compile(model, cluster)                    # under torchrun
    loss = step(batch)

Names are loaded when first used, so that ``import autoplan`` and ``autoplan --help`` do not wait for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "AutoplanError": "autoplan.errors",
    "Cluster": "autoplan.cost_models.cluster",
    "CompiledStep": "autoplan.api",
    "Pins": "autoplan.search.space",
    "PlanDocument": "autoplan.plans",
    "UserError": "autoplan.errors",
    "compile": "autoplan.api",
    "initialize": "autoplan.runtime.initial",
    "plan": "autoplan.api",
    "register_rule": "autoplan.sharding",
}

__all__ = [
    "AutoplanError",
    "Cluster",
    "CompiledStep",
    "Pins",
    "PlanDocument",
    "UserError",
    "__version__",
    "compile",
    "initialize",
    "plan",
    "register_rule",
]

if TYPE_CHECKING:
    from autoplan.api import CompiledStep, compile, plan
    from autoplan.cost_models.cluster import Cluster
    from autoplan.errors import AutoplanError, UserError
    from autoplan.plans import PlanDocument
    from autoplan.runtime.initial import initialize
    from autoplan.search.space import Pins
    from autoplan.sharding import register_rule


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'autoplan' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)

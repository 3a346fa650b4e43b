"""Every op's legal partitions, from factor rules.

``refine`` a graph's nodes, ask it for the ``choices`` of a node, run one with ``local_call``, move tensors between
placements with ``redistribution`` and ``redistribute``. ``verify_choice`` tests any of it against the unsharded op.
"""

from autoplan.sharding import rules  # noqa: F401  (fills the registry)
from autoplan.sharding.custom import register_rule
from autoplan.sharding.localize import LocalCall, local_call
from autoplan.sharding.placement import P, Placement, R, S
from autoplan.sharding.redistribution import Redistribution, redistribute, redistribution
from autoplan.sharding.refinement import Refinement, refine
from autoplan.sharding.registry import has_rule, replicated_ops, rule_for, tensor_operands
from autoplan.sharding.rule import Choice, InternalCollective, Rule
from autoplan.sharding.verify import verify_choice

__all__ = [
    "Choice", "InternalCollective", "LocalCall", "P", "Placement", "R", "Redistribution", "Refinement", "Rule", "S",
    "has_rule", "local_call", "redistribute", "redistribution", "refine", "register_rule",
    "replicated_ops", "rule_for", "tensor_operands", "verify_choice",
]  # fmt: skip

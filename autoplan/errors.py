"""Every exception autoplan raises on purpose.

AutoplanError                    anything autoplan raises on purpose
├── UserError (ValueError)       the caller can mend it; the message says how
│   ├── ClusterError             a device, link or cluster description is unknown or malformed
│   ├── ModelError               a model is unknown, or cannot be captured (names the user's source line)
│   ├── RuleError                a sharding rule does not parse or is refuted by its test
│   ├── BatchError               a batch that the plan's degrees do not divide (lists valid sizes)
│   ├── DegreeError              a degree that heads, layers or devices do not divide (lists valid degrees)
│   ├── InfeasibleError          nothing fits: names the binding resource and the cheapest way out
│   ├── PlanFileError            a plan file is damaged or of another schema
│   └── FingerprintError         a plan made for another model, shape or cluster (says what differs)
├── LegalityError                a rewrite pass broke an invariant (our bug; names the pass and the node)
└── RankError                    a rank died or timed out (carries its traceback)
"""

from autoplan.cost_models.errors import AutoplanError, ClusterError, UserError

__all__ = [
    "AutoplanError",
    "BatchError",
    "ClusterError",
    "DegreeError",
    "FingerprintError",
    "InfeasibleError",
    "LegalityError",
    "ModelError",
    "PlanFileError",
    "RankError",
    "RuleError",
    "UserError",
]


class ModelError(UserError):
    """A model is unknown, or cannot be captured."""


class RuleError(UserError):
    """A sharding rule does not parse, or its test refutes it."""


class BatchError(UserError):
    """A batch that the plan's degrees do not divide."""


class DegreeError(UserError):
    """A parallel degree that the model or the cluster does not divide by."""


class InfeasibleError(UserError):
    """No plan fits; the message names the binding resource and the cheapest way out."""


class PlanFileError(UserError):
    """A plan file is damaged or of another schema version."""


class FingerprintError(UserError):
    """A plan made for another model, shape or cluster."""


class LegalityError(AutoplanError):
    """A rewrite pass broke an invariant: a bug of ours, never the caller's."""


class RankError(AutoplanError):
    """A rank died or timed out; the message starts with its traceback."""

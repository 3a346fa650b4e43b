"""The root of autoplan's exceptions, and those that a cluster description can raise.

    AutoplanError                    anything autoplan raises on purpose
    └── UserError (ValueError)       the caller can mend it; the message says how
        └── ClusterError             a device, link, or cluster description is unknown or malformed

They live here because ``cost_models`` is the lowest room; ``autoplan.errors`` carries the rest of the tree.
"""


class AutoplanError(Exception):
    """Anything autoplan raises on purpose."""


class UserError(AutoplanError, ValueError):
    """Something the caller can mend; the message is an instruction."""


class ClusterError(UserError):
    """A device, a link or a cluster description is unknown or malformed."""

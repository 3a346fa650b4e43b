"""Examples have no deadline here: sympy's first look at an expression takes seconds on a machine that others share."""

from hypothesis import settings

settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")

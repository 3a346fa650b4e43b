"""From a captured graph and a plan to the graphs one rank runs."""

from autoplan.rewrite.passes import rewrite
from autoplan.rewrite.program import Coordinate, ParamSpec, StageProgram, ValueSpec
from autoplan.rewrite.redistribute import check_priced
from autoplan.rewrite.validate import require_valid

__all__ = ["Coordinate", "ParamSpec", "StageProgram", "ValueSpec", "check_priced", "require_valid", "rewrite"]

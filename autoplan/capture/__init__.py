"""From nn.Module to one joint forward+backward graph with symbolic sizes."""

from autoplan.capture.capture import capture, foldable
from autoplan.capture.fold import unfold
from autoplan.capture.graph import Graph, Sizes

__all__ = ["Graph", "Sizes", "capture", "foldable", "unfold"]

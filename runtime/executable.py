"""A stage program made ready to run: plain functions in the place of graphs, and what the runtime knows of them.

It needs no process group and holds no graph, so it can be made in one process and run in another that was forked from
it, which then holds neither the graphs nor what a rewrite leaves behind.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autoplan.rewrite.program import ParamSpec, StageProgram, ValueSpec
from autoplan.runtime.graphs import BoxedGraph, DeliveringGraph, boxed, delivering


@dataclass(frozen=True, kw_only=True)
class Executable:
    """Fields as those of ``StageProgram``."""

    groups: Mapping[str, str]  # axis to the name of the group that the functions call
    stage: int
    stages: int
    forward: BoxedGraph
    backward: DeliveringGraph
    weight: BoxedGraph | None
    params: tuple[ParamSpec, ...]
    buffers: tuple[str, ...]
    inputs: tuple[str, ...]
    activations: tuple[ValueSpec, ...]
    outputs: tuple[ValueSpec, ...]
    buffer_updates: tuple[str, ...]

    @classmethod
    def of(cls, program: StageProgram, groups: Mapping[str, str]) -> Executable:
        """``groups``: those that the program was rewritten for."""
        returned = sum(spec.grad for spec in program.activations)
        return cls(
            groups=dict(groups),
            stage=program.stage,
            stages=program.stages,
            forward=boxed(program.forward),
            backward=delivering(program.backward, returned),
            weight=None if program.weight is None else boxed(program.weight),
            params=program.params,
            buffers=program.buffers,
            inputs=program.inputs,
            activations=program.activations,
            outputs=program.outputs,
            buffer_updates=program.buffer_updates,
        )

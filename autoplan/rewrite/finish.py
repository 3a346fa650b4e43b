"""Pass 11: drop what nothing uses, and hand over the ``StageProgram``."""

from __future__ import annotations

import torch
from sympy import Integer
from torch import fx

from autoplan.capture.graph import TensorSpec
from autoplan.errors import LegalityError
from autoplan.rewrite.program import StageProgram, ValueSpec
from autoplan.rewrite.state import Crossing, State, boundary, operands, output_of, placement_of, specs_of

KEPT_META = ("value", "unit", "specs")


def finish(state: State, weight: fx.GraphModule | None) -> StageProgram:
    """Both graphs as modules, with what the runtime must know of their arguments and results."""
    pieces = state.pieces
    saved = [n for n in state.backward.nodes if n.op == "placeholder" and n.meta["saved"]]
    specs = tuple(_saved_spec(state, node) for node in saved)
    program = StageProgram(
        stage=state.stage,
        stages=state.plan.degrees.pipe,
        forward=as_module(state.forward, f"Stage{state.stage}Forward"),
        backward=as_module(state.backward, f"Stage{state.stage}Backward"),
        params=pieces.params,
        buffers=tuple(b.name for b in state.graph.buffers),
        inputs=tuple(i.path for i in state.graph.inputs),
        activations=tuple(_value_spec(state, c) for c in pieces.activations),
        outputs=tuple(_value_spec(state, c) for c in pieces.outputs),
        saved=specs,
        weight=weight,
        redistributions=state.redistributions,
        redistribution_layers=state.units,
        buffer_updates=state.updates,
    )
    check_program(program)
    return program


# Kernels that refuse what does not lie contiguous in memory. Eagerly they are called with copies where needed; a graph
# calls them with whatever a fake tensor looked like.
_WANT_CONTIGUOUS = {torch.ops.aten.native_group_norm.default, torch.ops.aten.native_group_norm_backward.default}


def as_module(graph: fx.Graph, name: str) -> fx.GraphModule:
    """``graph``, without dead code and without the notes of the passes, as a module that holds nothing but code."""
    graph.eliminate_dead_code(is_impure_node=lambda n: n.op in ("placeholder", "output"))
    for node in [n for n in graph.nodes if n.target in _WANT_CONTIGUOUS]:
        for operand in node.all_input_nodes:
            with graph.inserting_before(node):
                contiguous = graph.call_function(torch.ops.aten.contiguous.default, (operand,))
            contiguous.meta = {key: node.meta[key] for key in KEPT_META if key in node.meta}
            node.replace_input_with(operand, contiguous)
    for node in graph.nodes:
        node.meta = {key: node.meta[key] for key in KEPT_META if key in node.meta}
    graph.lint()
    return fx.GraphModule(torch.nn.Module(), graph, class_name=name)


def _value_spec(state: State, crossing: Crossing) -> ValueSpec:
    spec = specs_of(state.graph.node(crossing.value))[0]
    return ValueSpec(
        name=crossing.value,
        shape=crossing.placement.local_shape(spec.at(state.sizes), state.tensor),
        dtype=spec.dtype,
        placement=crossing.placement,
        grad=bool(crossing.gradient),
    )


def _saved_spec(state: State, node: fx.Node) -> TensorSpec:
    spec = specs_of(node)[0]
    local = placement_of(node).local_shape(spec.at(state.sizes), state.tensor)
    return TensorSpec(shape=tuple(Integer(d) for d in local), hint=local, dtype=spec.dtype)


def check_program(program: StageProgram) -> None:
    """The graphs take and return as many tensors as the calling convention says, and hold no state."""
    held = len(program.params) + len(program.buffers) + len(program.inputs)
    gradients = sum(v.grad for v in program.outputs)
    expected = {
        "forward": (
            program.forward,
            held + len(program.activations),
            len(program.outputs) + len(program.saved) + len(program.buffer_updates),
        ),
        "backward": (
            program.backward,
            held + len(program.saved) + gradients,
            sum(v.grad for v in program.activations) + sum(p.trainable for p in program.params),
        ),
    }
    for name, (module, takes, returns) in expected.items():
        nodes = list(module.graph.nodes)
        for node in nodes:
            if node.op not in ("placeholder", "call_function", "output") or node.target is boundary:
                raise LegalityError(f"finish: {name} has the node {node.name} ({node.op} {node.target})")
        found = sum(n.op == "placeholder" for n in nodes), len(operands(output_of(module.graph)))
        if found != (takes, returns):
            raise LegalityError(
                f"finish: {output_of(module.graph).name} of {name} takes and returns {found}, not {(takes, returns)}"
            )

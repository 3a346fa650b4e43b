"""Hand-made stage programs, so that the runtime is tested without capture and rewrite: a two-layer network,

    h = tanh(x @ w1.T + b1)      (batch, hidden)
    y = h @ w2.T + b2            (batch, classes)
    loss = mean over labels >= 0 of -log_softmax(scale * y)[label]

with w1, b1 cut by rows and w2 by columns on the tensor axis (in ``blocks`` blocks), the gradient of b2 left partial.
Tied, w1 is used in both layers: y = h @ w1 + b2.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn

from autoplan.capture.graph import InputInfo, TensorSpec
from autoplan.plans import Degrees, Fingerprint, LayerPlan, Plan, Strategy
from autoplan.rewrite.program import ParamSpec, StageProgram, ValueSpec
from autoplan.runtime.collectives import all_gather_rows, reduce_scatter_rows
from autoplan.runtime.executable import Executable
from autoplan.runtime.mesh import Axes, build_axes
from autoplan.runtime.params import ParamStore, module_source
from autoplan.runtime.pieces import cut
from autoplan.runtime.step import TrainStep
from autoplan.sharding.placement import R, S

FEATURES = 3
GROUPS: dict[str, dist.ProcessGroup] = {}  # the wrapped functions below find their groups here


class Net(nn.Module):
    def __init__(self, hidden: int = 8, classes: int = 6, tied: bool = False, dtype: torch.dtype = torch.float64):
        super().__init__()
        torch.manual_seed(0)
        self.tied = tied
        self.w1 = nn.Parameter(torch.randn(hidden, FEATURES, dtype=dtype))
        self.b1 = nn.Parameter(torch.randn(hidden, dtype=dtype))
        if not tied:
            self.w2 = nn.Parameter(torch.randn(classes, hidden, dtype=dtype))
        self.b2 = nn.Parameter(torch.randn(FEATURES if tied else classes, dtype=dtype))
        self.scale = nn.Parameter(torch.tensor(0.7, dtype=dtype))
        self.register_buffer("shift", torch.tensor(0.1, dtype=dtype))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        h = torch.tanh(x @ self.w1.T + self.b1 + self.shift)
        y = (h @ self.w1 if self.tied else h @ self.w2.T) + self.b2
        return nn.functional.cross_entropy(self.scale * y, labels, ignore_index=-100)


@fx.wrap
def gather(shard: Tensor, rows: int) -> Tensor:
    whole = shard.new_empty(rows, *shard.shape[1:])
    all_gather_rows([shard], [whole], GROUPS["data"])
    return whole


@fx.wrap
def scatter(gradient: Tensor) -> Tensor:
    return reduce_scatter_rows([gradient], GROUPS["data"])[0]


@fx.wrap
def sum_tensor(x: Tensor) -> Tensor:
    x = x.clone()
    dist.all_reduce(x, group=GROUPS["tensor"])
    return x


@fx.wrap
def share_of_rows(x: Tensor) -> Tensor:
    """Zero but for this tensor rank's rows: over the ranks they add up to ``x``."""
    group = GROUPS["tensor"]
    kept = torch.zeros_like(x)
    own = torch.arange(dist.get_rank(group), x.shape[0], group.size())
    kept[own] = x[own]
    return kept


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to run ``Net``."""

    degrees: Degrees = field(default_factory=Degrees)
    zero: int = 0
    hidden: int = 8
    classes: int = 6
    blocks: int = 1
    tied: bool = False
    micro_batch: int = 2
    micro_batches: int = 2
    schedule: str = "1f1b"
    precision: str = "fp64"
    weighted: bool = True
    moving: bool = False  # each forward multiplies ``shift`` by 1.5

    @property
    def rows(self) -> int:
        return self.degrees.data * self.micro_batch * self.micro_batches

    @property
    def dtype(self) -> torch.dtype:
        return {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}[self.precision]

    def model(self) -> Net:
        return Net(self.hidden, self.classes, self.tied, torch.float64 if self.precision == "fp64" else torch.float32)

    def batch(self, step: int) -> dict[str, Tensor]:
        maker = torch.Generator().manual_seed(100 + step)
        x = torch.randn(self.rows, FEATURES, generator=maker, dtype=torch.float64)
        labels = torch.randint(0, FEATURES if self.tied else self.classes, (self.rows,), generator=maker)
        if self.weighted:  # unequal counts; the first micro-batch has none at all
            labels[torch.rand(self.rows, generator=maker) < 0.4] = -100
            labels[: self.micro_batch] = -100
            labels[-1] = 0
        return {"x": x.to(self.model().w1.dtype), "labels": labels}

    def plan(self) -> Plan:
        return Plan(
            fingerprint=Fingerprint(
                model="m",
                model_name="m",
                global_batch=self.degrees.data * self.micro_batch * self.micro_batches,
                seq=1,
                cluster="c",
                cluster_name="c",
            ),
            degrees=self.degrees,
            micro_batch=self.micro_batch,
            micro_batches=self.micro_batches,
            schedule=self.schedule,  # type: ignore[arg-type]
            precision=self.precision,  # type: ignore[arg-type]
            cuts=tuple(range(self.degrees.pipe)),
            layers=(LayerPlan(strategy="s"), LayerPlan(strategy="s")),
            strategies=(
                Strategy(key="s", class_id="c", kind="k", choices=(), params=(), boundary_in=(), boundary_out=()),
            ),
        )

    def inputs(self) -> tuple[InputInfo, ...]:
        spec = TensorSpec(shape=(), hint=(), dtype=torch.float32)
        return tuple(InputInfo(path=p, placeholder=p, spec=spec, batch_dim=0) for p in ("x", "labels"))

    def specs(self, stage: int) -> tuple[ParamSpec, ...]:
        tensor = self.degrees.tensor > 1
        rows, columns = (S(0, self.blocks), S(1, self.blocks)) if tensor else (R, R)
        last_rows = FEATURES if self.tied else self.classes
        both = self.tied and self.degrees.pipe == 2
        known = {
            "w1": ((self.hidden, FEATURES), rows, False, (1 - stage,) if both else ()),
            "b1": ((self.hidden,), rows, False, ()),
            "w2": ((self.classes, self.hidden), columns, False, ()),
            "b2": ((last_rows,), R, tensor, ()),
            "scale": ((), R, False, ()),
        }
        names = ["w1", "b1"] if stage == 0 else []
        if stage == self.degrees.pipe - 1:
            names += ["w1"] if both else [] if self.tied else ["w2"]
            names += ["b2", "scale"]
        return tuple(
            ParamSpec(
                name=name,
                shape=known[name][0],
                dtype=self.dtype,
                trainable=True,
                tensor=known[name][1],
                zero=self.zero if known[name][0] else 0,
                layer=0,
                deferred=known[name][2],
                tied_stages=known[name][3],
            )
            for name in names
        )

    def program(self, axes: Axes) -> StageProgram:
        stage, pipe, tensor = axes.coordinate.pipe, self.degrees.pipe, self.degrees.tensor > 1
        specs = self.specs(stage)
        first, last = stage == 0, stage == pipe - 1
        position = {spec.name: i for i, spec in enumerate(specs)}
        pieces = {s.name: s.tensor.local_shape(s.shape, self.degrees.tensor) for s in specs}
        two = "w1" if self.tied else "w2"

        def whole(params: Any, name: str) -> Any:
            value = params[position[name]]
            return gather(value, pieces[name][0]) if self.zero == 3 and pieces[name] else value

        def out(gradient: Any, name: str) -> Any:
            return scatter(gradient) if self.zero >= 2 and pieces[name] else gradient

        def update(shift: Any) -> tuple[Any, ...]:
            return (shift * 1.5,) if self.moving else ()

        def forward(*args: Any) -> Any:
            params, (shift, x, labels), rest = (
                args[: len(specs)],
                args[len(specs) : len(specs) + 3],
                args[len(specs) + 3 :],
            )
            h = (
                torch.tanh(x.to(self.dtype) @ whole(params, "w1").t() + whole(params, "b1") + shift)
                if first
                else rest[0]
            )
            if not last:
                return h, (labels >= 0).to(torch.int64), h, *update(shift)
            y = h @ (whole(params, two) if self.tied else whole(params, two).t())
            y = (sum_tensor(y) if tensor else y) + whole(params, "b2")
            log_p = torch.log_softmax(params[position["scale"]] * y, dim=1)
            counts = ((labels >= 0) if first else rest[1]).to(log_p.dtype)
            picked = log_p.gather(1, labels.clamp(min=0).unsqueeze(1)).squeeze(1)
            loss = -(picked * counts).sum() / counts.sum()
            return loss, h, y, log_p, *(update(shift) if first else ())

        def backward(*args: Any) -> Any:
            params, (_, x, labels), rest = args[: len(specs)], args[len(specs) : len(specs) + 3], args[len(specs) + 3 :]
            found: dict[str, Any] = {}
            if last:
                h, y, log_p, tangent = rest
                counts = (labels >= 0).to(log_p.dtype)
                one_hot = torch.nn.functional.one_hot(labels.clamp(min=0), pieces["b2"][0]).to(log_p.dtype)
                share = torch.where(labels >= 0, tangent / counts.sum(), 0.0).to(log_p.dtype)
                d_scaled = (log_p.exp() - one_hot) * share.unsqueeze(1)
                found["scale"] = (d_scaled * y).sum()
                dy = d_scaled * params[position["scale"]]
                found["b2"] = out((share_of_rows(dy) if tensor else dy).sum(0), "b2")
                w = whole(params, two)
                d_two = h.t() @ dy if self.tied else dy.t() @ h
                dh = dy @ (w.t() if self.tied else w)
                if not (self.tied and first):
                    found[two] = out(d_two, two)
            else:
                h, dh = rest
            if first:
                dz = dh * (1 - h * h)
                dw = dz.t() @ x.to(self.dtype)
                found["w1"] = out(dw + d_two if self.tied and last else dw, "w1")
                found["b1"] = out(dz.sum(0), "b1")
            return tuple([] if first else [dh]) + tuple(found[s.name] for s in specs)

        local_hidden = self.hidden // self.degrees.tensor
        boundary = ValueSpec(
            name="h", shape=(self.micro_batch, local_hidden), dtype=self.dtype, placement=S(1, self.blocks)
        )
        counts = ValueSpec(name="counts", shape=(self.micro_batch,), dtype=torch.int64, placement=R, grad=False)
        loss = ValueSpec(name="loss", shape=(), dtype=self.dtype, placement=R)
        count = len(specs) + 3
        return StageProgram(
            stage=stage,
            stages=pipe,
            forward=traced(forward, count + (0 if first else 2)),
            backward=traced(backward, count + (4 if last else 2)),
            params=specs,
            buffers=("shift",),
            inputs=("x", "labels"),
            activations=() if first else (boundary, counts),
            outputs=(loss,) if last else (boundary, counts),
            saved=(),
            weight=traced(lambda x, labels: (labels >= 0).sum(), 2) if self.weighted else None,
            redistributions=(),
            buffer_updates=("shift",) if self.moving and first else (),
        )

    def step(self, axes: Axes, **options: Any) -> TrainStep:
        program = Executable.of(self.program(axes), axes.group_names)
        store = ParamStore(program, axes, module_source(self.model()))
        return TrainStep(program, store, self.plan(), axes, self.inputs(), **options)


def traced(function: Any, arguments: int) -> fx.GraphModule:
    """``function`` of so many tensors as a graph."""
    tracer = fx.Tracer()
    names = [f"a{i}" for i in range(arguments)]
    scope: dict[str, Any] = {"function": function}
    exec(f"def call({', '.join(names)}): return function({', '.join(names)})", scope)
    graph = tracer.trace(scope["call"])
    return fx.GraphModule(tracer.root, graph)


def axes_for(case: Case) -> Axes:
    axes = build_axes(case.degrees, torch.device("cpu"), 60.0)
    GROUPS.update(axes.groups)
    return axes


@dataclass(frozen=True, kw_only=True)
class Reference:
    """What one process does with the whole batch."""

    losses: list[float]
    norms: list[float]
    params: dict[str, Tensor]
    grads: dict[str, Tensor]  # of the last step, after clipping


def reference(case: Case, steps: int, max_norm: float | None, make: Any = None) -> Reference:
    model = case.model()
    optimizer = make(list(model.parameters())) if make else torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, norms = [], []
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(**case.batch(step))
        loss.backward()
        limit = float("inf") if max_norm is None else max_norm
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), limit)))
        optimizer.step()
        losses.append(float(loss.detach()))
    named = dict(model.named_parameters())
    return Reference(
        losses=losses,
        norms=norms,
        params={n: p.detach().clone() for n, p in named.items()},
        grads={n: p.grad.clone() for n, p in named.items() if p.grad is not None},
    )


def adamw(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2)


def assert_like(
    case: Case, axes: Axes, steps: int = 5, max_norm: float | None = 0.05, tolerance: float = 1e-12
) -> None:
    """Run ``case`` and compare losses, norms, the last gradients and the parameters with one process."""
    wanted = reference(case, steps, max_norm)
    step = case.step(axes, optimizer=adamw, max_norm=max_norm)
    grads: dict[str, Tensor] = {}

    def keep(*_: object) -> None:
        for held, master in step.store.trainable:
            assert master.grad is not None
            grads[held.spec.name] = step.store.full_tensor(held, master.grad).clone()

    step.optimizer.register_step_pre_hook(keep)
    for index in range(steps):
        loss = float(step(case.batch(index)))
        assert abs(loss - wanted.losses[index]) < tolerance * 10, (case, index, loss, wanted.losses[index])
        assert step.last_grad_norm is not None
        assert abs(step.last_grad_norm - wanted.norms[index]) < tolerance * 10, (case, index, step.last_grad_norm)
    for name, grad in grads.items():
        torch.testing.assert_close(grad, wanted.grads[name], rtol=0, atol=tolerance)
    for name, value in step.store.full_state_dict().items():
        if name in wanted.params:
            torch.testing.assert_close(value, wanted.params[name], rtol=0, atol=tolerance)
    for held in step.store.params:  # what graphs see next is what the optimizer left
        if held.spec.zero < 3:
            full = wanted.params[held.spec.name]
            piece = cut(full, held.spec.tensor, case.degrees.tensor, axes.coordinate.tensor)
            torch.testing.assert_close(held.value, piece, rtol=0, atol=tolerance)

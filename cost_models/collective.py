"""How long a collective takes: latency plus bytes over bandwidth, with a ring inside a node and a level across nodes.

Every algorithm costs ``alpha_us + beta_us_per_byte * size_bytes``; the time is that of the cheapest algorithm. For
``n`` members on ``k`` nodes, ``p`` per node, links with latency ``L1`` and rate ``B1`` inside a node and ``L2``, ``B2``
(per device) between nodes:

    ring          all_gather, reduce_scatter: (n-1)/n of the data past the slowest cut; all_reduce is both, one after
                  the other (Patarasuk & Yuan 2009). One ring per device crosses a node boundary through its own network
                  card, so the cut between nodes has rate p*B2. A chunk makes n-1 hops, k-1 of them between nodes.
    hierarchical  reduce_scatter in the node, all_reduce of 1/p of the data across nodes, all_gather in the node: k-1
                  long hops as well but only p-1 short ones (instead of n-k), and phases that do not overlap.
    tree          all_reduce: up and down a pair of binary trees over the nodes, a chain inside each (Sanders, Speck,
                  Träff 2009); log2(k) long hops, all the data through every node.
    pairwise      all_to_all: every pair exchanges directly; Bruck: log2(n) rounds of half the data (both, and the
                  latency-bandwidth model itself, in Thakur, Rabenseifner, Gropp 2005).
    chain         broadcast: pipelined along the ring; binomial: log2 rounds of the whole message (Thakur et al.).

    measured      ``Cluster.collectives``: latency and rates of this kind in this very group replace all of the above.
                  In a group of another shape the nearest measured group of the same level (inside a node or across
                  nodes) is scaled, in latency and in rate, as the model changes from that group to this one.

Not modelled: reductions inside a switch (NVLS, SHARP), and contention with other groups except through ``B2`` being a
per-device share. ``size_bytes`` is always the whole tensor that the group works on, for each kind:

    all_reduce      the tensor, of the same size on every member
    all_gather      the gathered result          reduce_scatter   the unscattered input
    all_to_all      one member's whole buffer    broadcast, send  the message
"""

import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import sympy

from autoplan.cost_models.cluster import Cluster
from autoplan.cost_models.collective_fit import KINDS, CollectiveFit
from autoplan.cost_models.errors import ClusterError
from autoplan.cost_models.fields import nearest
from autoplan.cost_models.mesh import GroupShape


@dataclass(frozen=True, kw_only=True, slots=True)
class Algorithm:
    """One way to run a collective, costing ``alpha_us + beta_us_per_byte * size_bytes``."""

    name: str
    alpha_us: float
    beta_us_per_byte: float

    def time_us(self, size_bytes: Any) -> Any:
        return self.alpha_us + self.beta_us_per_byte * size_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """A fit, with its latency and its transfer scaled for a group of another shape."""

    fit: CollectiveFit
    latency: float = 1.0
    transfer: float = 1.0

    def time_us(self, size_bytes: Any) -> Any:
        return self.fit.latency_us * self.latency + self.fit.transfer_us(size_bytes) * self.transfer


@functools.lru_cache(maxsize=65536)
def collective_algorithms(kind: str, group: GroupShape, cluster: Cluster) -> tuple[Algorithm | Measured, ...]:
    """The algorithms that are cheapest at some size, from the smallest sizes to the largest; or what was measured."""
    if kind not in KINDS:
        raise ClusterError(f"no collective is called {kind!r}; {nearest(kind, KINDS)}")
    if group.size == 1:
        return (Algorithm(name="none", alpha_us=0.0, beta_us_per_byte=0.0),)
    fit = _nearest_fit(kind, group, cluster)
    return _modelled(kind, group, cluster) if fit is None else (_scaled(fit, group, cluster),)


def _modelled(kind: str, group: GroupShape, cluster: Cluster) -> tuple[Algorithm, ...]:
    """By links and launch cost alone."""
    launch_us = cluster.device.collective_launch_us
    costs = {name: (alpha + launch_us, beta) for name, alpha, beta in _candidates(kind, group, cluster)}
    return _lower_envelope(costs)


def _nearest_fit(kind: str, group: GroupShape, cluster: Cluster) -> CollectiveFit | None:
    """The measured group of this kind and level whose shape is nearest, by the factor between them."""
    level = "intra" if group.nodes == 1 else "inter"
    fits = [fit for fit in cluster.collectives if (fit.kind, fit.level) == (kind, level)]

    def distance(fit: CollectiveFit) -> float:
        members, per_node = fit.shape
        return abs(math.log(group.size / members)) + abs(math.log(group.per_node / per_node))

    return min(fits, key=distance, default=None)


def _scaled(fit: CollectiveFit, group: GroupShape, cluster: Cluster) -> Measured:
    """The fit as it stands for its own group; for another, latency and rate change as in the model."""
    here = _modelled(fit.kind, group, cluster)
    there = _modelled(fit.kind, GroupShape(size=fit.shape[0], per_node=fit.shape[1]), cluster)
    # Latency is that of the smallest messages, rate that of the largest.
    latency = here[0].alpha_us / there[0].alpha_us if there[0].alpha_us else 1.0
    rate = here[-1].beta_us_per_byte / there[-1].beta_us_per_byte
    return Measured(fit=fit, latency=latency, transfer=rate)


def _candidates(kind: str, group: GroupShape, cluster: Cluster) -> list[tuple[str, float, float]]:
    """(name, alpha without launch, beta) of each algorithm for this kind."""
    n, p, k = group.size, group.per_node, group.nodes
    short_us, long_us = cluster.intra.latency_us, cluster.inter.latency_us
    # us per byte through one device's links; infinite rate (0) where the group does not use that level
    intra = 1 / cluster.intra.group_bytes_per_us(p) if p > 1 else 0.0
    inter = 1 / cluster.inter.bytes_per_us if k > 1 else 0.0
    cut = max(intra, inter / p)  # the slowest cut that a ring crosses
    hops_us = (n - k) * short_us + (k - 1) * long_us
    levels_us = (p - 1) * short_us + (k - 1) * long_us
    ring_share, intra_share, inter_share = (n - 1) / n, (p - 1) / p, (k - 1) / k
    one_pass = ("ring", hops_us, ring_share * cut)
    two_level = ("hierarchical", levels_us, intra_share * intra + inter_share * inter / p)
    if kind in ("all_gather", "reduce_scatter"):
        return [one_pass, two_level]
    if kind == "all_reduce":
        tree_us = 2 * ((p - 1) * short_us + math.ceil(math.log2(k)) * long_us)
        return [
            ("ring", 2 * one_pass[1], 2 * one_pass[2]),
            ("hierarchical", 2 * two_level[1], 2 * two_level[2]),
            ("tree", tree_us, 2 * cut),
        ]
    if kind == "all_to_all":
        # A direct exchange uses pair links; across nodes each device sends through its own card.
        direct = max((p - 1) / n * intra, (n - p) / n * inter)
        rounds = math.ceil(math.log2(n))
        slowest_us, slowest = (long_us, inter) if k > 1 else (short_us, intra)
        return [
            ("pairwise", (p - 1) * short_us + (n - p) * long_us, direct),
            ("hierarchical", levels_us, intra_share * intra + inter_share * inter),
            ("bruck", rounds * slowest_us, rounds / 2 * slowest),
        ]
    if kind == "broadcast":
        deep_us = math.ceil(math.log2(p)) * short_us + math.ceil(math.log2(k)) * long_us
        deep = math.ceil(math.log2(p)) * intra + math.ceil(math.log2(k)) * inter
        return [("chain", hops_us, cut), ("binomial", deep_us, deep)]
    link = cluster.inter if k > 1 else cluster.intra
    return [("send", link.latency_us, 1 / link.pair_bytes_per_us)]


def _lower_envelope(costs: dict[str, tuple[float, float]]) -> tuple[Algorithm, ...]:
    """The lines that are lowest somewhere on size >= 0, by growing size; ties go to the first named."""
    chosen: list[Algorithm] = []
    start = 0.0
    while True:
        # The next line takes over where it first undercuts the current one.
        if not chosen:
            name = min(costs, key=lambda item: costs[item])
        else:
            alpha, beta = chosen[-1].alpha_us, chosen[-1].beta_us_per_byte
            later = {item: (a - alpha) / (beta - b) for item, (a, b) in costs.items() if b < beta}
            if not later:
                return tuple(chosen)
            name = min(later, key=lambda item: (later[item], costs[item][1]))
            start = later[name]
            assert start >= 0, "the first line has the least alpha"
        chosen.append(Algorithm(name=name, alpha_us=costs[name][0], beta_us_per_byte=costs[name][1]))


def collective_time_us(kind: str, size_bytes: Any, group: GroupShape, cluster: Cluster) -> Any:
    """Time of one collective in microseconds; see the module docstring for what ``size_bytes`` is.

    ``size_bytes`` may be a number, a numpy array or a sympy expression; the result is of the same sort.
    """
    times = [algorithm.time_us(size_bytes) for algorithm in collective_algorithms(kind, group, cluster)]
    if isinstance(size_bytes, sympy.Basic):
        return sympy.Min(*times)
    if isinstance(size_bytes, np.ndarray):
        return np.minimum.reduce(np.asarray(times))
    return min(times)

"""The stage program's answer by trying everything: a reference for tests, of any use only on a handful of layers.

It shares with the program nothing but the step model: cuts come from ``combinations``, the layers of one run on one
stage from ``combinations_with_replacement`` (sorted by boundary placement, as in the program's space), and every plan
is priced whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, combinations_with_replacement, pairwise, product

from autoplan.plans import Estimate, Proof
from autoplan.search.chain import Chain
from autoplan.search.layer_row import Row, Setting
from autoplan.search.rows import Agreement, group_key
from autoplan.search.step_model import price_layers


def brute_force(
    chain: Chain, rows: Mapping[str, Sequence[Row]], setting: Setting, agreements: Sequence[Agreement]
) -> tuple[Estimate, tuple[Row, ...], tuple[int, ...]] | None:
    """The fastest plan that fits, with its rows and cuts; None if none does."""
    best: tuple[Estimate, tuple[Row, ...], tuple[int, ...]] | None = None
    by_group = {class_id: sorted(table, key=group_key) for class_id, table in rows.items()}
    for inner in combinations(range(1, len(chain.depth)), setting.degrees.pipe - 1):
        cuts = (0, *inner)
        for layers in _assignments(chain, by_group, cuts):
            if not all(len({key for row in layers for key in agreed.of(row)}) <= 1 for agreed in agreements):
                continue
            estimate = price_layers(layers, cuts, chain, setting, Proof(status="optimal", solver="brute force"))
            if estimate.fits and (best is None or estimate.step_us < best[0].step_us):
                best = (estimate, layers, cuts)
    return best


def _assignments(chain: Chain, rows: Mapping[str, Sequence[Row]], cuts: tuple[int, ...]) -> Iterator[tuple[Row, ...]]:
    """Rows for every layer; each piece of a run within a stage takes a multiset of its class's rows."""
    edges = sorted({*cuts, *(run.first for run in chain.runs), len(chain.depth)})
    pieces = [combinations_with_replacement(rows[chain.depth[first]], end - first) for first, end in pairwise(edges)]
    for choice in product(*pieces):
        yield tuple(row for piece in choice for row in piece)

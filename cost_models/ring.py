"""A matmul taken apart into the hops of a ring (``kernels/ring.py``): one product hides one hop.

With n ranks, a hop of h and a product of one chunk of m, slowed to m (1 + s) while a hop is in flight:

    gather then multiply      n products, n - 1 of them beside a hop:          (n - 1) max(h, m (1 + s)) + m
    multiply then scatter     the first product alone, n - 1 beside a hop:     m + (n - 1) max(h, m (1 + s))

which is the same. What is left of a hop behind its product is waited for.
"""


def ring_matmul_us(ranks: int, hop_us: float, product_us: float, comm_slowdown: float = 0.0) -> float:
    """Time of a ring product of ``ranks`` chunks, each multiplied in ``product_us`` and moved in ``hop_us``."""
    return product_us + (ranks - 1) * max(hop_us, product_us * (1 + comm_slowdown))

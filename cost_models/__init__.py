"""Seconds and bytes: the hardware catalogue and the models of compute, collectives, memory and pipelines.

Lowest room of the house: imports the standard library, numpy, sympy and networkx, never torch. Units stand in names:
``time_us``, ``size_bytes``, ``bandwidth_gbps`` (1e9 bytes/s), ``flops`` (floating-point operations, not a rate).
"""

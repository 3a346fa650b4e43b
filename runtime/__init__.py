"""Runs a rewritten plan on real ranks.

Terms
-----
*piece*    what one rank of the tensor axis has of a parameter: the tensor cut by its ``Placement``.
*shard*    the rows of a piece (dim 0, torch.chunk's sizes, the last may be short or empty) that one rank of the data
           axis has.
*value*    the tensor a graph gets for a parameter: the piece, or with zero 3 the shard.
*master*   the tensor the optimizer updates: the piece, or with zero 1 to 3 the shard; float32 where the value is
           bfloat16.
*whole*    not cut over the data axis: zero 0, or a parameter without dims, or one not trained (zero 1, 2).

Order of a step (``step.py``): cut the batch, weigh the losses, run the schedule, sum gradients, clip, update, publish
the new values. One file for each: ``mesh``, ``params``, ``precision``, ``graphs``, ``executable`` (a rank's program as
plain functions), ``schedule``, ``passage``, ``gradients``, ``clip``, ``optimizer``, ``step``, ``checkpoint``,
``launch``; ``pieces`` and ``collectives`` hold what they share.
"""

import autoplan.kernels.ops  # noqa: F401 -- registers the fused operators that rewritten graphs call

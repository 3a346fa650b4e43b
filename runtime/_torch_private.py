"""The private names of torch that a dry run stands on, in one place. Known good: torch 2.13.

- ``TorchDispatchMode``: sees every ATen call;
- ``FakeStore``: lets a process group be made without the other ranks;
- a process group written in Python: ``dist.ProcessGroup`` may be subclassed, and ``register_backend`` takes it.
"""

from __future__ import annotations

from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["FakeStore", "TorchDispatchMode"]

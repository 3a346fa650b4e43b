"""Models by name: what ``MODEL`` on the command line may be, turned into something that can be built and fed.

gpt3-175b                  a shipped architecture (``data/*.json``; every file says where its figures come from)
path/to/config.json        a Hugging Face configuration; its code must ship with transformers, nothing is downloaded
package.module:factory     a function that returns a module, or (module, batch function)
"""

from autoplan.models.load import load
from autoplan.models.shipped import shipped_names
from autoplan.models.spec import ModelSpec

__all__ = ["ModelSpec", "load", "shipped_names"]

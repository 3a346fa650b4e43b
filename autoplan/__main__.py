"""``python -m autoplan``, for where the script is not on the path (``torchrun -m autoplan run plan.json``)."""

from autoplan.cli import main

if __name__ == "__main__":
    main()

"""Scripts that measure flashgen, and the package `suite` that `gpu.py` and `report.py` run."""

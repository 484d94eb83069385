"""Functions over numpy arrays that generated code calls, one module per group of instructions."""

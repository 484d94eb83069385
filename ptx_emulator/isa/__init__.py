"""The instructions, one module per family: what registers them, and the functions they call."""

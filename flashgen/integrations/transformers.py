"""Hugging Face transformers: the public names of `flashgen.frontends.transformers`."""

from flashgen.frontends.transformers import context_parallel, operators, register

__all__ = ["context_parallel", "operators", "register"]

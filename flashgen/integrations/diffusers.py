"""Hugging Face diffusers: the public names of `flashgen.frontends.diffusers`."""

from flashgen.frontends.diffusers import operators, register, unregister

__all__ = ["operators", "register", "unregister"]

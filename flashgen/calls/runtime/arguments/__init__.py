"""The arguments of a call: which variant of the spec computes it, and whether they are right."""

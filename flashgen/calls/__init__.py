"""One call of an operator: arguments, backends, launches, autograd; exports and what they run."""

"""What every stage knows: errors, dtypes, architectures, code paths, and the values of a call."""

"""The part that every stage uses: errors, dtypes, architectures, code paths, values of a call."""

"""From Python to what a mask and a score are: the language, and its analysis."""

"""Emitters: one function per opcode that writes the Python code of an instruction."""

"""PTX text as data: lexer, parser, inlined calls, control flow and liveness of a kernel."""

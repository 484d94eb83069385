"""How a launch covers its work tiles: blocks, their order, and heads that share a tile."""

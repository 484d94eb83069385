"""Pictures of masks: `visualize` gives the tile map of a mask, for notebooks and terminals."""

from flashgen.pictures.api import visualize
from flashgen.pictures.element_map import ElementMap
from flashgen.pictures.tile_map import HeadTiles, TileMap

__all__ = ["ElementMap", "HeadTiles", "TileMap", "visualize"]

"""What people look at: tile maps of masks, and reports of calls as pages.

`visualize` makes a tile map, `collect` and `report_page` gather the values of a page, and `render`
makes one HTML document of them. Modules are imported where they are needed: few calls need any.
"""

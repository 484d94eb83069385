"""The PTX emulator, `ptx_emulator`, under its public name in flashgen."""

from ptx_emulator import *  # noqa: F403
from ptx_emulator import __all__ as __all__

"""``flashgen build-native``: the native part of calls, compiled for this torch and this Python."""

from __future__ import annotations

import time

from flashgen.shared import config
from flashgen.tools.cli.arguments import BuildNativeArguments
from flashgen.tools.cli.console import busy, say


def build_native(_: BuildNativeArguments) -> None:
    """Compiles it where it is not there yet; prints its file and the time."""
    with busy("loading torch"):
        from flashgen.calls.native import build

    file = build.path()
    if file is not None and not build.missing():
        say(f"{file} is there already")
        return
    start = time.perf_counter()
    with busy("compiling native.cpp, about half a minute"):
        built_file = build.build()
    say(f"{built_file} in {time.perf_counter() - start:.1f} s")
    if not config.native():
        say("FLASHGEN_NATIVE is 0: calls are made in Python nevertheless")

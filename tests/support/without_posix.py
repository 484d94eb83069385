"""Windows as far as it can be had here: flashgen and the emulator see no name that only POSIX has.

Other packages still see this machine, since their Windows is not what is tested.
"""

from __future__ import annotations

import builtins
import importlib
import sys
from types import ModuleType
from typing import Any

OURS = ("flashgen", "ptx_emulator")
MISSING = {
    "mmap": "MAP_ANONYMOUS MAP_PRIVATE MAP_SHARED PROT_READ PROT_WRITE",
    "os": "O_DIRECTORY O_NOFOLLOW O_NONBLOCK chown fchmod fork getegid geteuid getgid getuid "
    "killpg lchown mkfifo posix_spawn sched_getaffinity setpgid setsid symlink uname wait4",
    "signal": "ITIMER_REAL SIGALRM SIGHUP SIGKILL SIGPIPE SIGUSR1 alarm pause setitimer",
    "sys": "abiflags getdlopenflags setdlopenflags",
}
NO_MODULE = {"crypt", "curses", "fcntl", "grp", "posix", "pty", "pwd", "resource", "termios", "tty"}
OTHERWISE = {"os": {"name": "nt"}, "sys": {"platform": "win32"}}


class _Seen(ModuleType):
    """A module of the standard library as flashgen sees it."""

    def __init__(self, real: ModuleType) -> None:
        super().__init__(real.__name__)
        self.__dict__.update(OTHERWISE.get(real.__name__, {}), _real=real)

    def __getattr__(self, name: str) -> Any:
        if name in MISSING[self.__name__].split():
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}", name=name)
        return getattr(self._real, name)


def hide() -> None:
    """From now on, modules of flashgen that are imported see Windows.

    Raises:
        RuntimeError: flashgen is imported already.
    """
    if any(name.split(".")[0] in OURS for name in sys.modules):
        raise RuntimeError("flashgen was imported before, with the names of this system")
    seen = {name: _Seen(importlib.import_module(name)) for name in MISSING}
    real_import = builtins.__import__

    def import_(
        name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0
    ) -> Any:
        found = real_import(name, globals, locals, fromlist, level)
        importer = str((globals or {}).get("__name__", "")).split(".")[0]
        if importer not in OURS or level:
            return found
        if name.split(".")[0] in NO_MODULE:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return seen.get(name, found)

    builtins.__import__ = import_

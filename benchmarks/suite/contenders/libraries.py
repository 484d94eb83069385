"""The packages of peers that a machine may lack: their versions, and stand-ins for a dry run."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch

from benchmarks.suite.device import Device, first_line
from flashgen.version import __version__

NOT_INSTALLED = "not installed"


@dataclass(frozen=True)
class Library:
    """A package that brings kernels.

    Attributes:
        package: its name in package indexes, whose metadata has the version.
        module: the module that is imported.
        fake: the module of `benchmarks.suite.contenders.fakes` that has the same functions for
            CPU tensors, in a dry run; empty where the package runs there.
    """

    package: str
    module: str
    fake: str = ""

    @property
    def text(self) -> str:
        """Name and version, for records."""
        return named(self.package)

    def load(self, device: Device) -> Any:
        """The module; on a device that is no GPU its stand-in.

        Raises:
            Exception: whatever its import raises.
        """
        if device.kind != "gpu" and self.fake:
            from benchmarks.suite.contenders import fakes

            return getattr(fakes, self.fake)
        return importlib.import_module(self.module)

    def missing(self, device: Device) -> str | None:
        """The reason why it cannot be imported, or None."""
        return None if device.kind != "gpu" and self.fake else self.missing_module()

    def missing_module(self) -> str | None:
        """The same, whatever the device is."""
        try:
            importlib.import_module(self.module)
        except Exception as error:  # an import may raise anything
            return f"{self.package} cannot be imported: {first_line(error)}"
        return None

    def on(self, device: Device) -> str:
        """Name and version of the library that computes on a device."""
        return f"stand-in for {self.package}" if device.kind != "gpu" and self.fake else self.text


def named(package: str) -> str:
    """Name and version, for records; of torch and flashgen those that are imported here."""
    imported = {"torch": torch.__version__, "flashgen": __version__}
    if package in imported:
        return f"{package} {imported[package]}"
    try:
        return f"{package} {metadata.version(package)}"
    except metadata.PackageNotFoundError:
        return f"{package}, {NOT_INSTALLED}"


def cudnn_text() -> str:
    """The version of cuDNN's kernels, which cudnn-frontend and torch share."""
    version = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    if not version:
        return "no cuDNN"
    return f"cuDNN {version // 10000}.{version // 100 % 100}.{version % 100}"


FA4 = Library("flash-attn-4", "flash_attn.cute", "FlashAttention")
FA3 = Library("flash-attn-3", "flash_attn_interface")
CUDNN = Library("nvidia-cudnn-frontend", "cudnn", "Cudnn")
CUDNN_FLEX = Library("nvidia-cudnn-frontend", "cudnn.flex_attention", "CudnnFlex")
FLASHINFER = Library("flashinfer-python", "flashinfer", "FlashInfer")
FLEX_FLASH = Library("torch", "torch._inductor.kernel.flex.flex_flash_attention")
TRITON = Library("triton", "triton")

LIBRARIES = (
    FA4,
    FA3,
    CUDNN,
    CUDNN_FLEX,
    FLASHINFER,
    TRITON,
    FLEX_FLASH,
    Library("torch", "torch.nn.attention._fa4"),
)
"""All of them, for `benchmarks/peers.py --check`."""

"""The native calls of one operator: how they get plans, and what Python does for them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from flashgen.calls.launch import Launch
from flashgen.calls.launch.device import check, real_driver
from flashgen.calls.launch.params import describe_map
from flashgen.calls.native import build
from flashgen.calls.native.record import CallRecorder, NoPlan, recording
from flashgen.calls.runtime.backward import PreparedBackward
from flashgen.calls.runtime.bound_kernel import KernelRun
from flashgen.calls.runtime.forward import ForwardOutcome, PreparedForward
from flashgen.calls.runtime.prepared_call import DerivativeOutcome
from flashgen.shared import config
from flashgen.shared.call import CallOptions, Operands, OutputGradients
from flashgen.shared.errors import InputError
from flashgen.shared.tensormap import TensorMapSpec

Tensor = torch.Tensor
Gradients = tuple[Tensor | None, ...]
Differentiate = Callable[..., tuple[Gradients, Any]]

_FUNCTIONS = (
    *("cuLaunchKernelEx", "cuCtxGetCurrent", "cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2"),
    "cuTensorMapEncodeTiled",
)


class NativeCalls:
    """The calls of one operator that need no Python.

    Attributes:
        call: q, k, v, rng, the captured tensors, the fields of `CallOptions` and return_lse give
            the results; None where the call is unusual or has no plan.
        reasons: why calls have no plan, the last ones.
    """

    def __init__(self, library: Any, differentiate: Differentiate) -> None:
        """
        Args:
            library: `native.cpp`, loaded.
            differentiate: the backward pass in Python: the options, the tensors, the tensors whose
                gradients are needed, and whether to make a plan.
        """
        self._library = library
        self._calls = library.Calls(
            driver_functions(), *config.variables_of_calls(), differentiate, explain
        )
        self.call, self._wants_plan, self._keep_plan = self._calls.functions()
        self.reasons: list[str] = []

    @property
    def hits(self) -> tuple[int, int]:
        """Forward and backward calls that were made without Python."""
        counts: tuple[int, int] = self._calls.hits
        return counts

    @property
    def kept_calls(self) -> int:
        """The number of forward calls that are kept, with a plan or without."""
        return int(self._calls.known)

    def last_forward(self) -> ForwardOutcome | None:
        """The record of the last forward call; None where that was made in Python."""
        record: ForwardOutcome | None = self._calls.last_forward
        return record

    def last_backward(self) -> DerivativeOutcome | None:
        """The record of the last backward call; None where that was made in Python."""
        record: DerivativeOutcome | None = self._calls.last_backward
        return record

    def forget_forward(self) -> None:
        """The last forward call was made in Python."""
        self._calls.forget_forward()

    def forget_backward(self) -> None:
        """The last backward call was made in Python."""
        self._calls.forget_backward()

    def learn(
        self,
        operands: Operands,
        options: CallOptions,
        rng: Tensor | None,
        prepared: Callable[[], PreparedForward | None],
    ) -> None:
        """Makes the plan of a call that was made in Python, at the second such call.

        Args:
            operands: the operands of the call, with the rng that was used.
            rng: the rng that was passed; None where it was drawn.
            prepared: gives the prepared call; None where there is none yet that serves later calls.
        """
        q, k, v, captured, used = operands
        call_arguments = (q, k, v, rng, captured, *options, False)
        if not self._wants_plan(*call_arguments):
            return
        call, plan = prepared(), None
        if call is None:
            return
        if call.target.backend == "gpu":  # elsewhere there is nothing to launch
            inputs = (q, k, v, used, *captured)
            draws = rng is None and used is not None
            plan = self._library.Plan(len(inputs), call.target.index, draws, options)

            def run(prepared_call: Any, q: Any, k: Any, v: Any, rng: Any, *captured: Any) -> Any:
                *results, fields = prepared_call.run(Operands(q, k, v, captured, rng))
                outcome = ForwardOutcome(*fields)
                return results, outcome._replace(
                    call=call,
                    build_seconds=0.0,
                    run_seconds=0.0,
                    tables=tuple(map(_without_tensors, outcome.tables)),
                    merge=outcome.merge and _without_tensors(outcome.merge),
                )

            plan = self._recorded(plan, call, inputs, run)
        self._keep_plan(*call_arguments, plan)

    def backward_plan(
        self,
        call: PreparedBackward,
        operands: Operands,
        gradients: OutputGradients,
        in_place: Callable[[Sequence[Tensor]], Sequence[Tensor | None]],
    ) -> Any:
        """The plan of a backward call that was made in Python; None where it has none.

        Args:
            in_place: gives the gradients of q, k, v and each captured tensor, in order, from what
                the call returns.
        """
        q, k, v, captured, rng = operands
        inputs = (q, k, v, *gradients, rng, *captured)
        plan = self._library.Plan(len(inputs), call.target.index, False, None)

        def run(prepared_call: Any, q: Any, k: Any, v: Any, *tensors: Any) -> Any:
            *output_gradients, rng = tensors[:5]
            call_operands = Operands(q, k, v, tensors[5:], rng)
            results, outcome = prepared_call.run(call_operands, OutputGradients(*output_gradients))
            launches = tuple(map(_without_tensors, outcome.launches))
            record = outcome._replace(call=call, build_seconds=0.0, launches=launches)
            return in_place(results), record

        return self._recorded(plan, call, inputs, run)

    def _recorded(self, plan: Any, call: Any, inputs: Any, run: Callable[..., Any]) -> Any:
        """The plan with all steps of a call; None where it cannot have them."""
        try:
            recorder = CallRecorder(plan, inputs)
            with torch.no_grad(), recorder:
                results, plan.record = run(recording(call, recorder), *recorder.inputs)
            recorder.results(results)
        except NoPlan as error:
            self.reasons = [str(error), *self.reasons[:7]]
            return None
        return plan


def _without_tensors(run: KernelRun) -> KernelRun:
    return run._replace(seconds=0.0, table=None)


def attach(differentiate: Differentiate) -> NativeCalls | None:
    """The native calls of an operator; None where the native part is not used."""
    library = build.load()
    try:
        return None if library is None else NativeCalls(library, differentiate)
    except OSError:
        return None  # a stand-in for a GPU, without a driver


def driver_functions() -> tuple[int, ...]:
    """The addresses of the driver's functions, and of one that gives torch's current stream: 0,
    for torch's own.

    Raises:
        OSError: there is no driver.
    """
    library = ctypes.CDLL("libcuda.so.1")
    functions: list[Any] = [getattr(library, name, None) for name in _FUNCTIONS]
    return (*(ctypes.cast(function, ctypes.c_void_p).value or 0 for function in functions), 0)


def refuse_compiled_autograd() -> NoReturn:
    raise InputError(
        "compiled autograd cannot compile the backward pass of a call without Python",
        where="the backward pass under torch's compiled autograd",
        numbers="the forward call was made by the native part",
        way_out="set FLASHGEN_NATIVE=0 before the forward call",
    )


def explain(
    status: int,
    function: str,
    launch_and_maps: tuple[Launch, Sequence[TensorMapSpec]] | None,
    map_index: int,
) -> None:
    """Raises the LaunchError of the Python path for a status of the driver.

    Args:
        launch_and_maps: the launch and the tensor maps of the kernel; None for a function that
            concerns no kernel.
        map_index: the number of the tensor map that the driver refuses; -1 for none.
    """
    if launch_and_maps is None:
        driver, where = real_driver(), function
    else:
        launch, maps = launch_and_maps
        driver = launch.kernel.driver
        where = describe_map(maps[map_index]) if map_index >= 0 else str(launch)
    check(driver, (driver.CUresult(status),), where)

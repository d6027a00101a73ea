"""Inference by ONNX Runtime, the yardstick of the benchmarks that compare with another engine."""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from gradfilter.bench.sides import AGREE
from gradfilter.errors import GradFilterError
from gradfilter.models.extras import import_extra
from gradfilter.outputs import find_logits

PACKAGES = ("onnx", "onnxscript", "onnxruntime")
"""What the extra `bench` installs: the exporter of torch needs the first two."""


def check_packages(needed_for: str) -> None:
    """Refuse to begin where a package of the extra `bench` is missing.

    Raises:
        MissingExtraError: With what to install.
    """
    for package in PACKAGES:
        import_extra(package, needed_for)


def make_inference(network: nn.Module, images: Tensor, threads: int) -> Callable[[], float]:
    """Return a function that runs ONNX Runtime's inference of a network, and tells its seconds.

    The network is exported in eval mode, for this batch. Its weights are constants, so that all of ONNX Runtime's optimizations
    apply to them. Idle threads do not spin, which would take the cores from what runs next.

    Args:
        network: What is exported; it is not changed.
        images: The batch.
        threads: Of one operator; operators run one after the other.

    Raises:
        GradFilterError: The network cannot be exported, or the outputs differ from torch's.
    """
    runtime: Any = import_extra("onnxruntime", "inference by ONNX Runtime")
    model = copy.deepcopy(network).eval().to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    batch = images.contiguous()
    options = runtime.SessionOptions()
    options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    session = runtime.InferenceSession(export(model, batch), options, providers=["CPUExecutionProvider"])
    given = {session.get_inputs()[0].name: batch.numpy()}
    with torch.inference_mode():
        expected = find_logits(model(batch))
    found = torch.from_numpy(session.run(None, given)[0])
    if not torch.allclose(found, expected, rtol=0, atol=AGREE * float(expected.abs().max())):
        raise GradFilterError("the outputs of ONNX Runtime differ from torch's, so there is nothing to compare with.")

    def run() -> float:
        start = time.perf_counter()
        session.run(None, given)
        return time.perf_counter() - start

    return run


def export(model: nn.Module, batch: Tensor) -> bytes:
    """Return a model in eval mode as ONNX's bytes."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's exporter calls deprecated functions of torch
            program: Any = torch.onnx.export(model, (batch,), dynamo=True, verbose=False)
    except Exception as error:  # it fails in as many ways as there are passes
        reason = (str(error).strip().splitlines() or [""])[0]
        raise GradFilterError(f"the network cannot be exported to ONNX. It says {type(error).__name__}: {reason}") from error
    return program.model_proto.SerializeToString()


def find_version() -> str:
    """Return the version of ONNX Runtime."""
    runtime: Any = import_extra("onnxruntime", "inference by ONNX Runtime")
    return runtime.__version__

"""What the tests of the library's convolutions share: drawn shapes, activations, numbers of few bits."""

from contextlib import contextmanager

import torch
from hypothesis import strategies as st

from gradfilter import ops

STEPS = (ops.IDENTITY, ops.RELU, ops.RELU6, ops.Act(ops.CLAMP, -1.5, 2.0), ops.Act(ops.LEAKY, slope=0.25))
ACTS = (*STEPS, ops.HARDSWISH, ops.SILU)

batches = st.integers(1, 3)
channels = st.integers(16, 53) | st.sampled_from([16, 24, 32, 96])
sides = st.tuples(st.integers(1, 6), st.integers(1, 6)) | st.sampled_from([(1, 1), (2, 2), (4, 4), (20, 30)])
acts = st.sampled_from(ACTS)
parts = st.tuples(*[st.booleans()] * 5)


@st.composite
def axes(draw):
    """Draw one axis of a convolution: size, kernel, stride, dilation, zeros before, size of the output."""
    kernel = draw(st.sampled_from([1, 2, 3, 3, 4, 5, 5, 6, 7, 7, 8]))
    stride, dilation = draw(st.sampled_from([(1, 1), (1, 1), (2, 1), (2, 1), (3, 1), (1, 2), (2, 3)]))
    size, before, after = draw(st.integers(1, 17)), draw(st.integers(0, 9)), draw(st.integers(0, 9))
    most = (size + before + after - dilation * (kernel - 1) - 1) // stride + 1
    return size, kernel, stride, dilation, before, max(most, 1)


@contextmanager
def on_threads(threads):
    """Run on so many threads."""
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(1)


def draw_eighths(*shape, seed, most):
    """Return numbers of few bits: sums of products of some of them are exact, in whatever order they are added."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-most, most + 1, shape, generator=generator) / 8


def last(x):
    return x.contiguous(memory_format=torch.channels_last)

"""Calls of compressors by several members, in one process, and vectors for them."""

from typing import Any, NamedTuple

import torch

from offbeat.numerics.compressors.interface import AllGather, AllToAll


class Ended(NamedTuple):
    """What is left of a member's call."""

    residual: Any
    state: Any


def hard(kind, length, seed=0, dtype=torch.float64):
    """A vector of a kind that is hard to compress, or a normal one."""
    generator = torch.Generator().manual_seed(seed)
    vector = torch.randn(length, generator=generator, dtype=dtype)
    match kind:
        case "zero":
            vector.zero_()
        case "spike":
            vector.zero_()[length // 3] = -3.0
        case "constant":
            vector.fill_(0.7)
        case "huge range":
            vector *= 10 ** (16 * torch.rand(length, generator=generator, dtype=dtype) - 8)
        case "denormal":
            vector *= torch.finfo(dtype).tiny / 1000
        case "alternating":
            vector = torch.where(torch.arange(length) % 2 == 0, 1.0, -1e-3).to(dtype)
    return vector


def sum_compressed(compressor, vectors, states=None):
    """What each member gets as the sum, what is left of its call, and the bytes of each one's requests."""
    outs = [torch.full_like(vector, torch.nan) for vector in vectors]
    unwritten = torch.nan if compressor.keeps_residual else 0.0
    residuals = [torch.full_like(vector, unwritten) for vector in vectors]
    calls = [
        compressor.sum(vector, out, residual, state, members=len(vectors), position=position)
        for position, (vector, out, residual, state) in enumerate(
            zip(vectors, outs, residuals, states or [None] * len(vectors), strict=True)
        )
    ]
    ended, answers, requested_bytes, is_last = [], [None] * len(vectors), 0, False
    while True:
        requests = []
        for call, answer, residual in zip(calls, answers, residuals, strict=True):
            try:
                requests.append(call.send(answer))
            except StopIteration as end:
                ended.append(Ended(residual, end.value))
        if not requests:
            assert is_last, "the last request is announced as such"
            for vector, out, residual in zip(vectors, outs, residuals, strict=True):
                compressor.finish_residual(vector, out, residual, share=1 / len(vectors))
            return outs, ended, requested_bytes
        assert not ended, "all members make the same requests"
        assert not is_last, "no request follows the last one"
        is_last = requests[0].is_last
        assert len({type(request) for request in requests}) == 1
        requested_bytes += requests[0].values.nbytes
        values = torch.stack([request.values for request in requests])
        match requests[0]:
            case AllGather():
                answers = [values] * len(vectors)
            case AllToAll():
                answers = [*values.unflatten(1, (len(vectors), -1)).transpose(0, 1)]
            case _:
                answers = [values.sum(0)] * len(vectors)


class OtherSendsZeros:
    """An exchange of two members, of which the other one contributes zeros."""

    size, position, ended_s = 2, 0, 0.0

    def all_reduce(self, flat, into, **_):
        into.copy_(flat)
        return self

    def all_gather(self, flat, **_):
        flat[len(flat) // 2 :] = 0
        return self

    def wait(self, timeout_s):
        pass


class OneMember(OtherSendsZeros):
    """The same with a single member."""

    size = 1

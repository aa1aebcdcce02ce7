"""Calls of compressors by several members, in one process."""

import torch

from offbeat.numerics.compressors.interface import Gather, Sum


def sum_compressed(compressor, vectors, states=None):
    """What each member gets as the sum, what its call has returned, and the bytes of each one's requests."""
    outs = [torch.full_like(vector, torch.nan) for vector in vectors]
    calls = [
        compressor.sum(vector, out, state, members=len(vectors))
        for vector, out, state in zip(vectors, outs, states or [None] * len(vectors), strict=True)
    ]
    ended, answer, requested_bytes = [], None, 0
    while not ended:
        requests = []
        for call in calls:
            try:
                requests.append(call.send(answer))
            except StopIteration as end:
                ended.append(end.value)
        if not requests:
            break
        assert not ended, "all members make the same requests"
        kinds = {type(request) for request in requests}
        assert len(kinds) == 1
        values = torch.stack([request.values for request in requests])
        requested_bytes += requests[0].values.nbytes
        answer = values if kinds == {Gather} else values.sum(0)
        assert kinds <= {Gather, Sum}
    return outs, ended, requested_bytes

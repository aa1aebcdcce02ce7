"""PowerSGD beside torch's own communication hook, in float64 and with the same random numbers."""

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from offbeat.numerics.compressors.powersgd import PowerSGD
from support.compression import sum_compressed
from support.processes import start

WORKERS, STEPS, FIRST, RANK = 2, 8, 2, 2
SHAPES = [torch.Size((24, 40)), torch.Size((24,))]  # the second is not compressed


def gradients_of(rank, step):
    generator = torch.Generator().manual_seed(100 * rank + step)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]


def hooked(rank, emit, folder):
    """Emits the gradients after each backward pass of a DDP model, whose own gradients are given."""
    store = dist.FileStore(str(folder / "store"), WORKERS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORKERS)
    layer = nn.Linear(40, 24).double()
    model = nn.parallel.DistributedDataParallel(layer)
    state = PowerSGDState(None, matrix_approximation_rank=RANK, start_powerSGD_iter=FIRST)
    model.register_comm_hook(state, powerSGD_hook)
    found = []
    for step in range(STEPS):
        model.zero_grad()
        of_weight, of_bias = gradients_of(rank, step)
        x = torch.eye(40, dtype=torch.float64)
        # With the unit matrix as the input, this loss has these gradients.
        loss = ((model(x) - layer.bias).T * of_weight).sum() + (layer.bias * of_bias).sum()
        loss.backward()
        found.append([layer.weight.grad.tolist(), layer.bias.grad.tolist()])
    emit(found)  # before torch ends its threads, which may fail where a hook has run in one


def flat(tensors):
    return torch.cat([tensor.flatten() for tensor in tensors])


def test_all_steps_are_those_of_torchs_hook(tmp_path):
    with start(hooked, WORKERS, tmp_path) as running:
        found, others = running.receive(0), running.receive(1)
    assert found == others
    seed = int(np.random.RandomState(0).randint(1_000_000_000))  # as the hook draws it
    compressor = PowerSGD(RANK).compressor(SHAPES, seed)
    residuals, states = [torch.zeros(())] * WORKERS, None
    for step in range(FIRST, STEPS):
        own = [flat(gradients_of(rank, step)) / WORKERS + residuals[rank] for rank in range(WORKERS)]
        outs, ended, _ = sum_compressed(compressor, own, states)
        residuals, states = [one.residual for one in ended], [one.state for one in ended]
        expected = flat([torch.tensor(one, dtype=torch.float64) for one in found[step]])
        torch.testing.assert_close(outs[0], expected, rtol=0, atol=1e-10)

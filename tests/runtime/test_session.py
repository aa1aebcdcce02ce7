"""Promises of `offbeat.join` with `AllReduce`: real workers against one process with the large batch."""

import copy
import io
import os

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import offbeat
from offbeat.errors import OffbeatError
from offbeat.runtime.data.equal_shards import EqualShards, epoch_order
from offbeat.runtime.session import launched_loop
from offbeat.runtime.training.checks import describe_training
from offbeat.runtime.training.trained import TrainingState
from offbeat.strategies import AllReduce, PartialAllReduce
from support.parameters import flat
from support.processes import run, values

WORKERS = 4
STEPS = 50


def data(samples=WORKERS * 8 * STEPS, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 12, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(0, 3, (samples,), generator=generator))


class Net(nn.Module):
    """Layers of which one is used twice, another is frozen, and a head that only some inputs reach."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(12, 16)
        self.shared = nn.Linear(16, 16)
        self.tied = nn.Linear(16, 16)
        self.tied.weight = self.shared.weight
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.head = nn.Linear(16, 3)
        self.rare = nn.Linear(16, 3)
        self.never = nn.Linear(4, 4)
        self.double()

    def forward(self, x, rare=False):
        x = self.tied(torch.tanh(self.shared(torch.tanh(self.first(x)))))
        x = x + self.frozen(x)
        return self.rare(x) if rare else self.head(x)


def sgd(model, **more):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3, **more)


def alone(make, optimize, steps, batch=WORKERS * 8, loop=None, samples=None):
    """The same training in one process with the large batch."""
    torch.set_num_threads(1)
    model = make()
    optimizer = optimize(model)
    with offbeat.join(model, optimizer, AllReduce()) as session:
        (loop or plain_loop)(session, model, optimizer, data(*samples or ()), batch, steps)
    return flat(model)


def plain_loop(session, model, optimizer, dataset, batch, steps):
    trace = []
    for _ in session.epochs(1000):
        for x, y in session.batches(dataset, batch):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            trace.append(flat(model))
            if session.step == steps:
                return trace
    return trace


def train(rank, emit, make, loop, steps, samples, options):
    model = make(seed=rank)  # every worker has other parameters; join makes them equal
    optimizer = sgd(model)
    with offbeat.join(model, optimizer, AllReduce(**options)) as session:
        trace = loop(session, model, optimizer, data(*samples), 8, steps)
    return flat(model).tolist(), [one.tolist() for one in trace or []]


def compare(make=Net, loop=plain_loop, steps=STEPS, tolerance=1e-10, workers=WORKERS, samples=(), **options):
    results = values(run(train, workers, make, loop, steps, samples, options))
    first, trace = results[0]
    for final, other in results[1:]:
        assert final == first, "replicas differ"
        assert other == trace, "replicas differ during training"
    expected = alone(make, sgd, steps, loop=loop, batch=workers * 8, samples=samples)
    assert torch.allclose(torch.tensor(first, dtype=torch.float64), expected, rtol=0, atol=tolerance)
    return expected


def test_replicas_stay_bit_identical_and_follow_the_large_batch_for_50_steps():
    compare()


@pytest.mark.long(after=1)
@pytest.mark.parametrize("bucket_bytes", [1, 3000])
def test_the_trajectory_does_not_depend_on_the_buckets(bucket_bytes):
    compare(steps=10, bucket_bytes=bucket_bytes)


def test_replicas_follow_the_large_batch_with_three_workers():
    compare(steps=20, workers=3)


def test_an_uneven_last_batch_counts_by_samples():
    compare(steps=12, samples=(WORKERS * 8 * 5 + 13,))


def test_fewer_remaining_samples_than_workers_are_all_used():
    """Of 162 samples 2 remain: the last two steps share them and the last 32, so batches hold 5 or 4."""
    samples = WORKERS * 8 * 5 + 2
    results = values(run(train, WORKERS, Net, plain_loop, 6, (samples,), {}))
    model = Net()
    optimizer = sgd(model)
    plan = EqualShards(samples=samples, workers=1, batch_size=1, seed=0, epoch=0, shuffle=True)
    order = [index for batch in plan.batches(0) for index in batch]
    for start, stop in [(0, 32), (32, 64), (64, 96), (96, 128), (128, 145), (145, 162)]:
        x, y = data(samples)[order[start:stop]]
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    for final, _ in results:
        assert final == results[0][0]
        assert torch.allclose(torch.tensor(final, dtype=torch.float64), flat(model), rtol=0, atol=1e-10)


def normalises(rank, emit, strategy, options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer, sizes = sgd(model), []
    dataset = TensorDataset(torch.randn(10, 5), torch.randn(10, 2))
    with offbeat.join(model, optimizer, strategy) as session:
        for _ in session.epochs(2):
            for x, y in session.batches(dataset, 4, **options):
                optimizer.zero_grad()
                F.mse_loss(model(x), y).backward()
                optimizer.step()
                sizes.append(len(x))
    return sizes, flat(model).tolist()


@pytest.mark.long(after=2)
@pytest.mark.parametrize("strategy", [AllReduce(), PartialAllReduce(limit=10**6)])
@pytest.mark.parametrize("drop_last", [False, True])
def test_batch_normalization_trains_although_ten_samples_are_no_multiple_of_the_batch(strategy, drop_last):
    (first, final), (second, other) = values(run(normalises, 2, strategy, {"drop_last": drop_last}))
    assert final == other
    assert min(first + second) >= (4 if drop_last else 2)
    if not drop_last:
        assert sum(first + second) >= 2 * 10


def test_with_drop_last_a_state_from_mid_epoch_resumes_with_the_other_whole_batches():
    """Eleven samples in batches of three: two are left out, and the same two after the state was loaded."""
    model, dataset, used = nn.Linear(1, 1), TensorDataset(torch.arange(11.0)[:, None]), []

    def resume(state, batches):
        optimizer = sgd(model)
        with offbeat.join(model, optimizer, AllReduce()) as session:
            if state is not None:
                session.load_state_dict(state)
            for (x,) in session.batches(dataset, 3, drop_last=True):
                optimizer.zero_grad()
                model(x).sum().backward()
                optimizer.step()
                used.append(x[:, 0].long().tolist())
                batches -= 1
                if not batches:
                    break
            return session.state_dict()

    resume(resume(None, 1), 9)
    assert [len(batch) for batch in used] == [3, 3, 3]
    order = epoch_order(11, seed=0, epoch=0, shuffle=True)
    assert [index for batch in used for index in batch] == order[:9].tolist()


def clipping_loop(session, model, optimizer, dataset, batch, steps):
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.7)
    for x, y in session.batches(dataset, batch):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        schedule.step()
        if session.step == steps:
            break


def test_gradient_clipping_and_a_schedule_see_the_averaged_gradients():
    compare(loop=clipping_loop, steps=12)


def accumulating_loop(session, model, optimizer, dataset, batch, steps):
    for number, (x, y) in enumerate(session.batches(dataset, batch)):
        (F.cross_entropy(model(x), y) / 3).backward()
        if number % 3 == 2:
            optimizer.step()
            optimizer.zero_grad(set_to_none=session.step % 2 == 0)
        if session.step == steps:
            break


def quietly_accumulating_loop(session, model, optimizer, dataset, batch, steps):
    for number, (x, y) in enumerate(session.batches(dataset, batch)):
        if number % 3 == 2:
            (F.cross_entropy(model(x), y) / 3).backward()
            optimizer.step()
            optimizer.zero_grad()
        else:
            with session.no_sync():
                (F.cross_entropy(model(x), y) / 3).backward()
        if session.step == steps:
            break


def only_quietly_loop(session, model, optimizer, dataset, batch, steps):
    for x, y in session.batches(dataset, batch):
        optimizer.zero_grad()
        with session.no_sync():
            F.cross_entropy(model(x), y).backward()
        optimizer.step()
        if session.step == steps:
            break


@pytest.mark.long(after=1)
@pytest.mark.parametrize("loop", [accumulating_loop, quietly_accumulating_loop, only_quietly_loop])
def test_gradient_accumulation_with_and_without_no_sync(loop):
    compare(loop=loop, steps=10)


def rare_loop(session, model, optimizer, dataset, batch, steps):
    """The rare head is reached by none, all or a few of the workers."""
    for number, (x, y) in enumerate(session.batches(dataset, batch)):
        optimizer.zero_grad()
        F.cross_entropy(model(x, rare=number % 3 == 1), y).backward()
        optimizer.step()
        if session.step == steps:
            break


def test_parameters_without_a_gradient_in_a_step_are_not_changed():
    compare(loop=rare_loop, steps=12)


def few_reach_the_rare_head(rank, emit):
    model = Net(seed=rank)
    optimizer = sgd(model)
    with offbeat.join(model, optimizer, AllReduce()) as session:
        optimizer.zero_grad()
        model(torch.full((2, 12), rank + 1.0, dtype=torch.float64), rare=rank == 1).sum().backward()
        gradients = {name: p.grad for name, p in model.named_parameters()}
        missing = sorted(name for name, gradient in gradients.items() if gradient is None)
        optimizer.step()
        assert session.step == 1
    return gradients["rare.bias"].tolist(), missing, flat(model).tolist()


def test_a_gradient_that_only_some_workers_have_counts_as_zero_on_the_others():
    results = values(run(few_reach_the_rare_head, WORKERS))
    for bias, missing, final in results:
        assert bias == [2 / WORKERS] * 3
        assert missing == ["frozen.bias", "frozen.weight", "never.bias", "never.weight"]
        assert final == results[0][2]


class Branches(nn.Module):
    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(nn.Linear(12, 3) for _ in range(8)).double()
        self.order = range(8)

    def forward(self, x):
        return torch.stack([self.layers[index](x) for index in self.order]).sum(0)


def shuffled_loop(session, model, optimizer, dataset, batch, steps):
    for x, y in session.batches(dataset, batch):
        if session.world > 1:
            generator = torch.Generator().manual_seed(10 * session.step + session.worker)
            model.order = torch.randperm(8, generator=generator).tolist()
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        if session.step == steps:
            break


def test_gradients_may_appear_in_another_order_on_every_worker():
    compare(make=Branches, loop=shuffled_loop, steps=10, bucket_bytes=400)


class Reentrant(nn.Module):
    """A reentrant checkpoint around a layer used twice: its gradient accumulates twice in one backward."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(12, 12)
        self.middle = nn.Linear(12, 12)
        self.last = nn.Linear(12, 3)
        self.double()

    def forward(self, x):
        x = self.first(x)
        x = checkpoint(lambda t: torch.tanh(self.middle(t)), x, use_reentrant=True)
        x = checkpoint(lambda t: torch.tanh(self.middle(t)), x, use_reentrant=True)
        return self.last(x)


def test_reentrant_checkpoints_may_accumulate_a_gradient_twice():
    compare(make=Reentrant, steps=10, bucket_bytes=200)


def adversarial_loop(session, model, optimizer, dataset, batch, steps):
    """Two forward passes, one backward; then a second backward of another loss in the same step."""
    for x, y in session.batches(dataset, batch):
        optimizer.zero_grad()
        (F.cross_entropy(model(x), y) + model(2 * x).square().mean()).backward()
        model(x).abs().mean().backward()
        optimizer.step()
        if session.step == steps:
            break


def test_a_step_may_have_several_forward_and_backward_passes():
    compare(loop=adversarial_loop, steps=10)


class Normed(nn.Module):
    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.net = nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).double()


def batch_norm(rank, emit):
    model = Normed(seed=rank)
    optimizer = sgd(model)
    with offbeat.join(model, optimizer, AllReduce()) as session:
        own = None
        for number, (x, y) in enumerate(session.batches(data(), 8)):
            optimizer.zero_grad()
            loss = F.cross_entropy(model.net(x), y)
            own = model.net[1].running_mean.clone()
            loss.backward()
            optimizer.step()
            if number == 5:
                break
    return own.tolist(), model.net[1].running_mean.tolist(), flat(model).tolist()


def test_batch_norm_buffers_follow_the_first_worker_and_keep_their_types():
    results = values(run(batch_norm, WORKERS))
    own_of_first = results[0][0]
    assert results[1][0] != own_of_first
    for _, buffer, final in results:
        assert buffer == own_of_first
        assert final == results[0][2]


class Counting(nn.Module):
    """Replaces its buffers by new tensors in every forward pass."""

    def __init__(self, seed=0):
        super().__init__()
        self.layer = nn.Linear(12, 3).double()
        self.register_buffer("seen", torch.zeros(2))
        self.register_buffer("flag", torch.tensor(False))

    def forward(self, x):
        self.seen = self.seen + x.shape[0]
        self.flag = ~self.flag
        return self.layer(x)


def counted(rank, emit):
    model = Counting()
    optimizer = sgd(model)
    with offbeat.join(model, optimizer, AllReduce()):
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(rank + 1, 12, dtype=torch.float64)).sum().backward()
            optimizer.step()
    return model.seen.tolist(), model.flag.item()


def test_buffers_may_be_replaced_but_must_keep_type_and_shape():
    assert values(run(counted, 3)) == [([3.0, 3.0], True)] * 3
    model = Counting()
    with offbeat.join(model, sgd(model), AllReduce()) as session:
        model.seen = torch.zeros(3)
        with pytest.raises(OffbeatError, match=r"buffer 'seen' was torch\.float32"):
            session._synchronizer.averager._buckets.buffers.tensors()


def copied(rank, emit):
    """A copy, a pickle and an averaged copy of a model in a session are independent of it."""
    model = Net(seed=rank)
    optimizer = sgd(model)
    with offbeat.join(model, optimizer, AllReduce()) as session:
        plain_loop(session, model, optimizer, data(), 8, 2)
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        averaged = torch.optim.swa_utils.AveragedModel(model)
        for other in (copy.deepcopy(model), loaded, averaged.module):
            assert torch.equal(flat(other), flat(model))
            rounds = session._synchronizer.averager.round
            if rank == 0:  # no other worker takes part
                other(torch.ones(1, 12, dtype=torch.float64)).sum().backward()
            assert session._synchronizer.averager.round == rounds
        plain_loop(session, model, optimizer, data(), 8, 4)
    return flat(model).tolist()


def test_a_model_in_a_session_can_be_copied_saved_and_averaged():
    first, second = values(run(copied, 2))
    assert first == second


def mixed_precision(rank, emit):
    model = Net(seed=rank).float()
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
    scales = []
    with offbeat.join(model, optimizer, AllReduce()) as session:
        for number, (x, y) in enumerate(session.batches(data(), 8)):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.cross_entropy(model(x.float()), y)
            if number == 3 and rank == 2:
                loss = loss * float("inf")  # overflows on one worker: all workers must skip the step
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
            if number == 7:
                break
        steps = session.step
    return scales, steps, flat(model).tolist()


def test_a_grad_scaler_skips_the_same_step_everywhere_when_one_worker_overflows():
    results = values(run(mixed_precision, WORKERS))
    scales, steps, final = results[0]
    assert steps == 7
    assert scales[3] == scales[2] / 2
    assert all(torch.isfinite(torch.tensor(final)))
    assert all(one == results[0] for one in results)


def half_precision(rank, emit):
    model = nn.Linear(4, 1, bias=False, dtype=torch.float16)
    nn.init.zeros_(model.weight)
    with offbeat.join(model, torch.optim.SGD(model.parameters(), lr=1e-4), AllReduce()):
        (model(torch.full((1, 4), 30000.0, dtype=torch.float16))).sum().backward()
        return model.weight.grad.tolist()


def test_the_mean_of_half_precision_gradients_does_not_overflow():
    assert values(run(half_precision, WORKERS)) == [[[30000.0] * 4]] * WORKERS


def overlap(rank, emit):
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    with offbeat.join(model, optimizer, AllReduce(bucket_bytes=20_000)) as session:
        x = torch.randn(2, 64, requires_grad=True)
        x.register_hook(lambda _: seen.append(session._synchronizer.averager._buckets.launched))
        model(x).sum().backward()
        optimizer.step()
    return seen


def test_buckets_are_sent_before_the_backward_pass_ends():
    """The gradient of the model's input is the last; by then all buckets but one have been launched."""
    assert values(run(overlap, 2)) == [[5], [5]]


def hooks_of(model, optimizer):
    return (
        [dict(p._post_accumulate_grad_hooks or {}) for p in model.parameters()],
        dict(model._forward_pre_hooks),
        dict(model._forward_hooks),
        dict(optimizer._optimizer_step_pre_hooks),
        dict(optimizer._optimizer_step_post_hooks),
    )


def leave_twice(rank, emit):
    model = Net(seed=rank)
    optimizer = sgd(model)
    before = hooks_of(model, optimizer)
    forward = type(model).forward
    for _ in range(2):
        with offbeat.join(model, optimizer, AllReduce()) as session:
            plain_loop(session, model, optimizer, data(), 8, 2)
        assert hooks_of(model, optimizer) == before
        assert type(model).forward is forward
        assert "forward" not in vars(model)
        session.leave()
    model(torch.ones(1, 12, dtype=torch.float64)).sum().backward()  # no other worker takes part any more
    optimizer.step()
    return True


def test_leaving_removes_every_hook_and_the_model_may_join_again():
    assert values(run(leave_twice, 2)) == [True, True]


def interrupted(rank, emit, path):
    """Trains 30 steps with Adam; and again 13, then the rest in a new session from a checkpoint."""

    def fresh():
        model = Net(seed=rank)
        return model, torch.optim.Adam(model.parameters(), lr=0.01)

    dataset = data(WORKERS * 8 * 10)
    model, optimizer = fresh()
    with offbeat.join(model, optimizer, AllReduce()) as session:
        plain_loop(session, model, optimizer, dataset, 8, 30)
    whole = flat(model).tolist()
    model, optimizer = fresh()
    with offbeat.join(model, optimizer, AllReduce()) as session:
        plain_loop(session, model, optimizer, dataset, 8, 13)
        if rank == 0:
            torch.save(session.state_dict(), path)
    model, optimizer = fresh()
    with offbeat.join(model, optimizer, AllReduce()) as session:
        session.load_state_dict(torch.load(path))
        assert (session.epoch, session.step) == (1, 13)
        plain_loop(session, model, optimizer, dataset, 8, 30)
    return whole, flat(model).tolist()


def test_a_run_resumes_bit_identically_from_a_checkpoint_in_the_middle_of_an_epoch(tmp_path):
    for whole, resumed in values(run(interrupted, WORKERS, str(tmp_path / "checkpoint"))):
        assert whole == resumed


def trained_on_rank_0_only(rank, emit):
    model = Net(seed=rank)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    if rank == 0:
        model(torch.ones(1, 12, dtype=torch.float64)).sum().backward()
        optimizer.step()
    with offbeat.join(model, optimizer, AllReduce()):
        state = optimizer.state_dict()["state"]
        return flat(model).tolist(), {
            index: {name: value.tolist() for name, value in row.items()} for index, row in state.items()
        }


def test_a_launcher_gives_the_strategy_and_learns_which_session_the_loop_has_joined():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with launched_loop(AllReduce()) as loop:
        with offbeat.join(model, optimizer) as session:
            assert loop.session is session
    with pytest.raises(OffbeatError, match="expected a strategy"):
        offbeat.join(model, optimizer)


def test_join_copies_rank_0s_parameters_and_optimizer_state_to_all_workers():
    results = values(run(trained_on_rank_0_only, 3))
    assert results[0][1]
    assert all(one == results[0] for one in results)


def test_a_single_process_needs_no_launcher_and_starts_no_coordinator():
    model = Net()
    optimizer = sgd(model)
    with offbeat.join(model, optimizer, AllReduce()) as session:
        assert (session.worker, session.world) == (0, 1)
        assert session._job.coordinator is None
        plain_loop(session, model, optimizer, data(), 32, 3)
        assert session.step == 3


# Rejected input -----------------------------------------------------------------------------------------


def refusal(model, optimizer=None):
    with pytest.raises(OffbeatError) as caught:
        offbeat.join(model, optimizer or sgd(model), AllReduce())
    return str(caught.value)


def test_a_model_that_is_already_distributed_is_refused():
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    try:
        text = refusal(nn.parallel.DistributedDataParallel(nn.Linear(2, 2)))
    finally:
        torch.distributed.destroy_process_group()
    assert "DistributedDataParallel" in text
    assert "bare module" in text


def test_sparse_gradients_are_refused():
    model = nn.Embedding(3, 2, sparse=True)
    assert "sparse=False" in refusal(model, torch.optim.SGD(model.parameters(), lr=1))


@pytest.mark.parametrize("make", [nn.Embedding, nn.EmbeddingBag])
def test_embeddings_that_are_normalised_in_the_forward_pass_are_refused(make):
    assert "max_norm=1" in refusal(make(4, 2, max_norm=1.0))


def test_lbfgs_is_refused():
    model = nn.Linear(2, 2)
    assert "LBFGS" in refusal(model, torch.optim.LBFGS(model.parameters()))


def test_lazy_and_meta_parameters_are_refused():
    lazy = nn.Sequential(nn.LazyLinear(2), nn.Linear(2, 2))
    assert "0.weight is not initialised" in refusal(lazy, torch.optim.SGD(lazy[1].parameters(), lr=1))
    assert "meta device" in refusal(nn.Linear(2, 2, device="meta"))


def test_parameters_outside_the_model_are_refused():
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=1)
    assert "2 parameters that are not the model's" in refusal(model, optimizer)


def test_a_model_with_nothing_to_train_is_refused():
    model = nn.Linear(2, 2).requires_grad_(False)
    assert "nothing to train" in refusal(model, torch.optim.SGD(model.parameters(), lr=1))


def test_an_optimizer_can_be_in_one_session_only():
    model = nn.Linear(2, 2)
    optimizer = sgd(model)
    with offbeat.join(model, optimizer, AllReduce()):
        assert "in a session already" in refusal(model, optimizer)


def test_unfreezing_or_adding_parameters_in_a_session_is_an_error():
    model = Net()
    optimizer = sgd(model)
    with offbeat.join(model, optimizer, AllReduce()):
        model.frozen.requires_grad_(True)
        model(torch.ones(1, 12, dtype=torch.float64)).sum().backward()
        with pytest.raises(OffbeatError, match=r"frozen\.weight was frozen at join"):
            optimizer.step()
        model.frozen.requires_grad_(False)
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
        with pytest.raises(OffbeatError, match="held 13 parameters at join and hold 14"):
            optimizer.step()


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({"RANK": "0"}, "WORLD_SIZE is not"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK must be a whole number, got 'x'"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "0 <= RANK < WORLD_SIZE"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR is not set"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "99999"}, "1 to 65535"),
        ({"OFFBEAT_SLOW": "3:5"}, "worker 3"),
        ({"OFFBEAT_SLOW": "fast"}, "'fast'"),
    ],
)
def test_an_invalid_environment_is_refused_with_its_cause(monkeypatch, variables, text):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OFFBEAT_SLOW"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    model = nn.Linear(2, 2)
    assert text in refusal(model)
    assert os.environ.get("RANK") == variables.get("RANK")


def penalised_loop(session, model, optimizer, dataset, batch, steps):
    """A gradient penalty: autograd.grad runs a backward pass of its own, which must start no exchange."""
    for x, y in session.batches(dataset, batch):
        optimizer.zero_grad()
        x.requires_grad_(True)
        output = model(x)
        (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        (F.cross_entropy(output, y) + slope.square().mean()).backward()
        optimizer.step()
        if session.step == steps:
            break
    assert session._synchronizer.averager.round == steps


def test_a_gradient_penalty_starts_no_additional_exchange():
    compare(loop=penalised_loop, steps=8)


def test_a_model_of_very_many_parameters_is_described_by_a_digest_of_the_rest():
    small = nn.ParameterList(nn.Parameter(torch.zeros(1)) for _ in range(20))
    assert len(describe_training(TrainingState(small, [sgd(small)]))) == 21
    large = nn.ParameterList(nn.Parameter(torch.zeros(1)) for _ in range(15_000))
    lines = describe_training(TrainingState(large, [sgd(large)]))
    assert sum(map(len, lines)) < 300_000
    assert "more lines with the digest" in lines[-1]
    changed = nn.ParameterList([*list(large)[:-1], nn.Parameter(torch.zeros(2))])
    other = describe_training(TrainingState(changed, [sgd(changed)]))
    assert other[:-1] == lines[:-1]
    assert other[-1] != lines[-1]


def test_slowness_by_part_of_an_epoch_needs_the_sessions_own_batches(monkeypatch):
    monkeypatch.setenv("OFFBEAT_SLOW", "0:2@0.0-0.5")
    model = nn.Linear(2, 2)
    with offbeat.join(model, sgd(model), AllReduce()):
        with pytest.raises(OffbeatError, match=r"use session\.batches, which provides it"):
            model(torch.ones(1, 2)).sum().backward()

"""Layers that are averaged behind both passes: bit-identical to training that waits for every exchange."""

import copy
import pickle
import signal
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import offbeat
from offbeat.errors import WorkerError
from offbeat.strategies import AllReduce, Hybrid
from support.jobs import job
from support.processes import run, values
from support.run_logs import wait_until

STEPS = 6


class Plain(nn.Module):
    """Convolutions, a normalisation with buffers, two dense layers."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.hidden = nn.Linear(4 * 36, 300)
        self.head = nn.Linear(300, 3)

    def forward(self, x):
        return self.head(F.relu(self.hidden(F.relu(self.norm(self.conv(x))).flatten(1))))


class Tied(nn.Module):
    """The head's weight is the embedding's; a parameter of the whole model is used at the end."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.mix = nn.Linear(8, 8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, x):
        tokens = (x.flatten(1)[:, :5].abs() * 4).long() % 16
        return self.head(torch.tanh(self.mix(self.embedding(tokens)))).mean(1) * self.scale


class Borrowed(nn.Module):
    """A weight is used by a function, and never by the module that owns it."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(128, 16)
        self.store = nn.Linear(16, 3)

    def forward(self, x):
        return F.linear(torch.tanh(self.first(x.flatten(1))), self.store.weight, self.store.bias)


class Unused(nn.Module):
    """An unused layer, a layer that is used in every other step, and a frozen layer."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(128, 16)
        self.never = nn.Linear(7, 7)
        self.sometimes = nn.Linear(16, 16)
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.head = nn.Linear(16, 3)
        self.count = 0

    def forward(self, x):
        self.count += 1
        x = self.frozen(torch.tanh(self.first(x.flatten(1))))
        return self.head(self.sometimes(x) if self.count % 2 else x)


class Twice(nn.Module):
    """Two forward passes of the inner layers a step."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(128, 32), nn.Tanh(), nn.Linear(32, 16))
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        x = x.flatten(1)
        return self.head(self.inner(x) * self.inner(x.flip(1)))


class Normed(nn.Module):
    """Buffers are used before all parameters."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(128, affine=False)
        self.register_buffer("scale", torch.ones(()))
        self.first = nn.Linear(128, 16)
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        x = self.norm(x.flatten(1)) / self.scale
        self.scale += x.detach().abs().mean()
        return self.head(torch.tanh(self.first(x)))


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant):
        super().__init__()
        self.first = nn.Linear(128, 32)
        self.inner = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32))
        self.shared = nn.Linear(32, 32)
        self.head = nn.Linear(32, 3)
        self.reentrant = reentrant

    def forward(self, x):
        x = torch.tanh(self.first(x.flatten(1)))
        x = checkpoint(self.inner, x, use_reentrant=self.reentrant)
        x = checkpoint(self.shared, x, use_reentrant=self.reentrant)
        return self.head(checkpoint(self.shared, torch.tanh(x), use_reentrant=self.reentrant))


class Later(nn.Module):
    """From the third step on, a layer with many weights has two gradients in one backward pass."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(128, 200)
        self.shared = nn.Linear(200, 200)
        self.head = nn.Linear(200, 3)
        self.count = 0

    def forward(self, x):
        self.count += 1
        x = torch.tanh(self.first(x.flatten(1)))
        for _ in range(1 + (self.count > 2)):
            x = torch.tanh(checkpoint(self.shared, x, use_reentrant=True))
        return self.head(x)


class Unhooked(Plain):
    """Bypasses the hooks of the whole model."""

    def __call__(self, x):
        return self.forward(x)


MODELS = {
    "plain": Plain,
    "tied": Tied,
    "borrowed": Borrowed,
    "unused": Unused,
    "twice": Twice,
    "checkpointed": lambda: Checkpointed(reentrant=False),
    "checkpointed, reentrant": lambda: Checkpointed(reentrant=True),
    "unhooked": Unhooked,
    "normed": Normed,
}
CHANGING = {"later": Later}
OPTIMIZERS = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda ps: torch.optim.Adam(ps, lr=0.01),
    "foreach": lambda ps: torch.optim.AdamW(ps, lr=0.01, foreach=True),
}


def batch(rank, step):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(4, 2, 8, 8, generator=generator), torch.randint(0, 3, (4,), generator=generator)


def bits(model):
    return [(name, tensor.numpy().tobytes()) for name, tensor in sorted(model.state_dict().items())]


def made(model, optimizer="sgd"):
    torch.manual_seed(0)
    one = {**MODELS, **CHANGING}[model]()
    return one, OPTIMIZERS[optimizer]([p for p in one.parameters() if p.requires_grad])


def plain_step(session, model, optimizer, step):
    x, y = batch(session.worker, step)
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


def is_behind(session):
    """Whether a part of the last step is still deferred."""
    return session._synchronizer.averager.has_deferred_step


def trained(model, optimizer, strategy, step=plain_step, steps=STEPS):
    """The bits of a model after training, and the number of steps of which a part was deferred."""
    one, stepper = made(model, optimizer)
    with offbeat.join(one, stepper, strategy) as session:
        deferred = 0
        for number in range(steps):
            step(session, one, stepper, number)
            deferred += is_behind(session)
    return bits(one), deferred


def same_bits(rank, emit, model, optimizer, options):
    torch.set_num_threads(1)
    found = {
        overlap: trained(model, optimizer, Hybrid(overlap=overlap, **options))
        for overlap in ("none", "backward", "forward")
    }
    assert found["none"][1] == found["backward"][1] == 0
    assert found["forward"][1] == STEPS - 2, "all steps but the first two are deferred"
    assert found["none"][0] == found["backward"][0] == found["forward"][0]
    return found["none"][0]


@pytest.mark.long(after=1)
@pytest.mark.parametrize(
    ("model", "optimizer", "options"),
    [
        *((model, "sgd", {"policy": "conv_butterfly_fc_ring", "fuse_bytes": 2000}) for model in MODELS),
        ("plain", "adam", {"policy": "conv_butterfly_fc_ring", "fuse_bytes": 4000, "order": "fifo"}),
        ("plain", "foreach", {"policy": "table4", "fuse_bytes": 0}),
        ("tied", "adam", {"policy": "ring", "fuse_bytes": 10**9}),
        *(
            (model, "sgd", {"policy": "conv_butterfly_fc_ring", "fuse_bytes": 2000, "compress": method})
            for model in ("plain", "unused", "twice", "normed")
            for method in ("bf16", "powersgd:1", "topk:0.1")
        ),
    ],
)
def test_a_deferred_step_gives_bit_identical_results(model, optimizer, options):
    first, second, third = values(run(same_bits, 3, model, optimizer, options))
    assert first == second == third


def clipped_step(session, model, optimizer, step):
    x, y = batch(session.worker, step)
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    optimizer.step()


def scaled_step(session, model, optimizer, step):
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    x, y = batch(session.worker, step)
    optimizer.zero_grad()
    scaler.scale(F.cross_entropy(model(x), y)).backward()
    scaler.step(optimizer)


def closure_step(session, model, optimizer, step):
    x, y = batch(session.worker, step)

    def closure():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    optimizer.step(closure)


def twice_backward_step(session, model, optimizer, step):
    """Two backward passes of one forward pass: the second pass finds pending gradients."""
    x, y = batch(session.worker, step)
    optimizer.zero_grad()
    logits = model(x)
    F.cross_entropy(logits, y).backward(retain_graph=True)
    (logits.square().mean() / 10).backward()
    optimizer.step()


def accumulated_step(session, model, optimizer, step):
    optimizer.zero_grad()
    with session.no_sync():
        x, y = batch(session.worker, 100 + step)
        F.cross_entropy(model(x), y).backward()
    x, y = batch(session.worker, step)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


def by_hand_step(session, model, optimizer, step):
    x, y = batch(session.worker, step)
    parameters = list(model.parameters())
    for parameter, gradient in zip(
        parameters, torch.autograd.grad(F.cross_entropy(model(x), y), parameters), strict=True
    ):
        parameter.grad = gradient
    optimizer.step()


def doubled_step(session, model, optimizer, step):
    """One pending gradient is replaced by a new tensor."""
    x, y = batch(session.worker, step)
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    model.conv.weight.grad = model.conv.weight.grad * 2
    optimizer.step()


def dropped_step(session, model, optimizer, step):
    """Every other step is skipped."""
    x, y = batch(session.worker, step)
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    if step % 2:
        optimizer.step()


def last_gradient_in_place_step(session, model, optimizer, step):
    """Gradients stay from step to step and are set to zero in place."""
    x, y = batch(session.worker, step)
    optimizer.zero_grad(set_to_none=False)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


def twice_stepped_step(session, model, optimizer, step):
    x, y = batch(session.worker, step)
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.step()


def scaled_between_two_steps(session, model, optimizer, step):
    """Gradients that the program changes between two steps are averaged again, those of one worker too."""
    x, y = batch(session.worker, step)
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(1 + session.worker)
    optimizer.step()


def seldom_zeroed_step(session, model, optimizer, step):
    """Gradients accumulate where they are not set to zero, also when the step was deferred."""
    x, y = batch(session.worker, step)
    if step % 3 == 0:
        optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


def by_hand_every_other_step(session, model, optimizer, step):
    if step % 2 == 0:
        plain_step(session, model, optimizer, step)
        return
    optimizer.zero_grad()
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.01 * (1 + session.worker))
    optimizer.step()


def noisy_step(session, model, optimizer, step):
    """Gradients begin with values that the forward pass must keep."""
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.01)
    x, y = batch(session.worker, step)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


def penalised_step(session, model, optimizer, step):
    x, y = batch(session.worker, step)
    x.requires_grad_()
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    (loss + slope.square().sum()).backward()
    optimizer.step()


def saliency_on_one_step(session, model, optimizer, step):
    """One worker computes a gradient of its own input in some steps, without the other workers."""
    if session.worker == 0 and step % 2:
        x = batch(9, 9)[0].requires_grad_()
        model.norm.eval()  # so that its buffers do not change
        torch.autograd.grad(model(x).sum(), x)
        model.norm.train()
    plain_step(session, model, optimizer, step)


def evaluating_step(session, model, optimizer, step):
    plain_step(session, model, optimizer, step)
    with torch.inference_mode():
        model.eval()
        model(batch(0, 0)[0])
    model.train()


def hooked_step(session, model, optimizer, step):
    """A hook on the optimizer reads averaged gradients."""

    def clip(optimizer, args, kwargs):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)

    handle = optimizer.register_step_pre_hook(clip)
    plain_step(session, model, optimizer, step)
    handle.remove()


def reloading_step(session, model, optimizer, step):
    plain_step(session, model, optimizer, step)
    if step == 3:
        torch.manual_seed(5)
        model.load_state_dict(Plain().state_dict())


LOOPS = {
    "stepped twice": (twice_stepped_step, None),
    "scaled between two steps": (scaled_between_two_steps, None),
    "seldom zeroed": (seldom_zeroed_step, None),
    "by hand every other time": (by_hand_every_other_step, None),
    "noisy": (noisy_step, None),
    "penalised": (penalised_step, STEPS - 2),
    "saliency on one": (saliency_on_one_step, None),
    "evaluating": (evaluating_step, None),
    "hooked": (hooked_step, 0),
    "reloading": (reloading_step, None),
    "plain": (plain_step, STEPS - 2),
    "clipped": (clipped_step, 0),
    "scaled": (scaled_step, 0),
    "closure": (closure_step, 0),
    "twice": (twice_backward_step, 0),
    "accumulated": (accumulated_step, STEPS - 2),
    "by hand": (by_hand_step, 0),
    "doubled": (doubled_step, 0),
    "dropped": (dropped_step, None),
    "in place": (last_gradient_in_place_step, None),
}


def like_lockstep(rank, emit, loop, method):
    torch.set_num_threads(1)
    step, deferred = LOOPS[loop]
    expected, _ = trained("plain", "sgd", AllReduce(compress=method), step)
    found, count = trained("plain", "sgd", Hybrid(compress=method), step)
    assert deferred is None or count == deferred
    assert_close(found, expected)
    return found


def assert_close(found, expected):
    for (name, one), (_, other) in zip(found, expected, strict=True):
        if name != "norm.num_batches_tracked":
            close = torch.allclose(
                torch.frombuffer(bytearray(one), dtype=torch.float32),
                torch.frombuffer(bytearray(other), dtype=torch.float32),
                rtol=1e-3,
                atol=1e-5,
            )
            assert close, name


@pytest.mark.long(after=1)
@pytest.mark.parametrize("method", [None, "topk:0.05"])
@pytest.mark.parametrize("loop", LOOPS)
def test_every_kind_of_training_loop_ends_with_the_parameters_of_bsp(loop, method):
    first, second = values(run(like_lockstep, 2, loop, method))
    assert first == second


def later_twice(rank, emit):
    torch.set_num_threads(1)
    expected, _ = trained("later", "sgd", AllReduce())
    found, _ = trained("later", "sgd", Hybrid(overlap="none"))
    assert_close(found, expected)
    return found


def test_without_overlap_a_gradient_may_arrive_more_often_than_in_the_first_steps():
    first, second = values(run(later_twice, 2))
    assert first == second


def scheduled(rank, emit):
    """The learning rate changes between a step and its deferred part."""
    torch.set_num_threads(1)
    found = []
    for overlap in ("none", "forward"):
        one, stepper = made("plain")
        schedule = torch.optim.lr_scheduler.StepLR(stepper, 1, gamma=0.5)
        with offbeat.join(one, stepper, Hybrid(policy="ring", fuse_bytes=0, overlap=overlap)) as session:
            for number in range(STEPS):
                plain_step(session, one, stepper, number)
                schedule.step()
        found.append(bits(one))
        assert stepper.param_groups[0]["lr"] == 0.1 * 0.5**STEPS
    assert found[0] == found[1]
    return found[0]


def test_a_deferred_step_uses_the_learning_rate_of_its_own_time():
    first, second = values(run(scheduled, 2))
    assert first == second


def looked_at(rank, emit, look):
    torch.set_num_threads(1)
    strategy = {"policy": "ring", "fuse_bytes": 0}
    expected, _ = trained("plain", "sgd", Hybrid(overlap="none", **strategy))
    one, stepper = made("plain")
    with offbeat.join(one, stepper, Hybrid(**strategy)) as session:
        for number in range(STEPS):
            plain_step(session, one, stepper, number)
        before = one.head.weight.detach().clone()
        assert is_behind(session)
        if look == "model.state_dict":
            state = one.state_dict()
            assert [(name, t.numpy().tobytes()) for name, t in sorted(state.items())] == expected
        elif look == "optimizer.state_dict":
            assert stepper.state_dict()["state"][0]["momentum_buffer"] is not None
        elif look == "session.state_dict":
            session.state_dict()
        elif look == "eval":
            one.eval()
        elif look == "refresh":
            session.refresh()
        elif look == "evaluation":
            with torch.no_grad():
                one.train(False)
                one(batch(0, 0)[0])
        assert not torch.equal(before, one.head.weight), "the last step had not reached this layer yet"
        kept = {name: tensor.clone() for name, tensor in one.named_parameters()}
    assert bits(one) == expected
    assert all(torch.equal(kept[name], tensor) for name, tensor in one.named_parameters())


@pytest.mark.long(after=1)
@pytest.mark.parametrize(
    "look",
    ["model.state_dict", "optimizer.state_dict", "session.state_dict", "eval", "refresh", "evaluation"],
)
def test_reading_the_state_applies_the_deferred_step_first(look):
    values(run(looked_at, 2, look))


def copied(rank, emit):
    one, stepper = made("plain")
    with offbeat.join(one, stepper, Hybrid()) as session:
        for number in range(3):
            plain_step(session, one, stepper, number)
        for other in copy.deepcopy(one), pickle.loads(pickle.dumps(one)):
            assert other.eval() is other
            assert not other.training
            assert one.training
            assert other(batch(0, 0)[0]).shape == (4, 3)
            assert is_behind(session), "a copy does not affect the model"
    assert "train" not in vars(one)
    assert one.eval() is one
    assert not one.training


def test_copies_of_the_model_are_independent():
    values(run(copied, 2))


def two_optimizers(rank, emit):
    """Only one of them is in the session; the other one receives averaged gradients, too."""
    torch.set_num_threads(1)
    found = []
    for strategy in (AllReduce(), Hybrid(policy="ring", fuse_bytes=0)):
        one, _ = made("plain")
        joined = torch.optim.SGD([*one.conv.parameters(), *one.norm.parameters()], lr=0.1)
        other = torch.optim.SGD([*one.hidden.parameters(), *one.head.parameters()], lr=0.1)
        with offbeat.join(one, joined, strategy) as session:
            for number in range(STEPS):
                x, y = batch(rank, number)
                joined.zero_grad()
                other.zero_grad()
                F.cross_entropy(one(x), y).backward()
                joined.step()
                other.step()
            session.refresh()
        found.append([parameter.detach().clone() for parameter in one.parameters()])
    for one, other in zip(*found, strict=True):
        assert torch.allclose(one, other, rtol=1e-3, atol=1e-5)


def test_parameters_of_an_optimizer_outside_the_session_are_trained_as_well():
    values(run(two_optimizers, 2))


def plateau(rank, emit):
    """Each worker's scheduler uses its own loss; the first worker's learning rate applies to all workers."""
    one, stepper = made("plain")
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(stepper, patience=0)
    with offbeat.join(one, stepper, Hybrid()) as session:
        for number in range(STEPS):
            plain_step(session, one, stepper, number)
            schedule.step(1.0 if rank else 1.0 / (number + 1))
    return bits(one)


def test_learning_rates_are_the_first_workers():
    first, second = values(run(plateau, 2))
    assert first == second


def looked_at_late(rank, emit):
    """A gradient that was kept has the same values whenever it is read, also after the session."""
    torch.set_num_threads(1)
    one, stepper = made("plain")
    with offbeat.join(one, stepper, Hybrid(policy="ring", fuse_bytes=0)) as session:
        for number in range(4):
            plain_step(session, one, stepper, number)
        assert is_behind(session)
        kept = [parameter.grad for parameter in one.parameters()]
        before = one.head.weight.detach().clone()
        norms = [float(gradient.norm()) for gradient in kept]
        assert not torch.equal(before, one.head.weight), "a reader may also write: the step is taken first"
        plain_step(session, one, stepper, 4)
        plain_step(session, one, stepper, 5)
        assert [float(gradient.norm()) for gradient in kept] == norms
        assert torch.equal(copy.deepcopy(kept[0]), kept[0])
        x, y = batch(rank, 6)
        F.cross_entropy(one(x), y).backward()
    last = [parameter.grad for parameter in one.parameters()]
    assert all(type(gradient) is torch.Tensor for gradient in last)
    return norms + [float(gradient.norm()) for gradient in last]


def test_a_pending_gradient_is_the_gradient_of_its_own_step():
    first, second = values(run(looked_at_late, 2))
    assert first == second


def clamped(rank, emit):
    one, stepper = made("plain")
    with offbeat.join(one, stepper, Hybrid(policy="ring", fuse_bytes=0)) as session:
        for number in range(STEPS):
            plain_step(session, one, stepper, number)
            if number < 4:
                session.refresh()
            with torch.no_grad():
                one.head.weight.clamp_(-0.5, 0.5)


def test_changing_a_parameter_before_its_deferred_step_raises_an_error():
    for ended in run(clamped, 2):
        assert ended.error_type in ("OffbeatError", "WorkerError")
        assert "head.weight was changed between optimizer.step() and its next use" in ended.error


def behind(one, stepper, session):
    """Takes steps; the last one has not reached the head yet. Returns the head's weight."""
    for number in range(4):
        plain_step(session, one, stepper, number)
    assert is_behind(session)
    return one.head.weight.detach().clone()


def ahead(rank, emit):
    """The forward pass pauses at its second layer until the last layer has been stepped."""
    torch.set_num_threads(1)
    strategy = {"policy": "ring", "fuse_bytes": 0}
    expected, _ = trained("plain", "sgd", Hybrid(overlap="none", **strategy), steps=5)
    one, stepper = made("plain")
    with offbeat.join(one, stepper, Hybrid(**strategy)) as session:
        before = behind(one, stepper, session)
        handle = one.norm.register_forward_pre_hook(
            lambda *_: wait_until(lambda: not torch.equal(before, one.head.weight), "the head to be stepped")
        )
        plain_step(session, one, stepper, 4)
        handle.remove()
    assert bits(one) == expected


def test_a_deferred_step_is_applied_ahead_of_the_forward_pass():
    values(run(ahead, 2))


def past_the_hooks(rank, emit):
    """If the end of a forward pass is not observed, no layer is stepped ahead of it."""
    one, stepper = made("unhooked")
    with offbeat.join(one, stepper, Hybrid(policy="ring", fuse_bytes=0)) as session:
        behind(one, stepper, session)
        one(batch(rank, 4)[0])
        assert not session._synchronizer.averager._deferral.step.is_ahead


def test_no_step_is_taken_ahead_of_a_forward_pass_that_bypasses_the_hooks():
    values(run(past_the_hooks, 2))


def interrupted(rank, emit):
    """A forward pass raises at its second layer; no layer is stepped ahead of it from then on."""
    torch.set_num_threads(1)
    strategy = {"policy": "ring", "fuse_bytes": 0}
    expected, _ = trained("plain", "sgd", Hybrid(overlap="none", **strategy), steps=5)
    one, stepper = made("plain")

    def interrupt(*_):
        raise ArithmeticError("not this time")

    with offbeat.join(one, stepper, Hybrid(**strategy)) as session:
        behind(one, stepper, session)
        handle = one.norm.register_forward_pre_hook(interrupt)
        with pytest.raises(ArithmeticError):
            one(batch(rank, 4)[0])
        handle.remove()
        assert not session._synchronizer.averager._deferral.step.is_ahead
        plain_step(session, one, stepper, 4)
    assert bits(one) == expected


def test_no_step_is_taken_ahead_of_a_forward_pass_that_raised():
    values(run(interrupted, 2))


def clamped_behind(rank, emit):
    """The forward pass changes a layer that was stepped ahead of it."""
    one, stepper = made("plain")
    with offbeat.join(one, stepper, Hybrid(policy="ring", fuse_bytes=0)) as session:
        before = behind(one, stepper, session)

        def change(*_):
            wait_until(lambda: not torch.equal(before, one.head.weight), "the head to be stepped")
            with torch.no_grad():
                one.head.weight.clamp_(-0.5, 0.5)

        one.norm.register_forward_pre_hook(change)
        plain_step(session, one, stepper, 4)


def test_changing_a_parameter_that_was_stepped_ahead_raises_an_error():
    for ended in run(clamped_behind, 2):
        assert ended.error_type in ("OffbeatError", "WorkerError")
        assert "head.weight was changed between optimizer.step() and its next use" in ended.error


@torch.no_grad()
def bound(layer, _):
    layer.weight.clamp_(-0.05, 0.05)


def own_clamp(rank, emit):
    """Layers clamp their own weights when they begin, after the last step has reached them."""
    torch.set_num_threads(1)
    found = []
    for overlap in ("none", "forward"):
        one, stepper = made("plain")
        with offbeat.join(one, stepper, Hybrid(policy="ring", fuse_bytes=0, overlap=overlap)) as session:
            for number in range(3 * STEPS):
                plain_step(session, one, stepper, number)
                if number == 2:  # behind the session's own hooks
                    for layer in (one.conv, one.norm, one.hidden, one.head):
                        layer.register_forward_pre_hook(bound)
        found.append(bits(one))
    assert found[0] == found[1]


def test_a_layer_may_change_its_own_weights():
    values(run(own_clamp, 2))


class FailsOnce(dict):
    """An optimizer's state whose first read fails."""

    has_failed = False

    def get(self, *args):
        if not self.has_failed:
            self.has_failed = True
            raise ArithmeticError("no state, for once")
        return super().get(*args)


def failing_ahead(rank, emit):
    one, stepper = made("plain")
    with offbeat.join(one, stepper, Hybrid(policy="ring", fuse_bytes=0)) as session:
        behind(one, stepper, session)
        state = stepper.state[one.head.weight] = FailsOnce(stepper.state[one.head.weight])
        one.norm.register_forward_pre_hook(lambda *_: wait_until(lambda: state.has_failed, "the head's turn"))
        plain_step(session, one, stepper, 4)


def test_a_failed_step_ahead_of_the_forward_pass_raises_there_and_is_not_retried():
    kinds = {ended.error_type for ended in run(failing_ahead, 2)}
    assert "ArithmeticError" in kinds
    assert kinds <= {"ArithmeticError", "WorkerError"}


def constant_memory(rank, emit, method):
    one, stepper = made("plain")
    with offbeat.join(one, stepper, Hybrid(fuse_bytes=0, compress=method)) as session:
        rounds = session._synchronizer.averager._rounds
        buffer_ids = []

        def let_go(*_):
            """Waits until the endpoint's thread has finished with all buffers of this step."""
            is_past = threading.Event()
            rounds.exchange._endpoint.call_soon(is_past.set)
            assert is_past.wait(60)

        one.register_forward_hook(let_go)
        for number in range(12):
            (penalised_step if number % 2 else plain_step)(session, one, stepper, number)
            buffer_ids.append(
                {id(buffer) for bucket in rounds.buckets for buffer in (bucket.output, bucket._spare)}
            )
        uncompressed = rounds.buckets[0 if method is None else rounds.layout.gradient_buckets :]
        assert len(rounds.exchange._prepared) == len(uncompressed)
        assert buffer_ids[-1] == buffer_ids[3], "a buffer without references is reused"


@pytest.mark.parametrize("method", [None, "powersgd:1"])
def test_memory_stays_the_same_from_step_to_step(method):
    values(run(constant_memory, 2, method))


class MySGD(torch.optim.SGD):
    """A subclass, which might use all gradients together."""


def unknown_optimizer(rank, emit):
    OPTIMIZERS["mine"] = lambda ps: MySGD(ps, lr=0.1)
    expected, _ = trained("plain", "mine", Hybrid(policy="ring", fuse_bytes=0, overlap="none"))
    found, deferred = trained("plain", "mine", Hybrid(policy="ring", fuse_bytes=0))
    assert deferred == 0
    assert found == expected


def test_a_subclassed_optimizer_gets_all_gradients_at_once():
    values(run(unknown_optimizer, 2))


class Turning(nn.Module):
    """After some steps the last layer's parameters are used by a function, not by their module."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(128, 16)
        self.last = nn.Linear(16, 3)
        self.holder = nn.Identity()
        self.steps = 0

    def forward(self, x):
        self.steps += 1
        x = self.first(x.flatten(1))
        return self.last(x) if self.steps < 5 else F.linear(x, self.last.weight, self.last.bias)


class TurningAhead(Turning):
    """And the last step reaches that layer after its use, before the forward pass ends."""

    def forward(self, x):
        is_turned = self.steps >= 4
        before = self.last.weight.detach().clone() if is_turned else None
        out = super().forward(x)
        if is_turned:
            wait_until(lambda: not torch.equal(before, self.last.weight), "the last layer to be stepped")
        return out


def turned(rank, emit, kind):
    MODELS["turning"] = kind
    trained("turning", "sgd", Hybrid(policy="ring", fuse_bytes=0))


@pytest.mark.parametrize("kind", [Turning, TurningAhead])
def test_a_parameter_used_outside_its_module_raises_an_error_that_names_it(kind):
    for ended in run(turned, 2, kind):
        assert ended.error_type in (
            "OffbeatError",
            "WorkerError",
        )  # a WorkerError where the other worker failed first
        assert "last." in ended.error
        assert "use overlap=backward" in ended.error


def failed_backward(rank, emit):
    one, stepper = made("plain")

    def fail(_):
        raise ValueError("broken")

    with offbeat.join(one, stepper, Hybrid(fuse_bytes=0)) as session:
        for number in range(3):
            plain_step(session, one, stepper, number)
        x, y = batch(session.worker, 0)
        h = one.conv(x)
        h.register_hook(fail)
        loss = F.cross_entropy(one.head(F.relu(one.hidden(F.relu(one.norm(h)).flatten(1)))), y)
        with pytest.raises(ValueError, match="broken"):
            loss.backward()
        plain_step(session, one, stepper, 3)


def test_a_step_after_a_failed_backward_pass_raises_an_error():
    for ended in run(failed_backward, 2):
        assert ended.error_type in ("OffbeatError", "WorkerError")
        assert "a backward pass failed" in ended.error


def test_options_out_of_range_are_rejected():
    for options, text in [
        ({"policy": "best"}, "policy to be one of cost_model, conv_butterfly_fc_ring, table4, ring"),
        ({"order": "lifo"}, "order to be one of priority, fifo"),
        ({"overlap": "both"}, "overlap to be one of none, backward, forward"),
        ({"fuse_bytes": -1}, "fuse_bytes must be at least 0 bytes, got -1"),
        ({"timeout_s": float("inf")}, "timeout_s must be finite"),
    ]:
        with pytest.raises(ValueError, match=text):
            Hybrid(**options)


def compiled(rank, emit):
    one, stepper = made("plain")
    with offbeat.join(torch.compile(one), stepper, Hybrid()):
        pass


@pytest.mark.long
def test_a_compiled_model_is_rejected_with_a_clear_error():
    for ended in run(compiled, 2):
        assert ended.error_type in ("OffbeatError", "WorkerError")
        assert "the model is compiled" in ended.error
        assert "or use bsp" in ended.error


def hangs_in_forward(rank, emit, victim, method):
    one, stepper = made("plain")
    with offbeat.join(one, stepper, Hybrid(policy="ring", fuse_bytes=0, compress=method)) as session:
        for number in range(3):
            plain_step(session, one, stepper, number)
        if rank == victim:
            x, y = batch(rank, 3)
            F.cross_entropy(one(x), y).backward()
            emit("in time")
            threading.Event().wait()
        try:
            for number in range(3, 10):
                plain_step(session, one, stepper, number)
        except WorkerError as error:
            return error.worker, str(error)
        raise AssertionError("no worker was reported as lost")


@pytest.mark.long(after=1)
@pytest.mark.parametrize(("victim", "method"), [(0, None), (2, None), (1, "powersgd:1")])
def test_a_worker_killed_while_others_wait_for_its_layers_is_named(victim, method):
    with job(hangs_in_forward, 3, victim, method) as running:
        running.receive(victim)
        running.signal(victim, signal.SIGKILL)
        ended = running.ends()
    for worker, text in values([one for one in ended if one.rank != victim]):
        assert worker == victim
        assert f"worker {victim} was lost" in text

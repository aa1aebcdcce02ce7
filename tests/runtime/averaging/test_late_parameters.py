"""Parameters for late blocks are sent with their own step, though another round may be skipped meanwhile."""

import threading
from types import SimpleNamespace

import torch

from offbeat.events import AssignLateBlock, Block, Group, SkipRound
from offbeat.policies.membership.group_protocol import GroupProtocol
from offbeat.runtime.averaging.group_binding import GroupBinding
from offbeat.runtime.devices.host import Host

MEMBER, OUTSIDE = 0, 2


class Lock(threading.Condition):
    """Runs `at_release` once, where another thread may run: after the next release."""

    at_release = None

    def __exit__(self, *error):
        super().__exit__(*error)
        run, self.at_release = self.at_release, None
        if run is not None:
            run()


class Client:
    """What a binding asks of its client and its links.

    Attributes:
        steps: of the parameters that were sent.
    """

    def __init__(self):
        self.worker, self.failure, self.lock, self.steps = MEMBER, None, Lock(), []
        self.protocol, self.endpoint = GroupProtocol(MEMBER), self
        self.protocol.handle(
            Group(
                generation=0,
                step=0,
                exchange_id=0,
                members=(MEMBER, 1),
                joining=(),
                weights=(0.5, 0.5),
                reason="",
            )
        )

    def wait_for(self, condition, timeout_s, what):
        assert condition(), what

    def link_name(self, worker):
        return str(worker)

    def post_receive(self, peer, tag, into, on_data):
        pass

    def cancel(self, first, last):
        pass

    def send_tensor(self, peer, tag, data, *, priority, on_done):
        self.steps.append(torch.frombuffer(data, dtype=torch.float64)[0].item())


def test_parameters_that_are_sent_have_the_step_that_they_are_of_though_a_round_is_skipped_meanwhile():
    client = Client()
    binding = GroupBinding(
        client,
        lambda workers: SimpleNamespace(device=torch.device("cpu")),
        lambda *arguments: 0,
        1.0,
        device=Host(),
        reports_progress=False,
    )
    binding.late_gradients.set_tensors([torch.zeros(3)], list)
    binding.begin_contribution()
    assert binding.acquire(wait=True) is not None
    binding.allow_skipping(True)
    assert binding.finish_round(())
    block = Block(id=0, epoch=0, ranges=((0, 1),))
    binding.late_gradients.on_action(
        AssignLateBlock(worker=OUTSIDE, assignment=0, proxy=MEMBER, block=block, reason="")
    )
    client.protocol.handle(SkipRound(worker=MEMBER, generation=0, round=1, grace_s=0.0, reason=""))
    skipped = []

    def skip_round():
        assert binding.wait_for_skipped_round() is not None
        binding.finish_skipped_round((), keep=lambda: skipped.append(1))

    client.lock.at_release = skip_round
    binding.finish_step()
    assert skipped
    assert binding.membership.step == 2
    assert client.steps == [1.0]

"""`prepare`: what `accelerator.prepare` does, for a loop whose workers a session keeps in step.

    accelerator = Accelerator(gradient_accumulation_steps=2)
    model, optimizer, loader, session = offbeat.accelerate.prepare(
        accelerator, model, optimizer, loader, strategy=LocalSGD(shards="equal")
    )
    with session:
        for epoch in range(session.epoch, 10):
            for batch in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(model(**batch).loss)
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()

Accelerate places model and batches on the device, scales losses and applies mixed precision; it does not
average gradients, nor share out samples.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from offbeat.errors import OffbeatError
from offbeat.runtime.session import Session, join
from offbeat.runtime.training.ddp import SessionDDP, ddp
from offbeat.runtime.training.interface import Strategy
from offbeat.runtime.training.session_loader import SessionLoader

try:
    from accelerate import Accelerator
    from accelerate.data_loader import DataLoaderStateMixin
    from accelerate.utils import DistributedType, send_to_device
except ModuleNotFoundError as error:
    raise ImportError(
        "offbeat.accelerate needs accelerate, an extra: pip install offbeat[accelerate]"
    ) from error

__all__ = ["prepare"]

_SHARDING: Final = (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)
_END: Final = object()


class _PreparedLoader(DataLoaderStateMixin):  # type: ignore[misc]  # accelerate is not checked
    """A session's loader whose batches are on the accelerator's device.

    With accumulation it takes one batch ahead, so that `accelerator.accumulate` knows the last of an epoch.
    """

    def __init__(self, accelerator: Accelerator, session: Session, loader: DataLoader[Any]) -> None:
        self._accelerator = accelerator
        self._takes_ahead = accelerator.gradient_accumulation_steps > 1
        self._batches = session.loader(loader, takes_ahead=self._takes_ahead)
        self.gradient_state = accelerator.gradient_state
        self.end_of_dataloader, self.remainder = False, -1

    def __iter__(self) -> Iterator[Any]:
        self.begin()
        try:
            for batch in self._take_ahead() if self._takes_ahead else self._batches:
                yield send_to_device(batch, self._accelerator.device)
        finally:
            self.end()

    def _take_ahead(self) -> Iterator[Any]:
        taken = iter(self._batches)
        batch = next(taken, _END)
        while batch is not _END:
            following = next(taken, _END)
            self.end_of_dataloader = following is _END
            self._batches.begin_batch()
            yield batch
            batch = following

    def __len__(self) -> int:
        return len(self._batches)

    def set_epoch(self, epoch: int) -> None:
        """See `SessionLoader.set_epoch`."""
        self._batches.set_epoch(epoch)

    @property
    def sampler(self) -> SessionLoader:
        """See `SessionLoader.sampler`."""
        return self._batches.sampler

    @property
    def dataset(self) -> Any:
        """The samples of all workers."""
        return self._batches.dataset


def prepare(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: Optimizer,
    dataloader: DataLoader[Any],
    *,
    strategy: Strategy | None = None,
) -> tuple[nn.Module, Any, Any, Session]:
    """Prepare model, optimizer and training data, and join a session with them.

    `accelerator.accumulate`, `no_sync`, `backward`, `clip_grad_norm_` and mixed precision are used as ever.
    Accelerate's `gather` and `wait_for_everyone` wait for all processes, lost ones too;
    `session.gather_objects` and `session.barrier` for those that are in the job.

    Args:
        accelerator: with neither FSDP nor DeepSpeed nor Megatron-LM.
        model, optimizer: not prepared yet.
        dataloader: see `Session.loader`, not prepared yet. With accumulation the strategy needs equal shards.
        strategy: see `offbeat.join`.

    Returns:
        The model, in a DistributedDataParallel that exchanges nothing, the optimizer as Accelerate has it, a
        loader of this worker's batches, and the session, to be used in a `with` statement.

    Raises:
        OffbeatError: the model is in a DistributedDataParallel, or the accelerator shards it, or something is
            prepared already; or as `offbeat.join` and `Session.loader`.
        WorkerError: as `offbeat.join`.
    """
    if accelerator.distributed_type in _SHARDING:
        raise OffbeatError(
            "expected an accelerator that leaves the model whole, got one with "
            f"{accelerator.distributed_type}: configure Accelerate without it"
        )
    if isinstance(model, DistributedDataParallel) and not isinstance(model, SessionDDP):
        raise OffbeatError(
            "expected the bare model, got it within DistributedDataParallel, which would average its "
            "gradients once more: use offbeat.accelerate.prepare in place of accelerator.prepare"
        )
    for one, kind in ((optimizer, Optimizer), (dataloader, DataLoader)):
        if not isinstance(one, kind) or type(one).__module__.startswith("accelerate."):
            raise OffbeatError(
                f"expected a torch {kind.__name__}, got {type(one).__name__}: use "
                "offbeat.accelerate.prepare in place of accelerator.prepare"
            )
    prepared = ddp(
        accelerator.prepare_model(model, evaluation_mode=True)
    )  # in this mode without a DDP of its own
    prepared_optimizer = accelerator.prepare_optimizer(optimizer)
    session = join(model, optimizer, strategy)
    try:
        return prepared, prepared_optimizer, _PreparedLoader(accelerator, session, dataloader), session
    except BaseException as error:
        session.leave(error)
        raise

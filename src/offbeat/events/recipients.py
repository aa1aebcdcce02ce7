"""Who receives an action: each action inherits from one of these classes, or defines its recipients."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass


@dataclass(frozen=True)
class Recipient:
    """A worker or node that the coordinator may send an action to.

    Attributes:
        peer: its link name.
        sender: the worker's id, or the node's name.
    """

    peer: str
    sender: int | str

    @property
    def is_worker(self) -> bool:
        """Whether it is a worker; otherwise it is a node of the parameter server."""
        return isinstance(self.sender, int)


class Addressed:
    """Base of all actions: each one defines its recipients, so that none is sent by default.

    It is no `abc.ABC`, because `isinstance` of a subclass of that is several times as slow.

    Raises:
        TypeError: a subclass does not define `is_for`.
    """

    def __init_subclass__(cls) -> None:
        if cls.is_for is Addressed.is_for:
            raise TypeError(f"expected {cls.__name__} to define its recipients with is_for")

    @abstractmethod
    def is_for(self, recipient: Recipient) -> bool:
        """Return whether the coordinator sends the action to this worker or node, which is present."""

    @property
    def named_recipients(self) -> tuple[int | str, ...] | None:
        """All its recipients, ids of workers and names of nodes; None where it does not name them.

        They save the coordinator from asking `is_for` of every worker.
        """
        return None


class ToAllWorkers(Addressed):
    """All workers receive the action."""

    def is_for(self, recipient: Recipient) -> bool:
        """See `Addressed.is_for`."""
        return recipient.is_worker


class ToNamed(Addressed):
    """The workers or nodes that the action names receive it."""

    @property
    @abstractmethod
    def named_recipients(self) -> tuple[int | str, ...]:
        """See `Addressed.named_recipients`."""

    def is_for(self, recipient: Recipient) -> bool:
        """See `Addressed.is_for`."""
        return recipient.sender in self.named_recipients


class ToWorker(ToNamed):
    """One worker receives the action."""

    worker: int

    @property
    def named_recipients(self) -> tuple[int, ...]:
        """See `Addressed.named_recipients`."""
        return (self.worker,)


class ToWorkerOrAll(Addressed):
    """One worker receives the action, or all workers where it names none."""

    worker: int | None

    def is_for(self, recipient: Recipient) -> bool:
        """See `Addressed.is_for`."""
        return recipient.is_worker and self.worker in (None, recipient.sender)

    @property
    def named_recipients(self) -> tuple[int, ...] | None:
        """See `Addressed.named_recipients`."""
        return None if self.worker is None else (self.worker,)


class ToMembers(ToNamed):
    """The members of a group receive the action."""

    members: tuple[int, ...]

    @property
    def named_recipients(self) -> tuple[int, ...]:
        """See `Addressed.named_recipients`."""
        return self.members


class ToNode(ToNamed):
    """One node of the parameter server receives the action."""

    node: str

    @property
    def named_recipients(self) -> tuple[str, ...]:
        """See `Addressed.named_recipients`."""
        return (self.node,)


class ToNodeOrAll(Addressed):
    """One node of the parameter server receives the action, or all nodes where it names none."""

    node: str

    def is_for(self, recipient: Recipient) -> bool:
        """See `Addressed.is_for`."""
        return recipient.sender == self.node or (not self.node and not recipient.is_worker)

    @property
    def named_recipients(self) -> tuple[str, ...] | None:
        """See `Addressed.named_recipients`."""
        return (self.node,) if self.node else None
